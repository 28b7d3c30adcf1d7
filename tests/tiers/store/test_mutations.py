"""Mutations: each guard of the store's invariants is removed in turn, and the checks must notice.

A check that passes without its guard checks nothing. The same walks pass with all guards in place,
so what they find here is the missing guard.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from kvpool.blocks.tier import Tier
from tests.support.pool_model import CONFIG, LARGE, SMALL, Violation, random_walk
from tests.support.sizes import scaled
from tiers.store import blocks, evacuation, eviction, reservations, victims
from tiers.store.arena_allocator import ArenaAllocator
from tiers.store.block_table import BlockTable
from tiers.store.config import StoreConfig
from tiers.store.evacuation import EvacuationTable
from tiers.store.leases import LeaseTable
from tiers.store.quotas import QuotaTable
from tiers.store.reservations import ReservationTable
from tiers.store.retention import RetentionTable
from tiers.store.slab_allocator import StoreCorrupt

SEEDS = 30
# The first eight seeds notice each missing guard below.
SEEDS_WITH_GUARDS = scaled(8, SEEDS)
STEPS = 400
WITH_QUOTAS = replace(
    CONFIG, quotas={SMALL.namespace_id.hex(): 0.25, LARGE.namespace_id.hex(): 0.5}
)
QUOTA_BROKEN = "from one below its quota"
Patch = Callable[[pytest.MonkeyPatch], None]


def _what_is_caught(config: StoreConfig = CONFIG, seeds: int = SEEDS) -> str:
    # With and without HBM: a third tier makes some events rarer.
    for seed, hbm_slabs in product(range(seeds), (3, 0)):
        try:
            random_walk(seed, STEPS, config, hbm_slabs=hbm_slabs).settle()
        except (Violation, StoreCorrupt) as error:
            return str(error)
    return ""


def _pins_do_not_hold(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(eviction, "is_held", lambda copy: copy.filling > 0 or copy.reading > 0)


def _pins_hold_in_dram_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        eviction,
        "is_held",
        lambda copy: (
            copy.filling > 0 or copy.reading > 0 or (copy.tier == Tier.DRAM and copy.pins > 0)
        ),
    )


def _nothing_is_spared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(eviction, "is_spared", lambda copy: False)


def _parts_are_in_two_tiers(patch: pytest.MonkeyPatch) -> None:
    begun = reservations._begun_copy

    def begun_in_dram(block: Any) -> Any:
        copy = begun(block)
        return copy if copy is not None and copy.tier == Tier.DRAM else None

    patch.setattr(reservations, "_begun_copy", begun_in_dram)


def _migrations_do_not_hold(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        eviction,
        "is_held",
        lambda copy: copy.filling > 0 or copy.pins > 0,
    )


def _leased_blocks_migrate_away(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(evacuation, "_replace", evacuation._exchange_places)


def _arenas_go_while_in_use(patch: pytest.MonkeyPatch) -> None:
    def take_all(self: EvacuationTable) -> list[int]:
        gone = [*self._walks]
        for arena_id in gone:
            del self._walks[arena_id]
            slots = self._table.tiers[Tier.DRAM].allocator
            del slots._arenas[arena_id]
            slots.closed.discard(arena_id)
        return gone

    patch.setattr(EvacuationTable, "take_empty", take_all)


def _closed_arenas_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        ArenaAllocator,
        "capacity_bytes",
        property(lambda self: sum(a.capacity_bytes for a in self.arenas)),
    )


def _no_quarantine(patch: pytest.MonkeyPatch) -> None:
    end = ReservationTable._end

    def end_at_once(self: ReservationTable, grant: Any, **given: Any) -> None:
        end(self, grant, **{**given, "is_late_write_possible": False})

    patch.setattr(ReservationTable, "_end", end_at_once)


def _no_grace(patch: pytest.MonkeyPatch) -> None:
    init = LeaseTable.__init__

    def without_grace(self: LeaseTable, table: BlockTable, config: StoreConfig) -> None:
        init(self, table, replace(config, grace_s=0.0))

    patch.setattr(LeaseTable, "__init__", without_grace)


def _dead_writers_leave_no_quarantine(patch: pytest.MonkeyPatch) -> None:
    def abort_all(self: ReservationTable, writer_id: str, now: float) -> None:
        for reservation_id in sorted(self._by_writer.get(writer_id, ())):
            self.abort(reservation_id, True, now)

    patch.setattr(ReservationTable, "writer_gone", abort_all)


def _leases_of_the_dead_end_at_once(patch: pytest.MonkeyPatch) -> None:
    def end_all(self: LeaseTable, holder_id: str, now: float) -> None:
        for lease_id in list(self._by_holder.get(holder_id, ())):
            self.release(lease_id)

    patch.setattr(LeaseTable, "holder_gone", end_all)


def _first_part_is_enough(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(blocks.Copy, "is_whole", property(lambda copy: copy.committed >= 1))


def _reserved_twice_is_granted_twice(patch: pytest.MonkeyPatch) -> None:
    reserve = ReservationTable._reserve_part

    def grant_again(self: ReservationTable, space: Any, name: bytes, *rest: Any) -> Any:
        block = space.blocks.get(name)
        copy = block.copies[Tier.DRAM] if block is not None else None
        part = rest[1]
        is_hidden = not any(name in v for v in space.visible)
        is_begun = copy is not None and copy.places[part] is not None
        if copy is not None and is_begun and copy.checksums[part] is None and is_hidden:
            return 0, copy
        return reserve(self, space, name, *rest)

    patch.setattr(ReservationTable, "_reserve_part", grant_again)


def _prefixes_leave_before_suffixes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(eviction, "has_descendant", lambda copy: False)


def _quarantine_leaks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(victims.TierState, "end_quarantine", lambda *args: None)


def _eviction_leaks(patch: pytest.MonkeyPatch) -> None:
    unlink = BlockTable._close

    def close_and_forget_a_byte(self: BlockTable, copy: Any) -> None:
        unlink(self, copy)
        self.tiers[copy.tier].committed_bytes += 1

    patch.setattr(BlockTable, "_close", close_and_forget_a_byte)


def _hard_pins_are_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(eviction, "is_hard_pinned", lambda copy: False)


def _soft_pins_are_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(eviction, "is_soft_pinned", lambda copy: False)


def _retention_is_not_counted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RetentionTable, "_charge", lambda self, block, sign: self._retained.add(block))


def _retention_has_no_bound(patch: pytest.MonkeyPatch) -> None:
    init = RetentionTable.__init__
    patch.setattr(
        RetentionTable,
        "__init__",
        lambda self, table, namespaces, _: init(self, table, namespaces, 9.0),
    )


def _everybody_takes_from_everybody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(QuotaTable, "donors", lambda self, *_: range(len(self.used)))
    patch.setattr(QuotaTable, "is_over", lambda *_: True)


def _slabs_are_taken_from_everybody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(victims, "_is_fair", lambda *_: True)


def _quarantine_is_for_nothing(patch: pytest.MonkeyPatch) -> None:
    vacate = BlockTable.vacate

    def vacate_and_pay_back(self: BlockTable, copy: Any, part: int, **given: Any) -> Any:
        place = vacate(self, copy, part, **given)
        if given["is_late_write_possible"]:
            tier = self.tiers[copy.tier]
            tier.quota_table.charge(
                copy.block.space.account, -copy.block.space.slot_bytes[copy.tier]
            )
        return place

    patch.setattr(BlockTable, "vacate", vacate_and_pay_back)


@pytest.mark.parametrize(
    ("take_guard_away", "caught"),
    [
        pytest.param(_pins_do_not_hold, r"while \('lease'|lease is on", id="1: pins do not hold"),
        pytest.param(_pins_hold_in_dram_alone, r"while \('lease'|lease is on", id="1: pins in hbm"),
        pytest.param(_nothing_is_spared, "had room below hbm", id="hbm: lost without need"),
        pytest.param(
            _parts_are_in_two_tiers, "are in|granted twice|slot no more", id="4: parts in two tiers"
        ),
        pytest.param(
            _migrations_do_not_hold,
            r"while \('source'|source of migration",
            id="1: migrations do not hold",
        ),
        pytest.param(
            _leased_blocks_migrate_away, r"while \('lease'|sees|lost", id="1: leased blocks migrate"
        ),
        pytest.param(
            _arenas_go_while_in_use, "lost its arena|in no|not in|slot leaked", id="1: arenas leave"
        ),
        pytest.param(
            _closed_arenas_count, "dram is what its arenas are|slot leaked", id="7: closed"
        ),
        pytest.param(_no_quarantine, r"while \('late'", id="2: no quarantine"),
        pytest.param(_dead_writers_leave_no_quarantine, r"while \('late'", id="2: dead writers"),
        pytest.param(_no_grace, r"while \('lease'", id="3: no grace"),
        pytest.param(_leases_of_the_dead_end_at_once, r"while \('lease'", id="3: dead readers"),
        pytest.param(_first_part_is_enough, r"visible with parts \{", id="4: one part is enough"),
        pytest.param(_reserved_twice_is_granted_twice, "granted twice", id="4: granted twice"),
        pytest.param(
            _prefixes_leave_before_suffixes, " left .*before", id="6: prefixes leave first"
        ),
        pytest.param(_quarantine_leaks, "bytes by state", id="7: quarantine leaks"),
        pytest.param(_eviction_leaks, "bytes by state", id="7: eviction leaks"),
        pytest.param(_hard_pins_are_ignored, "hard pinned", id="hard pins"),
        pytest.param(_soft_pins_are_ignored, "left.*, retained", id="soft pins"),
        pytest.param(_retention_is_not_counted, "retained|misfiled", id="retention is not counted"),
        pytest.param(_retention_has_no_bound, "no more than the share", id="unbounded retention"),
        pytest.param(_everybody_takes_from_everybody, QUOTA_BROKEN, id="quotas: anybody gives"),
        pytest.param(_slabs_are_taken_from_everybody, QUOTA_BROKEN, id="quotas: slabs"),
        pytest.param(_quarantine_is_for_nothing, "account.* bytes|pays", id="quotas: quarantine"),
    ],
)
def test_the_checks_notice_a_missing_guard(
    take_guard_away: Patch, caught: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_guard_away(monkeypatch)
    config = WITH_QUOTAS if caught == QUOTA_BROKEN else CONFIG
    assert re.search(caught, _what_is_caught(config))


def test_the_same_walks_pass_with_all_guards_in_place() -> None:
    assert _what_is_caught(seeds=SEEDS_WITH_GUARDS) == ""
    assert _what_is_caught(WITH_QUOTAS) == ""
