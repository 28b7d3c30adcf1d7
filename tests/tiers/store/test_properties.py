"""Random interleavings of everything that can happen to a store, checked by an independent model.

After every step the store recomputes its own invariants (`check_integrity`), and the model compares
who may use which page, what readers see, and what was evicted in which order.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvpool.blocks.layout import Namespace
from kvpool.blocks.tier import Tier
from tests.support.pool_model import CONFIG, LARGE, NAMESPACES, SMALL, ModelledStore, random_walk
from tests.support.sizes import examples
from tiers.policies import POLICIES

namespaces = st.sampled_from(NAMESPACES)
chain_numbers = st.integers(0, 2)
clients = st.sampled_from(["client0", "client1", "client2"])
ttls = st.floats(0.1, 12.0)
picks = st.integers(0, 1000)
memory_tiers = st.sampled_from([Tier.DRAM, Tier.HBM])
tiers = st.sampled_from([Tier.DRAM, Tier.HBM])


class StoreMachine(RuleBasedStateMachine):
    """Namespaces with one part of one page and two of two; 4 slabs of dram and nvme, 3 of hbm."""

    def __init__(self) -> None:
        super().__init__()
        self.model = ModelledStore()

    @rule(
        namespace=namespaces,
        chain=chain_numbers,
        start=st.integers(0, 5),
        count=st.integers(1, 7),
        part=st.integers(0, 1),
        writer=clients,
        ttl=ttls,
        tier=tiers,
        is_committed=st.booleans(),
    )
    def reserve(
        self,
        namespace: Namespace,
        chain: int,
        start: int,
        count: int,
        part: int,
        writer: str,
        ttl: float,
        tier: Tier,
        is_committed: bool,
    ) -> None:
        reservation = self.model.reserve(namespace, chain, start, count, part, writer, ttl, tier)
        if reservation and is_committed:
            self.model.commit(reservation, None)

    @precondition(lambda self: self.model.grants)
    @rule(pick=picks, wanted=st.sets(st.integers(0, 6), min_size=1))
    def commit(self, pick: int, wanted: set[int]) -> None:
        reservation = sorted(self.model.grants)[pick % len(self.model.grants)]
        count = len(self.model.grants[reservation].blocks)
        self.model.commit(reservation, sorted({index % count for index in wanted}))

    @precondition(lambda self: self.model.grants)
    @rule(pick=picks, has_stopped=st.booleans())
    def abort(self, pick: int, has_stopped: bool) -> None:
        self.model.abort(sorted(self.model.grants)[pick % len(self.model.grants)], has_stopped)

    @rule(pick=picks)
    def confirm_stopped(self, pick: int) -> None:
        self.model.confirm_stopped(pick)

    @rule(pick=picks)
    def late_write(self, pick: int) -> None:
        self.model.late_write(pick)

    @rule(
        namespace=namespaces,
        chain=chain_numbers,
        count=st.integers(1, 7),
        holder=clients,
        ttl=ttls,
        tier=tiers,
    )
    def pin(
        self, namespace: Namespace, chain: int, count: int, holder: str, ttl: float, tier: Tier
    ) -> None:
        self.model.pin(namespace, chain, count, holder, ttl, tier)

    @rule(namespace=namespaces, chain=chain_numbers, count=st.integers(1, 7), tier=memory_tiers)
    def promote(self, namespace: Namespace, chain: int, count: int, tier: Tier) -> None:
        self.model.promote(namespace, chain, count, tier)

    @precondition(lambda self: self.model.leases)
    @rule(pick=picks, ttl=ttls)
    def renew(self, pick: int, ttl: float) -> None:
        self.model.renew(sorted(self.model.leases)[pick % len(self.model.leases)], ttl)

    @precondition(lambda self: self.model.leases)
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        self.model.release(sorted(self.model.leases)[pick % len(self.model.leases)])

    @rule(client=clients)
    def client_gone(self, client: str) -> None:
        self.model.client_gone(client)

    @rule(seconds=st.sampled_from([0.01, 0.5, 1.999, 2.0, 4.0, 20.0]), sweeps=st.booleans())
    def advance(self, seconds: float, sweeps: bool) -> None:
        self.model.advance(seconds, sweeps=sweeps)

    @rule(
        namespace=namespaces,
        chain=chain_numbers,
        position=st.integers(0, 6),
        reason=st.sampled_from(["checksum", "asked"]),
    )
    def drop(self, namespace: Namespace, chain: int, position: int, reason: str) -> None:
        self.model.drop(namespace, chain, position, reason)

    @rule(
        namespace=namespaces,
        chain=chain_numbers,
        count=st.integers(1, 7),
        ttl=st.one_of(st.none(), ttls),
    )
    def retain(self, namespace: Namespace, chain: int, count: int, ttl: float | None) -> None:
        self.model.retain(namespace, chain, count, ttl)

    @rule(namespace=namespaces, chain=chain_numbers, count=st.integers(1, 7))
    def end_retention(self, namespace: Namespace, chain: int, count: int) -> None:
        self.model.end_retention(namespace, chain, count)

    @rule(count=st.integers(1, 6))
    def plan_demotions(self, count: int) -> None:
        self.model.plan_demotions(count)

    @precondition(lambda self: len(self.model.arenas) < 4)
    @rule(slabs=st.integers(1, 4))
    def add_arena(self, slabs: int) -> None:
        self.model.add_arena(slabs)

    @rule(pick=picks)
    def evacuate_arena(self, pick: int) -> None:
        self.model.evacuate_arena(pick)

    @precondition(lambda self: self.model.store.evacuations.bytes_left())
    @rule(count=st.integers(1, 6))
    def plan_evacuation(self, count: int) -> None:
        self.model.plan_evacuation(count)

    @precondition(lambda self: self.model.store.evacuations.bytes_left())
    @rule()
    def take_evacuated(self) -> None:
        self.model.take_evacuated()

    @precondition(lambda self: self.model.migrations)
    @rule(pick=picks, ok=st.sampled_from([True, True, False, None]))
    def finish_migration(self, pick: int, ok: bool | None) -> None:
        self.model.finish_migration(pick, ok)

    @invariant()
    def everything_holds(self) -> None:
        self.model.check()

    def teardown(self) -> None:
        self.model.settle()


StoreMachine.TestCase.settings = settings(
    max_examples=examples(120),
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestStoreMachine = StoreMachine.TestCase


@pytest.mark.parametrize("seed", range(12))
def test_long_random_walks_break_nothing_and_leak_nothing(seed: int) -> None:
    random_walk(1000 + seed, 1500).settle()


@pytest.mark.parametrize(("nvme_slabs", "hbm_slabs"), [(4, 0), (0, 3), (0, 0), (4, 8)])
def test_walks_break_nothing_on_nodes_with_other_tiers(nvme_slabs: int, hbm_slabs: int) -> None:
    for seed in range(4):
        random_walk(seed, 500, nvme_slabs=nvme_slabs, hbm_slabs=hbm_slabs).settle()


def test_walks_reach_every_kind_of_transition() -> None:
    counters: set[str] = set()
    for seed in range(20):
        counters |= set(random_walk(seed, 400).store.counters)
    assert counters >= {
        "evicted:dram",
        "evicted:nvme",
        "evicted:hbm",
        "promoted:dram",
        "promoted:hbm",
        "demoted:nvme",
        "demoted:dram",
        "demotion_refused",
        "migrations_failed",
        "quarantined",
        "dropped",
        "slabs_reclaimed",
        "leases_expired",
        "reservations_expired",
        "miss:no_room",
        "evicted:soft",
        "retained",
        "retention_ended",
        "retentions_expired",
        "retention_refused",
        "no_room",
        "relocated",
    }


def test_write_through_walks_break_nothing() -> None:
    model = random_walk(7, 1500, replace(CONFIG, write_through=True))
    assert model.store.counters["demoted"] > 20
    model.settle()


QUOTAS = {SMALL.namespace_id.hex(): 0.25, LARGE.namespace_id.hex(): 0.5}


@pytest.mark.parametrize("policy", POLICIES)
def test_walks_break_nothing_under_any_policy_and_with_quotas(policy: str) -> None:
    config = replace(
        CONFIG, eviction=policy, nvme_eviction=policy, quotas=QUOTAS, write_through=True
    )
    counters: Counter[str] = Counter()
    for seed in range(4):
        model = random_walk(seed, 500, config, nvme_slabs=2)
        counters.update({name: int(count) for name, count in model.store.counters.items()})
        model.settle()
    assert counters["evicted:dram"] > 20
    assert counters["evicted:nvme"] > 5
    assert counters["promoted"] > 5


def test_equal_calls_give_equal_answers() -> None:
    first, second = random_walk(5, 600), random_walk(5, 600)
    assert first.memory == second.memory
    assert first.store.counters == second.store.counters
