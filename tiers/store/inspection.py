"""What a store holds, for people and for reports. Nothing here counts as a use of a block."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from kvpool.blocks.records import BlockInfo, NamespaceUsage, TierUsage
from kvpool.blocks.tier import Tier
from kvpool.errors import InvalidArgument
from tiers.store.block_table import BlockTable
from tiers.store.blocks import FOREVER, NEVER, Block
from tiers.store.namespaces import NamespaceTable
from tiers.store.quotas import AccountUsage

MAX_PAGE = 1000  # blocks: a few milliseconds of the event loop


class Inspection:
    """Describes tiers, accounts, namespaces and blocks.

    Args:
        table: the blocks.
        namespaces: the namespaces.
    """

    def __init__(self, table: BlockTable, namespaces: NamespaceTable) -> None:
        self._table = table
        self._namespaces = namespaces

    def tiers(self) -> list[TierUsage]:
        """Bytes by state of each tier; free + reserved + committed + quarantined = capacity.

        Pinned bytes are part of the committed ones. Targets of migrations count as reserved.
        """
        spaces = self._table.spaces.values()
        return [
            TierUsage(
                tier.index,
                tier.allocator.capacity_bytes,
                tier.free_bytes,
                tier.reserved_bytes,
                tier.committed_bytes,
                tier.pinned_bytes,
                tier.quarantined_bytes,
                sum(len(space.visible[tier.index]) for space in spaces),
                tier.retained_bytes,
            )
            for tier in self._table.tiers.values()
        ]

    def accounts(self) -> list[AccountUsage]:
        """What each tenant or namespace with a quota, and all others together, use of each tier."""
        return [
            AccountUsage(
                name, tier.index, tier.quota_table.quotas[number], tier.quota_table.used[number]
            )
            for tier in self._table.tiers.values()
            for number, name in enumerate(self._table.accounts.names)
        ]

    def arena_bytes(self) -> dict[int, int]:
        """Bytes in slots of each DRAM arena, by arena id."""
        arenas = self._table.tiers[Tier.DRAM].allocator.arenas
        return {arena.arena_id: arena.used_bytes for arena in arenas}

    def namespaces(self) -> list[NamespaceUsage]:
        """Each namespace with its blocks in each tier, in the order of registration."""
        usages: list[NamespaceUsage] = []
        for space in self._table.spaces.values():
            blocks = {tier: len(space.visible[tier]) for tier in Tier}
            usages.append(
                NamespaceUsage(
                    space.namespace_id,
                    space.namespace.name,
                    space.namespace.model,
                    space.block_tokens,
                    space.tp_size,
                    len(space.blocks),
                    {tier: count for tier, count in blocks.items() if count},
                )
            )
        return usages

    def blocks(self, namespace_id: bytes, offset: int, limit: int, now: float) -> list[BlockInfo]:
        """One page of a namespace's blocks, in the order of their arrival.

        Raises:
            UnknownNamespace.
            InvalidArgument: `offset` is negative, or `limit` is not in [1, `MAX_PAGE`].
        """
        space = self._namespaces.space(namespace_id)
        if offset < 0 or not 1 <= limit <= MAX_PAGE:
            raise InvalidArgument(
                f"offset {offset}, limit {limit}", hint=f"at most {MAX_PAGE} at a time"
            )
        self._table.access_clock.sample(now)
        first = min(offset, len(space.blocks))  # islice refuses numbers beyond the machine's
        page = islice(space.blocks.values(), first, first + limit)
        return [self._described(block, now) for block in page]

    def parents(self, namespace_id: bytes) -> dict[bytes, bytes]:
        """The parent of every visible block of a namespace, in any tier.

        Raises:
            UnknownNamespace.
        """
        visible = self._namespaces.space(namespace_id).visible
        return {name: copy.block.parent for names in visible for name, copy in names.items()}

    def snapshot(self) -> Iterator[tuple[bytes, Tier, bytes]]:
        """(namespace id, tier, hash) of every whole copy, as of this call."""
        slices = [
            (space.namespace_id, tier.index, list(space.visible[tier.index]))
            for space in self._table.spaces.values()
            for tier in self._table.tiers.values()
        ]
        return ((space_id, tier, name) for space_id, tier, names in slices for name in names)

    def _described(self, block: Block, now: float) -> BlockInfo:
        copies = [copy for copy in (block.copies[tier] for tier in Tier) if copy is not None]
        retained_s = -1.0
        if block.retained_until != NEVER:
            is_hard_pinned = block.retained_until == FOREVER
            retained_s = 0.0 if is_hard_pinned else max(1e-3, block.retained_until - now)
        return BlockInfo(
            block.name,
            block.parent,
            block.depth,
            [copy.tier for copy in copies if copy.is_whole],
            max((copy.committed for copy in copies), default=0),
            sum(copy.slot_bytes * (copy.committed + copy.filling) for copy in copies),
            sum(copy.pins for copy in copies),
            retained_s,
            self._table.access_clock.age_s(block.last_use, now),
        )
