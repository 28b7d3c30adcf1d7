"""Moves between tiers: which copies to make, and what their end means. Decides, copies nothing.

Promotion brings a run where its reader can read it: into dram, from nvme or from hbm, or into hbm for those who
ask for that. Demotion cleans: it gives the coldest copies of dram a second one in nvme, and those of hbm one
in dram, so that evicting them later loses nothing. The first copy stays until its room is needed. Both slots
of a move are held until it is finished. Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvpool.blocks.tier import Tier
from kvpool.errors import InvalidArgument
from tiers.store import eviction
from tiers.store.block_table import BlockTable
from tiers.store.blocks import Copy, Migration, Space
from tiers.store.writeback import Writeback

PATIENCE = 16  # times the wait of a block that found no room, when it is refused again unused


class MigrationTable:
    """The moves under way.

    Args:
        residency: where the slots are.
        retry_s: seconds before a block whose demotion failed is tried again.
    """

    def __init__(self, table: BlockTable, retry_s: float) -> None:
        self._table = table
        self._retry_s = retry_s
        self._next_id = 1
        self._migrations: dict[int, tuple[Migration, Copy, Copy]] = {}
        self.has_more = False  # the last plan ended before the first block that finds room

    def __len__(self) -> int:
        return len(self._migrations)

    def values(self) -> list[tuple[Migration, Copy, Copy]]:
        """Each move with its source and its target."""
        return list(self._migrations.values())

    def promote_run(
        self, space: Space, hashes: Sequence[bytes], readable: Collection[Tier], target: Tier
    ) -> tuple[list[Copy], list[Migration], str]:
        """Start bringing into `target` what the leading run has in no tier of `readable`, best first.

        Returns the copies that can be leased now, the moves, and "promoting" when there are any (own or
        others'), "no_room" when the run was cut for want of it, else "".
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
        self, max_blocks: int, now: float, sources: Collection[Tier]
    ) -> list[Migration]:
        """Moves for the coldest blocks of each source that stand in no tier below it, `max_blocks` of each.

        A block takes the place of a colder one only: else a full disk would be rewritten for ever. One that
        finds none counts as one of `max_blocks`, holds up nobody, and is tried again later.
        """
        migrations: list[Migration] = []
        self.has_more = False
        for index, writeback in reversed(self._table.writebacks.items()):  # from below
            if index in sources:
                writeback.offer_again(now)
                migrations += self._plan(writeback, max_blocks, now)
        return migrations

    def _plan(self, writeback: Writeback, max_blocks: int, now: float) -> list[Migration]:
        migrations: list[Migration] = []
        skipped: set[Copy] = set()  # pinned: hot, and not worth a write yet
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
            # All that could go below is hotter. What follows is hotter still, or of another slot size or account,
            # and may find room; this one waits, for longer if it waited before and was not used since.
            wait_s = self._retry_s * (PATIENCE if copy.refused_use == copy.last_use else 1)
            writeback.retry_later(copy, now + wait_s)
            copy.refused_use = (
                copy.last_use
            )  # from hbm it may go when room is needed (`eviction.is_spared`)
            self._table.counters["demotion_refused"] += 1
            self._table.settle_state(copy)
        self.has_more = self.has_more or (planned == max_blocks and not migrations)
        return migrations

    def _is_room_coming(self, writeback: Writeback, copy: Copy) -> bool:
        """The tier below is being cleaned itself: what made room there now would be lost."""
        below = self._table.writebacks.get(writeback.target)
        return (
            below is not None
            and below.cleaning_bytes > 0
            and below.reclaimable_bytes < copy.size_bytes
        )

    def demote(self, copy: Copy) -> list[Migration]:
        """Moves that give one copy another in the tier below; none where it has one or finds no room."""
        writeback = self._table.writebacks.get(copy.tier)
        if writeback is None or not copy.is_whole or eviction.has_backing(copy):
            return []
        if copy.block.copies[writeback.target] is not None:
            return []
        return self._begin(copy, writeback.target, copy.last_use) or []

    def finish(
        self, migration_id: int, is_ok: bool | None, now: float, checksum: int | None = None
    ) -> None:
        """The bytes of one move are in place, or never will be; nothing touches its slots any more.

        Args:
            is_ok: None for a move that was not begun, which is no failure.
            checksum: of the bytes that were written; None where they are those that were read.

        Raises:
            InvalidArgument: no such move is under way.
        """
        if migration_id not in self._migrations:
            raise InvalidArgument(f"no move {migration_id} is under way")
        migration, source, target = self._migrations.pop(migration_id)
        table = self._table
        is_up = target.tier < source.tier
        writeback = self._crossed(source, target.tier)
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
            table.discard_partial(target)  # some other part failed
        table.settle_state(source)
        if writeback is not None and not target.filling and not target.is_whole:
            writeback.retry_later(source, now + self._retry_s)

    # ------------------------------------------------------------ within

    def _crossed(self, source: Copy, target_tier: Tier) -> Writeback | None:
        """The boundary that a move cleans by crossing it."""
        writeback = self._table.writebacks.get(source.tier)
        return writeback if writeback is not None and writeback.target == target_tier else None

    def _begin(
        self, source: Copy, target_tier: Tier, colder_than: int | None
    ) -> list[Migration] | None:
        block = source.block
        if not source.is_whole:
            raise InvalidArgument(f"block {block.name.hex()} is not whole in {source.tier}")
        table, space = self._table, block.space
        source.reading += space.tp_size  # before room is made: the source is never the victim
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
        writeback = self._crossed(source, target_tier)
        if writeback is not None:
            writeback.dirty.discard(source)  # comes back when the move fails, after a while
            writeback.cleaning_bytes += space.slot_bytes[source.tier] * space.tp_size
        return migrations


def whole_copy(space: Space, tiers: Collection[Tier], name: bytes) -> Copy | None:
    """The block's whole copy in the first of the tiers that has one."""
    for tier in tiers:
        copy = space.visible[tier].get(name)
        if copy is not None:
            return copy
    return None
