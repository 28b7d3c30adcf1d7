"""Retains blocks on all nodes of a pool, and drops them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvpool.blocks.hashing import pack_hashes
from kvpool.blocks.layout import Namespace
from kvpool.client.node.deadlines import time_left
from kvpool.client.node.directory import NodeDirectory
from kvpool.errors import InvalidArgument
from kvpool.wire import messages as m


async def protect(
    directory: NodeDirectory,
    namespace: Namespace,
    hashes: Sequence[bytes],
    ttl_s: float | None,
    deadline: float,
) -> dict[str, int]:
    """Ask every node to retain blocks for `ttl_s`; None: until `unprotect`.

    Errors as in `AsyncPool.protect`.
    """
    if ttl_s is not None and not ttl_s > 0:
        raise InvalidArgument(f"ttl_s={ttl_s} must be positive", hint="None protects for ever")
    request = m.Protect(namespace.namespace_id, pack_hashes(hashes), ttl_s or 0.0)
    return await _ask_all_nodes(directory, namespace, request, deadline)


async def unprotect(
    directory: NodeDirectory, namespace: Namespace, hashes: Sequence[bytes], deadline: float
) -> dict[str, int]:
    """Ask every node to end the retention of blocks; returns how many lost it, by node id."""
    request = m.Protect(namespace.namespace_id, pack_hashes(hashes), 0.0, release=True)
    return await _ask_all_nodes(directory, namespace, request, deadline)


async def drop(
    directory: NodeDirectory, namespace: Namespace, hashes: Sequence[bytes], deadline: float
) -> dict[str, int]:
    """Ask every node to remove blocks; returns how many each had, by node id."""
    request = m.DropBlocks(namespace.namespace_id, pack_hashes(hashes))
    return await _ask_all_nodes(directory, namespace, request, deadline)


async def _ask_all_nodes(
    directory: NodeDirectory,
    namespace: Namespace,
    request: m.Protect | m.DropBlocks,
    deadline: float,
) -> dict[str, int]:
    """Send one request to every node at once.

    Raises the first error after all nodes have answered.
    """
    node_ids = [info.descriptor.node_id for info in await directory.nodes(deadline)]

    async def ask(node_id: str) -> int:
        link = await directory.link(node_id, deadline)
        reply: m.ProtectReply | m.DropBlocksReply = await link.call(
            request, namespace, time_left(deadline)
        )
        return reply.count

    replies = await asyncio.gather(*map(ask, node_ids), return_exceptions=True)
    counts: dict[str, int] = {}
    for node_id, reply in zip(node_ids, replies, strict=True):
        if isinstance(reply, BaseException):
            raise reply
        counts[node_id] = reply
    return counts
