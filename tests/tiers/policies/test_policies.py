"""Eviction policies: compared with naive versions, driven as caches, and counted in operations."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.errors import ConfigError, InvalidArgument
from planner.replay.policy_cache import BlockCache, CachedBlock
from tests.support.naive_policies import NAIVE, Item
from tests.support.sizes import examples
from tiers.policies import POLICIES, create, lazy_heap, policy_class, prefill_cost
from tiers.policies.gdsf import Gdsf

Step = tuple[str, int]
steps = st.lists(
    st.tuples(
        st.sampled_from(["use", "use", "use", "evict", "drop", "hold", "free"]),
        st.integers(0, 11),
    ),
    max_size=150,
)


class Pair:
    """A policy and its naive twin get the same calls; every victim must be the same."""

    def __init__(self, name: str) -> None:
        self.held: set[int] = set()
        self.real = create(name, self.may_go)
        self.naive = NAIVE[name]()
        self.items: dict[int, Item] = {}
        self.tick = 0
        self.evicted: list[int] = []

    def may_go(self, item: Item) -> bool:
        return item.ident not in self.held

    def step(self, kind: str, ident: int) -> None:
        self.tick += 1
        item = self.items.get(ident)
        if kind == "use" and item is None:
            item = self.items[ident] = Item(ident, 1 + ident % 3, 1.0 + ident % 5, self.tick)
            self.naive.arrive(item)
            self.real.offer(item)
        elif kind == "use" and item is not None:
            item.last_use = self.tick
            self.naive.use(item)
            self.real.used(item)
        elif kind == "evict":
            expected, victim = self.naive.victim(self.may_go), self.real.victim()
            assert victim is expected
            if victim is not None:
                self.evicted.append(victim.ident)
                self.naive.leave(victim, is_evicted=True)
                self.real.evicted(victim)
                assert victim not in self.real
                del self.items[victim.ident]
        elif kind == "drop" and item is not None:
            self.naive.leave(item, is_evicted=False)
            self.real.discard(item)
            del self.items[ident]
        elif kind == "hold":
            self.held.add(ident)
        elif kind == "free":
            self.held.discard(ident)
            if item is not None:
                self.real.offer(item)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=examples(150), deadline=None)
@given(trace=steps)
def test_a_policy_evicts_what_its_naive_version_evicts(name: str, trace: list[Step]) -> None:
    pair = Pair(name)
    for kind, ident in trace:
        pair.step(kind, ident)
    for ident in range(12):
        pair.step("free", ident)
    for _ in range(len(pair.items)):
        pair.step("evict", 0)
    assert not pair.items  # nothing is forgotten


def test_policies_differ_in_what_they_evict() -> None:
    rng = random.Random(3)
    kinds = ["use", "use", "use", "evict"]
    trace = [(rng.choice(kinds), min(int(rng.expovariate(0.3)), 11)) for _ in range(400)]
    orders: dict[str, list[int]] = {}
    for name in POLICIES:
        pair = Pair(name)
        for kind, ident in trace:
            pair.step(kind, ident)
        orders[name] = pair.evicted
    assert orders["lru"] == orders["prefix-lru"]  # alone, without chains
    assert len({tuple(order) for order in orders.values()}) == len(POLICIES) - 1


def test_an_unknown_policy_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 's3fifo'"):
        create("s3-fifo")
    with pytest.raises(ConfigError, match="use one of prefix-lru, lru"):
        policy_class("?")


# ---------------------------------------------------------------- a cache of its own

CHAINS = [[f"{name}{i}" for i in range(5)] for name in "abcd"] + [["a0", "a1", "x2", "x3"]]


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=examples(60), deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5)), max_size=40),
    capacity=st.integers(1, 12),
)
def test_where_chains_count_no_parent_is_evicted_before_its_child(
    name: str, requests: list[tuple[int, int]], capacity: int
) -> None:
    cache: BlockCache[str] = BlockCache(name, capacity, is_leaves_only=True)
    parents = {block: parent for c in CHAINS for parent, block in zip([None, *c], c, strict=False)}
    for number, length in requests:
        chain = CHAINS[number][:length]
        known = [ident in cache for ident in chain]
        hits = cache.access_chain(chain)
        assert hits == (known.index(False) if False in known else len(known))
        here = {ident for ident in parents if ident in cache}
        assert len(here) == len(cache) == cache.used_bytes <= capacity
        for ident in here:
            parent = parents[ident]
            assert parent is None or parent in here


def test_plain_lru_lets_a_parent_go_first_and_prefix_lru_does_not() -> None:
    remains = {}
    for name in ("lru", "prefix-lru"):
        cache: BlockCache[str] = BlockCache(name, 3)
        cache.access("parent")
        cache.access("child", parent="parent")
        cache.access("x")
        cache.access("y")
        remains[name] = "parent" in cache
    assert remains == {"lru": False, "prefix-lru": True}


def test_a_block_larger_than_the_cache_evicts_nothing() -> None:
    cache: BlockCache[int] = BlockCache("lru", 4)
    cache.access(1, size_bytes=3)
    assert not cache.access(2, size_bytes=5)
    assert 2 not in cache
    assert cache.evictions == 0
    assert cache.remove(1)
    assert not cache.remove(1)
    assert cache.used_bytes == 0
    with pytest.raises(InvalidArgument):
        BlockCache("lru", 0)


def _zipf_and_scans(requests: int, seed: int = 7) -> Iterator[int]:
    """A thousand ids by Zipf's law, with long runs of ids that never return in between."""
    rng = random.Random(seed)
    weights = list(accumulate(1 / rank for rank in range(1, 1001)))
    fresh = 1_000_000
    for number in range(requests):
        yield rng.choices(range(1000), cum_weights=weights)[0]
        if number % 500 < 150:
            fresh += 1
            yield fresh


def _hits(name: str, capacity: int = 100) -> int:
    cache: BlockCache[int] = BlockCache(name, capacity)
    for ident in _zipf_and_scans(15_000):
        cache.access(ident)
    return cache.hits


def test_s3fifo_hits_more_than_fifo_and_lru_where_scans_disturb() -> None:
    hits = {name: _hits(name) for name in ("fifo", "lru", "s3fifo")}
    assert hits["s3fifo"] > 1.1 * hits["fifo"]
    assert hits["s3fifo"] > hits["lru"]


def test_arc_hits_more_than_lru_where_scans_disturb_and_follows_a_shift_to_recency() -> None:
    assert _hits("arc") > 1.05 * _hits("lru")
    hits = {}
    for name in ("lru", "lfu", "arc"):
        cache: BlockCache[int] = BlockCache(name, 100)
        for ident in _zipf_and_scans(5_000):
            cache.access(ident)
        before = cache.hits
        for at in range(5_000):  # pairs of uses, 80 others apart
            cache.access(2_000_000 + (at if at % 160 < 80 else at - 80))
        hits[name] = cache.hits - before
    assert hits["arc"] > 0.9 * hits["lru"] > 2 * hits["lfu"]


def test_gdsf_saves_more_prefill_time_than_fifo_and_lru() -> None:
    saved = {}
    for name in ("fifo", "lru", "gdsf"):
        rng = random.Random(11)
        cache: BlockCache[int] = BlockCache(name, 200)
        saved[name] = 0.0
        for _ in range(15_000):
            ident = min(int(rng.paretovariate(0.6)), 2000)
            cost = prefill_cost(ident % 7 * 40, 64)
            saved[name] += cost * cache.access(ident, size_bytes=1 + ident % 4, cost=cost)
    assert saved["gdsf"] > saved["lru"]
    assert saved["gdsf"] > 1.05 * saved["fifo"]


def test_the_cost_of_a_block_grows_with_its_depth_and_can_be_given() -> None:
    costs = [prefill_cost(depth, 64) for depth in range(0, 500, 50)]
    assert costs == sorted(set(costs))
    assert prefill_cost(0, 64) == pytest.approx(64, rel=0.01)

    def make(may_go: Any) -> Gdsf[CachedBlock[str]]:
        return Gdsf(may_go, lambda block: {"dear": 9.0, "cheap": 1.0}.get(block.ident, 5.0))

    cache: BlockCache[str] = BlockCache("gdsf", 2, make=make)
    for ident in ("cheap", "dear", "other"):
        cache.access(ident)
    assert "cheap" not in cache
    assert "dear" in cache


# ---------------------------------------------------------------- what a step costs


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("held_share", [0.0, 0.5])
def test_the_work_of_a_step_does_not_grow_with_the_cache(
    name: str, held_share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts heap operations, each O(log n), and calls of `may_go`."""
    work: Counter[str] = Counter()
    for operation in ("heappush", "heappop", "heapreplace", "heapify"):
        real = getattr(lazy_heap, operation)

        def counted(entries: Any, *rest: Any, real: Any = real, what: str = operation) -> Any:
            work[what] += 1 if what != "heapify" else len(entries)
            return real(entries, *rest)

        monkeypatch.setattr(lazy_heap, operation, counted)

    def per_step(blocks: int) -> float:
        rng = random.Random(blocks)
        held = {i for i in range(blocks) if rng.random() < held_share}

        def may_go(item: Item) -> bool:
            work["may_go"] += 1
            return item.ident not in held

        policy = create(name, may_go)
        items = {}
        for tick in range(blocks):
            items[tick] = Item(tick, last_use=tick)
            policy.offer(items[tick])
        work.clear()
        steps = 2 * blocks
        for tick in range(blocks, blocks + steps):
            used = items[rng.choice((tick - 1, rng.randrange(tick))) % blocks]
            used.last_use = tick
            policy.used(used)
            victim = policy.victim()
            if victim is None:
                continue
            policy.evicted(victim)
            items[victim.ident] = Item(victim.ident, last_use=tick)
            policy.offer(items[victim.ident])
        return sum(work.values()) / steps

    few, many = per_step(500), per_step(8000)
    assert many < 12
    assert many < 1.5 * few + 0.5
