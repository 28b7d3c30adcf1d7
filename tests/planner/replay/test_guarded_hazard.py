"""The guarded cache is bounded, does not use the future, and is never far below the best plain policy."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.replay.belady import belady_hits
from planner.replay.compact_trace import CompactTrace, compact, load_trace
from planner.replay.fast_policies import PLAIN
from planner.replay.generate import generate
from planner.replay.guarded_hazard import GuardedCache
from planner.replay.replay import replay
from planner.traces import TraceRequest
from tests.support.sizes import examples
from tests.support.traces import CONVERSATION, needs_conversation

CAPACITIES = (1000, 10_000, 50_000)
chains = st.lists(
    st.tuples(st.integers(0, 4), st.integers(1, 7)).map(
        lambda pick: [pick[0] * 100 + depth if depth > 1 else depth for depth in range(pick[1])]
    ),
    max_size=60,
)


@settings(max_examples=examples(150), deadline=None)
@given(chains, st.integers(7, 20))
def test_it_is_bounded_and_knows_its_content(prompts: list[list[int]], capacity: int) -> None:
    cache = GuardedCache(capacity, 512)
    for at, prompt in enumerate(prompts):
        resident = 0
        while resident < len(prompt) and prompt[resident] in cache:
            resident += 1
        assert cache.access(prompt, float(at), 512 * len(prompt), 10) == resident
        assert len(cache) <= capacity


def _found(requests: list[TraceRequest], capacity: int) -> list[int]:
    with compact(requests) as trace:
        found: list[int] = replay(trace, "guarded", capacity).found.tolist()
        return found


def test_it_sees_only_the_past() -> None:
    requests = list(islice(generate("mixed", 600, seed=4), 600))
    whole = _found(requests, 500)
    assert _found(requests[:400], 500) == whole[:400]


def test_it_leaves_hazard_for_a_rival_that_pays_for_the_change_and_then_holds_what_that_holds() -> (
    None
):
    """Prompts in a cycle a little larger than the cache, all at one time, so that hazard cannot learn."""
    cache = GuardedCache(40, 512)
    for round_ in range(300):
        for prompt in range(9):
            ids = [10 * prompt + at for at in range(5)]
            cache.access(ids, 0.0, 2560, 10)
        cache.access([10_000 + round_], 0.0, 512, 10)
    assert cache.leader != "hazard"
    rival = PLAIN[cache.leader](40)
    found = []
    for _ in range(600):
        for prompt in range(9):
            ids = [10 * prompt + at for at in range(5)]
            found.append((cache.access(ids, 0.0, 2560, 10), rival.access(ids)))
    assert sum(mine for mine, _ in found) >= 0.95 * sum(theirs for _, theirs in found) > 0


@pytest.mark.parametrize("kind", ["agents", "scan", "shift", "mixed", "chat"])
def test_the_guard_costs_nothing_where_hazard_does_well(kind: str) -> None:
    with compact(generate(kind, 2000, seed=5)) as trace:
        for capacity in (1000, 10_000):
            hazard = replay(trace, "hazard", capacity).hit_ratio
            assert replay(trace, "guarded", capacity).hit_ratio >= 0.995 * hazard, capacity


def test_it_recovers_most_of_what_hazard_loses_to_the_best_of_five() -> None:
    with compact(generate("documents", 6000, seed=1)) as trace:
        best = max(replay(trace, policy, 1000).hit_ratio for policy in PLAIN)
        hazard, mine = (replay(trace, name, 1000).hit_ratio for name in ("hazard", "guarded"))
        assert hazard < 0.98 * best
        assert mine > hazard + 0.4 * (best - hazard)


@pytest.fixture(scope="module")
def conversation() -> CompactTrace:
    return load_trace(str(CONVERSATION))[0]


@needs_conversation
@pytest.mark.parametrize("capacity", CAPACITIES)
def test_on_real_conversations_it_is_no_worse_than_any_and_keeps_what_hazard_gains(
    conversation: CompactTrace, capacity: int
) -> None:
    mine = replay(conversation, "guarded", capacity).hit_blocks
    assert mine >= max(replay(conversation, policy, capacity).hit_blocks for policy in PLAIN)
    of_gap = {1000: 0.24, 10_000: 0.15}.get(capacity)
    if of_gap is not None:
        lru = replay(conversation, "lru", capacity).hit_blocks
        assert mine - lru >= of_gap * (sum(belady_hits(conversation, capacity)) - lru)
