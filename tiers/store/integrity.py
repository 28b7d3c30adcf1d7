"""Integrity check: recomputes from scratch what the store updates step by step, and compares.

O(everything), for tests. The order of evictions cannot be seen in a state, so invariant 6 is
checked only as far as the state shows it: counts of children, and candidates for eviction.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

from kvpool.blocks.tier import Tier
from tiers.store import eviction
from tiers.store.blocks import NEVER, Block, Copy, Migration
from tiers.store.slab_allocator import Place, StoreCorrupt

if TYPE_CHECKING:
    from tiers.store.block_table import BlockTable
    from tiers.store.evacuation import EvacuationTable
    from tiers.store.leases import LeaseTable
    from tiers.store.migrations import MigrationTable
    from tiers.store.reservations import ReservationTable
    from tiers.store.retention import RetentionTable
    from tiers.store.victims import TierState
    from tiers.store.writeback import Writeback

Slot = tuple[Place, int]  # where, bytes


def check(
    table: BlockTable,
    leases: LeaseTable,
    reservations: ReservationTable,
    migrations: MigrationTable,
    evacuations: EvacuationTable,
    retention: RetentionTable,
) -> None:
    """Compare every count, list and state with the records.

    Raises:
        StoreCorrupt: the first contradiction found.
    """
    blocks = _all_blocks(table)
    copies = [copy for block in blocks for copy in block.copies if copy is not None]
    under_way = [*migrations.values(), *evacuations.values()]
    _check_holders(blocks, copies, leases, reservations, under_way)
    for block in blocks:
        _check_block(block)
    for tier in table.tiers.values():
        quarantined = [
            (entry.place, entry.slot_bytes)
            for entry in reservations.quarantined()
            if entry.tier == tier.index
        ]
        tier.allocator.check_integrity()
        _check_tier(tier, copies, quarantined)
        _check_candidates(table, tier, copies)
        _check_quotas(tier, quarantined)
    _check_children(table)
    _check_retention(table, blocks, retention)
    for writeback in table.writebacks.values():
        _check_writeback(writeback, blocks, migrations)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise StoreCorrupt(message)


def _all_blocks(table: BlockTable) -> list[Block]:
    blocks = list(table.detached)
    for space in table.spaces.values():
        for name, block in space.blocks.items():
            _require(block.name == name and block.space is space, f"{name.hex()} is misfiled")
            _require(not block.is_detached, f"dropped block {name.hex()} can be found")
            _require(any(block.copies), f"block {name.hex()} has no copy")
            blocks.append(block)
    return blocks


def _check_holders(
    blocks: list[Block],
    copies: list[Copy],
    leases: LeaseTable,
    reservations: ReservationTable,
    migrations: list[tuple[Migration, Copy, Copy]],
) -> None:
    """Invariant 1: every hold has a holder, and every holder holds its copies."""
    pins = Counter(copy for lease in leases.values() for copy in lease.copies)
    _require(set(pins) <= set(copies), "a lease is on a copy that is gone")
    for pinned in copies:
        _require(pinned.pins == pins[pinned], f"{pinned.block.name.hex()}: {pinned.pins} pins")
        _require(not pinned.pins or pinned.is_whole, "a pinned copy is not whole")
    filling: Counter[Copy] = Counter()
    reading: Counter[Copy] = Counter()
    for grant in reservations.values():
        for copy in grant.copies:
            if copy is not None:
                is_reserved = (
                    copy.places[grant.part] is not None and copy.checksums[grant.part] is None
                )
                _require(is_reserved, f"reservation {grant.reservation_id} holds a slot no more")
                filling[copy] += 1
    for migration, source, target in migrations:
        _require(
            source.places[migration.part] == migration.source,
            f"source of migration {migration.migration_id} changed",
        )
        _require(
            target.places[migration.part] == migration.target,
            f"target of migration {migration.migration_id} changed",
        )
        filling[target] += 1
        reading[source] += 1
    _require(
        {*filling, *reading} <= set(copies), "a reservation or migration is on a copy that is gone"
    )
    for copy in copies:
        _require(copy.filling == filling[copy], f"{copy.block.name.hex()}: filling {copy.filling}")
        _require(copy.reading == reading[copy], f"{copy.block.name.hex()}: reading {copy.reading}")


def _check_block(block: Block) -> None:
    """Invariant 4: visible exactly when every part is committed."""
    name = block.name.hex()
    for copy in block.copies:
        if copy is None:
            continue
        committed = sum(checksum is not None for checksum in copy.checksums)
        placed = sum(place is not None for place in copy.places)
        _require(copy.committed == committed, f"{name}: {copy.committed} != {committed} committed")
        _require(placed == committed + copy.filling, f"{name}: a slot that nobody fills")
        _require(placed > 0, f"{name}: an empty copy")
    for tier_index, visible in enumerate(block.space.visible):
        copy = block.copies[tier_index]
        is_whole = copy is not None and copy.is_whole and not block.is_detached
        shown = visible.get(block.name)
        is_visible = shown is not None and shown.block is block
        _require(is_visible == is_whole, f"{name}: visible {is_visible}, whole {is_whole}")
        _require(not is_visible or shown is copy, f"{name}: an old copy is visible")
        if copy is not None and copy.is_whole:
            _require(list(copy.whole_places) == copy.places, f"{name}: hands out old places")
            is_current = list(copy.whole_checksums) == copy.checksums
            _require(is_current, f"{name}: hands out old checksums")


def _check_tier(tier: TierState, copies: list[Copy], quarantined: list[Slot]) -> None:
    """Invariant 7: the states add up to the tier, and no two slots overlap."""
    slots: list[Slot] = list(quarantined)
    reserved = committed = pinned = 0
    owned = 0
    for copy in copies:
        if copy.tier != tier.index:
            continue
        slot_bytes = copy.slot_bytes
        for place, checksum in zip(copy.places, copy.checksums, strict=True):
            if place is None:
                continue
            owned += 1
            _require(tier.owners.get(place) is copy, f"{place} belongs to another copy")
            slots.append((place, slot_bytes))
            if checksum is None:
                reserved += slot_bytes
            else:
                committed += slot_bytes
                pinned += slot_bytes if copy.pins else 0
    _require(owned == len(tier.owners), f"{tier.name}: {len(tier.owners)} owners of {owned} slots")
    slots.sort()
    for (place, size), (following, _) in pairwise(slots):
        is_apart = place.arena_id != following.arena_id or place.offset + size <= following.offset
        _require(is_apart, f"{tier.name}: slots overlap at {following}")
    states = (tier.reserved_bytes, tier.committed_bytes, tier.pinned_bytes, tier.quarantined_bytes)
    recount = (reserved, committed, pinned, sum(size for _, size in quarantined))
    _require(states == recount, f"{tier.name}: bytes by state {states} != {recount}")
    _require(tier.free_bytes == tier.allocator.free_bytes, f"{tier.name}: a slot leaked")


def _check_candidates(table: BlockTable, tier: TierState, copies: list[Copy]) -> None:
    """Every copy that can be evicted is in its queue."""
    for copy in copies:
        if copy.tier != tier.index:
            continue
        # Copies in closed arenas are taken by the evacuation, not chosen as victims.
        if eviction.is_evictable(copy) and not eviction.is_in_arenas(copy, tier.allocator.closed):
            queue = tier.queue_of(copy)
            _require(copy in queue, f"{copy.block.name.hex()} can never be evicted")


def _check_writeback(writeback: Writeback, blocks: list[Block], migrations: MigrationTable) -> None:
    """Clean bytes are right, and every dirty copy waits for its demotion."""
    name, index = writeback.upper.name, writeback.upper.index
    clean = 0
    waiting = writeback.waiting()
    cleaning = [
        source for _, source, target in migrations.values() if target.tier == writeback.target
    ]
    for block in blocks:
        copy = block.copies[index]
        if copy is None or not copy.is_whole or block.is_detached:
            continue
        below = [block.copies[tier] for tier in writeback.lower]
        if any(lower is not None and lower.is_whole for lower in below):
            clean += copy.size_bytes
        elif copy not in waiting and not any(below):
            _require(False, f"{block.name.hex()} of {name} can never be demoted")
    _require(clean == writeback.clean_bytes, f"{name}: {writeback.clean_bytes} != {clean} clean")
    parts = sum(source.block.space.slot_bytes[index] for source in cleaning if source.tier == index)
    _require(parts == writeback.cleaning_bytes, f"{name}: bytes under demotion are miscounted")


def _check_quotas(tier: TierState, quarantined: list[Slot]) -> None:
    """Every slot counts for one account, also in quarantine."""
    used: Counter[int] = Counter()
    for copy in tier.owners.values():
        used[copy.block.space.account] += copy.slot_bytes
    for place, slot_bytes in quarantined:
        used[tier.quarantined_of[place]] += slot_bytes
    _require(
        len(tier.quarantined_of) == len(quarantined),
        "an account pays for a slot that is not in quarantine",
    )
    for account, charged in enumerate(tier.quota_table.used):
        is_right = charged == used[account]
        _require(is_right, f"{tier.name}: account {account} pays {charged} for {used[account]}")


def _check_retention(table: BlockTable, blocks: list[Block], retention: RetentionTable) -> None:
    """Promised bytes are right, and no block is retained longer than its parent."""
    retained = {block for block in blocks if block.retained_until != NEVER}
    _require(retained == set(retention.blocks()), "retained blocks are misfiled")
    for tier in table.tiers.values():
        promising = retained if tier.index != Tier.HBM else set()
        promised = sum(b.space.slot_bytes[tier.index] * b.space.tp_size for b in promising)
        _require(
            tier.retained_bytes == promised,
            f"{tier.name}: {tier.retained_bytes} != {promised} retained",
        )
    for space in table.spaces.values():
        children = Counter(b.parent for b in retained if b.space is space and b.parent)
        _require(children == space.retained_children, "retained children are miscounted")


def _check_children(table: BlockTable) -> None:
    """Invariant 6: every copy counts with its parent."""
    for space in table.spaces.values():
        for tier_index in Tier:
            children = Counter(
                block.parent
                for block in space.blocks.values()
                if block.parent and block.copies[tier_index] is not None
            )
            _require(children == space.children[tier_index], "children are miscounted")
