"""Has blocks moved toward the worker that will read them, before it asks. Nobody waits for it.

At decision time it promotes what a request is planned to read and what stands on disks, as far as there is
time for it before the read. On a hint (`hint`) it promotes, and copies toward the host of the worker that
would be chosen, what would then be cheaper to read than to compute. Each no has a reason and is counted.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import structlog

from conductor.cluster.cluster import Cluster
from conductor.cluster.connections import Connections
from conductor.engine_servers.discovery import is_engine_server
from conductor.gateway.request import Job
from conductor.index.segments import cut
from conductor.members.membership import Member, State
from conductor.scheduling.decision import Decision
from conductor.scheduling.scheduler import ScheduleRequest, schedule
from kvpool.blocks.hashing import pack_hashes
from kvpool.blocks.layout import Namespace
from kvpool.errors import KvpoolError
from kvpool.wire import messages as m

log = structlog.get_logger(__name__)

AT_ONCE = 64  # moves under way; more are declined
CALL_TIMEOUT_S = 2.0
COPY_TIMEOUT_S = 30.0
MIN_LEAD_S = 0.005  # a read that comes sooner is not helped

Node = Member[m.NodeDescriptor, m.NodeStatsReply]


@dataclass(slots=True)
class Hinted:
    """What became of a hint. Blocks are counted once: found = resident + promoting + copying + declined ones.

    `reasons`: of the declined ones, those that the pool has not got included.
    """

    blocks: int
    found: int = 0
    worker: str = ""
    host: str = ""
    resident: int = 0
    promoting: int = 0
    copying: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def declined(self) -> int:
        return sum(self.reasons.values())


class Prefetcher:
    """See the module's docstring.

    Args:
        is_active: False: every move is declined as "off".
    """

    def __init__(
        self, cluster: Cluster, connections: Connections, *, is_active: bool = True
    ) -> None:
        self._cluster = cluster
        self._connections = connections
        self._is_active = is_active
        self._tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Give up what is under way."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ------------------------------------------------------------ at decision time

    def while_waiting(self, job: Job, decision: Decision) -> None:
        """The job waits in the queue: what its best choice would read can be in memory until it starts."""
        if decision.candidates and job.pool == "on":
            best = decision.candidates[0]
            self._promote_for(job, best.prefill or best.decode, best.reuse_blocks)

    def offer(self, job: Job, decision: Decision) -> None:
        """The job is sent: promote what is read only later than at once."""
        if job.pool != "on" or not decision.reuse_blocks or not decision.candidates:
            return
        chosen = decision.candidates[0]
        reader = self._cluster.workers.get(decision.prefills_on or "")
        # Our workers pin what they read as soon as the request arrives; other engines when its turn comes.
        reads_late = reader is not None and is_engine_server(reader.descriptor)
        if reads_late and chosen.queue_s >= MIN_LEAD_S:
            self._promote_for(job, decision.prefills_on or "", decision.reuse_blocks)
        if decision.mode == "disaggregated" and chosen.work_s >= MIN_LEAD_S:
            self._promote_for(job, decision.decode or "", decision.reuse_blocks)

    def _promote_for(self, job: Job, worker_id: str, blocks: int) -> None:
        worker = self._cluster.workers.get(worker_id)
        if worker is None or not blocks:
            return
        host = worker.descriptor.host

        async def work() -> None:
            found = await self._cluster.find(job.namespace.namespace_id, job.hashes)
            hinted = Hinted(blocks)
            for segment in cut(found.segments(host), blocks):
                if segment.tier == "nvme":
                    await self._promote(job.namespace, job.hashes, segment, hinted)
            self._count(hinted)

        self._spawn(work(), Hinted(blocks), blocks)

    # ------------------------------------------------------------ on a hint

    async def hint(self, namespace: Namespace, hashes: Sequence[bytes]) -> Hinted:
        """A request with this chain is about to come: begin to move its blocks. Returns at once."""
        hinted = Hinted(len(hashes))
        found = await self._cluster.find(namespace.namespace_id, hashes)
        segments = found.segments("")
        hinted.found = sum(segment.count for segment in segments)
        if hinted.found < len(hashes):
            hinted.reasons["not_in_pool"] = len(hashes) - hinted.found
        limit = hinted.found
        if hinted.found:
            worker, limit = self._reader(namespace, hashes, found.segments)
            if worker is None:
                limit = 0
                hinted.reasons["no_worker"] = hinted.found
            else:
                hinted.worker, hinted.host = worker.member_id, worker.descriptor.host
                if limit < hinted.found:
                    hinted.reasons["not_worth"] = hinted.found - limit
        for segment in cut(found.segments(hinted.host), limit):
            await self._bring(namespace, hashes, segment, hinted)
        self._cluster.counters["prefetch:hints"] += 1
        self._count(hinted)
        return hinted

    def _reader(
        self, namespace: Namespace, hashes: Sequence[bytes], segments_at: Any
    ) -> tuple[Member[m.WorkerDescriptor, m.WorkerLoad] | None, int]:
        """The worker that would read such a prompt, were it in memory, and how many blocks of it."""
        inputs = self._cluster.scheduling_inputs()
        layout = namespace.layout
        hosts = {worker.host for worker in inputs.workers.values()}
        segments = {
            host: [m.Segment(s.node_id, s.start, s.count, "dram") for s in segments_at(host)]
            for host in hosts
        }
        request = ScheduleRequest(
            "prefetch",
            namespace.namespace_id,
            len(hashes) * layout.block_tokens + 1,
            layout.block_tokens,
            layout.block_bytes,
            layout.layers,
            segments,
            engine_blocks=self._cluster.engine_feeds.leading(namespace.namespace_id, hashes),
        )
        decision = schedule(request, inputs, self._cluster.clock())
        reader, blocks = decision.prefills_on, decision.reuse_blocks
        if decision.is_refused and decision.candidates:  # for now: it is meant for later
            best = decision.candidates[0]
            reader, blocks = best.prefill or best.decode, best.reuse_blocks
        return (self._cluster.workers.get(reader) if reader else None), blocks

    async def _bring(
        self, namespace: Namespace, hashes: Sequence[bytes], segment: m.Segment, hinted: Hinted
    ) -> None:
        """One segment into memory, near the reader if a node stands there."""
        holder = self._cluster.nodes.get(segment.node_id)
        near = self._node_at(hinted.host)
        if holder is None or near is None or holder.descriptor.host == hinted.host:
            if segment.tier == "nvme":
                await self._promote(namespace, hashes, segment, hinted)
            else:
                hinted.resident += segment.count
            return
        if self._spawn(self._copy(namespace, hashes, segment, holder, near), hinted, segment.count):
            hinted.copying += segment.count

    def _node_at(self, host: str) -> Node | None:
        nodes = [
            node
            for node in self._cluster.nodes
            if node.descriptor.host == host and node.state is State.LIVE
        ]
        return nodes[0] if nodes else None

    # ------------------------------------------------------------ moves

    async def _promote(
        self, namespace: Namespace, hashes: Sequence[bytes], segment: m.Segment, hinted: Hinted
    ) -> None:
        """Ask the node that holds a segment to bring its slow part up."""
        hinted.resident += segment.ready
        run = hashes[segment.start + segment.ready : segment.start + segment.count]
        node = self._cluster.nodes.get(segment.node_id)
        if not self._is_active or node is None:
            hinted.reasons["off" if not self._is_active else "node_gone"] += len(run)
            return
        request = m.Prefetch(namespace.namespace_id, pack_hashes(run))
        try:
            reply: m.PrefetchReply = await self._connections.call_node(
                node, request, CALL_TIMEOUT_S
            )
        except KvpoolError as error:
            hinted.reasons[error.code] += len(run)
            return
        hinted.promoting += reply.accepted
        hinted.resident += reply.resident
        if reply.declined:
            hinted.reasons[reply.reason or "declined"] += reply.declined

    async def _copy(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes],
        segment: m.Segment,
        holder: Node,
        near: Node,
    ) -> None:
        """Have the node near the reader pull a segment; its source promotes what stands on a disk."""
        run = hashes[segment.start : segment.start + segment.count]
        request = m.Replicate(
            namespace.namespace_id,
            pack_hashes(run),
            hashes[segment.start - 1] if segment.start else b"",
            holder.descriptor,
            COPY_TIMEOUT_S,
        )
        counters = self._cluster.counters
        try:
            await self._connections.call_node(near, m.RegisterNamespace(namespace), CALL_TIMEOUT_S)
            reply: m.ReplicateReply = await self._connections.call_node(
                near, request, COPY_TIMEOUT_S + CALL_TIMEOUT_S
            )
        except KvpoolError as error:
            counters[f"prefetch:declined:{error.code}"] += len(run)
            return
        counters["prefetch:copied"] += reply.stored
        left = len(run) - reply.stored - reply.existing - reply.in_progress
        if left:
            counters[f"prefetch:declined:{reply.reason}"] += left

    def _spawn(self, work: Coroutine[Any, Any, None], hinted: Hinted, blocks: int) -> bool:
        """Do it in the background; False when it is declined."""
        reason = "" if self._is_active else "off"
        if len(self._tasks) >= AT_ONCE:
            reason = "busy"
        if reason:
            work.close()
            hinted.reasons[reason] += blocks
            return False
        task = asyncio.create_task(_never_raise(work), name="prefetch")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    def _count(self, hinted: Hinted) -> None:
        counters = self._cluster.counters
        for name in ("resident", "promoting", "copying"):
            if getattr(hinted, name):
                counters[f"prefetch:{name}"] += getattr(hinted, name)
        for reason, blocks in hinted.reasons.items():
            counters[f"prefetch:declined:{reason}"] += blocks


async def _never_raise(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except KvpoolError as error:
        log.warning("a prefetch failed", error=str(error))


def report(hinted: Hinted) -> dict[str, Any]:
    """For people and programs that gave a hint."""
    return {**msgspec.to_builtins(hinted), "declined": hinted.declined}
