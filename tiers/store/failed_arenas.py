"""Arenas that failed: one that takes nothing more, and one whose blocks are lost with it. Pure.

What is lost is hidden and told as removed, slice by slice, so that no call takes long. Until its turn comes a block
can still be found; a move that reads it fails then, which costs a miss.
"""

from __future__ import annotations

from collections import deque

from kvpool.blocks.tier import Tier
from tiers.store.block_table import BlockTable
from tiers.store.slab_allocator import Place


class FailedArenas:
    """Closes arenas, and takes out what stood in those that cannot be read."""

    def __init__(self, table: BlockTable) -> None:
        self._table = table
        self._left: deque[tuple[Tier, Place]] = deque()  # (tier, place) still to be looked at

    def __len__(self) -> int:
        return len(self._left)

    def close(self, tier_index: Tier, arena_id: int) -> None:
        """Allocate nothing there from now on; what stands there can be read, and goes by itself.

        Raises:
            NotFound: no such arena.
        """
        allocator = self._table.tiers[tier_index].allocator
        if allocator.is_open(arena_id):
            allocator.close(arena_id)
            self._table.resized(tier_index)

    def fail(self, tier_index: Tier, arena_id: int) -> None:
        """Nothing can be read there any more: close it, and give up what stands there (see `step`).

        Raises:
            NotFound: no such arena.
        """
        self.close(tier_index, arena_id)
        if (tier_index, arena_id) in self._table.failed:
            return
        self._table.failed.add((tier_index, arena_id))
        owners = self._table.tiers[tier_index].owners
        self._left.extend((tier_index, p) for p in owners if p.arena_id == arena_id)

    def step(self, limit: int, reason: str) -> int:
        """Look at up to `limit` of the slots that were lost; returns how many are left.

        Args:
            reason: what later pins of blocks that stood nowhere else are told.
        """
        for _ in range(min(limit, len(self._left))):
            tier_index, place = self._left.popleft()
            copy = self._table.tiers[tier_index].owners.get(place)
            if copy is not None:
                self._table.drop_unreadable(copy, reason)
        return len(self._left)
