"""`hazard` is bounded, does not use the future, keeps no tail without its head, and beats plain policies."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.replay import CompactTrace, TraceRequest, belady_hits, compact, load_trace, replay
from planner.replay.generate import generate
from planner.replay.hazard import HazardCache
from planner.replay.hazard_model import BINS, EDGES_S, HazardModel, age_bins
from tests.support.sizes import examples
from tests.support.traces import CONVERSATION, needs_conversation


def found_by(requests: list[TraceRequest], capacity: int) -> list[int]:
    cache = HazardCache(capacity, 512)
    return [cache.access(r.block_ids, r.time_s, r.input_tokens, r.output_tokens) for r in requests]


@pytest.mark.parametrize("kind", ["chat", "mixed"])
def test_it_sees_only_the_past(kind: str) -> None:
    """A truncated trace finds what the whole trace finds up to there."""
    requests = list(generate(kind, 500, seed=2))
    whole = found_by(requests, 300)
    for cut in (1, 137, 320):
        assert found_by(requests[:cut], 300) == whole[:cut]
    # Another future does not change the hits up to there either.
    other = requests[:320] + list(islice(generate("scan", 900, seed=8), 500, 600))
    assert found_by(other, 300)[:320] == whole[:320]


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 8), st.integers(0, 90), st.integers(0, 3000)),
        max_size=60,
    ),
    st.integers(1, 20),
)
def test_it_holds_no_more_than_its_capacity_and_counts_leading_blocks(
    steps: list[tuple[int, int, int, int]], capacity: int
) -> None:
    cache = HazardCache(capacity, 512)
    now_s = 0.0
    for chain, length, pause_s, output in steps:
        now_s += pause_s
        ids = [depth if depth < 2 else 100 * chain + depth for depth in range(length)]
        known = [ident in cache for ident in ids]
        expected = known.index(False) if False in known else length
        tokens = max(0, 512 * length - output % 512)
        assert cache.access(ids, now_s, tokens, output) == expected
        assert len(cache) <= capacity


def test_what_it_remembers_is_bounded_by_its_capacity_not_by_the_trace() -> None:
    cache = HazardCache(10, 512)
    cache._remembered = 50
    for request in generate("mixed", 1500, seed=3):
        cache.access(request.block_ids, request.time_s, request.input_tokens, request.output_tokens)
    assert len(cache._ghosts) <= 50
    assert len(cache._ends) <= 50
    assert len(cache._branches) <= 50
    assert len(cache._hubs) <= 50
    assert len(cache._records) < 200


def test_before_learning_the_order_is_that_of_recency() -> None:
    [row] = HazardModel(4).indices([(0, 1)])
    assert row.shape == (BINS,)
    assert (np.diff(row) <= 1e-12).all()


def test_it_learns_which_records_return_and_when() -> None:
    model = HazardModel(4)
    at_100_s = int(age_bins(np.array([100.0]))[0])
    for _ in range(200):
        model.learn(
            [(0,)] * BINS + [(1,)] * BINS,
            [*range(BINS)] * 2,
            [b == at_100_s for b in range(BINS)] + [False] * BINS,
        )
    returning, lost = model.indices([(0,), (1,)])
    assert returning[at_100_s] > 20 * lost[at_100_s]
    # The nearer the return, the more each second of keeping is worth. After the return it is worth nothing.
    assert returning[0] < returning[at_100_s - 3] < returning[at_100_s]
    assert returning[at_100_s + 2] < returning[at_100_s] / 10


def test_ages_fall_into_their_bins() -> None:
    assert age_bins(np.array([0.0, 3.9, 4.0, 1e9])).tolist() == [0, 0, 1, BINS - 1]
    assert (np.diff(EDGES_S) > 0).all()


@pytest.mark.parametrize("kind", ["chat", "scan", "mixed"])
def test_it_hits_more_than_lru_where_room_is_short_and_no_more_than_belady(kind: str) -> None:
    with compact(generate(kind, 2500, seed=9)) as trace:
        mine, lru = (replay(trace, policy, 1000).hit_ratio for policy in ("hazard", "lru"))
        assert 1.03 * lru < mine <= sum(belady_hits(trace, 1000)) / trace.blocks


@pytest.fixture(scope="module")
def conversation() -> CompactTrace:
    return load_trace(str(CONVERSATION))[0]


@needs_conversation
@pytest.mark.parametrize(("capacity", "of_gap"), [(1000, 0.24), (3000, 0.30), (10_000, 0.15)])
def test_it_closes_a_share_of_the_gap_from_lru_to_the_optimum(
    conversation: CompactTrace, capacity: int, of_gap: float
) -> None:
    lru = replay(conversation, "lru", capacity).hit_blocks
    optimum = sum(belady_hits(conversation, capacity))
    mine = replay(conversation, "hazard", capacity).hit_blocks
    assert mine - lru >= of_gap * (optimum - lru)


@needs_conversation
@pytest.mark.parametrize("capacity", [30_000, 50_000])
def test_with_much_room_it_is_no_worse_than_lru(conversation: CompactTrace, capacity: int) -> None:
    lru = replay(conversation, "lru", capacity).hit_blocks
    assert replay(conversation, "hazard", capacity).hit_blocks >= 0.99 * lru
