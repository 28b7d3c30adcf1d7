"""A client's replication and prefetch: which node to ask, and what to try when one fails.

The nodes move the bytes (`tiers.service.replication`).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvpool.blocks.hashing import pack_hashes
from kvpool.blocks.layout import Namespace
from kvpool.blocks.tier import Tier
from kvpool.client.node.deadlines import time_left
from kvpool.client.node.directory import NodeDirectory
from kvpool.client.node.lookup import lookup
from kvpool.client.node.node_link import NodeLink
from kvpool.client.node.placement import nodes_for_tenant, replica_targets
from kvpool.errors import KvpoolError
from kvpool.wire import messages as m

# Of the client's remaining time: a node that reaches its own deadline can still report its
# progress.
NODE_TIME_SHARE = 0.9


@dataclass(slots=True)
class ReplicateResult:
    """How many blocks of a `replicate` the node stored, had already, or lacks."""

    stored: int = 0
    existing: int = 0
    in_progress: int = 0  # another writer is writing them there
    missing: int = 0
    reason: str = ""  # why the first missing block is missing
    bytes_moved: dict[str, int] = field(default_factory=dict)  # by transport


@dataclass(slots=True, frozen=True)
class PrefetchResult:
    """How many blocks the nodes will bring, had already, or declined.

    Declined blocks may be asked for again.
    """

    accepted: int
    resident: int
    declined: int
    reasons: dict[str, int]  # reason -> blocks declined for it


async def replicate(
    directory: NodeDirectory,
    namespace: Namespace,
    hashes: Sequence[bytes],
    to: str,
    parent: bytes,
    deadline: float,
) -> ReplicateResult:
    """Copy a run of a chain to node `to`.

    Arguments, result and errors are those of `AsyncPool.replicate`.
    """
    result = ReplicateResult()
    if not hashes:
        return result
    target = await directory.link(to, deadline)
    request = m.NodeLookup(namespace.namespace_id, pack_hashes(hashes))
    at_target: m.NodeLookupReply = await target.call(request, namespace, time_left(deadline))
    done = result.existing = at_target.found
    excluded = {to}
    try:
        while done < len(hashes):
            rest = hashes[done:]
            located = await lookup(directory, namespace, rest, deadline, exclude=sorted(excluded))
            if not located.segments:
                result.reason = result.reason or "not_in_index"
                break
            segment = located.segments[0]
            source = await directory.link(segment.node_id, deadline)
            reply = await _replicate_to(
                target,
                namespace,
                rest[: segment.count],
                hashes[done - 1] if done else parent,
                source.node,
                deadline,
            )
            handled = reply.stored + reply.existing + reply.in_progress
            done += handled
            result.stored += reply.stored
            result.existing += reply.existing
            result.in_progress += reply.in_progress
            for name, size in reply.bytes_moved.items():
                result.bytes_moved[name] = result.bytes_moved.get(name, 0) + size
            result.reason = reply.reason
            if reply.reason in ("no_room", "deadline", "reservation_gone"):
                break  # another source would not help
            if reply.reason:
                excluded.add(segment.node_id)
                if reply.reason == "checksum" or reply.reason.startswith("source:"):
                    directory.report_misses(segment.node_id, namespace, [rest[handled]])
    except KvpoolError as error:
        if not done:
            raise
        result.reason = error.code
    result.missing = len(hashes) - done
    return result


async def add_replicas(
    directory: NodeDirectory,
    namespace: Namespace,
    hashes: Sequence[bytes],
    parent: bytes,
    holder: NodeLink,
    wanted: int,
    deadline: float,
) -> tuple[int, dict[str, str]]:
    """Copy blocks from their holder to `wanted` other nodes, on hosts without a copy first.

    Returns:
        How many nodes now have all blocks, and for each node that failed, the reason by node id.
    """
    complete = 0
    failures: dict[str, str] = {}
    try:
        nodes = await directory.nodes(deadline)
    except KvpoolError as error:
        return 0, {"": error.code}
    nodes = nodes_for_tenant(nodes, holder.node.tenant or namespace.tenant)
    candidates = replica_targets(nodes, hashes[0], holder_id=holder.node.node_id)
    while complete < wanted and candidates and time.monotonic() < deadline:
        batch = [info.descriptor for info in candidates[: wanted - complete]]
        candidates = candidates[len(batch) :]
        reasons = await asyncio.gather(
            *(
                _copy_to(directory, node, namespace, hashes, parent, holder, deadline)
                for node in batch
            )
        )
        for node, reason in zip(batch, reasons, strict=True):
            if reason:
                failures[node.node_id] = reason
            else:
                complete += 1
    return complete, failures


async def _copy_to(
    directory: NodeDirectory,
    node: m.NodeDescriptor,
    namespace: Namespace,
    hashes: Sequence[bytes],
    parent: bytes,
    holder: NodeLink,
    deadline: float,
) -> str:
    """Have one node pull the blocks. Returns why it lacks some, or ""."""
    try:
        link = directory.link_to(node)
        reply = await _replicate_to(link, namespace, hashes, parent, holder.node, deadline)
    except KvpoolError as error:
        directory.forget_node(node.node_id, error)
        return error.code
    return reply.reason or ("in_progress" if reply.in_progress else "")


async def _replicate_to(
    target: NodeLink,
    namespace: Namespace,
    hashes: Sequence[bytes],
    parent: bytes,
    source: m.NodeDescriptor,
    deadline: float,
) -> m.ReplicateReply:
    left = time_left(deadline)
    request = m.Replicate(
        namespace.namespace_id, pack_hashes(hashes), parent, source, left * NODE_TIME_SHARE
    )
    reply: m.ReplicateReply = await target.call(request, namespace, left)
    return reply


async def prefetch(
    directory: NodeDirectory,
    namespace: Namespace,
    hashes: Sequence[bytes],
    deadline: float,
    tier: Tier = Tier.DRAM,
) -> PrefetchResult:
    """Ask every holder to bring its blocks into `tier`.

    Result and errors are those of `AsyncPool.prefetch`.
    """
    located = await lookup(directory, namespace, hashes, deadline)
    replies = await asyncio.gather(
        *(
            _prefetch_at(directory, namespace, hashes, segment, deadline, tier)
            for segment in located.segments
        )
    )
    reasons: Counter[str] = Counter()
    for reply in replies:
        reasons[reply.reason] += reply.declined
    reasons["not_in_index"] += len(hashes) - located.found
    return PrefetchResult(
        sum(reply.accepted for reply in replies),
        sum(reply.resident for reply in replies),
        sum(reasons.values()),
        {reason: count for reason, count in reasons.items() if count},
    )


async def _prefetch_at(
    directory: NodeDirectory,
    namespace: Namespace,
    hashes: Sequence[bytes],
    segment: m.Segment,
    deadline: float,
    tier: Tier,
) -> m.PrefetchReply:
    rows = hashes[segment.start : segment.start + segment.count]
    request = m.Prefetch(namespace.namespace_id, pack_hashes(rows), tier)
    try:
        link = await directory.link(segment.node_id, deadline)
        reply: m.PrefetchReply = await link.call(request, namespace, time_left(deadline))
    except KvpoolError as error:
        directory.forget_node(segment.node_id, error)
        return m.PrefetchReply(0, 0, len(rows), error.code)
    return reply
