"""Reading traces: formats, bad lines, tokens per block. Describing traces, and generating them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.blocks.hashing import hash_chain
from kvpool.blocks.layout import Layout, Namespace
from kvpool.errors import ConfigError
from planner.replay import EmptyTrace, TraceReport, TraceRequest, compact, load_trace, read_trace
from planner.replay.compact_trace import NEVER
from planner.replay.generate import KINDS, generate
from planner.replay.trace_stats import reuse_distances, trace_stats
from tests.support.sizes import examples
from tests.support.traces import encode, of_chains, row


def read(rows: list[Any], **how: Any) -> tuple[list[TraceRequest], TraceReport]:
    report = TraceReport()
    return list(read_trace(encode(rows), report, **how)), report


# ---------------------------------------------------------------- Mooncake's format


def test_a_line_of_mooncakes_becomes_a_request() -> None:
    requests, report = read([row(1500, 1030, [4, 5, 6], output=7), b"\n", row(1500, 512, [4])])
    assert requests == [TraceRequest(1.5, 1030, 7, [4, 5, 6]), TraceRequest(1.5, 512, 10, [4])]
    assert (report.skipped, report.unsorted, report.block_tokens) == (0, 0, 512)


WRONG: dict[str, tuple[Any, str]] = {
    "truncated": (b'{"timestamp": 3, "input_le', "not JSON"),
    "no object": (b"[1, 2]\n", "not a request"),
    "binary": (b"\xff\xfe\x00\n", "not JSON"),
    "deep": (b"[" * 200_000 + b"\n", "not JSON"),
    "negative input": (row(0, -5, [1]), "input_length -5"),
    "no input": (row(0, 0, []), "the prompt has no tokens"),
    "empty prompt": ({"timestamp": 1, "prompt": ""}, "the prompt has no tokens"),
    "negative output": (row(0, 5, [1], output=-1), "output_length -1"),
    "ids too few": (row(0, 5120, [1, 2, 3]), "3 hash_ids, but input_length 5120 implies 10"),
    "ids too many": (row(0, 512, [1, 2]), "2 hash_ids, but input_length 512 implies 1"),
    "id of no number": ({**row(0, 512, []), "hash_ids": ["a"]}, "not a request"),
    "id too large": (row(0, 512, [1 << 70]), "not a request"),
    "no lengths": ({"timestamp": 1, "hash_ids": [1]}, "not a request"),
    "length of no number": ({**row(0, 512, [1]), "input_length": "512"}, "not a request"),
    "no prompt": ({"timestamp": 1}, "no prompt"),
    "time is nonsense": ({"timestamp": [], "prompt": "x"}, "is not a time"),
    "time too large": (row(1e300, 512, [1]), "timestamp 1e+300"),
    "tokens are nonsense": ({"prompt_token_ids": [1, -1] * 400}, "token ids must be"),
    "messages are nonsense": ({"messages": [7, None]}, "is not a message"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_bad_line_is_skipped_and_counted_or_ends_a_strict_reading(what: str) -> None:
    wrong, why = WRONG[what]
    rows = [row(0, 512, [1]), wrong, row(9, 512, [2])]
    requests, report = read(rows)
    assert [request.block_ids for request in requests] == [[1], [2]]
    assert report.skipped == 1
    assert report.first[0].startswith("line 2: ")
    assert why in report.first[0]
    with pytest.raises(ConfigError, match=r"t\.jsonl, line 2: "):
        read(rows, name="t.jsonl", is_strict=True)


def test_a_tail_that_fills_no_block_may_have_an_id_or_none() -> None:
    requests, report = read([row(0, 1000, [1, 2]), row(0, 1000, [1])])
    assert [len(request.block_ids) for request in requests] == [2, 1]
    assert not report.skipped


def test_lines_out_of_order_are_counted_or_end_a_strict_reading() -> None:
    rows = [row(5000, 512, [1]), row(2000, 512, [2]), row(6000, 512, [3])]
    requests, report = read(rows)
    assert len(requests) == 3
    assert report.unsorted == 1
    assert report.first[0].startswith("line 2: its time, 2 s")
    with pytest.raises(ConfigError, match="line 2"):
        read(rows, is_strict=True)


def test_another_block_size_is_derived_from_the_lines_or_given() -> None:
    rows = [row(at, 100 + at, range((100 + at + 15) // 16)) for at in range(10)]
    assert read(rows)[1].block_tokens == 16
    assert read(rows, block_tokens=16)[1].skipped == 0
    assert read(rows[:2])[1].skipped == 2  # two lines are too few to derive another size
    assert read([row(0, 512, [1, 2])] * 20, block_tokens=512)[1].skipped == 20


def test_the_unit_of_time_can_be_given() -> None:
    assert read([row(3, 512, [1])], time_unit_s=1.0)[0][0].time_s == 3.0


# ---------------------------------------------------------------- request logs

TOKENS = list(range(100, 1300))


def test_token_ids_are_hashed_as_a_pool_hashes_them() -> None:
    space = Namespace("m", "trace", Layout("float16", 1, 1, 1, 64))
    expected = [int.from_bytes(h[:8], "little", signed=True) for h in hash_chain(space, TOKENS)]
    for log in (
        {"prompt_token_ids": TOKENS},
        {"prompt": TOKENS},
        {"body": {"input": TOKENS}},
        {"request": {"token_ids": TOKENS}},
    ):
        [request], _ = read([{"model": "m", "arrival_time": 2.5, **log}], block_tokens=64)
        assert request == TraceRequest(2.5, 1200, 0, expected)


def test_what_makes_kv_differ_makes_ids_differ() -> None:
    same = {"model": "m", "prompt_token_ids": TOKENS}
    logs = [
        same,
        {**same, "model": "n"},
        {**same, "lora": "sql"},
        {**same, "cache_salt": "t"},
        same,
    ]
    requests, _ = read(logs)
    ids = [request.block_ids[0] for request in requests]
    assert ids[0] == ids[4]
    assert len(set(ids)) == 4


def test_a_conversation_in_text_begins_with_its_earlier_turns() -> None:
    said = [
        {"role": "system", "content": "Be brief. " * 300},
        {"role": "user", "content": "Hello" * 90},
    ]
    more = [
        {"role": "assistant", "content": "Hm"},
        {"role": "user", "content": [{"text": "é" * 900}]},
    ]
    logs = [{"messages": said}, {"messages": said + more, "usage": {"completion_tokens": 12}}]
    first, second = read(logs, block_tokens=64)[0]
    assert second.output_tokens == 12
    assert len(first.block_ids) == first.input_tokens // 64 > 5
    assert second.block_ids[: len(first.block_ids)] == first.block_ids
    assert len(second.block_ids) > len(first.block_ids)


def test_a_tokenizer_replaces_the_rule_of_four_bytes() -> None:
    log = [{"prompt": "ab" * 200, "output": "xyz"}]
    [plain], _ = read(log, block_tokens=16)
    [exact], _ = read(log, block_tokens=16, tokenize=lambda text: [ord(c) for c in text])
    assert (plain.input_tokens, plain.output_tokens) == (100, 1)
    assert (exact.input_tokens, exact.output_tokens, len(exact.block_ids)) == (400, 3, 25)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (12.5, 12.5),
        (1_700_000_000, 1.7e9),
        (1_700_000_000_000, 1.7e9),
        ("2023-11-14T22:13:20Z", 1.7e9),
    ],
)
def test_times_of_a_log_are_seconds_milliseconds_or_texts(value: Any, seconds: float) -> None:
    [request], _ = read([{"timestamp": value, "prompt": "x"}])
    assert request.time_s == seconds


# ---------------------------------------------------------------- files


def test_a_file_is_read_plain_or_gzipped(tmp_path: Path) -> None:
    data = b"".join(encode([row(0, 512, [1]), row(1000, 1024, [1, 2])]))
    (tmp_path / "t.jsonl").write_bytes(data)
    (tmp_path / "t.jsonl.gz").write_bytes(gzip.compress(data))
    for name in ("t.jsonl", "t.jsonl.gz"):
        trace, _ = load_trace(str(tmp_path / name))
        with trace:
            assert list(trace.chains()) == [[1], [1, 2]]
            assert trace.span_s == (0.0, 1.0)


def test_a_file_that_cannot_be_read_or_holds_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "wrong").write_text("nonsense\n")
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"x" * 10_000)[:-9])
    with pytest.raises(EmptyTrace, match=r"holds no request$"):
        load_trace(str(tmp_path / "empty"))
    with pytest.raises(EmptyTrace, match="1 lines were skipped, line 1: not JSON"):
        load_trace(str(tmp_path / "wrong"))
    for name in ("absent", ".", "cut.gz"):
        with pytest.raises(ConfigError, match="cannot read the trace"):
            load_trace(str(tmp_path / name))


# ---------------------------------------------------------------- descriptions


def test_turns_sessions_and_reuse_of_a_small_trace() -> None:
    trace = of_chains([[1, 2, 3], [1, 7, 8], [1, 2, 3, 4], [1, 2, 3, 4, 5]], gap_s=10.0)
    with trace:
        stats = trace_stats(trace)
    assert (stats.requests, stats.blocks, stats.unique_blocks) == (4, 15, 7)
    assert stats.sessions == 2
    assert stats.turns["max"] == 3
    assert stats.turn_gap_s == {"mean": 15.0, "p50": 15.0, "p90": 19.0, "p99": 19.9, "max": 20.0}
    assert stats.unbounded_hit_ratio == 8 / 15


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.integers(0, 9), max_size=80))
def test_reuse_distances_count_different_blocks_in_between(ids: list[int]) -> None:
    following, expected = [], []
    for at, ident in enumerate(ids):
        following.append(next((i for i in range(at + 1, len(ids)) if ids[i] == ident), NEVER))
        before = [i for i in range(at) if ids[i] == ident]
        if before:
            expected.append(len(set(ids[before[-1] + 1 : at])))
    assert reuse_distances(np.array(following, np.int64)).tolist() == expected


# ---------------------------------------------------------------- made-up traces


@pytest.mark.parametrize("kind", KINDS)
def test_a_generated_trace_is_sorted_consistent_and_repeatable_by_seed(kind: str) -> None:
    requests = list(generate(kind, 300, seed=3))
    assert requests == list(generate(kind, 300, seed=3))
    assert requests != list(generate(kind, 300, seed=4))
    assert [r.time_s for r in requests] == sorted(r.time_s for r in requests)
    parents: dict[int, int | None] = {}
    for request in requests:
        assert len(request.block_ids) == -(-request.input_tokens // 512)
        parent = None
        for ident in request.block_ids:
            assert parents.setdefault(ident, parent) == parent
            parent = ident
    lines = [row(r.time_s * 1000, r.input_tokens, r.block_ids, r.output_tokens) for r in requests]
    assert read([json.loads(json.dumps(line)) for line in lines])[1].skipped == 0
    with compact(requests) as trace:
        shares = trace_stats(trace).unbounded_hit_ratio
    assert 0.02 < shares < 0.99


def test_no_requests_or_an_unknown_kind_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown kind of trace 'talk'"):
        generate("talk", 1)
    with pytest.raises(ConfigError, match="0 requests"):
        generate("chat", 0)
