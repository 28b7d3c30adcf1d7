"""What the scheduler sees of the cluster, and what it has learned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import structlog

from conductor.cluster import disk_wait
from conductor.cluster.members import Nodes, Workers
from conductor.members.membership import Member
from conductor.scheduling.cost_model import CostModel
from conductor.scheduling.in_flight import InFlight
from conductor.scheduling.scheduler import (
    IDLE,
    NodeStatus,
    SchedulerConfig,
    SchedulingInputs,
    WorkerStatus,
)
from kvpool.blocks.layout import Namespace
from kvpool.blocks.tier import Tier
from kvpool.wire import messages as m

log = structlog.get_logger(__name__)

FORGET_REQUESTS_AFTER_S = 3600.0
UNKNOWN_ROOM = 1 << 62  # before its first report, a node is assumed to have space


class SchedulerView:
    """The inputs of the scheduler.

    Args:
        isolated_tenants: each has nodes of its own.
    """

    def __init__(
        self,
        nodes: Nodes,
        workers: Workers,
        cost: CostModel,
        config: SchedulerConfig,
        isolated_tenants: frozenset[str] = frozenset(),
    ) -> None:
        self.cost = cost
        self.in_flight = InFlight()
        self.config = config
        self._nodes = nodes
        self._workers = workers
        self._isolated_tenants = isolated_tenants
        self._known_workers: set[str] = set()

    def inputs(self, tenant: str | None = None) -> SchedulingInputs:
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
            for worker in self._workers
        }
        nodes = {
            node.member_id: _status_of(node)
            for node in self._nodes
            if tenant is None or self.is_open_to(node.descriptor, tenant)
        }
        return SchedulingInputs(workers, nodes, self.cost, self.in_flight, self.config)

    def worthwhile_s(
        self,
        worker: Member[m.WorkerDescriptor, Any],
        namespace: Namespace,
        tokens: int,
        segments: Sequence[m.Segment],
    ) -> float:
        """How long this worker should wait for a disk before computing is faster; 0: no limit."""
        if self.config.always_reuse:
            return 0.0
        return disk_wait.worthwhile_s(self.cost, self._nodes, worker, namespace, tokens, segments)

    def live_nodes(self, tenant: str) -> list[m.NodeDescriptor]:
        """Descriptors of the nodes where a tenant's blocks may be read."""
        nodes = (node.descriptor for node in self._nodes.readable())
        return [node for node in nodes if self.is_open_to(node, tenant)]

    def is_open_to(self, node: m.NodeDescriptor, tenant: str) -> bool:
        """Whether the node may hold blocks of this tenant, and the tenant's clients may see it."""
        return node.tenant == (tenant if tenant in self._isolated_tenants else "")

    def sweep(self, now: float) -> None:
        """Forget what was learned of workers that are gone, and requests that never ended."""
        workers = {worker.member_id for worker in self._workers}
        for gone in self._known_workers - workers:
            self.cost.forget_worker(gone)
            self.in_flight.forget_worker(gone)
        self._known_workers = workers
        for request_id in self.in_flight.expire(now - FORGET_REQUESTS_AFTER_S):
            log.warning("request never ended, its load is dropped", request_id=request_id)


def _status_of(node: Member[m.NodeDescriptor, m.NodeStatsReply]) -> NodeStatus:
    tiers = disk_wait.tiers(node.report)
    return NodeStatus(
        node.member_id,
        node.descriptor.host,
        _available_bytes(node.report),
        node.state,
        {tier.tier: tier.read_bytes_per_s for tier in tiers if tier.read_bytes_per_s},
        sum(tier.queued_read_bytes for tier in tiers),
    )


def _available_bytes(report: m.NodeStatsReply | None) -> int:
    """Bytes that a reservation could get: free ones, and those of blocks that are not pinned."""
    if report is None:
        return UNKNOWN_ROOM
    return sum(
        tier.free_bytes + tier.committed_bytes - tier.pinned_bytes
        for tier in report.tiers
        if tier.tier == Tier.DRAM
    )
