"""Retention: blocks that are evicted last (soft pins) or never (hard pins).

Retention belongs to the block, wherever its copies are, and not to a caller: a call that ends it
ends it for all. Its bytes are promised in every tier but HBM, within a bounded share of each tier,
so that the promise holds when the block migrates. HBM promises nothing, because a small HBM would
bound all others; a retained block leaves it for DRAM. The parent of a retained block is retained as
long, and counted: it could not be evicted earlier anyway (invariant 6).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from kvpool.blocks.tier import Tier
from kvpool.errors import InvalidArgument, NoRoom
from tiers.store.block_table import BlockTable
from tiers.store.blocks import FOREVER, NEVER, Block, Space
from tiers.store.namespaces import NamespaceTable
from tiers.store.victims import TierState


class Retention(NamedTuple):
    """Until when one block is retained."""

    namespace_id: bytes
    block_hash: bytes
    until: float  # monotonic seconds; infinite for a hard pin


class RetentionTable:
    """All retained blocks.

    Args:
        table: the blocks.
        namespaces: the namespaces.
        share: of each tier that may be promised.
    """

    def __init__(self, table: BlockTable, namespaces: NamespaceTable, share: float) -> None:
        self._table = table
        self._namespaces = namespaces
        self._share = share
        self._retained: set[Block] = set()
        # (until, number, block); void if the block is retained for another time by now.
        self._due: list[tuple[float, int, Block]] = []
        self._pushes = 0
        self.changes = 0  # grows with every retention that begins, is extended or ends
        table.on_gone = self._forget

    def __len__(self) -> int:
        return len(self._retained)

    def blocks(self) -> list[Block]:
        """All retained blocks."""
        return list(self._retained)

    def values(self) -> list[Retention]:
        """All retained blocks, and until when."""
        return [
            Retention(block.space.namespace_id, block.name, block.retained_until)
            for block in self._retained
        ]

    def retain(
        self, namespace_id: bytes, hashes: Sequence[bytes], until: float | None, now: float
    ) -> int:
        """Retain those of `hashes` that are here, all or none; returns how many they are.

        A soft pin (`until`) lets a block go only if nothing else can; a hard pin (None) never does.
        Dropping a corrupt block ends either.

        Args:
            hashes: a chain from its start; hashes that are not here are passed over.
            until: monotonic seconds. A second call may extend a retention, and never shortens it.

        Raises:
            UnknownNamespace.
            InvalidArgument: too many hashes, `until` is not after `now`, or a parent is here that
                is neither named nor retained as long.
            NoRoom: more than `retention_share` of a tier would be promised.
        """
        space = self._namespaces.space(namespace_id, len(hashes))
        self.expire(now)
        return self.retain_in(space, hashes, until, now)

    def retain_in(
        self, space: Space, hashes: Sequence[bytes], until: float | None, now: float
    ) -> int:
        """As `retain`, for any number of hashes."""
        end = FOREVER if until is None else until
        if not end > now:
            raise InvalidArgument(f"a retention until {end} has ended at {now}")
        blocks = dict.fromkeys(_visible(space, hashes))
        for block in blocks:
            parent = next(_visible(space, [block.parent]), None)
            if parent is not None and parent not in blocks and parent.retained_until < end:
                raise InvalidArgument(
                    f"the parent of block {block.name.hex()} is not retained as long",
                    hint="name the chain from its start",
                )
        fresh = [block for block in blocks if block.retained_until == NEVER]
        for tier in self._promising_tiers():
            size = space.slot_bytes[tier.index] * space.tp_size
            limit = self._share * tier.allocator.open_bytes
            if fresh and tier.retained_bytes + size * len(fresh) > limit:
                self._table.counters["retention_refused"] += 1
                raise NoRoom(
                    f"{tier.name} has {tier.retained_bytes} retained bytes, and at most"
                    f" {limit:.0f}",
                    hint="end another retention, or raise retention_share",
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

    def end(self, namespace_id: bytes, hashes: Sequence[bytes], now: float) -> int:
        """End the retention of a chain; returns how many blocks lost theirs.

        A block stays retained while one of its children is.

        Raises:
            UnknownNamespace, InvalidArgument: too many hashes.
        """
        space = self._namespaces.space(namespace_id, len(hashes))
        self.expire(now)
        count = 0
        for name in reversed(hashes):  # tails first: a parent is free when its last child is
            block = space.blocks.get(name)
            count += block is not None and self._end(block)
        self._table.counters["retention_ended"] += count
        return count

    def expire(self, now: float) -> int:
        """End the retentions whose time has passed; returns how many."""
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
        """The rank of its copies has changed."""
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
