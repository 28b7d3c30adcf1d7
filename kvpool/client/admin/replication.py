"""Copies on other nodes, asked for by a client: `replicate`, replicas of a put, prefetch, and draining a node.

The nodes do the work (`tiers.service.replication`); here is whom to ask, and what to try when one fails.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvpool.blocks.hashing import pack_hashes
from kvpool.blocks.layout import Namespace
from kvpool.client.node.deadlines import time_left
from kvpool.client.node.node_link import NodeLink
from kvpool.client.node.placement import open_to, replica_targets
from kvpool.errors import KvpoolError
from kvpool.wire import messages as m

if TYPE_CHECKING:
    from kvpool.client.async_pool import AsyncPool

# Of what is left to us, so that a node that keeps its own deadline can still say how far it came.
NODE_SHARE = 0.9


@dataclass(slots=True)
class ReplicateResult:
    """What became of the blocks of a `replicate`; `missing` of them are not there, for `reason`."""

    stored: int = 0
    existing: int = 0
    in_progress: int = 0  # another writer brings them there
    missing: int = 0
    reason: str = ""  # of the first that is missing
    bytes_moved: dict[str, int] = field(default_factory=dict)  # by transport


@dataclass(slots=True, frozen=True)
class PrefetchResult:
    """What nodes will bring where it was asked for, what was there, and what they declined (ask again later)."""

    accepted: int
    resident: int
    declined: int
    reasons: dict[str, int]  # blocks declined, by reason


async def replicate(
    pool: AsyncPool,
    namespace: Namespace,
    hashes: Sequence[bytes],
    to: str,
    parent: bytes,
    deadline: float,
) -> ReplicateResult:
    """See `AsyncPool.replicate`."""
    result = ReplicateResult()
    if not hashes:
        return result
    target = await pool.link(to, deadline)
    request = m.NodeLookup(namespace.namespace_id, pack_hashes(hashes))
    there: m.NodeLookupReply = await target.call(request, namespace, time_left(deadline))
    done = result.existing = there.found
    excluded = {to}
    try:
        while done < len(hashes):
            rest = hashes[done:]
            where = await pool.lookup(
                namespace, rest, exclude=sorted(excluded), timeout_s=time_left(deadline)
            )
            if not where.segments:
                result.reason = result.reason or "not_in_index"
                break
            segment = where.segments[0]
            source = await pool.link(segment.node_id, deadline)
            reply = await _ask(
                target,
                namespace,
                rest[: segment.count],
                hashes[done - 1] if done else parent,
                source.node,
                deadline,
            )
            dealt = reply.stored + reply.existing + reply.in_progress
            done += dealt
            result.stored += reply.stored
            result.existing += reply.existing
            result.in_progress += reply.in_progress
            for name, size in reply.bytes_moved.items():
                result.bytes_moved[name] = result.bytes_moved.get(name, 0) + size
            result.reason = reply.reason
            if reply.reason in ("no_room", "deadline", "reservation_gone"):
                break  # no other source changes that
            if reply.reason:
                excluded.add(segment.node_id)
                if reply.reason == "checksum" or reply.reason.startswith("source:"):
                    pool.note_misses(segment.node_id, namespace, [rest[dealt]])
    except KvpoolError as error:
        if not done:
            raise
        result.reason = error.code
    result.missing = len(hashes) - done
    return result


async def add_replicas(
    pool: AsyncPool,
    namespace: Namespace,
    hashes: Sequence[bytes],
    parent: bytes,
    holder: NodeLink,
    wanted: int,
    deadline: float,
) -> tuple[int, dict[str, str]]:
    """Copy blocks from their holder to `wanted` other nodes, on hosts without a copy first.

    Returns how many have them all now, and why those that were tried in vain have not, by node id.
    """
    standing = 0
    failures: dict[str, str] = {}
    try:
        nodes = await pool.nodes(timeout_s=time_left(deadline))
    except KvpoolError as error:
        return 0, {"": error.code}
    nodes = open_to(nodes, holder.node.tenant or namespace.tenant)
    waiting = replica_targets(nodes, hashes[0], holder_id=holder.node.node_id)
    while standing < wanted and waiting and time.monotonic() < deadline:
        batch = [info.descriptor for info in waiting[: wanted - standing]]
        waiting = waiting[len(batch) :]
        reasons = await asyncio.gather(
            *(_copy_to(pool, node, namespace, hashes, parent, holder, deadline) for node in batch)
        )
        for node, reason in zip(batch, reasons, strict=True):
            if reason:
                failures[node.node_id] = reason
            else:
                standing += 1
    return standing, failures


async def _copy_to(
    pool: AsyncPool,
    node: m.NodeDescriptor,
    namespace: Namespace,
    hashes: Sequence[bytes],
    parent: bytes,
    holder: NodeLink,
    deadline: float,
) -> str:
    """Let one node pull the blocks; why it has not got them all, or ""."""
    try:
        link = pool.link_to(node)
        reply = await _ask(link, namespace, hashes, parent, holder.node, deadline)
    except KvpoolError as error:
        pool.forget_node(node.node_id, error)
        return error.code
    return reply.reason or ("in_progress" if reply.in_progress else "")


async def _ask(
    target: NodeLink,
    namespace: Namespace,
    hashes: Sequence[bytes],
    parent: bytes,
    source: m.NodeDescriptor,
    deadline: float,
) -> m.ReplicateReply:
    left = time_left(deadline)
    request = m.Replicate(
        namespace.namespace_id, pack_hashes(hashes), parent, source, left * NODE_SHARE
    )
    reply: m.ReplicateReply = await target.call(request, namespace, left)
    return reply


async def prefetch(
    pool: AsyncPool,
    namespace: Namespace,
    hashes: Sequence[bytes],
    deadline: float,
    tier: str = "",
) -> PrefetchResult:
    """See `AsyncPool.prefetch`."""
    where = await pool.lookup(namespace, hashes, timeout_s=time_left(deadline))
    replies = await asyncio.gather(
        *(
            _prefetch_at(pool, namespace, hashes, segment, deadline, tier)
            for segment in where.segments
        )
    )
    reasons: Counter[str] = Counter()
    for reply in replies:
        reasons[reply.reason] += reply.declined
    reasons["not_in_index"] += len(hashes) - where.found
    return PrefetchResult(
        sum(reply.accepted for reply in replies),
        sum(reply.resident for reply in replies),
        sum(reasons.values()),
        {reason: count for reason, count in reasons.items() if count},
    )


async def _prefetch_at(
    pool: AsyncPool,
    namespace: Namespace,
    hashes: Sequence[bytes],
    segment: m.Segment,
    deadline: float,
    tier: str,
) -> m.PrefetchReply:
    rows = hashes[segment.start : segment.start + segment.count]
    request = m.Prefetch(namespace.namespace_id, pack_hashes(rows), tier)
    try:
        link = await pool.link(segment.node_id, deadline)
        reply: m.PrefetchReply = await link.call(request, namespace, time_left(deadline))
    except KvpoolError as error:
        pool.forget_node(segment.node_id, error)
        return m.PrefetchReply(0, 0, len(rows), error.code)
    return reply
