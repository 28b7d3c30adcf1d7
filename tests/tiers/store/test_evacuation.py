"""Arenas that come and go: which blocks migrate, which stay, and that none is lost without need."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from kvpool.blocks.tier import Tier
from kvpool.errors import InvalidArgument, NoRoom, NotFound
from tests.support.pool_model import CONFIG, LARGE, PAGE, SLAB, SMALL
from tests.tiers.store.test_store import A, B, names, put, store
from tiers.store.config import StoreConfig
from tiers.store.slab_allocator import Place, SlabAllocator
from tiers.store.store import Store


def grow(s: Store, arena_id: int, slabs: int = 1) -> None:
    s.add_arena(Tier.DRAM, SlabAllocator(slabs * SLAB, SLAB, arena_id), 0.0)


def empty(s: Store, now: float = 0.0, *, ok: bool = True) -> None:
    """Evacuate as the node does, until nothing happens any more."""
    for _ in range(100):
        before = s.evacuations.bytes_left()
        migrations = s.plan_evacuation(4, now)
        for migration in migrations:
            s.finish_migration(migration.migration_id, ok, now)
        if not migrations and s.evacuations.bytes_left() == before:
            break
    s.check_integrity()


def tiers_of(s: Store, run: list[bytes], space: bytes = A) -> list[Tier | str]:
    found = (s.lookup(space, [name]) for name in run)
    return [tiers[0] if tiers else "gone" for tiers in found]


def places_of(s: Store, run: list[bytes], space: bytes = A) -> list[Place]:
    pinned = s.pin(space, run, "c", 1.0, 0.0)
    s.leases.release(pinned.lease_id)
    return pinned.places


def test_a_new_arena_takes_what_the_old_ones_have_no_room_for() -> None:
    s = store(dram=1)
    put(s, names(4))
    grow(s, 1)
    put(s, names(4, b"m"))
    assert tiers_of(s, names(4) + names(4, b"m")) == [Tier.DRAM] * 8
    assert s.inspection.tiers()[0].capacity_bytes == 2 * SLAB
    assert {place.arena_id for place in places_of(s, names(4, b"m"))} == {1}


def test_a_block_that_fits_in_what_remains_is_never_lost() -> None:
    s = store(dram=1)
    grow(s, 1)
    run = names(4)
    put(s, run)
    s.evacuations.begin(0)
    empty(s)
    assert (s.evacuations.take_empty(), s.evacuations.bytes_left()) == ([0], {})
    assert tiers_of(s, run) == [Tier.DRAM] * 4


def test_blocks_migrate_with_their_checksums_and_without_an_event() -> None:
    s = store(dram=2)
    grow(s, 1, slabs=2)
    put(s, names(3))
    put(s, names(1), space=B)  # two parts of two pages
    s.take_events()
    s.evacuations.begin(0)
    empty(s)
    assert s.evacuations.take_empty() == [0]
    assert s.take_events() == []
    assert s.counters["relocated"] == 4
    assert s.counters.get("lost", 0) == 0


def test_both_parts_of_a_block_migrate_and_readers_get_the_new_places() -> None:
    s = store(dram=1)
    run = names(1)
    put(s, run, space=B)
    before = s.pin(B, run, "c", 1.0, 0.0)
    s.leases.release(before.lease_id)
    grow(s, 1)
    s.evacuations.begin(0)
    migrations = s.plan_evacuation(4, 0.0)
    assert [(m.source_tier, m.target_tier, m.part) for m in migrations] == [
        (Tier.DRAM, Tier.DRAM, 0),
        (Tier.DRAM, Tier.DRAM, 1),
    ]
    assert [m.source for m in migrations] == before.places
    s.finish_migration(migrations[0].migration_id, True, 0.0)
    assert places_of(s, run, B) == before.places  # not before both parts are there
    s.finish_migration(migrations[1].migration_id, True, 0.0)
    assert places_of(s, run, B) == [m.target for m in migrations]
    assert s.pin(B, run, "c", 1.0, 0.0).checksums == before.checksums
    assert s.evacuations.take_empty() == [0]
    s.check_integrity()


def test_recently_used_blocks_stay_and_cold_ones_are_evicted() -> None:
    s = store(dram=1)
    put(s, names(4, b"c"))
    grow(s, 1)
    put(s, names(4, b"h"))
    s.evacuations.begin(1)
    empty(s)
    assert s.evacuations.take_empty() == [1]
    assert tiers_of(s, names(4, b"h")) == [Tier.DRAM] * 4
    assert tiers_of(s, names(4, b"c")) == ["gone"] * 4


def test_cold_blocks_of_the_arena_go_before_warmer_ones_elsewhere_and_tails_before_heads() -> None:
    s = store(dram=1)
    put(s, names(4, b"c"))
    grow(s, 1)
    put(s, names(4, b"h"))
    s.evacuations.begin(0)
    s.take_events()
    empty(s)
    assert tiers_of(s, names(4, b"h")) == [Tier.DRAM] * 4
    assert [e.block_hash for e in s.take_events()] == names(4, b"c")[::-1]


def test_blocks_that_find_no_room_in_dram_are_demoted_to_nvme() -> None:
    s = store(dram=1, nvme=4, config=replace(CONFIG, dram_high_watermark=1.0))
    put(s, names(4, b"c"))
    grow(s, 1)
    put(s, names(4, b"h"))
    s.evacuations.begin(0)
    empty(s)
    assert s.evacuations.take_empty() == [0]
    assert tiers_of(s, names(4, b"c")) == [Tier.NVME] * 4
    assert tiers_of(s, names(4, b"h")) == [Tier.DRAM] * 4
    assert s.counters.get("lost", 0) == 0


def test_leased_blocks_keep_their_places_until_the_lease_and_its_grace_are_over() -> None:
    s = store(dram=1)
    run = names(4)
    put(s, run)
    grow(s, 1)
    lease = s.pin(A, run[:2], "c", 5.0, 0.0)
    s.evacuations.begin(0)
    empty(s)
    assert s.evacuations.bytes_left() == {0: 2 * PAGE}
    assert s.inspection.tiers()[0].pinned_bytes == 2 * PAGE
    empty(s, now=5.0 + CONFIG.grace_s - 0.1)
    assert (s.evacuations.bytes_left(), s.evacuations.take_empty()) == ({0: 2 * PAGE}, [])
    empty(s, now=5.0 + CONFIG.grace_s)
    assert s.evacuations.take_empty() == [0]
    assert tiers_of(s, run) == [Tier.DRAM] * 4
    assert {place.arena_id for place in lease.places} == {0}


def test_new_readers_of_a_leased_block_find_it_elsewhere() -> None:
    s = store(dram=1, nvme=1)
    run = names(2)
    put(s, run)
    grow(s, 1)
    old = s.pin(A, run, "c", 5.0, 0.0)
    s.evacuations.begin(0)
    empty(s)
    assert places_of(s, run) == old.places  # the lease may end soon; but then another one comes
    empty(s)
    new = s.pin(A, run, "d", 9.0, 0.0)
    assert {place.arena_id for place in new.places} == {1}
    assert new.checksums == old.checksums
    s.leases.release(old.lease_id)
    assert s.evacuations.take_empty() == [0]
    s.check_integrity()
    assert s.drop(A, run[0], "checksum", 0.0)
    s.leases.release(new.lease_id)
    s.check_integrity()
    assert tiers_of(s, run) == ["gone", Tier.DRAM]


def test_leased_blocks_that_fit_nowhere_else_stay_until_they_are_released() -> None:
    s = store(dram=1)
    put(s, names(4, b"c"))
    grow(s, 1)
    put(s, names(4, b"h"))
    for run in (names(4, b"c"), names(4, b"h")):
        lease = s.pin(A, run, "c", 5.0, 0.0)
    s.evacuations.begin(1)
    empty(s)
    assert s.evacuations.bytes_left() == {1: 4 * PAGE}
    assert places_of(s, names(4, b"h")) == lease.places
    s.leases.release(lease.lease_id)
    empty(s)
    assert s.evacuations.take_empty() == [1]
    assert tiers_of(s, names(4, b"h")) == ["gone"] * 4


def test_a_lease_that_begins_while_its_block_migrates_keeps_the_old_place() -> None:
    s = store(dram=1)
    run = names(1)
    put(s, run)
    grow(s, 1)
    s.evacuations.begin(0)
    [migration] = s.plan_evacuation(4, 0.0)
    lease = s.pin(A, run, "c", 5.0, 0.0)
    s.finish_migration(migration.migration_id, True, 0.0)
    s.check_integrity()
    assert lease.places == [migration.source]
    assert s.evacuations.bytes_left() == {0: PAGE}
    s.leases.release(lease.lease_id)
    assert s.evacuations.take_empty() == [0]
    assert tiers_of(s, run) == [Tier.DRAM]


def test_what_waits_for_a_lease_takes_no_room_from_what_was_used_since() -> None:
    s = store(dram=1)
    old, new = names(4, b"o"), names(4, b"n")
    put(s, old)
    lease = s.pin(A, old, "c", 5.0, 0.0)
    grow(s, 1)
    s.evacuations.begin(0)
    put(s, new)
    empty(s)
    places_of(s, new)
    s.leases.release(lease.lease_id)
    empty(s)
    assert s.evacuations.take_empty() == [0]
    assert tiers_of(s, new) == [Tier.DRAM] * 4
    assert tiers_of(s, old) == ["gone"] * 4


def test_reserved_and_quarantined_slots_hold_the_arena() -> None:
    s = store(dram=1)
    granted = s.reserve(A, names(2), b"", 0, "w", 5.0, 0.0)
    lost = s.reserve(A, names(1, b"x"), b"", 0, "w2", 5.0, 0.0)
    s.reservations.abort(lost.reservation_id, False, 0.0)
    grow(s, 1)
    s.evacuations.begin(0)
    empty(s)
    assert s.evacuations.bytes_left() == {0: 3 * PAGE}
    s.commit(granted.reservation_id, [1, 2], 1.0)
    empty(s, 1.0)
    assert (s.evacuations.bytes_left(), s.evacuations.take_empty()) == ({0: PAGE}, [])
    empty(s, CONFIG.quarantine_s)
    assert s.evacuations.take_empty() == [0]
    assert tiers_of(s, names(2)) == [Tier.DRAM] * 2


def test_a_block_whose_migration_fails_stays_readable_and_is_tried_again() -> None:
    s = store(dram=1)
    put(s, names(2))
    grow(s, 1)
    s.evacuations.begin(0)
    for migration in s.plan_evacuation(4, 0.0):
        s.finish_migration(migration.migration_id, False, 0.0)
    s.check_integrity()
    assert (tiers_of(s, names(2)), s.evacuations.bytes_left()) == ([Tier.DRAM] * 2, {0: 2 * PAGE})
    empty(s)
    assert s.evacuations.take_empty() == [0]


def test_a_block_dropped_while_it_migrates_is_gone_from_both_places() -> None:
    s = store(dram=1)
    put(s, names(1))
    grow(s, 1)
    s.evacuations.begin(0)
    [migration] = s.plan_evacuation(4, 0.0)
    assert s.drop(A, names(1)[0], "checksum", 0.0)
    s.finish_migration(migration.migration_id, True, 0.0)
    s.check_integrity()
    assert s.inspection.tiers()[0].free_bytes == s.inspection.tiers()[0].capacity_bytes == SLAB
    assert s.evacuations.take_empty() == [0]


def test_pressure_elsewhere_takes_nothing_from_an_arena_on_its_way_out() -> None:
    s = store(dram=1)
    put(s, names(4, b"o"))
    grow(s, 1)
    s.evacuations.begin(0)
    put(s, names(4, b"n"))
    put(s, names(2, b"p"))
    assert tiers_of(s, names(4, b"o")) == [Tier.DRAM] * 4
    assert s.counters["evicted"] == 2
    s.check_integrity()


@pytest.mark.parametrize("until", [None, 100.0])
def test_retained_blocks_take_room_from_warmer_ones(until: float | None) -> None:
    s = store(dram=1)
    put(s, names(2, b"k"))
    s.retention.retain(A, names(2, b"k"), until, 0.0)
    grow(s, 1)
    put(s, names(6, b"h"))
    s.evacuations.begin(0)
    empty(s)
    assert s.evacuations.take_empty() == [0]
    assert tiers_of(s, names(2, b"k")) == [Tier.DRAM] * 2


def test_the_retention_share_follows_the_capacity() -> None:
    s = store(dram=1)
    put(s, names(4))
    with pytest.raises(NoRoom):
        s.retention.retain(A, names(3), None, 0.0)
    grow(s, 1)
    assert s.retention.retain(A, names(3), None, 0.0) == 3
    s.evacuations.begin(1)
    with pytest.raises(NoRoom):
        s.retention.retain(A, names(4), None, 0.0)


def test_quotas_follow_the_capacity() -> None:
    def quotas(s: Store) -> dict[str, int]:
        return {u.account: u.quota_bytes for u in s.inspection.accounts()}

    config = replace(CONFIG, quotas={"half": 0.5, "page": PAGE})
    s = store(dram=1, config=config)
    assert quotas(s) == {"": PAGE, "half": 2 * PAGE, "page": PAGE}
    grow(s, 1, slabs=3)
    assert quotas(s) == {"": 7 * PAGE, "half": 8 * PAGE, "page": PAGE}
    s.evacuations.begin(1)
    assert quotas(s) == {"": PAGE, "half": 2 * PAGE, "page": PAGE}


def test_quotas_that_exceed_what_remains_are_cut_in_proportion() -> None:
    s = store(dram=4, config=replace(CONFIG, quotas={"a": 9 * PAGE, "b": 3 * PAGE}))
    grow(s, 1)
    s.evacuations.begin(0)
    assert [u.quota_bytes for u in s.inspection.accounts()] == [0, 3 * PAGE, PAGE]


def test_the_last_arena_stays_and_unknown_ones_are_not_found() -> None:
    s = store(dram=1)
    with pytest.raises(InvalidArgument, match="last one"):
        s.evacuations.begin(0)
    with pytest.raises(NotFound):
        s.evacuations.begin(7)
    with pytest.raises(NotFound):
        s.add_arena(Tier.HBM, SlabAllocator(SLAB, SLAB, 1), 0.0)
    grow(s, 1)
    s.evacuations.begin(0)
    s.evacuations.begin(0)
    with pytest.raises(InvalidArgument):
        s.evacuations.begin(1)
    assert s.evacuations.take_empty() == [0]


def test_no_call_takes_long_however_full_the_arena_is() -> None:
    slots = 4096
    config = StoreConfig(max_reservation_s=100.0)
    s = Store(SlabAllocator(slots * PAGE, 64 * SLAB, 0), None, config)
    for namespace in (SMALL, LARGE):
        s.namespaces.register(namespace)
    run = names(slots)
    put(s, run)
    s.add_arena(Tier.DRAM, SlabAllocator(slots * PAGE // 2, 64 * SLAB, 1), 0.0)
    s.evacuations.begin(0)
    times: list[float] = []
    while not s.evacuations.take_empty():
        start = time.process_time()
        migrations = s.plan_evacuation(16, 0.0)
        times.append(time.process_time() - start)
        for migration in migrations:
            s.finish_migration(migration.migration_id, True, 0.0)
    assert tiers_of(s, run) == [Tier.DRAM] * (slots // 2) + ["gone"] * (slots // 2)
    times.sort()
    assert times[len(times) // 2] < 0.005
    s.check_integrity()
