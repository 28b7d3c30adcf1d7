"""Protection: blocks that go last (for a while) or never, such as those of system prompts. Pure.

Protection is of a block, wherever it stands, and of no caller: whoever ends it, ends it for all. It is promised
for each tier but hbm as if the block stood there, within a bounded share of each, so that the promise stays
good when the block moves. A small hbm would bound it for all: from there a protected block goes down, not away. A protected block's parent is protected as long: it could not go first anyway
(invariant 6), and is counted for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush

from kvpool.blocks.tier import Tier
from kvpool.errors import InvalidArgument, NoRoom
from tiers.store.block_table import BlockTable
from tiers.store.blocks import FOREVER, NEVER, Block, Space
from tiers.store.victims import TierState


class RetentionTable:
    """All protected blocks.

    Args:
        residency: where they stand.
        share: of each tier that may be promised.
    """

    def __init__(self, table: BlockTable, share: float) -> None:
        self._table = table
        self._share = share
        self._retained: set[Block] = set()
        # (until, number, block); void when the block is protected for another time by now.
        self._due: list[tuple[float, int, Block]] = []
        self._pushes = 0
        self.changes = 0  # grows with every protection that begins, is prolonged or ends
        table.on_gone = self._forget

    def __len__(self) -> int:
        return len(self._retained)

    def values(self) -> list[Block]:
        """All protected blocks."""
        return list(self._retained)

    def retain(self, space: Space, hashes: Sequence[bytes], until: float | None, now: float) -> int:
        """Protect those of `hashes` that stand here, all or none; returns how many do.

        Args:
            until: monotonic seconds; None: for ever. Never shortens a protection.

        Raises:
            InvalidArgument: `until` is not after `now`, or a parent stands here that is neither named nor
                protected as long.
            NoRoom: more than the share of a tier would be promised.
        """
        end = FOREVER if until is None else until
        if not end > now:
            raise InvalidArgument(f"protection until {end} has ended at {now}")
        blocks = dict.fromkeys(_visible(space, hashes))
        for block in blocks:
            parent = next(_visible(space, [block.parent]), None)
            if parent is not None and parent not in blocks and parent.retained_until < end:
                raise InvalidArgument(
                    f"block {block.name.hex()} builds on one that is not protected as long",
                    hint="name the chain from its start",
                )
        fresh = [block for block in blocks if block.retained_until == NEVER]
        for tier in self._promising_tiers():
            size = space.slot_bytes[tier.index] * space.tp_size
            limit = self._share * tier.allocator.open_bytes
            if fresh and tier.retained_bytes + size * len(fresh) > limit:
                self._table.counters["retention_refused"] += 1
                raise NoRoom(
                    f"{tier.name} has {tier.retained_bytes} protected bytes, and at most {limit:.0f}",
                    hint="end another protection, or raise retention_share",
                )
        for block in fresh:
            self._charge(block, 1)
        for block in blocks:
            if block.retained_until < end:
                block.retained_until = end
                self.changes += 1
                self._wait_for(block)
                self._offer(block)
        self._table.counters["retained"] += len(fresh)
        return len(blocks)

    def end_retention(self, space: Space, hashes: Sequence[bytes]) -> int:
        """End the protection of those of `hashes` that have one; returns how many had and lost it.

        A block stays protected while one that builds on it is.
        """
        count = 0
        for name in reversed(hashes):  # tails first: a parent is free when its last child is
            block = space.blocks.get(name)
            count += block is not None and self._end(block)
        self._table.counters["retention_ended"] += count
        return count

    def expire(self, now: float) -> int:
        """End the protections that are past their time; returns how many."""
        ended = 0
        while self._due and self._due[0][0] <= now:
            until, _, block = heappop(self._due)
            if block.retained_until == until:
                ended += self._end(block, is_over=True)
        self._table.counters["retentions_expired"] += ended
        return ended

    # ------------------------------------------------------------ within

    def _promising_tiers(self) -> list[TierState]:
        return [tier for tier in self._table.tiers.values() if tier.index != Tier.HBM]

    def _wait_for(self, block: Block) -> None:
        if block.retained_until == FOREVER:
            return
        self._pushes += 1
        heappush(self._due, (block.retained_until, self._pushes, block))
        if len(self._due) > 1024 and len(self._due) > 2 * len(self._retained):
            self._due = [entry for entry in self._due if entry[2].retained_until == entry[0]]
            heapify(self._due)

    def _end(self, block: Block, *, is_over: bool = False) -> bool:
        if block.retained_until == NEVER:
            return False
        if not is_over and block.name in block.space.retained_children:
            return False
        self._forget(block)
        self._offer(block)
        return True

    def _forget(self, block: Block) -> None:
        self._charge(block, -1)
        self.changes += 1
        block.retained_until = NEVER

    def _charge(self, block: Block, sign: int) -> None:
        space = block.space
        for tier in self._promising_tiers():
            tier.retained_bytes += sign * space.slot_bytes[tier.index] * space.tp_size
        if sign > 0:
            self._retained.add(block)
        else:
            self._retained.discard(block)
        if block.parent:
            children = space.retained_children.get(block.parent, 0) + sign
            if children:
                space.retained_children[block.parent] = children
            else:
                del space.retained_children[block.parent]

    def _offer(self, block: Block) -> None:
        """Its copies have another rank now."""
        for copy in block.copies:
            if copy is not None and copy.committed:
                self._table.offer(copy)


def _visible(space: Space, hashes: Sequence[bytes]) -> Iterator[Block]:
    for name in hashes:
        for names in space.visible:
            copy = names.get(name)
            if copy is not None:
                yield copy.block
                break
