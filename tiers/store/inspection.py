"""What stands on a node, for people who look: namespaces, and blocks page by page. Pure; no look is a use."""

from __future__ import annotations

from itertools import islice

from kvpool.blocks.tier import Tier
from kvpool.wire import messages as m
from tiers.store.access_clock import AccessClock
from tiers.store.block_table import BlockTable
from tiers.store.blocks import FOREVER, NEVER, Block, Space

MAX_PAGE = 1000  # blocks: a few milliseconds of the event loop


def usage_of(space: Space) -> m.NamespaceUsage:
    """One namespace and what stands of it in each tier."""
    namespace = space.namespace
    blocks = {tier: len(space.visible[tier]) for tier in Tier}
    return m.NamespaceUsage(
        space.namespace_id,
        namespace.name,
        namespace.model,
        namespace.layout.block_tokens,
        space.tp_size,
        len(space.blocks),
        {tier: count for tier, count in blocks.items() if count},
    )


def page(
    space: Space, offset: int, limit: int, access_clock: AccessClock, now: float
) -> list[m.BlockInfo]:
    """Up to `limit` blocks from the `offset`-th on, in the order in which they came here."""
    first = min(offset, len(space.blocks))  # islice takes no number past the machine's
    blocks = islice(space.blocks.values(), first, first + limit)
    return [_described(block, access_clock, now) for block in blocks]


def _described(block: Block, access_clock: AccessClock, now: float) -> m.BlockInfo:
    copies = [copy for copy in (block.copies[tier] for tier in Tier) if copy is not None]
    retained_s = -1.0
    if block.retained_until != NEVER:
        retained_s = (
            0.0 if block.retained_until == FOREVER else max(1e-3, block.retained_until - now)
        )
    return m.BlockInfo(
        block.name,
        block.parent,
        block.depth,
        [copy.tier for copy in copies if copy.is_whole],
        max((copy.committed for copy in copies), default=0),
        sum(copy.slot_bytes * (copy.committed + copy.filling) for copy in copies),
        sum(copy.pins for copy in copies),
        retained_s,
        access_clock.age_s(block.last_use, now),
    )


def usages(table: BlockTable) -> list[m.NamespaceUsage]:
    """Of every namespace, in the order of their registration."""
    return [usage_of(space) for space in table.spaces.values()]
