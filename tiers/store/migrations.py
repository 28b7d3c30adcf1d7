"""Migrations between tiers: which copies to make, and what their end means.

The caller copies the bytes.

Promotion copies a run to where its reader can read it: to DRAM from NVMe or HBM, or to HBM if the
reader asks for that. Demotion cleans: it gives the coldest copies of DRAM a second copy on NVMe,
and those of HBM one in DRAM, so that a later eviction loses nothing. The first copy stays until its
room is needed. Both slots of a migration are held until it is finished.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from kvpool.blocks.tier import Tier
from kvpool.errors import InvalidArgument
from tiers.store import eviction
from tiers.store.block_table import BlockTable
from tiers.store.blocks import Copy, Migration, Space
from tiers.store.writeback import Writeback

PATIENCE = 16  # times the wait after a second refusal, if the block was not used in between


class DemotionPlan(NamedTuple):
    """Demotions to carry out. `has_more`: all blocks up to the limit found no room; plan again."""

    migrations: list[Migration]
    has_more: bool


class MigrationTable:
    """The migrations in flight.

    Args:
        table: the blocks.
        retry_s: seconds until a block whose demotion failed is tried again.
    """

    def __init__(self, table: BlockTable, retry_s: float) -> None:
        self._table = table
        self._retry_s = retry_s
        self._next_id = 1
        self._migrations: dict[int, tuple[Migration, Copy, Copy]] = {}

    def __len__(self) -> int:
        return len(self._migrations)

    def values(self) -> list[tuple[Migration, Copy, Copy]]:
        """Each migration with its source and its target."""
        return list(self._migrations.values())

    def promote_run(
        self, space: Space, hashes: Sequence[bytes], readable: Collection[Tier], target: Tier
    ) -> tuple[list[Copy], list[Migration], str]:
        """Begin to copy into `target` the blocks of the leading run that no `readable` tier has.

        Returns the copies that can be leased now, the migrations to carry out, and "promoting" if
        any are in flight (these or others'), "no_room" if the run was cut because a slot was
        missing, else "".

        Args:
            readable: tiers, best first.
        """
        run: list[tuple[Copy, bool]] = []
        for name in hashes:
            copy = whole_copy(space, readable, name)
            is_ready = copy is not None
            copy = copy or whole_copy(space, tuple(Tier), name)
            if copy is None:
                break
            run.append((copy, is_ready))
        blocks = [copy.block for copy, _ in run]
        self._table.touch(blocks)
        migrations: list[Migration] = []
        is_waiting = False
        with self._table.shield(blocks):
            for position, (copy, is_ready) in enumerate(run):
                if is_ready:
                    continue
                if copy.block.copies[target] is not None:
                    is_waiting = True
                    continue
                started = self._begin(copy, target, None)
                if started is None:
                    if not is_waiting:
                        return [ready for ready, _ in run[:position]], [], "no_room"
                    break
                is_waiting = True
                migrations += started
        if is_waiting:
            return [], migrations, "promoting"
        return [copy for copy, _ in run], [], ""

    def plan_demotions(
        self,
        max_blocks: int,
        now: float,
        sources: Collection[Tier] = (Tier.HBM, Tier.DRAM),
        resting: Iterable[int] = (),
    ) -> DemotionPlan:
        """Plan to clean the coldest dirty blocks of each source, at most `max_blocks`.

        A block replaces only colder ones: else a full disk would be rewritten for ever. A block
        that finds no room counts as one of `max_blocks`, holds up nothing, and is tried again
        later.

        End every migration by `Store.finish_migration`. Before writing to the targets, apply the
        "removed" events of NVMe from `Store.take_events`: the slots may have held those blocks
        until now.

        Args:
            resting: numbers of the NVMe devices to which nothing is to be written now.
        """
        nvme = self._table.tiers.get(Tier.NVME)
        if nvme is not None:
            nvme.allocator.rest(resting)
        migrations: list[Migration] = []
        has_more = False
        for index, writeback in reversed(self._table.writebacks.items()):  # from below
            if index in sources:
                writeback.offer_again(now)
                planned, is_cut = self._plan(writeback, max_blocks, now)
                migrations += planned
                has_more = has_more or is_cut
        if nvme is not None:
            nvme.allocator.rest(())
        return DemotionPlan(migrations, has_more)

    def _plan(
        self, writeback: Writeback, max_blocks: int, now: float
    ) -> tuple[list[Migration], bool]:
        """Plan for one source; also tell whether `max_blocks` that found no room ended it."""
        migrations: list[Migration] = []
        skipped: set[Copy] = set()  # pinned: too hot to be worth a write yet
        planned = 0
        while planned < max_blocks and writeback.is_due:
            copy = writeback.dirty.lowest(lambda copy: copy in skipped)
            if copy is None:
                break
            if copy.pins and not writeback.is_write_through:
                skipped.add(copy)
                continue
            if self._is_room_coming(writeback, copy):
                break
            planned += 1
            planned_migrations = self._begin(copy, writeback.target, copy.last_use)
            if planned_migrations is not None:
                migrations += planned_migrations
                continue
            # Everything that could leave the tier below is hotter. The next copy may still find
            # room, if its slot size or account differs. This one waits, and longer if it waited
            # before without a use since.
            wait_s = self._retry_s * (PATIENCE if copy.refused_use == copy.last_use else 1)
            writeback.retry_later(copy, now + wait_s)
            copy.refused_use = (
                copy.last_use
            )  # from HBM it may now be evicted (`eviction.is_spared`)
            self._table.counters["demotion_refused"] += 1
            self._table.settle_state(copy)
        return migrations, planned == max_blocks and not migrations

    def _is_room_coming(self, writeback: Writeback, copy: Copy) -> bool:
        """The tier below is being cleaned itself: making room there now would lose blocks."""
        below = self._table.writebacks.get(writeback.target)
        return (
            below is not None
            and below.cleaning_bytes > 0
            and below.reclaimable_bytes < copy.size_bytes
        )

    def demote(self, copy: Copy) -> list[Migration]:
        """Migrations that copy one copy to the tier below; none if it is there or has no room."""
        writeback = self._table.writebacks.get(copy.tier)
        if writeback is None or not copy.is_whole or eviction.has_backing(copy):
            return []
        if copy.block.copies[writeback.target] is not None:
            return []
        return self._begin(copy, writeback.target, copy.last_use) or []

    def finish(
        self, migration_id: int, is_ok: bool | None, now: float, checksum: int | None = None
    ) -> None:
        """The bytes of one migration are in place, or never will be; its slots are let go.

        Args:
            is_ok: None for a migration that was not begun, which is no failure.
            checksum: of the bytes that were written; None if they are the bytes that were read.

        Raises:
            InvalidArgument: no such migration is in flight.
        """
        if migration_id not in self._migrations:
            raise InvalidArgument(f"no migration {migration_id} is in flight")
        migration, source, target = self._migrations.pop(migration_id)
        table = self._table
        is_up = target.tier < source.tier
        writeback = self._writeback_of(source, target.tier)
        if writeback is not None:
            writeback.cleaning_bytes -= source.block.space.slot_bytes[source.tier]
        source.reading -= 1
        if is_ok and table.is_unreadable(target):
            is_ok = False
        if is_ok:
            if table.fill(
                target, migration.part, migration.checksum if checksum is None else checksum
            ):
                kind = "promoted" if is_up else "demoted"
                table.counters[kind] += 1
                table.counters[f"{kind}:{migration.target_tier}"] += 1
        else:
            table.counters["migrations_cancelled" if is_ok is None else "migrations_failed"] += 1
            table.vacate(target, migration.part, is_late_write_possible=False)
        if not target.filling:
            table.discard_partial(target)  # if some other part failed
        table.settle_state(source)
        if writeback is not None and not target.filling and not target.is_whole:
            writeback.retry_later(source, now + self._retry_s)

    # ------------------------------------------------------------ within

    def _writeback_of(self, source: Copy, target_tier: Tier) -> Writeback | None:
        """The writeback that this migration serves, if it is a demotion."""
        writeback = self._table.writebacks.get(source.tier)
        return writeback if writeback is not None and writeback.target == target_tier else None

    def _begin(
        self, source: Copy, target_tier: Tier, colder_than: int | None
    ) -> list[Migration] | None:
        block = source.block
        if not source.is_whole:
            raise InvalidArgument(f"block {block.name.hex()} is not whole in {source.tier}")
        table, space = self._table, block.space
        source.reading += space.tp_size  # first, so that the source is never the victim
        for part in range(space.tp_size):
            if table.hold(block, target_tier, part, colder_than) is None:
                target = block.copies[target_tier]
                if target is not None:
                    for taken in range(part):
                        table.vacate(target, taken, is_late_write_possible=False)
                source.reading -= space.tp_size
                table.settle_state(source)
                return None
        target = block.copies[target_tier]
        migrations: list[Migration] = []
        for part, (place, checksum) in enumerate(zip(source.places, source.checksums, strict=True)):
            to = target.places[part] if target is not None else None
            if target is None or to is None or place is None or checksum is None:
                raise InvalidArgument(f"block {block.name.hex()} lost a part")
            migration = Migration(
                self._next_id,
                space.namespace_id,
                block.name,
                part,
                source.tier,
                place,
                target_tier,
                to,
                space.part_bytes,
                checksum,
                block.parent,
                target.encoding if target_tier == Tier.NVME else source.encoding,
            )
            self._migrations[self._next_id] = (migration, source, target)
            self._next_id += 1
            migrations.append(migration)
        writeback = self._writeback_of(source, target_tier)
        if writeback is not None:
            writeback.dirty.discard(source)  # offered again if the migration fails
            writeback.cleaning_bytes += space.slot_bytes[source.tier] * space.tp_size
        return migrations


def whole_copy(space: Space, tiers: Collection[Tier], name: bytes) -> Copy | None:
    """The whole copy of a block in the first of the tiers that has one."""
    for tier in tiers:
        copy = space.visible[tier].get(name)
        if copy is not None:
            return copy
    return None
