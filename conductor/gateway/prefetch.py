"""Session prefetch: moves blocks toward the worker that will read them, before it asks.

No request waits for it.

At decision time it promotes the blocks of a request's plan that are on disk, if there is time
before the read. On a hint it promotes the blocks that would be cheaper to read than to compute, and
copies them toward the host of the worker that the scheduler would choose. Every block that is not
moved is counted with a reason.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import structlog

from conductor.cluster.connections import Connections
from conductor.cluster.lookups import Lookups
from conductor.cluster.members import Members
from conductor.cluster.scheduler_view import SchedulerView
from conductor.engine_servers.discovery import is_engine_server
from conductor.gateway.request import GenerationRequest
from conductor.index.segments import cut
from conductor.kv_events.feeds import EngineFeeds
from conductor.members.membership import Member, State
from conductor.requests.request import Plan
from conductor.scheduling.scheduler import ScheduleRequest, schedule
from kvpool.blocks.hashing import pack_hashes
from kvpool.blocks.layout import Namespace
from kvpool.blocks.tier import Tier
from kvpool.errors import KvpoolError
from kvpool.wire import messages as m

log = structlog.get_logger(__name__)

MAX_MOVES = 64  # concurrent moves; more are declined
CALL_TIMEOUT_S = 2.0
COPY_TIMEOUT_S = 30.0
MIN_LEAD_S = 0.005  # a prefetch does not help a read that starts sooner

Node = Member[m.NodeDescriptor, m.NodeStatsReply]


@dataclass(slots=True)
class PrefetchReport:
    """The result of a hint.

    Each block counts once: blocks = resident + promoting + copying + declined.

    `reasons` counts the declined blocks by reason, including those that the pool does not have.
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

    def document(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {**msgspec.to_builtins(self), "declined": self.declined}


class SessionPrefetch:
    """Moves blocks ahead of their reads.

    Args:
        clock: returns monotonic seconds.
        is_active: if False, every move is declined with reason "off".
    """

    def __init__(
        self,
        members: Members,
        view: SchedulerView,
        lookups: Lookups,
        feeds: EngineFeeds,
        connections: Connections,
        counters: Counter[str],
        clock: Callable[[], float],
        *,
        is_active: bool = True,
    ) -> None:
        self._nodes = members.nodes
        self._workers = members.workers
        self._view = view
        self._lookups = lookups
        self._feeds = feeds
        self._connections = connections
        self._counters = counters
        self._clock = clock
        self._is_active = is_active
        self._tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Cancel the moves under way."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ------------------------------------------------------------ at decision time

    def while_waiting(self, request: GenerationRequest, plan: Plan) -> None:
        """Promote what the best candidate of a queued request would read."""
        if plan.decision.candidates:
            best = plan.decision.candidates[0]
            self._promote_for(request, plan, best.prefill or best.decode, best.reuse_blocks)

    def offer(self, request: GenerationRequest, plan: Plan) -> None:
        """Promote what a request that is sent now will read later."""
        decision = plan.decision
        if not decision.reuse_blocks or not decision.candidates:
            return
        chosen = decision.candidates[0]
        reader = self._workers.get(decision.prefills_on or "")
        # Our workers pin their blocks when the request arrives; other engines pin when the request
        # is scheduled.
        reads_late = reader is not None and is_engine_server(reader.descriptor)
        if reads_late and chosen.queue_s >= MIN_LEAD_S:
            self._promote_for(request, plan, decision.prefills_on or "", decision.reuse_blocks)
        if decision.mode == "disaggregated" and chosen.work_s >= MIN_LEAD_S:
            self._promote_for(request, plan, decision.decode or "", decision.reuse_blocks)

    def _promote_for(
        self, request: GenerationRequest, plan: Plan, worker_id: str, blocks: int
    ) -> None:
        worker = self._workers.get(worker_id)
        if worker is None or not blocks or plan.found is None:
            return
        segments = cut(plan.found.segments(worker.descriptor.host), blocks)
        on_disk = [segment for segment in segments if segment.tier == Tier.NVME]
        if not on_disk:
            return

        async def work() -> None:
            report = PrefetchReport(blocks)
            for segment in on_disk:
                await self._promote(request.namespace, request.hashes, segment, report)
            self._count(report)

        self._spawn(work(), PrefetchReport(blocks), blocks)

    # ------------------------------------------------------------ on a hint

    async def hint(self, namespace: Namespace, hashes: Sequence[bytes]) -> PrefetchReport:
        """Start to move the blocks of an announced request, and report what was started."""
        report = PrefetchReport(len(hashes))
        found = await self._lookups.find(namespace.namespace_id, hashes)
        segments = found.segments("")
        report.found = sum(segment.count for segment in segments)
        if report.found < len(hashes):
            report.reasons["not_in_pool"] = len(hashes) - report.found
        limit = report.found
        if report.found:
            worker, limit = self._reader(namespace, hashes, found.segments)
            if worker is None:
                limit = 0
                report.reasons["no_worker"] = report.found
            else:
                report.worker, report.host = worker.member_id, worker.descriptor.host
                if limit < report.found:
                    report.reasons["not_worth"] = report.found - limit
        for segment in cut(found.segments(report.host), limit):
            await self._move_to_memory(namespace, hashes, segment, report)
        self._counters["prefetch:hints"] += 1
        self._count(report)
        return report

    def _reader(
        self, namespace: Namespace, hashes: Sequence[bytes], segments_at: Any
    ) -> tuple[Member[m.WorkerDescriptor, m.WorkerLoad] | None, int]:
        """The worker that would read this prompt from memory, and how many blocks it would read."""
        inputs = self._view.inputs()
        layout = namespace.layout
        hosts = {worker.host for worker in inputs.workers.values()}
        segments = {
            host: [m.Segment(s.node_id, s.start, s.count, Tier.DRAM) for s in segments_at(host)]
            for host in hosts
        }
        schedule_request = ScheduleRequest(
            "prefetch",
            namespace.namespace_id,
            len(hashes) * layout.block_tokens + 1,
            layout.block_tokens,
            layout.block_bytes,
            layout.layers,
            segments,
            engine_blocks=self._feeds.leading(namespace.namespace_id, hashes),
        )
        decision = schedule(schedule_request, inputs, self._clock())
        reader, blocks = decision.prefills_on, decision.reuse_blocks
        if decision.is_refused and decision.candidates:
            # Refused for now, but the hint is about later.
            best = decision.candidates[0]
            reader, blocks = best.prefill or best.decode, best.reuse_blocks
        return (self._workers.get(reader) if reader else None), blocks

    async def _move_to_memory(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes],
        segment: m.Segment,
        report: PrefetchReport,
    ) -> None:
        """Move one segment into memory, on the reader's host if a node runs there."""
        holder = self._nodes.get(segment.node_id)
        near = self._node_at(report.host)
        if holder is None or near is None or holder.descriptor.host == report.host:
            if segment.tier == Tier.NVME:
                await self._promote(namespace, hashes, segment, report)
            else:
                report.resident += segment.count
            return
        if self._spawn(self._copy(namespace, hashes, segment, holder, near), report, segment.count):
            report.copying += segment.count

    def _node_at(self, host: str) -> Node | None:
        nodes = [
            node
            for node in self._nodes
            if node.descriptor.host == host and node.state is State.LIVE
        ]
        return nodes[0] if nodes else None

    # ------------------------------------------------------------ moves

    async def _promote(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes],
        segment: m.Segment,
        report: PrefetchReport,
    ) -> None:
        """Ask the node that holds a segment to promote the part that is on disk."""
        report.resident += segment.ready
        run = hashes[segment.start + segment.ready : segment.start + segment.count]
        node = self._nodes.get(segment.node_id)
        if not self._is_active or node is None:
            report.reasons["off" if not self._is_active else "node_gone"] += len(run)
            return
        message = m.Prefetch(namespace.namespace_id, pack_hashes(run))
        try:
            reply: m.PrefetchReply = await self._connections.call_node(
                node, message, CALL_TIMEOUT_S
            )
        except KvpoolError as error:
            report.reasons[error.code] += len(run)
            return
        report.promoting += reply.accepted
        report.resident += reply.resident
        if reply.declined:
            report.reasons[reply.reason or "declined"] += reply.declined

    async def _copy(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes],
        segment: m.Segment,
        holder: Node,
        near: Node,
    ) -> None:
        """Have the node on the reader's host copy a segment from its holder."""
        run = hashes[segment.start : segment.start + segment.count]
        message = m.Replicate(
            namespace.namespace_id,
            pack_hashes(run),
            hashes[segment.start - 1] if segment.start else b"",
            holder.descriptor,
            COPY_TIMEOUT_S,
        )
        counters = self._counters
        try:
            await self._connections.call_node(near, m.RegisterNamespace(namespace), CALL_TIMEOUT_S)
            reply: m.ReplicateReply = await self._connections.call_node(
                near, message, COPY_TIMEOUT_S + CALL_TIMEOUT_S
            )
        except KvpoolError as error:
            counters[f"prefetch:declined:{error.code}"] += len(run)
            return
        counters["prefetch:copied"] += reply.stored
        left = len(run) - reply.stored - reply.existing - reply.in_progress
        if left:
            counters[f"prefetch:declined:{reply.reason}"] += left

    def _spawn(self, work: Coroutine[Any, Any, None], report: PrefetchReport, blocks: int) -> bool:
        """Run `work` in the background; return False if it is declined."""
        reason = "" if self._is_active else "off"
        if len(self._tasks) >= MAX_MOVES:
            reason = "busy"
        if reason:
            work.close()
            report.reasons[reason] += blocks
            return False
        task = asyncio.create_task(_log_errors(work), name="prefetch")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    def _count(self, report: PrefetchReport) -> None:
        counters = self._counters
        for name in ("resident", "promoting", "copying"):
            if getattr(report, name):
                counters[f"prefetch:{name}"] += getattr(report, name)
        for reason, blocks in report.reasons.items():
            counters[f"prefetch:declined:{reason}"] += blocks


async def _log_errors(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except KvpoolError as error:
        log.warning("a prefetch failed", error=str(error))
