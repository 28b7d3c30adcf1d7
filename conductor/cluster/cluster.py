"""The soft state of the pool: nodes, workers, namespaces and the index.

`Cluster` handles every message over wire, gRPC and HTTP except requests for tokens.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import structlog

from conductor.cluster.peer_guard import PeerGuard
from conductor.index.block_history import BlockHistory
from conductor.index.contract import Found, Index
from conductor.kv_events.feeds import EngineFeeds
from conductor.members.membership import BatchAction, Member, Membership, MembershipConfig
from conductor.members.namespaces import KnownNamespaces
from conductor.scheduling import disk_wait
from conductor.scheduling.cost_model import CostModel
from conductor.scheduling.in_flight import InFlight
from conductor.scheduling.scheduler import (
    IDLE,
    NodeStatus,
    SchedulerConfig,
    SchedulingInputs,
    WorkerStatus,
)
from kvpool.blocks.hash_check import check_proof
from kvpool.blocks.hashing import HASH_BYTES, unpack_hashes
from kvpool.blocks.layout import Namespace
from kvpool.blocks.tier import Tier
from kvpool.errors import LayoutMismatch, StaleEpoch
from kvpool.security.authorization import unknown_namespace
from kvpool.wire import Session, WireServer
from kvpool.wire import messages as m
from kvpool.wire.principal import ANYBODY, Principal

log = structlog.get_logger(__name__)

RECLAIM_BLOCKS = 8_000  # per sweep, at about 0.6 µs a block: at most 5 ms
FORGET_REQUESTS_AFTER_S = 3600.0
MAX_COUNTED = 8_192  # hashes in one CountCopies, 3 µs each
MAX_MISSES = 8_192  # hashes used of one ReportMiss
UNKNOWN_ROOM = 1 << 62  # before its first report, a node is assumed to have space


class Cluster:
    """Membership, index and look-ups of one conductor.

    Args:
        conductor_id, epoch: identity of this process.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        conductor_id: str,
        epoch: int,
        index: Index,
        config: MembershipConfig,
        scheduler_config: SchedulerConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        now = clock()
        self.conductor_id = conductor_id
        self.epoch = epoch
        self.index = index
        self.nodes: Membership[m.NodeDescriptor, m.NodeStatsReply] = Membership(config, now)
        self.workers: Membership[m.WorkerDescriptor, m.WorkerLoad] = Membership(config, now)
        self.namespaces = KnownNamespaces()
        self.cost = CostModel()
        self.in_flight = InFlight()
        self.block_history = BlockHistory()  # for the reasons of misses
        self.engine_feeds = EngineFeeds()  # blocks in the engines' own memory
        self.peer_guard = PeerGuard()  # ends calls to lost nodes and workers
        self.scheduler_config = scheduler_config
        self.counters: Counter[str] = Counter()
        self.isolated_tenants: frozenset[str] = frozenset()  # each has nodes of its own
        self.clock = clock
        self._started = now
        self._config = config

    def expose(self, server: WireServer) -> None:
        """Register every handler with a wire server."""
        handlers: dict[type[m.Message], Callable[[Any, Session], m.Reply]] = {
            m.NodeJoin: lambda r, _s: self.node_join(r),
            m.NodeEvents: lambda r, _s: self.node_events(r),
            m.NodeHeartbeat: lambda r, _s: self.node_heartbeat(r),
            m.NodeLeave: lambda r, _s: self.node_leave(r),
            m.NodeDraining: lambda r, _s: self.node_draining(r),
            m.WorkerJoin: lambda r, _s: self.worker_join(r),
            m.WorkerHeartbeat: lambda r, _s: self.worker_heartbeat(r),
            m.WorkerLeave: lambda r, _s: self.worker_leave(r),
            m.RegisterNamespace: lambda r, _s: self.register_namespace(r),
            m.Lookup: lambda r, _s: self.lookup(r),
            m.ReportMiss: lambda r, _s: self.report_miss(r),
            m.CountCopies: lambda r, _s: self.count_copies(r),
            m.Nodes: lambda _r, s: self.node_list(s.principal),
            m.Namespaces: lambda r, s: self.namespace_page(r, s.principal),
            m.PoolStats: lambda _r, s: self.stats_for(s.principal),
        }
        for message, handler in handlers.items():
            server.handle(message, handler)

    # ------------------------------------------------------------ nodes

    def node_join(self, request: m.NodeJoin) -> m.MemberReply:
        """Add a node. Its full report follows, in slices of a snapshot."""
        node = request.descriptor
        try:
            joined = self.nodes.join(node.node_id, node.epoch, node, self.clock())
            self.index.begin_snapshot(node.node_id, node.epoch)
        except StaleEpoch:
            return self._reply(resync=True)
        for namespace in request.namespaces:
            self._learn(node.node_id, namespace)
        log.info(
            "node joined",
            node=node.node_id,
            epoch=node.epoch,
            host=node.host,
            restarted=joined.voided_epoch is not None,
        )
        return self._reply()

    def _learn(self, node_id: str, namespace: Namespace) -> None:
        """Add a namespace that a node reports, unless its layout contradicts the known one.

        Any client may have registered it there, so the node's other blocks stay trusted.
        """
        try:
            self.namespaces.add(namespace)
        except LayoutMismatch as error:
            self.counters["layout_mismatches"] += 1
            log.error("a node has blocks of another layout", node=node_id, error=str(error))

    def node_events(self, request: m.NodeEvents) -> m.MemberReply:
        """Apply a numbered batch of events, or a slice of the full report."""
        return self._reply(resync=self._take_events(request).resync)

    def _take_events(self, request: m.NodeEvents) -> BatchAction:
        """Apply a batch of events as far as it is in sequence; return what was done."""
        try:
            action = self.nodes.receive_events(
                request.node_id,
                request.epoch,
                request.sequence,
                self.clock(),
                snapshot=request.snapshot,
                snapshot_end=request.snapshot_end,
            )
            if action.resync:
                self.counters["event_gaps"] += 1
            if action.begin_snapshot:
                self.index.begin_snapshot(request.node_id, request.epoch)
            if action.apply:
                self.index.apply(request.node_id, request.epoch, request.events)
                self.block_history.record(request.node_id, request.events)
            if action.end_snapshot:
                self.index.end_snapshot(request.node_id)
        except StaleEpoch:
            return BatchAction(resync=True)
        return action

    def node_heartbeat(self, request: m.NodeHeartbeat) -> m.MemberReply:
        """Record that a node is alive, with its accounting."""
        try:
            resync = self.nodes.heartbeat(
                request.node_id, request.epoch, self.clock(), request.stats, request.sequence
            )
        except StaleEpoch:
            resync = True
        return self._reply(resync=resync)

    def node_leave(self, request: m.NodeLeave) -> m.Ok:
        """Remove a node that stops, and its blocks at once."""
        if self.nodes.leave(request.node_id, request.epoch):
            self._forget_node(request.node_id)
            log.info("node left", node=request.node_id)
        return m.Ok()

    def node_draining(self, request: m.NodeDraining) -> m.Ok:
        """Mark a node that will stop: it gets no new blocks, and is read until it leaves."""
        member = self.nodes.get(request.node_id)
        if member is not None and member.epoch == request.epoch:
            self.nodes.drain(request.node_id)
            log.info("node is draining", node=request.node_id)
        return m.Ok()

    # ------------------------------------------------------------ workers

    def worker_join(self, request: m.WorkerJoin) -> m.MemberReply:
        """Add a worker and its namespace.

        Raises:
            LayoutMismatch: its model, revision, tenant and salt are known with another layout.
            HashMismatch: the worker's hashes differ from this conductor's.
        """
        worker = request.descriptor
        check_proof(worker.namespace, request.proof)
        self.namespaces.add(worker.namespace)
        try:
            self.workers.join(worker.worker_id, worker.epoch, worker, self.clock())
        except StaleEpoch:
            return self._reply(resync=True)
        log.info("worker joined", worker=worker.worker_id, role=worker.role, host=worker.host)
        return self._reply()

    def worker_heartbeat(self, request: m.WorkerHeartbeat) -> m.MemberReply:
        """Record that a worker is alive, with its load, and learn from its measurements."""
        try:
            resync = self.workers.heartbeat(
                request.worker_id, request.epoch, self.clock(), request.load
            )
        except StaleEpoch:
            resync = True
        load = request.load
        if load.tpot_s and load.decode_sequences:
            self.cost.observe_tpot(
                request.worker_id, load.decode_context_tokens, load.decode_sequences, load.tpot_s
            )
        return self._reply(resync=resync)

    def worker_leave(self, request: m.WorkerLeave) -> m.Ok:
        """Remove a worker that stops."""
        if self.workers.leave(request.worker_id, request.epoch):
            self._forget_worker(request.worker_id)
            log.info("worker left", worker=request.worker_id)
        return m.Ok()

    def _forget_node(self, node_id: str) -> None:
        self.index.remove_node(node_id, RECLAIM_BLOCKS)

    def _forget_worker(self, worker_id: str) -> None:
        self.cost.forget_worker(worker_id)
        self.in_flight.forget_worker(worker_id)

    # ------------------------------------------------------------ clients

    def register_namespace(self, request: m.RegisterNamespace) -> m.NamespaceReply:
        """Make a namespace known.

        Raises:
            LayoutMismatch: its model, revision, tenant and salt are known with another layout.
            HashMismatch: the caller's hashes differ from this conductor's.
        """
        check_proof(request.namespace, request.proof)
        return m.NamespaceReply(self.namespaces.add(request.namespace))

    def lookup(self, request: m.Lookup) -> m.LookupReply:
        """The leading blocks that live nodes hold, and where.

        Raises:
            UnknownNamespace: the namespace was not registered since this conductor started.
        """
        if request.namespace_id not in self.namespaces:
            raise unknown_namespace(request.namespace_id)
        segments = self.index.segments(
            request.namespace_id,
            unpack_hashes(request.hashes),
            self._readable_hosts(request.exclude),
            request.host,
        )
        return self._lookup_reply(request, segments)

    async def answer_lookup(self, request: m.Lookup) -> m.LookupReply:
        """`lookup`, for indexes that need I/O as well."""
        return self.lookup(request)

    async def answer_registration(self, request: m.RegisterNamespace) -> m.NamespaceReply:
        """`register_namespace`, for indexes that need I/O as well."""
        return self.register_namespace(request)

    def _lookup_reply(self, request: m.Lookup, segments: list[m.Segment]) -> m.LookupReply:
        found = sum(segment.count for segment in segments)
        wait_s = disk_wait.wait_s(self.nodes, self.namespaces[request.namespace_id], segments)
        self.counters["lookups"] += 1
        self.counters["lookup_hits" if found else "lookup_misses"] += 1
        return m.LookupReply(found, segments, wait_s)

    async def find(self, namespace_id: bytes, hashes: Sequence[bytes]) -> Found:
        """Look up the leading blocks of a chain, once for any number of hosts."""
        return Found(self.index.holders(namespace_id, hashes), self._readable_hosts())

    def _readable_hosts(self, exclude: Sequence[str] = ()) -> Mapping[str, str]:
        return {
            node.member_id: node.descriptor.host
            for node in self.nodes.readable()
            if node.member_id not in exclude
        }

    def report_miss(self, request: m.ReportMiss) -> m.Ok:
        """Record that a client's pin or read failed.

        The record expires soon, because the report may be wrong.
        Of a long run only the head is recorded: no plan reads past a missing block.
        """
        hashes = unpack_hashes(request.hashes[: MAX_MISSES * HASH_BYTES])
        self.counters["reported_misses"] += len(hashes)
        self.record_misses(request.node_id, request.namespace_id, hashes)
        return m.Ok()

    def count_copies(self, request: m.CountCopies) -> m.CopyCounts:
        """Count the live nodes that hold each block. Draining and excluded nodes do not count.

        Raises:
            InvalidArgument: more than `MAX_COUNTED` hashes.
        """
        live = {node.member_id for node in self.nodes.choosable()} - set(request.exclude)
        copies = bytearray()
        for block_hash in unpack_hashes(request.hashes, MAX_COUNTED):
            found = self.index.holders(request.namespace_id, [block_hash])
            holders = {holder.node_id for holder in found[0]} & live if found else ()
            copies.append(min(255, len(holders)))
        return m.CopyCounts(bytes(copies))

    def namespace_page(
        self, request: m.Namespaces, principal: Principal = ANYBODY
    ) -> m.NamespacesReply:
        """A page of the namespaces that the principal may see."""
        tenant = None if principal.sees_all else principal.tenant
        return m.NamespacesReply(self.namespaces.page(request.offset, request.limit, tenant))

    def node_list(self, principal: Principal = ANYBODY) -> m.NodesReply:
        """Every node that the principal may see, with its state and space."""
        infos = []
        now = self.clock()
        for node in self.nodes.members():
            free = capacity = 0
            # The reported uptime is right even if this conductor restarted.
            age_s = max(now - node.joined_at, node.report.uptime_s if node.report else 0.0)
            for tier in node.report.tiers if node.report else ():
                if tier.tier == Tier.DRAM:
                    free, capacity = tier.free_bytes, tier.capacity_bytes
            if not principal.sees_all and not self.is_open_to(node.descriptor, principal.tenant):
                continue
            infos.append(m.NodeInfo(node.descriptor, node.state, free, capacity, age_s))
        return m.NodesReply(infos)

    def notice(self) -> str:
        """A warning for the operator; "" if there is none."""
        return ""

    def index_blocks(self) -> int:
        """The number of entries in the index that serves look-ups now."""
        return self.index.blocks()

    def stats(self) -> m.PoolStatsReply:
        """The accounting of the whole pool, as nodes and workers last reported it."""
        return m.PoolStatsReply(
            self.conductor_id,
            self.epoch,
            self.clock() - self._started,
            [node.report for node in self.nodes if node.report is not None],
            {node.member_id: str(node.state) for node in self.nodes},
            [
                m.WorkerInfo(worker.descriptor, worker.state, worker.report or IDLE)
                for worker in self.workers
            ],
            self.index_blocks(),
            {name: float(value) for name, value in self.counters.items()}
            | self.engine_feeds.stats(),
        )

    def stats_for(self, principal: Principal) -> m.PoolStatsReply:
        """`stats`, limited to what the principal may see. A tenant gets no counts of the pool."""
        stats = self.stats()
        if principal.sees_all:
            return stats
        own = {worker.member_id for worker in self.workers_of(principal)}
        nodes = {
            node.member_id
            for node in self.nodes.members()
            if self.is_open_to(node.descriptor, principal.tenant)
        }
        return msgspec.structs.replace(
            stats,
            nodes=[m.visible_stats(node, False) for node in stats.nodes if node.node_id in nodes],
            node_states={k: state for k, state in stats.node_states.items() if k in nodes},
            workers=[info for info in stats.workers if info.descriptor.worker_id in own],
            index_blocks=0,
            counters={},
            conductors=[],
        )

    def is_open_to(self, node: m.NodeDescriptor, tenant: str) -> bool:
        """Whether the node may hold blocks of this tenant, and the tenant's clients may see it."""
        return node.tenant == (tenant if tenant in self.isolated_tenants else "")

    def tenant_of_worker(self, worker_id: str) -> str | None:
        """The tenant of a worker; None if the worker is unknown."""
        worker = self.workers.get(worker_id)
        return worker.descriptor.namespace.tenant if worker is not None else None

    def workers_of(self, principal: Principal) -> list[Member[m.WorkerDescriptor, m.WorkerLoad]]:
        """The workers that the principal may see: those of its tenant."""
        return [
            worker
            for worker in self.workers
            if principal.sees_all or worker.descriptor.namespace.tenant == principal.tenant
        ]

    # ------------------------------------------------------------ for the scheduler

    def scheduling_inputs(self, tenant: str | None = None) -> SchedulingInputs:
        """The cluster's present state for the scheduler, with the nodes of one tenant or of all."""
        workers = {
            worker.member_id: WorkerStatus(
                worker.member_id,
                worker.descriptor.role,
                worker.descriptor.host,
                worker.descriptor.namespace.namespace_id,
                worker.state,
                worker.report or IDLE,
                worker.reported_at,
                worker.descriptor.max_model_tokens,
            )
            for worker in self.workers
        }
        nodes = {
            node.member_id: NodeStatus(
                node.member_id,
                node.descriptor.host,
                _available_bytes(node.report),
                node.state,
                {
                    t.tier: t.read_bytes_per_s
                    for t in disk_wait.tiers(node.report)
                    if t.read_bytes_per_s
                },
                sum(t.queued_read_bytes for t in disk_wait.tiers(node.report)),
            )
            for node in self.nodes
            if tenant is None or self.is_open_to(node.descriptor, tenant)
        }
        return SchedulingInputs(workers, nodes, self.cost, self.in_flight, self.scheduler_config)

    def worthwhile_s(
        self,
        worker: Member[m.WorkerDescriptor, Any],
        namespace: Namespace,
        tokens: int,
        segments: Sequence[m.Segment],
    ) -> float:
        """How long this worker should wait for a disk before computing is faster; 0: no limit."""
        if self.scheduler_config.always_reuse:
            return 0.0
        return disk_wait.worthwhile_s(self.cost, self.nodes, worker, namespace, tokens, segments)

    def live_nodes(self, tenant: str) -> list[m.NodeDescriptor]:
        """Descriptors of the nodes where a tenant's blocks may be read."""
        nodes = (node.descriptor for node in self.nodes.readable())
        return [node for node in nodes if self.is_open_to(node, tenant)]

    def sweep(self) -> None:
        """Suspect silent members, remove dead ones, end waits for lost ones, free memory in slices.

        Call it every `sweep_s`.
        """
        now = self.clock()
        for member in self.nodes.sweep(now).died:
            log.warning("node is dead, its blocks are dropped", node=member)
            self._forget_node(member)
        for member in self.workers.sweep(now).died:
            log.warning("worker is dead", worker=member)
            self._forget_worker(member)
        self.engine_feeds.follow([worker.descriptor for worker in self.workers])
        self.peer_guard.check()
        for request_id in self.in_flight.expire(now - FORGET_REQUESTS_AFTER_S):
            log.warning("request never ended, its load is dropped", request_id=request_id)
        self.index.expire_misses(now)
        self.index.reclaim(RECLAIM_BLOCKS)

    def record_misses(self, node_id: str, namespace_id: bytes, hashes: Sequence[bytes]) -> None:
        """Do not plan reads of these blocks from this node for a while: one has failed."""
        until = self.clock() + self._config.suspect_after_s
        for block_hash in hashes:
            self.index.record_miss(node_id, namespace_id, block_hash, until)

    def _reply(self, *, resync: bool = False) -> m.MemberReply:
        return m.MemberReply(resync, self._config.heartbeat_s)


def _available_bytes(report: m.NodeStatsReply | None) -> int:
    """Bytes that a reservation could get: free ones, and those of blocks that are not pinned."""
    if report is None:
        return UNKNOWN_ROOM
    return sum(
        tier.free_bytes + tier.committed_bytes - tier.pinned_bytes
        for tier in report.tiers
        if tier.tier == Tier.DRAM
    )
