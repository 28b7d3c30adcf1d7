"""What stands on the nodes of a pool, for people who look; page by page, so that no node is held up."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpool.client.node.deadlines import time_left
from kvpool.errors import InvalidArgument
from kvpool.wire import messages as m

if TYPE_CHECKING:
    from kvpool.client.async_pool import AsyncPool
    from kvpool.client.node.node_link import NodeLink

PAGE = 1000  # what nodes give at a time


@dataclass(slots=True, frozen=True)
class SpaceListing:
    """One namespace on one node; `blocks` are the first of them."""

    usage: m.NamespaceUsage
    blocks: list[m.BlockInfo]


@dataclass(slots=True, frozen=True)
class NodeListing:
    """One node."""

    node_id: str
    host: str
    namespaces: list[SpaceListing]


async def list_blocks(
    pool: AsyncPool, node_id: str, model: str, limit: int, deadline: float
) -> list[NodeListing]:
    """See `AsyncPool.list_blocks`."""
    if limit < 0:
        raise InvalidArgument(f"limit={limit} is negative")
    node_ids = [node_id]
    if not node_id:
        infos = await pool.nodes(timeout_s=time_left(deadline))
        node_ids = [info.descriptor.node_id for info in infos]

    async def of_node(one: str) -> NodeListing:
        link = await pool.link(one, deadline)
        spaces = await _namespaces(link, deadline)
        wanted = [s for s in spaces if model in ("", s.model, s.name, s.namespace_id.hex())]
        blocks = [await _blocks(link, space, limit, deadline) for space in wanted]
        return NodeListing(
            one, link.node.host, [SpaceListing(*pair) for pair in zip(wanted, blocks, strict=True)]
        )

    return list(await asyncio.gather(*map(of_node, node_ids)))


async def _namespaces(link: NodeLink, deadline: float) -> list[m.NamespaceUsage]:
    known: list[m.NamespaceUsage] = []
    while True:
        reply: m.ListNamespacesReply = await link.wire.call(
            m.ListNamespaces(len(known), PAGE), time_left(deadline)
        )
        known += reply.namespaces
        if len(reply.namespaces) < PAGE:
            return known


async def _blocks(
    link: NodeLink, space: m.NamespaceUsage, limit: int, deadline: float
) -> list[m.BlockInfo]:
    found: list[m.BlockInfo] = []
    while len(found) < limit:
        count = min(PAGE, limit - len(found))
        request = m.ListBlocks(space.namespace_id, len(found), count)
        reply: m.ListBlocksReply = await link.wire.call(request, time_left(deadline))
        found += reply.blocks
        if len(reply.blocks) < count:
            break
    return found
