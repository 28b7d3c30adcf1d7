"""Evacuation: emptying arenas that will be removed, while the node serves.

The caller copies the bytes.

Nothing new is allocated in such an arena. Its blocks migrate to the other arenas, into free room or
the room of blocks that were used less recently. A block that finds none there is demoted to NVMe if
the node has it, and else evicted. Reserved and quarantined slots stay until that ends. A leased
slot keeps its bytes until the lease ends, also after new readers find the block elsewhere
(invariants 1 to 3).

While a block migrates it has a twin: a hidden record that holds the new slots. At the end the two
swap their places, and the twin leaves with the old slots, at once or with their last lease.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvpool.blocks.tier import Tier
from kvpool.errors import InvalidArgument, NotFound
from tiers.store import eviction
from tiers.store.block_table import BlockTable
from tiers.store.blocks import NEVER, Block, Copy, Migration, Space
from tiers.store.migrations import MigrationTable
from tiers.store.slab_allocator import Place, SlabAllocator, StoreCorrupt

LOOKS_AT_ONCE = 1024  # slots looked at in one call, so that no call takes longer than 5 ms


class _Walk:
    """How far the evacuation of one arena has come. It starts over until nothing is left."""

    __slots__ = ("acted", "arena", "held", "is_pressing", "offset", "since")

    def __init__(self, arena: SlabAllocator, since: int) -> None:
        self.arena = arena
        self.since = since  # the last tick before it began
        self.offset = 0
        self.acted = 0  # blocks that this round migrated or evicted
        self.held = 0  # slots of blocks that somebody holds
        # Nobody holds anything and still no block leaves: parents may take room from any block.
        self.is_pressing = False

    def places(self) -> Iterator[Place]:
        """The taken slots, from where the last call ended."""
        slab_bytes = self.arena.slab_bytes
        while self.offset < self.arena.capacity_bytes:
            slab = self.offset // slab_bytes
            for place in self.arena.places_in(slab):
                if place.offset >= self.offset:
                    self.offset = place.offset + 1
                    yield place
            self.offset = (slab + 1) * slab_bytes

    def start_over(self, *, is_pressing: bool) -> None:
        self.is_pressing = is_pressing
        self.offset = self.acted = self.held = 0


class _Budget:
    """What one call may still do, and the migrations that it began."""

    __slots__ = ("blocks", "looks", "migrations", "refused")

    def __init__(self, max_blocks: int) -> None:
        self.blocks = max_blocks
        self.looks = LOOKS_AT_ONCE
        self.migrations: list[Migration] = []
        # By namespace: a block last used at this tick found no room, so no colder one does.
        self.refused: dict[Space, int] = {}

    @property
    def is_spent(self) -> bool:
        return self.blocks <= 0 or self.looks <= 0


class EvacuationTable:
    """The DRAM arenas that are being evacuated, and the migrations that empty them.

    Args:
        table: the blocks.
        migrations: demotes the blocks that must go to NVMe.
    """

    def __init__(self, table: BlockTable, migrations: MigrationTable) -> None:
        self._table = table
        self._demotions = migrations
        self._walks: dict[int, _Walk] = {}  # by arena id
        self._next_id = -1  # downwards: the numbers of all other migrations are positive
        self._migrations: dict[int, tuple[Migration, Copy, Copy]] = {}
        # Each copy is demoted once only, so that a disk that refuses it does not keep the arena.
        self._demoted: set[Copy] = set()
        self._may_demote = True

    def __len__(self) -> int:
        return len(self._migrations)

    def __contains__(self, migration_id: int) -> bool:
        return migration_id in self._migrations

    def values(self) -> list[tuple[Migration, Copy, Copy]]:
        """Each migration with its source and its target."""
        return list(self._migrations.values())

    def begin(self, arena_id: int) -> None:
        """Allocate nothing in this arena from now on; `Store.plan_evacuation` empties it.

        A second call changes nothing.

        Raises:
            NotFound: no such arena. InvalidArgument: it is the last one.
        """
        allocator = self._table.tiers[Tier.DRAM].allocator
        arena = next((arena for arena in allocator.arenas if arena.arena_id == arena_id), None)
        if arena is None:
            raise NotFound(f"there is no dram arena {arena_id}")
        if arena_id in self._walks:
            return
        if len(self._walks) + 1 == len(allocator.arenas):
            raise InvalidArgument(f"arena {arena_id} is the last one", hint="stop the node instead")
        allocator.close(arena_id)
        self._walks[arena_id] = _Walk(arena, self._table.access_clock.advance(0))
        self._table.resized(Tier.DRAM)

    def bytes_left(self) -> dict[int, int]:
        """Bytes in slots of each arena that is being evacuated, by arena id."""
        return {arena_id: walk.arena.used_bytes for arena_id, walk in self._walks.items()}

    def take_empty(self) -> list[int]:
        """Remove the evacuated arenas that are empty; returns their ids. They may be unmapped."""
        empty = [arena_id for arena_id, used_bytes in self.bytes_left().items() if not used_bytes]
        for arena_id in empty:
            del self._walks[arena_id]
            if not self._walks:
                self._demoted.clear()
            self._table.tiers[Tier.DRAM].allocator.remove(arena_id)
            self._table.resized(Tier.DRAM)
        return empty

    def plan(self, max_blocks: int, *, may_demote: bool = True) -> list[Migration]:
        """Migrate or evict up to `max_blocks` blocks that nobody holds; returns the migrations."""
        self._may_demote = may_demote
        owners = self._table.tiers[Tier.DRAM].owners
        budget = _Budget(max_blocks)
        for walk in self._walks.values():
            is_stuck = False
            while not is_stuck:
                for place in walk.places():
                    copy = owners.get(place)  # None: in quarantine
                    while copy is not None and not budget.is_spent and _is_free_to_go(copy, walk):
                        if not self._leave(copy, walk, budget):
                            break
                        copy = self._parent_in(walk.arena.arena_id, copy.block)
                    if copy is not None and not copy.block.is_detached:
                        walk.held += not _is_free_to_go(copy, walk)
                    budget.looks -= 1
                    if budget.is_spent:
                        return budget.migrations
                is_waiting = walk.held + len(self._migrations) + len(self._demotions) > 0
                is_pressing = not walk.acted and not is_waiting and not walk.is_pressing
                is_stuck = not walk.acted and not is_pressing
                walk.start_over(is_pressing=is_pressing)
        return budget.migrations

    def finish(self, migration_id: int, is_ok: bool | None) -> None:
        """The bytes of one part are in their new place, or never will be.

        Args:
            is_ok: None for a migration that was not begun.
        """
        migration, source, target = self._migrations.pop(migration_id)
        table = self._table
        source.reading -= 1
        target.reading += 1  # keeps the filled parts until the end of this call
        if is_ok:
            table.fill(target, migration.part, migration.checksum)
        else:
            table.counters["migrations_cancelled" if is_ok is None else "migrations_failed"] += 1
            table.vacate(target, migration.part, is_late_write_possible=False)
        target.reading -= 1
        is_complete = target.committed == source.committed
        # Another migration, or a writer, that began in between uses the old places: try again
        # after it.
        if is_complete and not source.block.is_detached and not source.reading + source.filling:
            if source.pins:
                _replace(table, source, target)
            else:
                _exchange_places(table, source, target)
            table.counters["relocated"] += 1
        table.settle_state(target)
        table.settle_state(source)

    # ------------------------------------------------------------ within

    def _leave(self, copy: Copy, walk: _Walk, budget: _Budget) -> bool:
        """Take one copy out of its arena; True if it was evicted (its parent may follow)."""
        block = copy.block
        is_pressed = walk.is_pressing and eviction.has_descendant(copy)
        is_urgent = is_pressed or block.retained_until != NEVER
        started = self._relocate(copy, None if is_urgent else block.last_use, budget)
        if not started and not copy.pins and self._may_demote and copy not in self._demoted:
            started = self._demotions.demote(copy)
            if started:
                self._demoted.add(copy)
        budget.migrations += started
        is_evicted = not started and eviction.is_evictable(copy)
        if is_evicted:
            self._table.evict(copy)
        if started or is_evicted:
            walk.acted += 1
            budget.blocks -= 1
        return is_evicted

    def _parent_in(self, arena_id: int, block: Block) -> Copy | None:
        """The parent's copy if it is in the same arena; the walk has usually passed it."""
        parent = block.space.blocks.get(block.parent)
        copy = parent.copies[Tier.DRAM] if parent is not None else None
        return copy if copy is not None and eviction.is_in_arenas(copy, {arena_id}) else None

    def _relocate(self, source: Copy, colder_than: int | None, budget: _Budget) -> list[Migration]:
        """Migrations to slots elsewhere in the tier; none if there is no room."""
        table, block, space = self._table, source.block, source.block.space
        if colder_than is not None and colder_than <= budget.refused.get(space, -1):
            return []
        twin = Block(space, block.name, block.parent, block.last_use, block.depth)
        twin.is_detached = True
        table.detached.add(twin)
        parts = [part for part, checksum in enumerate(source.checksums) if checksum is not None]
        source.reading += len(parts)  # first, so that the source is never the victim
        for count, part in enumerate(parts):
            if table.hold(twin, source.tier, part, colder_than) is None:
                self._give_up(source, twin, parts, count)
                budget.blocks -= 1
                if colder_than is not None:
                    budget.refused[space] = colder_than
                return []
        target = twin.copies[source.tier]
        migrations: list[Migration] = []
        for part in parts:
            place, checksum = source.places[part], source.checksums[part]
            to = target.places[part] if target is not None else None
            if target is None or to is None or place is None or checksum is None:
                raise StoreCorrupt(f"block {block.name.hex()} lost a part")
            tier = source.tier
            migration = Migration(
                self._next_id,
                space.namespace_id,
                block.name,
                part,
                tier,
                place,
                tier,
                to,
                space.part_bytes,
                checksum,
                block.parent,
            )
            self._migrations[self._next_id] = (migration, source, target)
            self._next_id -= 1
            migrations.append(migration)
        return migrations

    def _give_up(self, source: Copy, twin: Block, parts: list[int], held: int) -> None:
        target = twin.copies[source.tier]
        if target is not None:
            for part in parts[:held]:
                self._table.vacate(target, part, is_late_write_possible=False)
        source.reading -= len(parts)
        self._table.settle_state(source)


def _is_free_to_go(copy: Copy, walk: _Walk) -> bool:
    if copy.block.is_detached or copy.reading or copy.filling:
        return False
    # A leased block waits for the end of its lease. If new leases keep coming, it migrates, and the
    # old slots stay for the old leases.
    return not copy.pins or copy.last_use > walk.since


def _exchange_places(table: BlockTable, copy: Copy, twin: Copy) -> None:
    """Swap the slots of two copies of one block in one tier that have the same parts."""
    owners = table.tiers[copy.tier].owners
    for owner, places in ((copy, twin.places), (twin, copy.places)):
        owners.update((place, owner) for place in places if place is not None)
    copy.places, twin.places = twin.places, copy.places
    if copy.is_whole:
        copy.hand_out()


def _replace(table: BlockTable, copy: Copy, twin: Copy) -> None:
    """Put a whole copy in the place of a pinned one, which stays for its leases only."""
    block, remnant = copy.block, twin.block
    table.tiers[copy.tier].queue_of(copy).discard(copy)
    copy.block, twin.block = remnant, block
    remnant.copies[copy.tier], block.copies[copy.tier] = copy, twin
    block.space.visible[copy.tier][block.name] = twin
    twin.hand_out()
    for writeback in table.writebacks.values():
        writeback.replaced(copy, twin)
