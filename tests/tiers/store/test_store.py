"""The store's behaviour, case by case; random interleavings are in test_properties."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from kvpool.blocks.layout import Layout, Namespace
from kvpool.blocks.records import BlockStatus
from kvpool.blocks.tier import Tier
from kvpool.errors import (
    BlockTooLarge,
    ConfigError,
    InvalidArgument,
    LayoutMismatch,
    LeaseExpired,
    NoRoom,
    ReservationGone,
    UnknownNamespace,
)
from tests.support.pool_model import CONFIG, LARGE, PAGE, SLAB, SMALL
from tiers.store.slab_allocator import Place, SlabAllocator
from tiers.store.store import Migration, Store, StoreConfig, StoreCorrupt

GRANTED, EXISTS, IN_PROGRESS, NO_ROOM = (
    BlockStatus.GRANTED,
    BlockStatus.EXISTS,
    BlockStatus.IN_PROGRESS,
    BlockStatus.NO_ROOM,
)
WRITE_THROUGH = replace(CONFIG, write_through=True)
A, B = SMALL.namespace_id, LARGE.namespace_id
OTHER = Namespace("other", "r1", Layout("float16", 1, 1, 32, 64))  # parts of two pages


def names(count: int, tag: bytes = b"n") -> list[bytes]:
    return [tag + i.to_bytes(15, "big") for i in range(count)]


def store(dram: int = 1, nvme: int = 0, config: StoreConfig = CONFIG) -> Store:
    made = Store(
        SlabAllocator(dram * SLAB, SLAB), SlabAllocator(nvme * SLAB, SLAB) if nvme else None, config
    )
    for namespace in (SMALL, LARGE, OTHER):
        made.namespaces.register(namespace)
    return made


def put(
    s: Store, run: list[bytes], parent: bytes = b"", now: float = 0.0, space: bytes = A
) -> None:
    for part in range(2 if space == B else 1):
        granted = s.reserve(space, run, parent, part, "w", 5.0, now)
        assert granted.statuses == [GRANTED] * len(run)
        s.commit(granted.reservation_id, list(range(len(run))), now)


def demote(s: Store, count: int = 100, now: float = 0.0) -> list[Migration]:
    migrations = s.migrations.plan_demotions(count, now).migrations
    for migration in migrations:
        s.finish_migration(migration.migration_id, True, now)
    return migrations


# ---------------------------------------------------------------- namespaces


def test_registering_again_changes_nothing() -> None:
    s = store()
    assert s.namespaces.register(SMALL) == A
    assert list(s.namespaces) == [SMALL, LARGE, OTHER]
    assert s.namespaces[B].layout.part_bytes == 2 * PAGE


def test_another_layout_of_a_known_model_is_refused_with_the_differing_fields() -> None:
    s = store()
    twin = Namespace("small", "r1", Layout("bfloat16", 1, 1, 16, 64, tp_size=1))
    with pytest.raises(LayoutMismatch, match="dtype: float16 != bfloat16"):
        s.namespaces.register(twin)
    s.namespaces.register(Namespace("small", "r1", twin.layout, tenant="t"))
    s.namespaces.register(Namespace("small", "r2", twin.layout))


def test_a_salt_never_shows_in_an_error() -> None:
    s = store()
    s.namespaces.register(Namespace("m", "r", SMALL.layout, salt="hush"))
    with pytest.raises(LayoutMismatch) as raised:
        s.namespaces.register(Namespace("m", "r", LARGE.layout, salt="hush"))
    assert "hush" not in str(raised.value)


def test_a_part_larger_than_a_slab_is_refused() -> None:
    with pytest.raises(BlockTooLarge):
        store().namespaces.register(Namespace("big", "r", Layout("float32", 9, 4, 64, 64)))


def test_the_number_of_namespaces_is_bounded() -> None:
    s = store(config=replace(CONFIG, max_namespaces=3))
    with pytest.raises(NoRoom):
        s.namespaces.register(Namespace("one more", "r", SMALL.layout))


def test_a_tenant_that_registers_without_end_leaves_room_for_others() -> None:
    s = store(config=replace(CONFIG, max_namespaces=103))  # three of them are known

    def register_all(tenant: str) -> int:
        for number in range(200):
            try:
                s.namespaces.register(Namespace("m", f"r{number}", SMALL.layout, tenant))
            except NoRoom:
                return number
        raise AssertionError("there is no limit")

    assert register_all("a") == 75
    assert register_all("b") == 19
    s.namespaces.register(Namespace("m", "r", SMALL.layout, "c"))
    assert register_all("") == 5  # without tenants there is nobody to leave room for


def test_calls_that_name_an_unknown_namespace_are_refused() -> None:
    s = store()
    unknown = bytes(16)
    for call in (
        lambda: s.lookup(unknown, []),
        lambda: s.pin(unknown, [], "c", 1.0, 0.0),
        lambda: s.reserve(unknown, [], b"", 0, "w", 1.0, 0.0),
        lambda: s.drop(unknown, names(1)[0], "", 0.0),
        lambda: s.namespaces[unknown].layout.part_bytes,
        lambda: s.recovery.recover_part(unknown, names(1)[0], b"", 0, Place(0, 0), 1),
    ):
        with pytest.raises(UnknownNamespace):
            call()


def test_two_namespaces_share_no_block() -> None:
    s = store(dram=2)
    put(s, names(1))
    assert s.lookup(A, names(1)) == [Tier.DRAM]
    assert s.lookup(OTHER.namespace_id, names(1)) == []


# ---------------------------------------------------------------- reserve and commit


def test_reserved_blocks_are_invisible_until_committed() -> None:
    s = store()
    run = names(2)
    granted = s.reserve(A, run, b"", 0, "w", 5.0, 0.0)
    assert granted.statuses == [GRANTED, GRANTED]
    assert granted.slot_bytes == PAGE
    assert granted.deadline == 5.0
    assert s.lookup(A, run) == []
    assert s.pin(A, run, "c", 1.0, 0.0).miss_reason == "in_progress"
    assert s.commit(granted.reservation_id, [7, 8], 1.0) == run
    pinned = s.pin(A, run, "c", 1.0, 1.0)
    assert (pinned.found, pinned.checksums, pinned.places) == (2, [7, 8], granted.places)
    assert pinned.miss_reason == ""


def test_a_block_is_visible_when_its_last_part_is_committed() -> None:
    s = store(dram=2)
    run = names(1)
    first = s.reserve(B, run, b"", 0, "rank0", 5.0, 0.0)
    second = s.reserve(B, run, b"", 1, "rank1", 5.0, 0.0)
    assert s.commit(first.reservation_id, [1], 0.0) == []
    assert s.lookup(B, run) == []
    assert s.reserve(B, run, b"", 0, "again", 5.0, 0.0).statuses == [EXISTS]
    assert s.commit(second.reservation_id, [2], 0.0) == run
    assert s.pin(B, run, "c", 1.0, 0.0).places == [*first.places, *second.places]
    only = s.pin(B, run, "c", 1.0, 0.0, [1])
    assert (only.places, only.checksums) == (second.places, [2])


def test_a_block_reserved_twice_is_granted_once() -> None:
    s = store()
    first = s.reserve(A, names(2), b"", 0, "w1", 5.0, 0.0)
    second = s.reserve(A, names(3), b"", 0, "w2", 5.0, 0.0)
    assert second.statuses == [IN_PROGRESS, IN_PROGRESS, GRANTED]
    assert len(second.places) == 1
    s.commit(first.reservation_id, [0, 0], 0.0)
    third = s.reserve(A, names(3), b"", 0, "w3", 5.0, 0.0)
    assert third.statuses == [EXISTS, EXISTS, IN_PROGRESS]
    assert third.reservation_id == 0


def test_commits_may_be_partial_and_each_index_comes_once() -> None:
    s = store()
    run = names(3)
    number = s.reserve(A, run, b"", 0, "w", 5.0, 0.0).reservation_id
    assert s.commit(number, [5], 0.0, [1]) == [run[1]]
    with pytest.raises(ReservationGone):
        s.commit(number, [5, 5], 0.0, [0, 1])
    assert s.lookup(A, run) == []  # all or none: index 0 was not committed either
    s.commit(number, [5, 5], 0.0, [0, 2])
    with pytest.raises(ReservationGone):
        s.commit(number, [5], 0.0, [0])
    assert len(s.reservations) == 0


def test_a_commit_that_does_not_fit_the_reservation_is_refused_whole() -> None:
    s = store()
    number = s.reserve(A, names(2), b"", 0, "w", 5.0, 0.0).reservation_id
    for checksums, indices in (
        ([1], None),
        ([1, 2], [0]),
        ([1], [2]),
        ([1], [-1]),
        ([1, 1], [0, 0]),
    ):
        with pytest.raises(InvalidArgument):
            s.commit(number, checksums, 0.0, indices)
    assert len(s.commit(number, [1, 2], 0.0)) == 2


def test_an_expired_reservation_cannot_be_committed_even_before_the_sweep() -> None:
    s = store()
    number = s.reserve(A, names(1), b"", 0, "w", 5.0, 0.0).reservation_id
    with pytest.raises(ReservationGone):
        s.commit(number, [1], 5.0)
    assert s.inspection.tiers()[0].quarantined_bytes == PAGE


def test_a_renewed_reservation_lives_on_and_never_shrinks() -> None:
    s = store()
    number = s.reserve(A, names(1), b"", 0, "w", 5.0, 0.0).reservation_id
    assert s.reservations.renew(number, 8.0, 4.0) == 8.0
    assert s.reservations.renew(number, 1.0, 4.0) == 8.0
    s.expire(11.9)
    assert len(s.commit(number, [1], 11.9)) == 1
    with pytest.raises(ReservationGone):
        s.reservations.renew(number, 1.0, 11.9)


def test_promised_times_are_bounded() -> None:
    s = store()
    assert s.reserve(A, names(1), b"", 0, "w", 1e9, 0.0).ttl_s == CONFIG.max_reservation_s
    for ttl in (0.0, -1.0, float("nan")):
        with pytest.raises(InvalidArgument):
            s.reserve(A, names(1), b"", 0, "w", ttl, 0.0)
        with pytest.raises(InvalidArgument):
            s.pin(A, names(1), "c", ttl, 0.0)


def test_malformed_calls_are_refused() -> None:
    s = store(config=replace(CONFIG, max_blocks_per_call=2))
    for bad in (
        lambda: s.reserve(A, [b"short"], b"", 0, "w", 1.0, 0.0),
        lambda: s.reserve(A, names(1), b"short", 0, "w", 1.0, 0.0),
        lambda: s.reserve(A, names(1), b"", 1, "w", 1.0, 0.0),
        lambda: s.reserve(A, names(3), b"", 0, "w", 1.0, 0.0),
        lambda: s.lookup(A, names(3)),
        lambda: s.pin(A, names(3), "c", 1.0, 0.0),
        lambda: s.pin(A, names(1), "c", 1.0, 0.0, [1]),
        lambda: s.pin(B, names(1), "c", 1.0, 0.0, [0, 0]),
        lambda: s.finish_migration(99, True, 0.0),
    ):
        with pytest.raises(InvalidArgument):
            bad()


@pytest.mark.parametrize(
    "change",
    [{"grace_s": -1.0}, {"max_lease_s": 0.0}, {"dram_low_watermark": 0.95}, {"first_id": 0}],
)
def test_impossible_limits_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        replace(StoreConfig(), **change)  # type: ignore[arg-type]


# ---------------------------------------------------------------- quarantine


def test_expired_reservation_is_quarantined_until_the_longest_transfer_is_over() -> None:
    s = store()
    s.reserve(A, names(4), b"", 0, "w", 1.0, 0.0)
    assert s.expire(1.0) == 1
    assert s.inspection.tiers()[0].quarantined_bytes == 4 * PAGE
    again = s.reserve(A, names(1), b"", 0, "w2", 1.0, 1.0 + CONFIG.quarantine_s - 0.001)
    assert again.statuses == [NO_ROOM]
    again = s.reserve(A, names(1), b"", 0, "w2", 1.0, 1.0 + CONFIG.quarantine_s)
    assert again.statuses == [GRANTED]


def test_expired_reservation_is_quarantined_until_its_writer_confirms_that_it_stopped() -> None:
    s = store()
    first = s.reserve(A, names(3), b"", 0, "w1", 1.0, 0.0).reservation_id
    second = s.reserve(A, names(1, b"x"), b"", 0, "w2", 1.0, 0.0).reservation_id
    s.expire(1.0)
    s.reservations.abort(first, True, 1.0)
    usage = s.inspection.tiers()[0]
    assert (usage.quarantined_bytes, usage.free_bytes) == (PAGE, 3 * PAGE)
    assert (s.reservations.writer_of(first), s.reservations.writer_of(second)) == (None, "w2")
    s.reservations.abort(first, True, 1.0)
    assert s.expire(1.0 + CONFIG.quarantine_s) == 1  # only the second's slot is left
    assert s.inspection.tiers()[0].free_bytes == 4 * PAGE
    s.check_integrity()


def test_the_end_of_a_writer_ends_no_quarantine() -> None:
    """Its transfers may still arrive, and its children may still map the arena (invariant 2)."""
    s = store()
    number = s.reserve(A, names(2), b"", 0, "w", 10.0, 0.0).reservation_id
    for now in (1.0, 2.0):
        s.client_gone("w", now)
        assert (s.inspection.tiers()[0].quarantined_bytes, s.reservations.writer_of(number)) == (
            2 * PAGE,
            "w",
        )
    s.expire(1.0 + CONFIG.quarantine_s - 0.001)
    assert s.inspection.tiers()[0].quarantined_bytes == 2 * PAGE
    s.expire(1.0 + CONFIG.quarantine_s)
    assert (s.inspection.tiers()[0].free_bytes, s.reservations.writer_of(number)) == (
        4 * PAGE,
        None,
    )


def test_abort_frees_at_once_only_when_the_writer_stopped() -> None:
    s = store()
    first = s.reserve(A, names(2), b"", 0, "w", 5.0, 0.0).reservation_id
    second = s.reserve(A, names(2, b"x"), b"", 0, "w", 5.0, 0.0).reservation_id
    s.reservations.abort(first, True, 0.0)
    assert s.inspection.tiers()[0].free_bytes == 2 * PAGE
    s.reservations.abort(second, False, 0.0)
    assert s.inspection.tiers()[0].quarantined_bytes == 2 * PAGE
    s.reservations.abort(second, True, 0.1)  # confirmed later
    assert s.inspection.tiers()[0].free_bytes == 4 * PAGE
    s.reservations.abort(second, True, 0.1)
    s.reservations.abort(12345, True, 0.1)


def test_what_was_committed_survives_the_abort_of_the_rest() -> None:
    s = store()
    run = names(3)
    number = s.reserve(A, run, b"", 0, "w", 5.0, 0.0).reservation_id
    s.commit(number, [1], 0.0, [0])
    s.reservations.abort(number, False, 0.0)
    assert s.lookup(A, run) == [Tier.DRAM]
    usage = s.inspection.tiers()[0]
    assert (usage.committed_bytes, usage.quarantined_bytes) == (PAGE, 2 * PAGE)


def test_a_client_that_dies_leaves_grace_and_quarantine_and_then_nothing() -> None:
    s = store()
    put(s, names(2))
    s.pin(A, names(2), "c", 10.0, 0.0)
    s.reserve(A, names(2, b"x"), b"", 0, "c", 10.0, 0.0)
    s.client_gone("c", 1.0)
    usage = s.inspection.tiers()[0]
    assert (usage.pinned_bytes, usage.quarantined_bytes) == (2 * PAGE, 2 * PAGE)
    s.expire(1.0 + CONFIG.grace_s)
    assert s.inspection.tiers()[0].pinned_bytes == 0
    s.expire(1.0 + CONFIG.quarantine_s)
    assert s.inspection.tiers()[0].free_bytes == 2 * PAGE
    assert (len(s.leases), len(s.reservations)) == (0, 0)


# ---------------------------------------------------------------- leases


def test_a_lease_keeps_its_blocks_until_deadline_and_grace_have_passed() -> None:
    s = store()
    put(s, names(4))
    s.pin(A, names(4), "c", 3.0, 0.0)
    late = 3.0 + CONFIG.grace_s
    assert s.reserve(A, names(1, b"x"), b"", 0, "w", 1.0, late - 0.001).statuses == [NO_ROOM]
    assert s.reserve(A, names(1, b"x"), b"", 0, "w", 1.0, late).statuses == [GRANTED]


def test_a_lease_can_be_renewed_before_its_deadline_only() -> None:
    s = store()
    put(s, names(1))
    lease = s.pin(A, names(1), "c", 3.0, 0.0).lease_id
    assert s.leases.renew(lease, 3.0, 2.0) == 3.0
    assert s.leases.renew(lease, 1e9, 3.0) == CONFIG.max_lease_s
    s.expire(10.0)
    with pytest.raises(LeaseExpired):
        s.leases.renew(lease, 3.0, 13.0)
    with pytest.raises(LeaseExpired):
        s.leases.renew(99, 3.0, 0.0)


def test_blocks_pinned_twice_are_held_until_both_let_go() -> None:
    s = store()
    put(s, names(4))
    first = s.pin(A, names(4), "c1", 9.0, 0.0).lease_id
    second = s.pin(A, names(4), "c2", 9.0, 0.0).lease_id
    assert s.inspection.tiers()[0].pinned_bytes == 4 * PAGE
    s.leases.release(first)
    s.leases.release(first)
    assert s.reserve(A, names(1, b"x"), b"", 0, "w", 1.0, 0.0).statuses == [NO_ROOM]
    s.leases.release(second)
    assert s.reserve(A, names(1, b"x"), b"", 0, "w", 1.0, 0.0).statuses == [GRANTED]


def test_lookup_takes_no_lease_and_counts_as_no_use() -> None:
    s = store()
    for tag in (b"a", b"b", b"c", b"d"):
        put(s, names(1, tag))
    s.lookup(A, names(1, b"a"))
    put(s, names(1, b"e"))
    assert s.lookup(A, names(1, b"a")) == []
    assert s.inspection.tiers()[0].pinned_bytes == 0


def test_a_pin_says_why_the_next_block_is_missing() -> None:
    s = store()
    run = names(5)
    put(s, run[:2])
    assert s.pin(A, run, "c", 1.0, 0.0).miss_reason == "never_stored"
    s.reserve(A, run[2:3], run[1], 0, "w", 1.0, 0.0)
    result = s.pin(A, run, "c", 1.0, 0.0)
    assert (result.found, result.miss_reason) == (2, "in_progress")
    s.client_gone("c", 0.0)
    s.expire(5.0)
    s.drop(A, run[1], "checksum", 5.0)
    assert s.pin(A, run, "c", 1.0, 5.0).miss_reason == "checksum"
    s.client_gone("c", 5.0)
    s.expire(20.0)
    put(s, names(4, b"x"), now=20.0)
    assert s.pin(A, run, "c", 1.0, 20.0).miss_reason == "evicted"
    assert s.counters["miss:evicted"] == 1


def test_numbers_start_where_the_epoch_says() -> None:
    s = store(config=replace(CONFIG, first_id=7 << 32))
    put(s, names(1))
    assert s.pin(A, names(1), "c", 1.0, 0.0).lease_id == 7 << 32


# ---------------------------------------------------------------- eviction


def test_the_least_recently_used_leaf_is_evicted_first() -> None:
    s = store()
    chain = names(3)
    put(s, chain)
    put(s, names(1, b"x"))
    put(s, names(1, b"y"))  # evicts the tail of the chain, not its older head
    assert s.lookup(A, chain) == [Tier.DRAM, Tier.DRAM]
    s.leases.release(s.pin(A, chain[:2], "c", 1.0, 0.0).lease_id)
    put(s, names(1, b"z"))
    assert s.lookup(A, chain) == [Tier.DRAM, Tier.DRAM]
    assert s.lookup(A, names(1, b"x")) == []


def test_a_prefix_stays_while_a_reserved_suffix_builds_on_it() -> None:
    s = store()
    chain = names(2)
    put(s, chain[:1])
    s.reserve(A, chain[1:], chain[0], 0, "w", 9.0, 0.0)
    for tag in (b"a", b"b", b"c", b"d"):
        put(s, names(1, tag))
    assert s.lookup(A, chain[:1]) == [Tier.DRAM]


def test_a_run_never_evicts_what_it_builds_on() -> None:
    s = store()
    chain = names(6)
    put(s, chain[:3])
    granted = s.reserve(A, chain[3:], chain[2], 0, "w", 9.0, 0.0)
    assert granted.statuses == [GRANTED, NO_ROOM, NO_ROOM]
    assert s.lookup(A, chain[:3]) == [Tier.DRAM] * 3


def test_a_run_does_not_evict_its_ancestors_beyond_a_gap() -> None:
    s = store()
    chain = names(6)
    put(s, chain[:4])
    s.drop(A, chain[1], "asked", 0.0)
    granted = s.reserve(A, chain, b"", 0, "w", 9.0, 0.0)
    assert granted.statuses == [EXISTS, GRANTED, EXISTS, EXISTS, NO_ROOM, NO_ROOM]


def test_parents_in_a_circle_do_not_make_blocks_immortal() -> None:
    s = store()
    one, two = names(2)
    put(s, [one], parent=two)
    put(s, [two], parent=one)
    put(s, names(1, b"s"), parent=names(1, b"s")[0])
    put(s, names(4, b"x"))
    assert s.lookup(A, names(4, b"x")) == [Tier.DRAM] * 4


def test_half_written_blocks_do_not_hold_their_room_for_ever() -> None:
    s = store()
    number = s.reserve(B, names(2), b"", 0, "rank0", 5.0, 0.0).reservation_id
    s.commit(number, [1, 1], 0.0)
    put(s, names(4))
    assert s.inspection.tiers()[0].blocks == 4


def test_a_slab_of_another_size_is_reclaimed_whole() -> None:
    s = store(dram=2)
    put(s, names(8))
    other = OTHER.namespace_id
    put(s, names(2, b"x"), space=other)
    assert s.lookup(other, names(2, b"x")) == [Tier.DRAM, Tier.DRAM]
    assert s.lookup(A, names(8)) == [Tier.DRAM] * 4  # the tail was evicted, the head stayed
    s.check_integrity()


def test_a_slab_with_one_pinned_block_is_not_reclaimed() -> None:
    s = store(dram=1)
    put(s, names(4))
    s.pin(A, names(1), "c", 9.0, 0.0)
    granted = s.reserve(OTHER.namespace_id, names(1), b"", 0, "w", 1.0, 0.0)
    assert granted.statuses == [NO_ROOM]
    assert s.lookup(A, names(4)) == [Tier.DRAM] * 4


def test_a_busy_slot_size_outgrows_an_idle_one() -> None:
    s = store(dram=4)
    put(s, names(12))  # idle: three slabs
    other = OTHER.namespace_id
    for i in range(20):
        put(s, names(1, bytes([i])), space=other)
    assert sum(bool(s.lookup(other, names(1, bytes([i])))) for i in range(20)) == 8


# ---------------------------------------------------------------- drop


def test_a_dropped_block_that_is_read_is_hidden_at_once_and_freed_later() -> None:
    s = store()
    put(s, names(2))
    lease = s.pin(A, names(2), "c", 9.0, 0.0).lease_id
    assert s.drop(A, names(2)[1], "checksum", 0.0)
    assert s.lookup(A, names(2)) == [Tier.DRAM]
    assert s.inspection.tiers()[0].committed_bytes == 2 * PAGE
    granted = s.reserve(A, names(2)[1:], names(2)[0], 0, "w", 9.0, 0.0)
    assert granted.statuses == [GRANTED]
    s.leases.release(lease)
    usage = s.inspection.tiers()[0]
    assert (usage.committed_bytes, usage.reserved_bytes) == (PAGE, PAGE)
    s.check_integrity()


def test_dropping_ignores_blocks_that_are_only_being_written() -> None:
    s = store()
    number = s.reserve(A, names(1), b"", 0, "w", 9.0, 0.0).reservation_id
    assert not s.drop(A, names(1)[0], "checksum", 0.0)
    assert not s.drop(A, names(2)[1], "checksum", 0.0)
    assert len(s.commit(number, [1], 0.0)) == 1


def test_a_part_committed_after_its_block_was_dropped_stays_invisible() -> None:
    s = store(dram=2)
    first = s.reserve(B, names(1), b"", 0, "r0", 9.0, 0.0).reservation_id
    second = s.reserve(B, names(1), b"", 1, "r1", 9.0, 0.0).reservation_id
    s.commit(first, [1], 0.0)
    assert s.drop(B, names(1)[0], "asked", 0.0)
    assert s.commit(second, [1], 0.0) == []
    assert s.inspection.tiers()[0].free_bytes == 2 * SLAB


# ---------------------------------------------------------------- nvme


def test_cold_blocks_are_copied_above_the_high_watermark_down_to_the_low_one() -> None:
    s = store(dram=2, nvme=2)  # 8 slots: high 4, low 2
    put(s, names(4))
    assert s.migrations.plan_demotions(9, 0.0).migrations == []
    put(s, names(2, b"x"))
    migrations = s.migrations.plan_demotions(9, 0.0).migrations
    assert [m.block_hash for m in migrations] == names(4)[
        ::-1
    ]  # coldest first; 2 are free, 6 will be
    assert {(m.source_tier, m.target_tier, m.length) for m in migrations} == {
        (Tier.DRAM, Tier.NVME, PAGE)
    }
    assert [m.parent for m in migrations] == [*names(4)[2::-1], b""]
    assert s.migrations.plan_demotions(9, 0.0).migrations == []
    assert s.inspection.tiers()[1].reserved_bytes == 4 * PAGE
    for migration in migrations:
        s.finish_migration(migration.migration_id, True, 0.0)
    assert s.inspection.tiers()[1].committed_bytes == 4 * PAGE
    assert s.lookup(A, names(4)) == [Tier.DRAM] * 4


def test_pinned_blocks_are_not_demoted_unless_everything_is_written_through() -> None:
    s = store(dram=1, nvme=2)
    put(s, names(4))
    s.pin(A, names(4), "c", 9.0, 0.0)
    assert s.migrations.plan_demotions(9, 0.0).migrations == []
    s = store(dram=2, nvme=2, config=WRITE_THROUGH)
    put(s, names(2))
    s.pin(A, names(2), "c", 9.0, 0.0)
    assert len(s.migrations.plan_demotions(1, 0.0).migrations) == 1
    assert len(s.migrations.plan_demotions(9, 0.0).migrations) == 1


def test_an_evicted_block_with_an_nvme_copy_is_found_there_and_promoted() -> None:
    s = store(dram=1, nvme=2)
    run = names(3)
    put(s, run)
    demoted = demote(s)
    put(s, names(3, b"x"))
    assert s.lookup(A, run) == [Tier.DRAM, Tier.NVME, Tier.NVME]
    first = s.pin(A, run, "c", 1.0, 0.0)
    assert (first.lease_id, first.found, first.miss_reason) == (0, 0, "promoting")
    assert [m.block_hash for m in first.promote] == run[1:]
    targets = {m.block_hash: m.target for m in demoted}
    assert [m.source for m in first.promote] == [targets[h] for h in run[1:]]
    waiting = s.pin(A, run, "c", 1.0, 0.0)
    assert (waiting.miss_reason, waiting.promote) == ("promoting", [])
    for migration in first.promote:
        s.finish_migration(migration.migration_id, True, 0.0)
    second = s.pin(A, run, "c", 1.0, 0.0)
    assert (second.found, second.tiers) == (3, [Tier.DRAM] * 3)
    assert second.checksums == [0, 1, 2]
    assert s.counters["promoted"] == 2


def test_a_run_that_dram_has_no_room_for_is_cut_there() -> None:
    s = store(dram=1, nvme=2)
    put(s, names(3))
    demote(s)
    put(s, names(3, b"x"))
    s.pin(A, names(3, b"x"), "c", 9.0, 0.0)
    result = s.pin(A, names(3), "c", 9.0, 0.0)
    assert (result.found, result.miss_reason, result.promote) == (1, "no_room", [])
    s.check_integrity()


def test_a_failed_promotion_leaves_the_block_in_nvme() -> None:
    s = store(dram=1, nvme=2, config=WRITE_THROUGH)
    put(s, names(3))
    demote(s)
    put(s, names(4, b"x"))
    migrations = s.pin(A, names(3), "c", 9.0, 0.0).promote
    for migration in migrations:
        s.finish_migration(migration.migration_id, False, 0.0)
    assert s.lookup(A, names(3)) == [Tier.NVME] * 3
    assert s.inspection.tiers()[0].reserved_bytes == 0
    s.check_integrity()


def test_promotions_can_be_cancelled() -> None:
    s = store(dram=1, nvme=2, config=WRITE_THROUGH)
    put(s, names(3))
    demote(s)
    put(s, names(4, b"x"))
    s.cancel_migrations(s.pin(A, names(3), "c", 9.0, 0.0).promote, 0.0)
    assert (s.migration_count, s.inspection.tiers()[0].reserved_bytes) == (0, 0)
    assert s.counters.get("migrations_failed", 0) == 0


def test_a_failed_demotion_is_tried_again_later() -> None:
    s = store(dram=1, nvme=2, config=WRITE_THROUGH)
    put(s, names(4))
    migrations = s.migrations.plan_demotions(1, 0.0).migrations
    s.finish_migration(migrations[0].migration_id, False, 0.0)
    rest = demote(s)
    assert len(rest) == 3
    s.check_integrity()
    assert [
        m.block_hash for m in s.migrations.plan_demotions(9, CONFIG.migration_retry_s).migrations
    ] == [migrations[0].block_hash]


def test_every_part_must_arrive_before_a_copy_counts() -> None:
    s = store(dram=1, nvme=1, config=WRITE_THROUGH)
    put(s, names(1), space=B)
    first, second = s.migrations.plan_demotions(9, 0.0).migrations
    assert (first.part, second.part) == (0, 1)
    s.take_events()
    s.finish_migration(first.migration_id, True, 0.0)
    assert s.take_events() == []
    s.finish_migration(second.migration_id, False, 0.0)
    assert s.inspection.tiers()[1].free_bytes == SLAB


def test_a_full_disk_is_not_rewritten_for_ever() -> None:
    s = store(dram=2, nvme=1, config=WRITE_THROUGH)
    put(s, names(8))
    total = sum(len(demote(s, now=100.0 * i)) for i in range(20))
    assert total <= 8
    assert s.migrations.plan_demotions(9, 1e4).migrations == []


def test_a_block_that_finds_no_colder_one_below_holds_up_no_hotter_one() -> None:
    s = store(dram=4, nvme=1, config=WRITE_THROUGH)  # 16 slots over 4
    for name in names(12):  # in DRAM to stay, and on NVMe until hotter ones came
        put(s, [name])
        demote(s)
    assert [s.resident_tiers(A, name) for name in names(12)[-5:]] == [[Tier.DRAM]] + [
        [Tier.DRAM, Tier.NVME]
    ] * 4
    [newest] = names(1, b"x")
    put(s, [newest])
    # Eight colder ones are tried first. Each finds nothing colder, and none is tried again at once.
    retry_s = CONFIG.migration_retry_s
    assert [m.block_hash for m in demote(s, 9, retry_s)] == [newest]
    assert s.counters["demotion_refused"] == 8 + 8
    s.check_integrity()


def test_a_block_of_another_slot_size_is_demoted_while_one_finds_no_room() -> None:
    s = store(dram=6, nvme=2, config=WRITE_THROUGH)
    space = OTHER.namespace_id
    for name in names(2, b"o"):
        put(s, [name], space=space)
        demote(s)
    for name in names(5):  # the last one takes the room of the first
        put(s, [name])
        demote(s)
    [newest] = names(1, b"x")
    put(s, [newest], space=space)
    assert [m.block_hash for m in demote(s, 9, CONFIG.migration_retry_s)] == [newest]
    assert s.resident_tiers(A, names(1)[0]) == [Tier.DRAM]


def test_refused_blocks_come_again_late_unless_they_are_used() -> None:
    s = store(dram=4, nvme=1, config=WRITE_THROUGH)
    for name in names(6):
        put(s, [name])
        demote(s)
    retry_s = CONFIG.migration_retry_s

    def refused() -> float:
        return s.counters.get("demotion_refused", 0)

    assert (demote(s), refused()) == ([], 2)
    assert (s.migrations.plan_demotions(9, retry_s).migrations, refused()) == ([], 4)
    assert (s.migrations.plan_demotions(9, 3 * retry_s).migrations, refused()) == ([], 4)
    s.pin(A, names(1), "c", 1.0, 4 * retry_s)
    migrations = s.migrations.plan_demotions(9, 20 * retry_s).migrations
    assert [m.block_hash for m in migrations] == names(1)


def test_a_round_of_refusals_alone_says_that_there_is_more_to_plan() -> None:
    s = store(dram=4, nvme=1, config=WRITE_THROUGH)
    for name in names(8):
        put(s, [name])
        demote(s)
    put(s, names(1, b"x"))
    retry_s = CONFIG.migration_retry_s
    assert s.migrations.plan_demotions(2, retry_s) == ([], True)
    assert s.migrations.plan_demotions(2, retry_s) == ([], True)
    plan = s.migrations.plan_demotions(2, retry_s)
    assert [m.block_hash for m in plan.migrations] == names(1, b"x")
    assert not plan.has_more


def test_a_block_dropped_while_moving_leaves_both_tiers() -> None:
    s = store(dram=1, nvme=1)
    put(s, names(4))
    migrations = s.migrations.plan_demotions(1, 0.0).migrations
    s.drop(A, migrations[0].block_hash, "checksum", 0.0)
    s.check_integrity()
    s.finish_migration(migrations[0].migration_id, True, 0.0)
    assert s.inspection.tiers()[1].free_bytes == SLAB
    assert s.inspection.tiers()[0].committed_bytes == 3 * PAGE


def test_what_is_found_in_nvme_at_start_is_visible_again() -> None:
    s = store(dram=1, nvme=2)
    one, two = names(2)
    assert s.recovery.recover_part(A, two, one, 0, Place(0, 2 * PAGE), 22)
    assert s.recovery.recover_part(A, one, b"", 0, Place(0, 0), 11)
    assert not s.recovery.recover_part(A, one, b"", 0, Place(0, PAGE), 11)  # known
    assert not s.recovery.recover_part(A, names(3)[2], two, 0, Place(0, 0), 33)  # taken
    assert not s.recovery.recover_part(
        A, names(3)[2], two, 1, Place(0, 3 * PAGE), 33
    )  # no such part
    assert s.lookup(A, [one, two]) == [Tier.NVME, Tier.NVME]
    s.check_integrity()
    migrations = s.pin(A, [one, two], "c", 1.0, 0.0).promote
    assert [(m.source, m.checksum) for m in migrations] == [
        (Place(0, 0), 11),
        (Place(0, 2 * PAGE), 22),
    ]


def test_half_recovered_blocks_are_freed_and_named() -> None:
    s = store(dram=1, nvme=2)
    whole, half = names(2)
    assert s.recovery.recover_part(B, whole, b"", 0, Place(0, 0), 1)
    assert s.recovery.recover_part(B, whole, b"", 1, Place(0, 2 * PAGE), 1)
    assert s.recovery.recover_part(B, half, whole, 1, Place(0, 4 * PAGE), 1)
    assert s.recovery.discard_partial() == [(B, half)]
    assert s.inspection.tiers()[1].committed_bytes == 4 * PAGE
    assert s.lookup(B, [whole, half]) == [Tier.NVME]


def test_a_half_recovered_block_gives_way_to_a_new_writer() -> None:
    s = store(dram=1, nvme=2)
    assert s.recovery.recover_part(B, names(1)[0], b"", 0, Place(0, 0), 1)
    put(s, names(1), space=B)
    assert s.lookup(B, names(1)) == [Tier.DRAM]
    assert s.inspection.tiers()[1].free_bytes == 2 * SLAB


# ---------------------------------------------------------------- reports


def test_events_tell_of_whole_copies_in_order() -> None:
    s = store(dram=1, nvme=1)
    put(s, names(1))
    assert [tuple(e) for e in s.take_events()] == [("stored", A, names(1)[0], Tier.DRAM)]
    assert s.take_events() == []
    put(s, names(3, b"x"))
    demote(s)
    s.take_events()
    put(s, names(1, b"y"))
    events = [tuple(e) for e in s.take_events()]
    assert events == [
        ("removed", A, names(1)[0], Tier.DRAM),
        ("stored", A, names(1, b"y")[0], Tier.DRAM),
    ]
    assert (Tier.NVME, names(1)[0]) in {(tier, name) for _, tier, name in s.inspection.snapshot()}


def test_events_that_nobody_takes_are_bounded_and_the_loss_is_counted() -> None:
    s = store(config=replace(CONFIG, max_pending_events=3))
    put(s, names(4))
    assert [e.block_hash for e in s.take_events()] == names(4)[1:]
    assert s.counters["events_lost"] == 1


def test_the_states_add_up_to_the_arena() -> None:
    s = store(dram=2)
    put(s, names(2))
    s.pin(A, names(1), "c", 9.0, 0.0)
    s.reserve(A, names(1, b"x"), b"", 0, "w", 9.0, 0.0)
    aborted = s.reserve(A, names(1, b"y"), b"", 0, "w", 9.0, 0.0).reservation_id
    s.reservations.abort(aborted, False, 0.0)
    usage = s.inspection.tiers()[0]
    assert usage.reserved_bytes == usage.quarantined_bytes == usage.pinned_bytes == PAGE
    assert usage.committed_bytes == 2 * PAGE
    assert usage.free_bytes == 4 * PAGE
    assert usage.blocks == 2


def test_a_state_that_contradicts_itself_is_noticed() -> None:
    s = store()
    put(s, names(1))
    s._table.tiers[Tier.DRAM].committed_bytes += 1
    with pytest.raises(StoreCorrupt):
        s.check_integrity()


def test_lookup_and_pin_fit_inside_a_scheduling_step() -> None:
    # Generous, for a busy machine: it must only notice quadratic work.
    s = Store(SlabAllocator(1024 * PAGE, SLAB), None, CONFIG)
    s.namespaces.register(SMALL)
    run = names(256)
    put(s, run)
    best = [1.0, 1.0]
    for _ in range(200):
        start = time.perf_counter()
        s.lookup(A, run)
        middle = time.perf_counter()
        lease = s.pin(A, run, "c", 1.0, 0.0).lease_id
        end = time.perf_counter()
        s.leases.release(lease)
        best = [min(best[0], middle - start), min(best[1], end - middle)]
    assert max(best) < 500e-6


def test_chains_that_lie_across_slabs_give_way_to_another_slot_size() -> None:
    """No slab can be emptied at once: each holds a block with a descendant in another slab."""
    s = store(dram=4)
    per_slab = SLAB // PAGE
    filler, chain = names(2 * per_slab, b"f"), names(4 * per_slab, b"c")
    for i, name in enumerate(
        filler
    ):  # chains of one block each, so that any of them may be evicted
        put(s, [name], now=float(i))
    put(s, chain[: 2 * per_slab], now=100.0)
    for i, name in enumerate(filler[::2]):
        s.drop(A, name, "checksum", 101.0)
        put(s, [chain[2 * per_slab + i]], parent=chain[2 * per_slab + i - 1], now=102.0)
    for i, name in enumerate(filler[1::2]):
        s.drop(A, name, "checksum", 103.0)
        at = 3 * per_slab + i
        put(s, [chain[at]], parent=chain[at - 1], now=104.0)
    put(s, names(1, b"z"), now=105.0, space=OTHER.namespace_id)
    s.check_integrity()
    left = len(s.lookup(A, chain))
    assert left < 4 * per_slab  # tails were evicted first, so that the head is still a run
    assert s.inspection.tiers()[0].blocks == left + 1
