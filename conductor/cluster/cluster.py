"""The soft state of the pool, put together: members, namespaces, blocks, and who is asked for what."""

from __future__ import annotations

import inspect
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import structlog

from conductor.cluster.connections import Connections
from conductor.cluster.lookups import Lookups
from conductor.cluster.members import Members
from conductor.cluster.namespaces import NamespaceRegistry
from conductor.cluster.overview import PoolOverview
from conductor.cluster.peer_guard import PeerGuard
from conductor.cluster.pool_state import PoolState
from conductor.cluster.reports import NodeReports, WorkerReports
from conductor.cluster.scheduler_view import SchedulerView
from conductor.index.block_history import BlockHistory
from conductor.index.memory import complete
from conductor.kv_events.feeds import EngineFeeds
from conductor.scheduling.cost_model import CostModel
from conductor.scheduling.scheduler import SchedulerConfig
from kvpool.wire import Session
from kvpool.wire import messages as m
from kvpool.wire.credentials import Credentials
from kvpool.wire.server import Handler

log = structlog.get_logger(__name__)


class Cluster:
    """The parts of one conductor that answer everything except requests for tokens.

    Args:
        conductor_id, epoch: identity of this process.
        counters: shared by all parts.
        history: for the reasons of misses; None means one of default size.
        cost: None means one without measurements.
        isolated_tenants: each has nodes of its own.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        conductor_id: str,
        epoch: int,
        members: Members,
        state: PoolState,
        scheduler_config: SchedulerConfig,
        *,
        counters: Counter[str] | None = None,
        history: BlockHistory | None = None,
        cost: CostModel | None = None,
        isolated_tenants: frozenset[str] = frozenset(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        nodes, workers = members.nodes, members.workers
        self.conductor_id = conductor_id
        self.epoch = epoch
        self.members = members
        self.counters: Counter[str] = Counter() if counters is None else counters
        self.history = history or BlockHistory()
        self.engine_feeds = EngineFeeds()  # blocks in the engines' own memory
        self.peer_guard = PeerGuard()  # ends calls to lost nodes and workers
        self.clock = clock
        self._state = state
        self.view = SchedulerView(
            nodes, workers, cost or CostModel(), scheduler_config, isolated_tenants
        )
        self.namespaces = NamespaceRegistry(members.namespaces, state, self.counters)
        self.lookups = Lookups(nodes, self.namespaces, state, self.counters, clock)
        self.node_reports = NodeReports(
            nodes, self.namespaces, state, self.history, self.counters, clock
        )
        self.worker_reports = WorkerReports(workers, self.namespaces, state, self.view.cost, clock)
        # For workers that each conductor finds by itself, such as engine servers.
        self.own_worker_reports = WorkerReports(
            workers, self.namespaces, state.own, self.view.cost, clock
        )
        self.overview = PoolOverview(
            conductor_id,
            epoch,
            members,
            self.view,
            state,
            self.engine_feeds,
            self.counters,
            clock,
        )

    def handlers(self) -> dict[type[m.Message], Handler]:
        """What the parts answer over the wire: at once, without a task, if the conductor is alone."""
        nodes, workers = self.node_reports, self.worker_reports
        lookups, namespaces, overview = self.lookups, self.namespaces, self.overview
        handlers: dict[type[m.Message], Handler] = {
            m.NodeJoin: lambda r, _s: nodes.join(r),
            m.NodeEvents: lambda r, _s: nodes.events(r),
            m.NodeHeartbeat: lambda r, _s: nodes.heartbeat(r),
            m.NodeLeave: lambda r, _s: nodes.leave(r),
            m.NodeDraining: lambda r, _s: nodes.draining(r),
            m.WorkerJoin: lambda r, _s: workers.join(r),
            m.WorkerHeartbeat: lambda r, _s: workers.heartbeat(r),
            m.WorkerLeave: lambda r, _s: workers.leave(r),
            m.RegisterNamespace: lambda r, _s: namespaces.register(r),
            m.Lookup: lambda r, _s: lookups.lookup(r),
            m.ReportMiss: lambda r, _s: lookups.report_miss(r),
            m.CountCopies: lambda r, _s: lookups.count_copies(r),
            m.Nodes: lambda _r, s: overview.node_list(s.principal),
            m.Namespaces: lambda r, s: namespaces.page(r, s.principal),
            m.PoolStats: lambda _r, s: overview.stats(s.principal),
        }
        if self._state.own is not self._state:
            return handlers
        return {message: _at_once(handler) for message, handler in handlers.items()}

    def connections(self, credentials: Credentials) -> Connections:
        """Connections to the members, which end waits for lost ones."""
        return Connections(
            self.conductor_id, self.epoch, self.members, self.peer_guard, self.clock, credentials
        )

    async def sweep(self) -> None:
        """Suspect silent members, remove dead ones, end waits for lost ones, free memory in slices.

        Call it every `sweep_s`.
        """
        now = self.clock()
        nodes, workers = self.members.nodes, self.members.workers
        await self._state.sweep(now)
        for node in nodes.sweep(now).died:
            log.warning("node is dead, its blocks are dropped", node=node.member_id)
            await self._state.left("node", node)
        for worker in workers.sweep(now).died:
            log.warning("worker is dead", worker=worker.member_id)
            await self._state.left("worker", worker)
        self.engine_feeds.follow([worker.descriptor for worker in workers])
        self.peer_guard.check()
        self.view.sweep(now)


def _at_once(handler: Handler) -> Handler:
    """The handler as a plain function. Its coroutines never wait."""

    def answer(request: Any, session: Session) -> Any:
        result = handler(request, session)
        return complete(result) if inspect.iscoroutine(result) else result

    return answer
