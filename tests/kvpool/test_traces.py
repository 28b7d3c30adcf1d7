"""Traces in Mooncake's format: good lines come through, bad ones are named by number and counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvpool.errors import ConfigError
from kvpool.traces import TraceProblems, parse_trace, read_trace


def line(**changes: object) -> str:
    row = {"timestamp": 5, "input_length": 700, "output_length": 3, "hash_ids": [1, 2]}
    return json.dumps(row | changes)


def test_lines_become_requests_in_order() -> None:
    problems = TraceProblems()
    [first, second] = parse_trace([line(), "", line(timestamp=7)], "t", problems)
    assert (first.timestamp_ms, first.input_tokens, first.output_tokens) == (5, 700, 3)
    assert first.hash_ids == (1, 2)
    assert second.timestamp_ms == 7
    assert problems.skipped == 0


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ('{"timestamp": 1, "input_le', "truncated"),
        ("[1, 2]", "Expected"),
        ('{"timestamp": 1}', "input_length"),
        (line(input_length=-1), "input_length is -1"),
        (line(output_length=-1), "output_length is -1"),
        (line(timestamp=-1), "timestamp is -1"),
        (line(hash_ids=[1]), "1 hash_ids"),
        (line(hash_ids=[1, 2, 3]), "3 hash_ids"),
        (line(hash_ids=["x", "y"]), "hash_ids"),
    ],
)
def test_a_bad_line_is_skipped_with_its_number_or_ends_a_strict_read(bad: str, named: str) -> None:
    problems = TraceProblems()
    assert len(list(parse_trace([line(), bad, line()], "t", problems))) == 2
    assert problems.skipped == 1
    assert problems.shown[0].startswith("t:2: ")
    assert named in problems.shown[0]
    with pytest.raises(ConfigError, match="t:2: "):
        list(parse_trace([line(), bad], "t", TraceProblems(), is_strict=True))


def test_unsorted_lines_are_counted_and_sorted(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join([line(timestamp=9), line(timestamp=4), line(timestamp=6)]))
    requests, problems = read_trace(path)
    assert [r.timestamp_ms for r in requests] == [4, 6, 9]
    assert problems.unsorted == 2
    with pytest.raises(ConfigError, match="earlier"):
        read_trace(path, is_strict=True)


def test_a_file_without_requests_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("not json\n")
    with pytest.raises(ConfigError, match=r"no request.*t.jsonl:1"):
        read_trace(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_trace(tmp_path / "absent")
