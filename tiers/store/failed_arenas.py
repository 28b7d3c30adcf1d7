"""Arenas that failed: those that take no new blocks, and those that cannot be read any more.

Blocks of an unreadable arena are hidden and reported as removed, slice by slice, so that no call
takes long. Until its turn comes such a block can still be found; a migration that reads it fails,
which costs a miss.
"""

from __future__ import annotations

from collections import deque

from kvpool.blocks.tier import Tier
from tiers.store.block_table import BlockTable
from tiers.store.slab_allocator import Place

DISK_FAILED = "disk_failed"  # the reason that later pins report


class FailedArenas:
    """Closes arenas, and drops the blocks of those that cannot be read."""

    def __init__(self, table: BlockTable) -> None:
        self._table = table
        self._left: deque[tuple[Tier, Place]] = deque()  # slots still to be looked at

    def __len__(self) -> int:
        return len(self._left)

    def close(self, tier: Tier, arena_id: int) -> None:
        """Allocate nothing in this arena any more. Its blocks stay readable until evicted.

        Raises:
            NotFound: no such arena.
        """
        allocator = self._table.tiers[tier].allocator
        if allocator.is_open(arena_id):
            allocator.close(arena_id)
            self._table.resized(tier)

    def fail(self, tier: Tier, arena_id: int) -> None:
        """This arena cannot be read any more: close it. Calls of `drop_some` drop its blocks.

        Raises:
            NotFound: no such arena.
        """
        self.close(tier, arena_id)
        if (tier, arena_id) in self._table.failed:
            return
        self._table.failed.add((tier, arena_id))
        owners = self._table.tiers[tier].owners
        self._left.extend((tier, place) for place in owners if place.arena_id == arena_id)

    def drop_some(self, max_slots: int) -> int:
        """Drop the blocks in up to `max_slots` unreadable slots; returns how many slots are left.

        A block that has a copy elsewhere loses this copy only.
        """
        for _ in range(min(max_slots, len(self._left))):
            tier, place = self._left.popleft()
            copy = self._table.tiers[tier].owners.get(place)
            if copy is not None:
                self._table.drop_unreadable(copy, DISK_FAILED)
        return len(self._left)
