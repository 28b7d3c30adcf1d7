"""Loading a whole trace: sorted by time, bad lines counted and named, prompts without ids if allowed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvpool.errors import ConfigError
from planner.traces import EmptyTrace, TraceRequest, load_requests


def line(**changes: object) -> str:
    row = {"timestamp": 5, "input_length": 700, "output_length": 3, "hash_ids": [1, 2]}
    return json.dumps({key: value for key, value in (row | changes).items() if value is not None})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "t.jsonl"


def test_unsorted_lines_are_counted_and_sorted(path: Path) -> None:
    path.write_text("\n".join([line(timestamp=9000), line(timestamp=4000), line(timestamp=6000)]))
    requests, report = load_requests(str(path))
    assert [request.time_s for request in requests] == [4, 6, 9]
    assert report.unsorted == 2
    with pytest.raises(ConfigError, match="is earlier than"):
        load_requests(str(path), is_strict=True)


def test_lengths_alone_are_a_prompt_that_shares_nothing_unless_ids_are_needed(path: Path) -> None:
    path.write_text("\n".join([line(), line(hash_ids=None), line(hash_ids=None, input_length=-1)]))
    requests, report = load_requests(str(path))
    assert requests == [TraceRequest(0.005, 700, 3, [1, 2]), TraceRequest(0.005, 700, 3, [])]
    assert report.first == ["line 3: input_length -1 is out of range"]
    requests, report = load_requests(str(path), needs_ids=True)
    assert (len(requests), report.skipped) == (1, 2)


def test_the_first_few_requests_can_be_asked_for(path: Path) -> None:
    path.write_text("\n".join([line(timestamp=at) for at in (3000, 2000, 1000)]))
    requests, _ = load_requests(str(path), limit=2)
    assert [request.time_s for request in requests] == [2, 3]


def test_a_file_without_requests_is_refused(path: Path) -> None:
    path.write_text("not json\n")
    with pytest.raises(EmptyTrace, match=r"holds no request; 1 lines were skipped, line 1"):
        load_requests(str(path))
    with pytest.raises(ConfigError, match="cannot read"):
        load_requests(str(path.with_name("absent")))
