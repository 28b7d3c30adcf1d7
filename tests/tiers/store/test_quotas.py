"""Quotas: guaranteed room for each tenant or namespace, and free room for all."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvpool.blocks.layout import Layout, Namespace
from kvpool.blocks.records import BlockStatus
from kvpool.blocks.tier import Tier
from kvpool.errors import ConfigError
from tests.support.pool_model import CONFIG, PAGE, SLAB
from tests.support.sizes import examples
from tests.tiers.store.test_store import names, put
from tiers.store.quotas import Accounts, Quotas, QuotaTable
from tiers.store.slab_allocator import SlabAllocator
from tiers.store.store import Store

SLOTS = 16


def space(tenant: str, pages: int = 1) -> Namespace:
    return Namespace("m", f"r{pages}", Layout("float16", 1, 1, 16 * pages, 64), tenant=tenant)


A, B, C = space("a"), space("b"), space("c")
WIDE_A, WIDE_C = space("a", 2), space("c", 2)
ALL = (A, B, C, WIDE_A, WIDE_C)
QUOTAS: Quotas = {"a": 0.25, "b": 8 * PAGE}  # 4, 8, and 4 pages for everybody else


def store(quotas: Quotas = QUOTAS, nvme: int = 0) -> Store:
    disk = SlabAllocator(nvme * SLAB, SLAB) if nvme else None
    made = Store(SlabAllocator(SLOTS * PAGE, SLAB), disk, replace(CONFIG, quotas=quotas))
    for namespace in ALL:
        made.namespaces.register(namespace)
    return made


def used(s: Store) -> dict[str, int]:
    s.check_integrity()
    return {usage.account: usage.used_bytes // PAGE for usage in s.inspection.accounts()}


def put_alone(s: Store, owner: Namespace, count: int, tag: bytes = b"x") -> int:
    """Store chains of one block each until one is refused; returns how many were granted."""
    for i, name in enumerate(names(count, tag)):
        granted = s.reserve(owner.namespace_id, [name], b"", 0, "w", 5.0, 0.0)
        if not granted.reservation_id:
            return i
        s.commit(granted.reservation_id, [1], 0.0)
    return count


def test_without_contention_everybody_may_borrow_all() -> None:
    for owner in (A, B, C):
        s = store()
        put_alone(s, owner, SLOTS)
        assert used(s)[owner.tenant if owner is not C else ""] == SLOTS


def test_an_account_below_its_quota_takes_from_borrowers_down_to_theirs() -> None:
    s = store()
    put_alone(s, C, SLOTS)
    put_alone(s, A, 4)
    assert used(s) == {"": 12, "a": 4, "b": 0}
    put_alone(s, B, 20)
    assert used(s) == {"": 4, "a": 4, "b": 8}


def test_an_account_at_its_quota_evicts_its_own_blocks_when_nobody_borrows() -> None:
    s = store()
    put_alone(s, A, 4)
    put_alone(s, B, 8)
    put_alone(s, C, 4)
    put_alone(s, A, 5, b"y")
    assert used(s) == {"": 4, "a": 4, "b": 8}
    assert s.lookup(A.namespace_id, names(1, b"x")) == []


def test_borrowers_converge_on_equal_use_of_their_quotas() -> None:
    s = store({"a": 0.125, "b": 0.25, "idle": 0.625})
    put_alone(s, A, SLOTS)
    put_alone(s, B, 40)
    after = used(s)
    assert after["a"] + after["b"] == SLOTS
    assert after["b"] in (10, 11)  # twice as much as a's
    put_alone(s, A, 40, b"y")
    assert used(s) == after


def test_a_refused_borrower_takes_from_no_account_below_its_quota() -> None:
    s = store()
    put_alone(s, B, 8)
    put_alone(s, A, 8)
    for name in names(8, b"x"):
        s.pin(A.namespace_id, [name], "reader", 9.0, 0.0)
    assert put_alone(s, A, 1, b"y") == 0
    assert used(s) == {"": 0, "a": 8, "b": 8}
    assert put_alone(s, C, 1) == 1  # below its own: from b, since a's are held
    assert used(s)["b"] == 7


def test_a_namespace_has_its_own_quota_before_its_tenant_s() -> None:
    s = store({"a": 0.25, WIDE_A.namespace_id.hex(): 0.5})
    put(s, names(1), space=A.namespace_id)
    put(s, names(1), space=WIDE_A.namespace_id)
    assert used(s) == {"": 0, "a": 1, WIDE_A.namespace_id.hex(): 2}


def test_quarantined_slots_count_for_whose_writer_they_are() -> None:
    s = store()
    s.reserve(A.namespace_id, names(3), b"", 0, "w", 5.0, 0.0)
    s.client_gone("w", 0.0)
    assert used(s) == {"": 0, "a": 3, "b": 0}
    s.expire(1000.0)
    assert used(s) == {"": 0, "a": 0, "b": 0}


def test_a_slab_shared_with_somebody_below_the_quota_is_no_borrower_s_to_take() -> None:
    s = store()
    put_alone(s, WIDE_C, 6)  # three slabs
    put_alone(s, A, 2)
    put_alone(s, C, 2)
    assert put_alone(s, WIDE_C, 20, b"y") == 20
    assert s.lookup(A.namespace_id, names(1, b"x")) == [Tier.DRAM]
    put_alone(s, WIDE_A, 1)  # below its quota: takes from the borrower
    assert used(s)["a"] == 4


def test_other_tiers_have_the_same_shares() -> None:
    s = store({"a": 0.25, "b": 4 * PAGE}, nvme=2)
    quotas = {(u.tier, u.account): u.quota_bytes // PAGE for u in s.inspection.accounts()}
    assert quotas[Tier.DRAM, "a"] == quotas[Tier.DRAM, "b"] == 4
    assert quotas[Tier.NVME, "a"] == quotas[Tier.NVME, "b"] == 2
    assert quotas[Tier.NVME, ""] == 4


@pytest.mark.parametrize(
    "quotas",
    [
        {"a": 0.6, "b": 0.5},
        {"": 0.5},
        {"a": 0.0},
        {"a": 1.5},
        {"a": -1},
        {"a": True},
        {"a": float("nan")},
        {"a": "half"},
    ],
)
def test_quotas_that_cannot_be_kept_are_refused(quotas: Quotas) -> None:
    with pytest.raises(ConfigError, match="quota"):
        replace(CONFIG, quotas=quotas)


def test_quotas_beyond_the_arena_are_refused() -> None:
    with pytest.raises(ConfigError, match=f"of {SLOTS * PAGE} bytes"):
        store({"a": (SLOTS + 1) * PAGE})


# ---------------------------------------------------------------- at random

ops = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "put", "pin", "release"]),
        st.integers(0, len(ALL) - 1),
        st.integers(0, 9),  # which chain
        st.integers(0, 3),  # which block of it
    ),
    max_size=80,
)


def _account(namespace: Namespace) -> str:
    return namespace.tenant if namespace.tenant in QUOTAS else ""


@settings(max_examples=examples(300), deadline=None)
@given(trace=ops)
@example(
    trace=[("put", *op) for op in [(0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1), (3, 0, 0)]]
    + [("put", *op) for op in [(3, 0, 1), (3, 0, 2), (4, 0, 0), (4, 0, 1), (0, 0, 2)]]
)
def test_no_account_above_its_quota_takes_from_one_below_and_those_below_always_get_room(
    trace: list[tuple[str, int, int, int]],
) -> None:
    s = store()
    quota = {usage.account: usage.quota_bytes for usage in s.inspection.accounts()}
    owners = {namespace.namespace_id: namespace for namespace in ALL}
    leases: list[int] = []
    for kind, which, chain, position in trace:
        asking = ALL[which]
        run = names(4, bytes([chain]))
        if kind == "pin":
            lease = s.pin(asking.namespace_id, run, "reader", 50.0, 0.0).lease_id
            leases += [lease] if lease else []
        elif kind == "release" and leases:
            s.leases.release(leases.pop(which % len(leases)))
        if kind != "put":
            continue
        before = {usage.account: usage.used_bytes for usage in s.inspection.accounts()}
        free = s.inspection.tiers()[0].free_bytes
        size = asking.layout.part_bytes
        me = _account(asking)
        is_below = before[me] + size <= quota[me]
        s.take_events()
        parent = run[position - 1] if position else b""
        granted = s.reserve(asking.namespace_id, [run[position]], parent, 0, "w", 5.0, 0.0)
        left = dict(before)
        evictions = [event for event in s.take_events() if event.kind == "removed"]
        for event in evictions:
            victim = owners[event.namespace_id]
            other = _account(victim)
            if other != me:
                assert is_below or left[other] > quota[other], "taken from one below its quota"
            left[other] -= victim.layout.part_bytes
        if granted.statuses == [BlockStatus.NO_ROOM]:
            assert not is_below or leases, "refused below its quota"
        elif granted.reservation_id:
            s.commit(granted.reservation_id, [1], 0.0)
        if size == PAGE and free and not evictions:
            assert granted.statuses != [BlockStatus.NO_ROOM] or leases
        s.check_integrity()


@settings(max_examples=examples(200), deadline=None)
@given(
    changes=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9), st.booleans()), max_size=40),
    asking=st.integers(0, 3),
    size=st.integers(1, 5),
)
def test_donors_are_those_that_use_more_of_their_quota_most_first(
    changes: list[tuple[int, int, bool]], asking: int, size: int
) -> None:
    quota_table = QuotaTable(Accounts({"a": 0.5, "b": 0.2, "c": 0.3}, 40), 40)  # nothing for others
    model = [0, 0, 0, 0]
    for account, amount, is_more in changes:
        amount = amount if is_more else -min(amount, model[account])
        model[account] += amount
        quota_table.charge(account, amount)
    assert quota_table.used == model
    ratio = [
        model[i] / quota if quota else float("inf") if model[i] else 0.0
        for i, quota in enumerate([0, 20, 8, 12])
    ]
    own = (model[asking] + size) / quota_table.quotas[asking] if asking else float("inf")
    is_below = own <= 1
    over = [i for i in range(4) if i != asking and ratio[i] > 1 and (is_below or ratio[i] > own)]
    under = [i for i in range(4) if i != asking and own < ratio[i] <= 1 and is_below]
    donors = list(quota_table.donors(asking, size))
    assert set(donors) == {asking, *over, *under}
    assert donors.index(asking) == len(over)
    ratios = [ratio[i] for i in donors if i != asking]
    assert ratios == sorted(ratios, reverse=True)
