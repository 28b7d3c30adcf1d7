"""Keeping blocks, and dropping them, on all nodes of a pool; what that means is each node's affair."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvpool.blocks.hashing import pack_hashes
from kvpool.blocks.layout import Namespace
from kvpool.client.node.deadlines import time_left
from kvpool.errors import InvalidArgument
from kvpool.wire import messages as m

if TYPE_CHECKING:
    from kvpool.client.async_pool import AsyncPool


async def protect(
    pool: AsyncPool,
    namespace: Namespace,
    hashes: Sequence[bytes],
    ttl_s: float | None,
    deadline: float,
) -> dict[str, int]:
    """See `AsyncPool.protect`."""
    if ttl_s is not None and not ttl_s > 0:
        raise InvalidArgument(f"ttl_s={ttl_s} must be positive", hint="None protects for ever")
    request = m.Protect(namespace.namespace_id, pack_hashes(hashes), ttl_s or 0.0)
    return await _ask_all(pool, namespace, request, deadline)


async def unprotect(
    pool: AsyncPool, namespace: Namespace, hashes: Sequence[bytes], deadline: float
) -> dict[str, int]:
    """See `AsyncPool.unprotect`."""
    request = m.Protect(namespace.namespace_id, pack_hashes(hashes), 0.0, release=True)
    return await _ask_all(pool, namespace, request, deadline)


async def drop(
    pool: AsyncPool, namespace: Namespace, hashes: Sequence[bytes], deadline: float
) -> dict[str, int]:
    """See `AsyncPool.drop`."""
    request = m.DropBlocks(namespace.namespace_id, pack_hashes(hashes))
    return await _ask_all(pool, namespace, request, deadline)


async def _ask_all(
    pool: AsyncPool,
    namespace: Namespace,
    request: m.Protect | m.DropBlocks,
    deadline: float,
) -> dict[str, int]:
    """The same request to every node at once; the first error is raised when all have answered."""
    node_ids = [info.descriptor.node_id for info in await pool.nodes(timeout_s=time_left(deadline))]

    async def ask(node_id: str) -> int:
        link = await pool.link(node_id, deadline)
        reply: m.ProtectReply | m.DropBlocksReply = await link.call(
            request, namespace, time_left(deadline)
        )
        return reply.count

    answers = await asyncio.gather(*map(ask, node_ids), return_exceptions=True)
    counts: dict[str, int] = {}
    for node_id, answer in zip(node_ids, answers, strict=True):
        if isinstance(answer, BaseException):
            raise answer
        counts[node_id] = answer
    return counts
