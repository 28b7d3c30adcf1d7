"""Replays compared with known figures, naive caches and brute force. Tiers, time windows, memory."""

from __future__ import annotations

import itertools
import random
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.errors import ConfigError
from planner.replay import (
    CompactTrace,
    TierSize,
    TraceRequest,
    belady_hits,
    compact,
    load_trace,
    over_time,
    replay,
)
from planner.replay.compact_trace import NEVER, _find_next_uses
from planner.replay.fast_policies import PLAIN
from planner.replay.generate import generate
from planner.replay.policy_cache import BlockCache
from tests.support.sizes import examples
from tests.support.traces import CONVERSATION, needs_conversation, of_chains
from tiers.policies import POLICIES

CAPACITIES = (1000, 3000, 10000, 30000, 50000)
KNOWN_ANSWERS_SIZE = (600, 10027)  # requests and blocks of the generated trace
KNOWN_ANSWERS = {  # capacity -> blocks found by LRU and by the optimum
    50: (1132, 1541),
    200: (1196, 2069),
    1000: (1469, 3041),
    4000: (2785, 3310),
    10**6: (3310, 3310),
}


# ---------------------------------------------------------------- known figures


@pytest.fixture(scope="module")
def conversation() -> Iterator[CompactTrace]:
    trace, report = load_trace(str(CONVERSATION), is_strict=True)
    assert report.skipped == report.unsorted == 0
    with trace:
        yield trace


@needs_conversation
def test_lru_on_the_conversation_trace_gives_the_known_figures(conversation: CompactTrace) -> None:
    ratios = [round(replay(conversation, "lru", size).hit_ratio, 4) for size in CAPACITIES]
    assert ratios == [0.0445, 0.0650, 0.2112, 0.3257, 0.3546]
    assert round(replay(conversation, "lru", 10**9).hit_ratio, 4) == 0.3664


@needs_conversation
def test_the_optimum_on_the_conversation_trace_is_the_known_one(conversation: CompactTrace) -> None:
    ratios = [round(sum(belady_hits(conversation, size)) / 288_500, 4) for size in CAPACITIES]
    assert ratios == [0.1907, 0.2945, 0.3664, 0.3664, 0.3664]


@pytest.fixture(scope="module")
def chat() -> Iterator[CompactTrace]:
    with compact(generate("chat", 600, seed=5)) as trace:
        yield trace


def test_a_generated_trace_gives_the_known_answers(chat: CompactTrace) -> None:
    """Known answers: the two rules of the public figures, on a generated trace."""
    assert (chat.requests, chat.blocks) == KNOWN_ANSWERS_SIZE
    for size, (lru, optimum) in KNOWN_ANSWERS.items():
        assert replay(chat, "lru", size).hit_blocks == lru, size
        assert sum(belady_hits(chat, size)) == optimum, size


# ---------------------------------------------------------------- against plain versions

chains = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 7)).map(
        lambda pick: [pick[0] * 100 + depth if depth > 1 else depth for depth in range(pick[1])]
    ),
    max_size=30,
)


@settings(max_examples=examples(200), deadline=None)
@given(st.sampled_from(sorted(PLAIN)), chains, st.integers(1, 14))
def test_each_plain_cache_hits_and_holds_what_the_policy_does(
    policy: str, prompts: list[list[int]], capacity: int
) -> None:
    cache: BlockCache[int] = BlockCache(policy, capacity, is_leaves_only=False)
    plain = PLAIN[policy](capacity)
    for prompt in prompts:
        before = set(plain.resident)
        assert plain.access(prompt) == cache.touch_chain(prompt)
        assert len(plain.resident) == len(cache)
        assert all(ident in cache for ident in plain.resident)
        assert before - set(plain.resident) <= set(plain.evicted)


def _most_hits(prompts: list[list[int]], capacity: int) -> int:
    """The most hits over all choices of what to keep after each request, tried one by one."""
    best = {frozenset[int](): 0}
    for prompt in prompts:
        after: dict[frozenset[int], int] = {}
        for resident, hits in best.items():
            found = next((i for i, b in enumerate(prompt) if b not in resident), len(prompt))
            everything = resident | set(prompt)
            for keep in itertools.combinations(everything, min(capacity, len(everything))):
                key = frozenset(keep)
                after[key] = max(after.get(key, 0), hits + found)
        best = after
    return max(best.values())


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 3)).map(
            lambda p: [0, 10 + p[0], 20 + p[0]][: p[1]]
        ),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 4),
)
def test_no_choice_of_what_to_keep_hits_more_than_belady(
    prompts: list[list[int]], capacity: int
) -> None:
    with of_chains(prompts) as trace:
        assert sum(belady_hits(trace, capacity)) == _most_hits(prompts, capacity)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("is_as_node", [False, True])
def test_no_policy_hits_more_than_belady(policy: str, is_as_node: bool, chat: CompactTrace) -> None:
    for size in (50, 400, 10**6):
        result = replay(chat, policy, size, is_as_node=is_as_node)
        assert result.hit_blocks <= sum(belady_hits(chat, size))
        assert 0 < result.token_hit_ratio < 1
    assert result.hit_blocks == sum(belady_hits(chat, size))  # nothing ever leaves


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.integers(-5, 5), max_size=60), st.integers(1, 20))
def test_next_uses_are_those_of_a_plain_search(
    tmp_path_factory: Any, ids: list[int], bucket: int
) -> None:
    path = tmp_path_factory.mktemp("next") / "next"
    found = _find_next_uses(np.array(ids, "<i8"), path, bucket).tolist()
    for at, ident in enumerate(ids):
        assert found[at] == next((i for i in range(at + 1, len(ids)) if ids[i] == ident), NEVER)


# ---------------------------------------------------------------- what a request finds


def test_a_request_finds_leading_blocks_only_and_then_brings_its_own() -> None:
    with of_chains([[1, 2, 3], [1, 9, 3], [1, 2, 3]]) as trace:
        assert replay(trace, "lru", 100).found.tolist() == [0, 1, 3]
        # The cache holds three blocks; the tail of each prompt is the most recent.
        assert replay(trace, "lru", 3).found.tolist() == [0, 1, 1]


def test_a_prompt_larger_than_the_cache_leaves_its_tail_in_an_lru_and_its_head_in_a_node() -> None:
    with of_chains([[1, 2, 3, 4], [1, 2, 3, 4]]) as trace:
        assert replay(trace, "lru", 3).found.tolist() == [0, 0]
        assert replay(trace, "lru", 3, is_as_node=True).found.tolist() == [0, 3]


def test_tokens_of_a_partly_filled_tail_count_as_they_are() -> None:
    requests = [TraceRequest(at, 700, 1, [1, 2]) for at in (0.0, 1.0)]
    with compact(requests) as trace:
        result = replay(trace, "lru", 10)
    assert (result.hit_blocks, result.hit_tokens, result.tokens) == (2, 700, 1400)


@pytest.mark.parametrize("policy", ["lru", "prefix-lru", "s3fifo", "arc"])
def test_tiers_of_one_size_in_sum_hit_what_falls_from_one_to_the_next(
    policy: str, chat: CompactTrace
) -> None:
    alone = replay(chat, policy, 100)
    tiers = [TierSize("dram", 100), TierSize("nvme", 300)]
    both = replay(chat, policy, 400, tiers=tiers)
    assert both.hit_blocks == sum(both.tier_hits.values())
    assert both.tier_hits["nvme"] > 0
    assert both.hit_blocks > alone.hit_blocks
    if policy == "lru":  # an LRU split in two levels is the same LRU
        assert both.found.tolist() == replay(chat, policy, 400).found.tolist()


def test_windows_of_time_add_up_to_the_whole(chat: CompactTrace) -> None:
    result = replay(chat, "lru", 500)
    windows = over_time(chat, result.found, 30.0)
    assert sum(window.blocks for window in windows) == chat.blocks
    hits = sum(window.hit_ratio * window.blocks for window in windows)
    assert hits == pytest.approx(result.hit_blocks)
    assert [window.from_s for window in windows] == sorted({window.from_s for window in windows})
    assert all(window.from_s % 30.0 == 0 for window in windows)


def test_requests_out_of_order_are_replayed_by_time() -> None:
    late, early = TraceRequest(5.0, 512, 1, [7]), TraceRequest(1.0, 1024, 2, [8, 9])
    with compact([late, early]) as trace:
        assert list(trace.chains()) == [[8, 9], [7]]
        assert trace.times_s.tolist() == [1.0, 5.0]
        assert trace.output_tokens.tolist() == [2, 1]


@pytest.mark.parametrize("blocks", [1, 3, 1 << 18])
def test_pieces_of_a_trace_hold_every_request_once(blocks: int) -> None:
    prompts = [list(range(10 * at, 10 * at + at % 5)) for at in range(40)]
    with of_chains(prompts) as trace:
        spans = list(trace.spans(blocks))
    assert [t for span in spans for t in span.times_s] == [float(at) for at in range(40)]
    ends = list(itertools.accumulate(map(len, prompts)))
    assert [end for span in spans for end in span.ends] == ends
    assert [span.first_block for span in spans[1:]] == [span.ends[-1] for span in spans[:-1]]


def test_a_replay_holds_the_cache_and_not_the_trace_in_memory() -> None:
    def many() -> Iterator[TraceRequest]:
        rng = random.Random(1)
        for at in range(20_000):
            yield TraceRequest(float(at), 25_600, 1, [rng.randrange(1 << 40) for _ in range(50)])

    tracemalloc.start()
    try:
        with compact(many()) as trace:
            replay(trace, "lru", 1000)
            belady_hits(trace, 1000)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert trace.blocks == 1_000_000  # as ids in lists 32 MB and more, with their next uses 70
    assert peak < 64 << 20


@pytest.mark.parametrize("size", [0, -1])
def test_a_cache_of_no_blocks_is_refused(size: int, chat: CompactTrace) -> None:
    with pytest.raises(ConfigError, match="blocks"):
        replay(chat, "lru", size)
    with pytest.raises(ConfigError, match="blocks"):
        replay(chat, "lru", 10, tiers=[TierSize("dram", size)])
    with pytest.raises(ConfigError, match="unknown eviction policy"):
        replay(chat, "belady", 10)
