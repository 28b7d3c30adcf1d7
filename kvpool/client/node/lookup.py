"""Finds blocks: in the conductor's index, at a single node, and among recent writes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from kvpool.blocks.hashing import pack_hashes
from kvpool.blocks.layout import Namespace
from kvpool.blocks.tier import Tier
from kvpool.client.node.deadlines import time_left
from kvpool.client.node.directory import NodeDirectory
from kvpool.errors import UnknownNamespace
from kvpool.wire import messages as m

CALLS_AT_ONCE = 64  # to a single node


async def lookup(
    directory: NodeDirectory,
    namespace: Namespace,
    hashes: Sequence[bytes],
    deadline: float,
    *,
    exclude: Sequence[str] = (),
) -> m.LookupReply:
    """Find the longest leading run of a chain in the pool.

    Arguments and errors are those of `AsyncPool.lookup`.

    Args:
        deadline: monotonic seconds.
    """
    await directory.ensure_registered(namespace, deadline)
    packed = pack_hashes(hashes)
    if directory.has_conductor:
        request = m.Lookup(namespace.namespace_id, packed, directory.host_label, list(exclude))
        reply: m.LookupReply = await _ask_conductor(directory, namespace, request, deadline)
        return reply
    link = await directory.only_link(deadline)
    at_node: m.NodeLookupReply = await link.call(
        m.NodeLookup(namespace.namespace_id, packed), namespace, time_left(deadline)
    )
    if not at_node.found:
        return m.LookupReply(0, [])
    tier = Tier(max(at_node.tiers))
    segment = m.Segment(link.node.node_id, 0, at_node.found, tier)
    return m.LookupReply(at_node.found, [segment], at_node.wait_s)


async def locate(
    directory: NodeDirectory, namespace: Namespace, hashes: Sequence[bytes], deadline: float
) -> Sequence[m.Segment]:
    """Where to read a chain: the look-up, extended by this client's recent writes.

    Without a conductor, the single node is asked for all blocks; no look-up is needed.
    """
    if not directory.has_conductor:
        link = await directory.only_link(deadline)
        return [m.Segment(link.node.node_id, 0, len(hashes), Tier.DRAM)] if hashes else []
    found = await lookup(directory, namespace, hashes, deadline)
    return directory.recent_writes.extend(
        found, namespace.namespace_id, hashes, time.monotonic()
    ).segments


async def exists(
    directory: NodeDirectory, namespace: Namespace, hashes: Sequence[bytes], deadline: float
) -> list[bool]:
    """For each block, whether the pool has it. With a conductor this is one call."""
    if not hashes:
        return []
    if not directory.has_conductor:
        return await _exists_at_one(directory, namespace, hashes, deadline)
    request = m.CountCopies(namespace.namespace_id, pack_hashes(hashes))
    reply: m.CopyCounts = await _ask_conductor(directory, namespace, request, deadline)
    is_recent = directory.recent_writes.contains(namespace.namespace_id, hashes, time.monotonic())
    return [count > 0 or recent for count, recent in zip(reply.copies, is_recent, strict=True)]


async def _exists_at_one(
    directory: NodeDirectory, namespace: Namespace, hashes: Sequence[bytes], deadline: float
) -> list[bool]:
    found: list[bool] = []
    for start in range(0, len(hashes), CALLS_AT_ONCE):
        run = hashes[start : start + CALLS_AT_ONCE]
        replies = await asyncio.gather(
            *(lookup(directory, namespace, [one], deadline) for one in run)
        )
        found += [reply.found > 0 for reply in replies]
    return found


async def _ask_conductor(
    directory: NodeDirectory, namespace: Namespace, request: m.Message, deadline: float
) -> Any:
    """Ask the conductor about a namespace. Registers it if this conductor does not know it."""
    try:
        return await directory.ask_conductor(request, time_left(deadline))
    except UnknownNamespace:
        await directory.register(namespace, time_left(deadline))
        return await directory.ask_conductor(request, time_left(deadline))
