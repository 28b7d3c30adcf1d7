"""Lists the blocks of a pool's nodes, page by page, so that no listing holds up a node."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from kvpool.client.node.deadlines import time_left
from kvpool.client.node.directory import NodeDirectory
from kvpool.client.node.node_link import NodeLink
from kvpool.errors import InvalidArgument
from kvpool.wire import messages as m

PAGE = 1000  # the most that nodes send at a time


@dataclass(slots=True, frozen=True)
class SpaceListing:
    """One namespace on one node: its totals, and its first blocks."""

    usage: m.NamespaceUsage
    blocks: list[m.BlockInfo]


@dataclass(slots=True, frozen=True)
class NodeListing:
    """The namespaces of one node."""

    node_id: str
    host: str
    namespaces: list[SpaceListing]


async def list_blocks(
    directory: NodeDirectory, node_id: str, model: str, limit: int, deadline: float
) -> list[NodeListing]:
    """List the blocks of one node or of all.

    Arguments and errors are those of `AsyncPool.list_blocks`.
    """
    if limit < 0:
        raise InvalidArgument(f"limit={limit} is negative")
    node_ids = [node_id]
    if not node_id:
        node_ids = [info.descriptor.node_id for info in await directory.nodes(deadline)]

    async def list_node(one: str) -> NodeListing:
        link = await directory.link(one, deadline)
        spaces = await _namespaces(link, deadline)
        wanted = [s for s in spaces if model in ("", s.model, s.name, s.namespace_id.hex())]
        blocks = [await _blocks(link, space, limit, deadline) for space in wanted]
        return NodeListing(
            one, link.node.host, [SpaceListing(*pair) for pair in zip(wanted, blocks, strict=True)]
        )

    return list(await asyncio.gather(*map(list_node, node_ids)))


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
