"""The pool as its users see it: nodes, workers and accounting, limited to what each may see."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec

from conductor.cluster.members import Members
from conductor.cluster.pool_state import PoolState
from conductor.cluster.scheduler_view import SchedulerView
from conductor.kv_events.feeds import EngineFeeds
from conductor.members.membership import Member
from conductor.scheduling.scheduler import IDLE
from kvpool.blocks.tier import Tier
from kvpool.wire import messages as m
from kvpool.wire.principal import ANYBODY, Principal


class PoolOverview:
    """Answers who and what is in the pool.

    Args:
        conductor_id, epoch: identity of this conductor.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        conductor_id: str,
        epoch: int,
        members: Members,
        view: SchedulerView,
        state: PoolState,
        feeds: EngineFeeds,
        counters: Counter[str],
        clock: Callable[[], float],
    ) -> None:
        self._conductor_id = conductor_id
        self._epoch = epoch
        self._nodes = members.nodes
        self._workers = members.workers
        self._view = view
        self._state = state
        self._feeds = feeds
        self._counters = counters
        self._clock = clock
        self._started = clock()

    def node_list(self, principal: Principal = ANYBODY) -> m.NodesReply:
        """Every node that the principal may see, with its state and space."""
        infos = []
        now = self._clock()
        for node in self._nodes.members():
            free = capacity = 0
            # The reported uptime is right even if this conductor restarted.
            age_s = max(now - node.joined_at, node.report.uptime_s if node.report else 0.0)
            for tier in node.report.tiers if node.report else ():
                if tier.tier == Tier.DRAM:
                    free, capacity = tier.free_bytes, tier.capacity_bytes
            if principal.sees_all or self._view.is_open_to(node.descriptor, principal.tenant):
                infos.append(m.NodeInfo(node.descriptor, node.state, free, capacity, age_s))
        return m.NodesReply(infos)

    def notice(self) -> str:
        """A warning for the operator; "" if there is none."""
        return self._state.status().notice

    def index_blocks(self) -> int:
        """The number of entries in the index that serves look-ups now."""
        return self._state.status().blocks

    def stats(self, principal: Principal = ANYBODY) -> m.PoolStatsReply:
        """The accounting of the pool, as nodes and workers last reported it.

        A tenant gets its own nodes and workers, and no counts of the pool.
        """
        status = self._state.status()
        counters = {name: float(value) for name, value in self._counters.items()}
        stats = m.PoolStatsReply(
            self._conductor_id,
            self._epoch,
            self._clock() - self._started,
            [node.report for node in self._nodes if node.report is not None],
            {node.member_id: str(node.state) for node in self._nodes},
            [
                m.WorkerInfo(worker.descriptor, worker.state, worker.report or IDLE)
                for worker in self.workers_of(principal)
            ],
            status.blocks,
            {**counters, **self._feeds.stats(), **status.counters},
            status.kind,
            status.notice,
            list(status.conductors),
        )
        if principal.sees_all:
            return stats
        nodes = {
            node.member_id
            for node in self._nodes
            if self._view.is_open_to(node.descriptor, principal.tenant)
        }
        return msgspec.structs.replace(
            stats,
            nodes=[m.visible_stats(node, False) for node in stats.nodes if node.node_id in nodes],
            node_states={k: state for k, state in stats.node_states.items() if k in nodes},
            index_blocks=0,
            counters={},
            conductors=[],
        )

    def workers_of(self, principal: Principal) -> list[Member[m.WorkerDescriptor, m.WorkerLoad]]:
        """The workers that the principal may see: those of its tenant."""
        return [
            worker
            for worker in self._workers
            if principal.sees_all or worker.descriptor.namespace.tenant == principal.tenant
        ]

    def tenant_of_worker(self, worker_id: str) -> str | None:
        """The tenant of a worker; None if the worker is unknown."""
        worker = self._workers.get(worker_id)
        return worker.descriptor.namespace.tenant if worker is not None else None
