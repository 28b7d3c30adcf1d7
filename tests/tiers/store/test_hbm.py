"""The HBM tier of the store, case by case; random interleavings are in test_properties."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpool.blocks.tier import Tier
from kvpool.errors import BlockTooLarge, ConfigError, InvalidArgument
from tests.support.pool_model import CONFIG, HBM_ARENA, LARGE, PAGE, SLAB, SMALL
from tests.tiers.store.test_store import EXISTS, GRANTED, IN_PROGRESS, NO_ROOM, A, B, demote, names
from tiers.store.slab_allocator import SlabAllocator
from tiers.store.store import Migration, Store, StoreConfig

EARLY = replace(CONFIG, hbm_high_watermark=0.0, hbm_low_watermark=0.0)  # demotes every block


def store(hbm: int = 1, dram: int = 1, nvme: int = 0, config: StoreConfig = CONFIG) -> Store:
    made = Store(
        SlabAllocator(dram * SLAB, SLAB),
        SlabAllocator(nvme * SLAB, SLAB) if nvme else None,
        config,
        hbm=SlabAllocator(hbm * SLAB, SLAB, HBM_ARENA) if hbm else None,
    )
    for namespace in (SMALL, LARGE):
        made.namespaces.register(namespace)
    return made


def put(s: Store, run: list[bytes], parent: bytes = b"", tier: Tier = Tier.HBM) -> list[int]:
    """Store blocks; returns the arena of each."""
    granted = s.reserve(A, run, parent, 0, "w", 5.0, 0.0, tier)
    assert granted.statuses == [GRANTED] * len(run)
    s.commit(granted.reservation_id, list(range(len(run))), 0.0)
    return [place.arena_id for place in granted.places]


def finish(s: Store, migrations: list[Migration], ok: bool = True) -> None:
    for migration in migrations:
        s.finish_migration(migration.migration_id, ok, 0.0)


def usage(s: Store, tier: Tier) -> tuple[int, int, int]:
    [found] = [u for u in s.inspection.tiers() if u.tier == tier]
    return found.blocks, found.committed_bytes, found.pinned_bytes


# ---------------------------------------------------------------- writing


def test_blocks_are_granted_in_hbm_as_far_as_there_is_room_and_then_in_dram() -> None:
    s = store()
    assert put(s, names(6)) == [HBM_ARENA] * 4 + [0, 0]
    assert s.lookup(A, names(6)) == [Tier.HBM] * 4 + [Tier.DRAM] * 2
    events = [(event.kind, event.tier) for event in s.take_events()]
    assert events == [("stored", Tier.HBM)] * 4 + [("stored", Tier.DRAM)] * 2
    assert usage(s, Tier.HBM) == (4, 4 * PAGE, 0)


def test_a_writer_that_does_not_ask_for_hbm_gets_none() -> None:
    s = store()
    assert put(s, names(2), tier=Tier.DRAM) == [0, 0]
    assert put(s, names(1, b"m"), tier=Tier.DRAM) == [0]
    with pytest.raises(InvalidArgument, match="nvme"):
        s.reserve(A, names(1, b"o"), b"", 0, "w", 5.0, 0.0, Tier.NVME)


def test_a_node_without_hbm_grants_in_dram() -> None:
    s = store(hbm=0)
    assert put(s, names(2)) == [0, 0]
    assert s.tiers == [Tier.DRAM]
    assert s.promote(A, names(2), 0.0, Tier.HBM) == ([], "no_room")
    assert s.pin(A, names(2), "c", 1.0, 0.0, None, Tier.HBM).tiers == [Tier.DRAM] * 2


def test_a_block_in_hbm_exists_for_every_writer() -> None:
    s = store()
    put(s, names(1))
    for tier in (Tier.DRAM, Tier.HBM):
        assert s.reserve(A, names(1), b"", 0, "w", 5.0, 0.0, tier).statuses == [EXISTS]


def test_all_parts_of_a_block_are_in_the_tier_of_the_first() -> None:
    s = store(hbm=2, dram=2)
    first = s.reserve(B, names(1), b"", 0, "w", 5.0, 0.0, Tier.HBM)
    # A writer that cannot write to HBM cannot add a part.
    assert s.reserve(B, names(1), b"", 1, "v", 5.0, 0.0, Tier.DRAM).statuses == [IN_PROGRESS]
    second = s.reserve(B, names(1), b"", 1, "v", 5.0, 0.0, Tier.HBM)
    assert [g.places[0].arena_id for g in (first, second)] == [HBM_ARENA] * 2
    s.commit(first.reservation_id, [1], 0.0)
    assert s.commit(second.reservation_id, [2], 0.0) == names(1)
    other = s.reserve(B, names(1, b"m"), b"", 0, "w", 5.0, 0.0, Tier.DRAM)
    joined = s.reserve(B, names(1, b"m"), b"", 1, "w", 5.0, 0.0, Tier.HBM)
    assert [g.places[0].arena_id for g in (other, joined)] == [0, 0]


def test_a_half_written_block_in_hbm_gives_way_to_a_writer_of_dram() -> None:
    s = store(hbm=2, dram=2)
    half = s.reserve(B, names(1), b"", 0, "w", 5.0, 0.0, Tier.HBM)
    s.commit(half.reservation_id, [1], 0.0)
    for part in (0, 1):
        granted = s.reserve(B, names(1), b"", part, "v", 5.0, 0.0)
        assert [place.arena_id for place in granted.places] == [0]
        s.commit(granted.reservation_id, [part], 0.0)
    assert s.lookup(B, names(1)) == [Tier.DRAM]
    assert usage(s, Tier.HBM) == (0, 0, 0)
    s.check_integrity()


def test_late_writes_to_hbm_keep_their_slots_in_quarantine() -> None:
    s = store(dram=1)
    number = s.reserve(A, names(4), b"", 0, "w", 1.0, 0.0, Tier.HBM).reservation_id
    s.expire(2.0)
    [hbm] = [u for u in s.inspection.tiers() if u.tier == Tier.HBM]
    assert (hbm.quarantined_bytes, hbm.free_bytes) == (4 * PAGE, 0)
    assert put(s, names(1, b"m")) == [0]
    s.reservations.abort(number, True, 2.0)
    assert put(s, names(1, b"o")) == [HBM_ARENA]
    s.check_integrity()


# ---------------------------------------------------------------- reading


def test_a_reader_of_device_memory_is_given_hbm_first_and_holds_that_copy_alone() -> None:
    s = store(dram=2)
    run = names(6)
    put(s, run)
    pinned = s.pin(A, run, "c", 1.0, 0.0, None, Tier.HBM)
    assert pinned.tiers == [Tier.HBM] * 4 + [Tier.DRAM] * 2
    assert [place.arena_id for place in pinned.places] == [HBM_ARENA] * 4 + [0, 0]
    assert usage(s, Tier.HBM)[2] == 4 * PAGE
    assert usage(s, Tier.DRAM)[2] == 2 * PAGE
    s.leases.release(pinned.lease_id)
    assert usage(s, Tier.HBM)[2] == usage(s, Tier.DRAM)[2] == 0


def test_other_readers_wait_until_the_block_is_copied_down() -> None:
    s = store()
    put(s, names(2))
    waiting = s.pin(A, names(2), "c", 1.0, 0.0)
    assert (waiting.found, waiting.miss_reason) == (0, "promoting")
    assert [(m.source_tier, m.target_tier) for m in waiting.promote] == [(Tier.HBM, Tier.DRAM)] * 2
    again = s.pin(A, names(2), "d", 1.0, 0.0)
    assert (again.miss_reason, again.promote) == ("promoting", [])
    finish(s, waiting.promote)
    pinned = s.pin(A, names(2), "c", 1.0, 0.0)
    assert (pinned.found, pinned.tiers) == (2, [Tier.DRAM] * 2)
    assert s.resident_tiers(A, names(1)[0]) == [Tier.HBM, Tier.DRAM]
    assert s.counters["demoted:dram"] == 2


def test_a_block_pinned_in_hbm_stays_there_whatever_is_asked_for() -> None:
    s = store(config=EARLY)
    put(s, names(4))
    pinned = s.pin(A, names(4), "c", 1.0, 0.0, None, Tier.HBM)
    finish(s, s.pin(A, names(4), "d", 1.0, 0.0).promote)  # clean now, and still leased
    s.drop(A, names(4)[0], "test", 0.0)
    assert put(s, names(1, b"m")) == [0]
    s.leases.release(pinned.lease_id)
    assert put(s, names(1, b"o")) == [HBM_ARENA]


# ---------------------------------------------------------------- down


def test_cold_blocks_are_copied_down_before_they_leave() -> None:
    s = store(dram=2)
    put(s, names(4))
    migrations = s.migrations.plan_demotions(100, 0.0).migrations
    assert {(m.source_tier, m.target_tier) for m in migrations} == {(Tier.HBM, Tier.DRAM)}
    assert len(migrations) == 3  # down to the low watermark of a quarter
    finish(s, migrations)
    assert s.lookup(A, names(4)) == [Tier.HBM] * 4
    assert put(s, names(3, b"m")) == [HBM_ARENA] * 3
    assert s.lookup(A, names(4)) == [Tier.HBM] + [Tier.DRAM] * 3
    assert s.counters.get("lost", 0) == 0


def test_the_only_copy_of_a_block_does_not_leave_hbm_for_want_of_time() -> None:
    s = store(dram=2)
    put(s, names(4))
    assert put(s, names(2, b"m")) == [0, 0]  # nothing was copied down yet
    assert s.lookup(A, names(4)) == [Tier.HBM] * 4


def test_what_is_colder_than_all_of_dram_may_leave_hbm_and_is_lost() -> None:
    s = store(config=EARLY)
    put(s, names(4))
    put(s, names(4, b"m"), tier=Tier.DRAM)
    assert s.migrations.plan_demotions(100, 0.0).migrations == []
    assert s.counters["demotion_refused"] == 4
    assert put(s, names(1, b"o")) == [HBM_ARENA]
    assert s.lookup(A, names(4)) == [Tier.HBM] * 3
    assert s.pin(A, names(4), "c", 1.0, 0.0, None, Tier.HBM).miss_reason == "evicted"
    s.check_integrity()


def test_a_refused_block_that_is_used_again_stays() -> None:
    s = store(config=EARLY)
    put(s, names(4))
    put(s, names(4, b"m"), tier=Tier.DRAM)
    s.migrations.plan_demotions(100, 0.0)
    s.leases.release(s.pin(A, names(4), "c", 1.0, 0.0, None, Tier.HBM).lease_id)
    # The oldest block of DRAM is evicted instead: it is colder now.
    assert put(s, names(1, b"o")) == [0]
    assert s.lookup(A, names(4)) == [Tier.HBM] * 4


def test_a_retained_block_leaves_hbm_only_for_the_tier_below() -> None:
    s = store(dram=2, config=replace(EARLY, retention_share=1.0))
    put(s, names(1))
    s.retention.retain(A, names(1), None, 0.0)
    [retained] = [u for u in s.inspection.tiers() if u.tier == Tier.HBM]
    assert retained.retained_bytes == 0  # the promise is of the node, not of hbm
    assert put(s, names(4, b"m"))[-1] == 0  # not in its place, while HBM has its only copy
    finish(s, s.migrations.plan_demotions(100, 0.0).migrations)
    put(s, names(3, b"o"))
    put(s, names(1, b"p"))
    assert Tier.HBM not in s.resident_tiers(A, names(1)[0])
    assert s.lookup(A, names(1)) == [Tier.DRAM]


def test_demotion_from_hbm_waits_for_the_cleaning_of_dram() -> None:
    config = replace(EARLY, write_through=True)
    s = store(hbm=1, dram=1, nvme=4, config=config)
    put(s, names(4, b"m"), tier=Tier.DRAM)
    put(s, names(4))
    migrations = s.migrations.plan_demotions(100, 0.0).migrations
    assert {m.target_tier for m in migrations} == {
        Tier.NVME
    }  # room made in dram now would lose those
    finish(s, migrations)
    finish(s, s.migrations.plan_demotions(100, 0.0).migrations)
    assert s.counters.get("lost", 0) == 0
    assert s.counters["demoted:dram"] == 4
    assert s.lookup(A, names(4, b"m")) == [Tier.NVME] * 4


def test_blocks_sink_through_all_tiers_and_none_is_lost() -> None:
    s = store(hbm=1, dram=1, nvme=8, config=replace(EARLY, write_through=True))
    runs = [names(4, bytes([i])) for i in range(6)]
    for run in runs:
        put(s, run)
        for _ in range(6):
            finish(s, s.migrations.plan_demotions(100, 0.0).migrations)
    assert [len(s.lookup(A, run)) for run in runs] == [4] * 6
    assert s.counters.get("lost", 0) == 0
    assert [s.lookup(A, run)[0] for run in runs] == [Tier.NVME] * 5 + [Tier.HBM]
    assert s.resident_tiers(A, runs[-1][0]) == [Tier.HBM, Tier.DRAM, Tier.NVME]
    s.check_integrity()


def test_a_failed_demotion_is_tried_again_also_when_its_last_part_ends_late() -> None:
    s = store(hbm=4, dram=4, config=EARLY)
    for part in (0, 1):
        granted = s.reserve(B, names(1), b"", part, "w", 5.0, 0.0, Tier.HBM)
        s.commit(granted.reservation_id, [part], 0.0)
    first, second = s.migrations.plan_demotions(1, 0.0).migrations
    s.finish_migration(first.migration_id, False, 0.0)
    assert s.migrations.plan_demotions(1, 1.5).migrations == []  # the other part is in flight
    s.finish_migration(second.migration_id, True, 2.0)
    s.check_integrity()
    assert len(s.migrations.plan_demotions(1, 3.1).migrations) == 2


# ---------------------------------------------------------------- up


def test_prefetch_brings_a_run_into_hbm_from_dram_and_from_nvme() -> None:
    s = store(hbm=2, dram=1, nvme=2, config=replace(CONFIG, write_through=True))
    put(s, names(4), tier=Tier.DRAM)
    demote(s)
    put(s, names(2, b"m"), tier=Tier.DRAM)  # two of the first ones are on NVMe only now
    assert s.lookup(A, names(4)) == [Tier.DRAM, Tier.DRAM, Tier.NVME, Tier.NVME]
    migrations, reason = s.promote(A, names(4), 0.0, Tier.HBM)
    assert reason == ""
    assert [m.source_tier for m in migrations] == [Tier.DRAM, Tier.DRAM, Tier.NVME, Tier.NVME]
    assert {m.target_tier for m in migrations} == {Tier.HBM}
    finish(s, migrations)
    assert s.lookup(A, names(4)) == [Tier.HBM] * 4
    assert s.counters["promoted:hbm"] == 4
    assert s.promote(A, names(4), 0.0, Tier.HBM) == ([], "")


def test_prefetch_into_a_full_hbm_says_so() -> None:
    s = store(dram=2)
    put(s, names(4))
    put(s, names(1, b"m"), tier=Tier.DRAM)
    assert s.promote(A, names(1, b"m"), 0.0, Tier.HBM) == ([], "no_room")


def test_a_reader_of_device_memory_has_nvme_blocks_brought_to_dram() -> None:
    s = store(hbm=1, dram=1, nvme=2, config=replace(CONFIG, write_through=True))
    put(s, names(4), tier=Tier.DRAM)
    demote(s)
    put(s, names(4, b"m"), tier=Tier.DRAM)
    waiting = s.pin(A, names(2), "c", 1.0, 0.0, None, Tier.HBM)
    assert {m.target_tier for m in waiting.promote} == {Tier.DRAM}


# ---------------------------------------------------------------- limits


def test_quotas_hold_in_hbm() -> None:
    config = replace(CONFIG, quotas={A.hex(): 0.5, B.hex(): 0.5})
    s = store(hbm=4, dram=4, config=config)
    put(s, names(16))
    finish(
        s, s.migrations.plan_demotions(100, 0.0).migrations
    )  # reclaimable, and more than A's half
    granted = s.reserve(B, names(2, b"m"), b"", 0, "w", 5.0, 0.0, Tier.HBM)
    assert [place.arena_id for place in granted.places] == [HBM_ARENA] * 2
    used = {u.account: u.used_bytes for u in s.inspection.accounts() if u.tier == Tier.HBM}
    assert used[B.hex()] == 4 * PAGE
    s.check_integrity()


def test_sizes_and_watermarks_are_checked() -> None:
    with pytest.raises(ConfigError, match="hbm watermarks"):
        StoreConfig(hbm_low_watermark=0.9, hbm_high_watermark=0.5)
    small = Store(SlabAllocator(SLAB, SLAB), hbm=SlabAllocator(SLAB // 4, SLAB // 4, HBM_ARENA))
    with pytest.raises(BlockTooLarge):
        small.namespaces.register(LARGE)


def test_hbm_full_of_reserved_slots_leaves_dram_to_others() -> None:
    s = store(hbm=1, dram=1)
    s.reserve(A, names(4), b"", 0, "w", 5.0, 0.0, Tier.HBM)
    granted = s.reserve(A, names(6, b"m"), b"", 0, "w", 5.0, 0.0, Tier.HBM)
    assert granted.statuses == [GRANTED] * 4 + [NO_ROOM] * 2
