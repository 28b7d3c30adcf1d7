"""Serves requests over a cluster: admission, plans, and one run of a lifecycle per request.

KV does not pass through the gateway. It plans which worker reads and writes which blocks, and relays
tokens. What happens to a request is decided in `conductor.requests`; this module carries it out.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import structlog

from conductor.cluster.cluster import Cluster
from conductor.engine_servers.discovery import is_engine_server
from conductor.gateway.calls import WorkerCalls
from conductor.gateway.hot_replication import HotReplication
from conductor.gateway.prefetch import SessionPrefetch
from conductor.gateway.request import GenerationRequest
from conductor.gateway.request_recorder import RequestRecorder
from conductor.gateway.runner import RequestRun
from conductor.gateway.sessions import Sessions
from conductor.requests import admission as a
from conductor.requests import events as e
from conductor.requests.admission import AdmissionControl, AdmissionLimits
from conductor.requests.lifecycle import Patience
from conductor.requests.measurements import observe_costs
from conductor.requests.planning import Where, plan, routing_choice
from conductor.requests.request import Plan
from conductor.requests.request_log import RequestLog
from conductor.routing.rules_file import RulesFile
from conductor.scheduling.decision import Decision
from kvpool.errors import KvpoolError, Overloaded, Unavailable
from kvpool.wire.credentials import NO_CREDENTIALS, Credentials

log = structlog.get_logger(__name__)

LOOK_UP_FRESH_S = 1.0  # for so long the look-up of a waiting request is used again
NO_WORKER_REASONS = frozenset(("no_decode_worker", "no_prefill_choice", "prompt_too_long"))

# (prefill met its objective, decode met its objective)
OnSloRecorded = Callable[[bool, bool], None]


class Refused(Overloaded):
    """The request was refused; `decision` records why."""

    def __init__(self, decision: Decision) -> None:
        super().__init__(
            f"refused early: {decision.reason}",
            reason=decision.reason,
            retry_after_s=decision.retry_after_s,
        )
        self.decision = decision


class Gateway:
    """Serves requests over a cluster.

    Args:
        limits: bounds of admission.
        patience: how long a request waits for workers.
        replications_at_once: maximum number of concurrent copies of hot prefixes.
        rules: the routing rules; None means none.
        on_slo_recorded: called once per request with whether prefill and decode met its objectives.
        credentials: presented to workers and nodes.
        prefetches: whether blocks are moved ahead of their reads.
        sessions: the table of conversations; None means one with default bounds.
    """

    def __init__(
        self,
        cluster: Cluster,
        request_log: RequestLog,
        limits: AdmissionLimits,
        *,
        patience: Patience,
        replications_at_once: int = 0,
        rules: RulesFile | None = None,
        on_slo_recorded: OnSloRecorded = lambda _ttft, _tpot: None,
        credentials: Credentials = NO_CREDENTIALS,
        prefetches: bool = True,
        sessions: Sessions | None = None,
    ) -> None:
        self.clock = cluster.clock
        self.counters = cluster.counters
        self.view = cluster.view
        self.rules = rules or RulesFile()
        self.request_log = request_log
        self.connections = cluster.connections(credentials)
        self.prefetch = SessionPrefetch(
            cluster.members,
            cluster.view,
            cluster.lookups,
            cluster.engine_feeds,
            self.connections,
            cluster.counters,
            cluster.clock,
            is_active=prefetches,
        )
        self.sessions = sessions or Sessions()
        self.admission = AdmissionControl(limits, cluster.view.config.strategy)
        self._patience = patience
        self._on_slo_recorded = on_slo_recorded
        self._lookups = cluster.lookups
        self._feeds = cluster.engine_feeds
        self._workers = cluster.members.workers
        self._recorder = RequestRecorder(
            request_log,
            cluster.members,
            cluster.lookups,
            cluster.history,
            cluster.counters,
            cluster.clock,
        )
        self._calls = WorkerCalls(cluster.members, cluster.view, self.connections, cluster.clock)
        self._hot_replication = HotReplication(
            cluster.members.nodes,
            self.connections,
            cluster.counters,
            cluster.clock,
            replications_at_once,
        )
        self._runs: dict[str, RequestRun] = {}
        self._events: deque[a.Event] = deque()  # of admission, while one is being carried out
        self._is_admitting = False
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        for members in (cluster.members.nodes, cluster.members.workers):
            members.listeners.append(self._members_changed)

    @property
    def active(self) -> int:
        """The number of requests being served: admitted, and not ended."""
        return sum(run.lifecycle.plan is not None for run in self._runs.values())

    async def close(self) -> None:
        """Refuse queued requests, cancel background work, and close all connections."""
        self._tell_admission(a.Closed())
        for run in list(self._runs.values()):
            await run.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.prefetch.close()
        await self._hot_replication.close()
        await self._recorder.close()
        await self.connections.close()

    async def admit(self, request: GenerationRequest) -> RequestRun:
        """Wait until the request may run, and start it. Nothing is sent to the client before.

        Cancelling the call withdraws the request. The caller closes the run.

        Raises:
            Refused: no choice meets the objectives, the queue is full, or the wait was too long.
            Unavailable: no worker serves this namespace, or the conductor stops.
            KvpoolError: the decision failed.
        """
        run = RequestRun(self, request, self._patience)
        self._runs[request.request_id] = run
        self._tell_admission(a.Arrived(request.facts))
        try:
            await run.started()
        except asyncio.CancelledError:
            await run.close()
            raise
        refusal, error = run.lifecycle.refusal, run.lifecycle.error
        if refusal is not None:
            raise _refused(refusal)
        if error is not None and run.lifecycle.plan is None:
            raise error
        return run

    # ------------------------------------------------------------ admission

    def _tell_admission(self, event: a.Event) -> None:
        """Feed an event and carry out the actions. An event of an action waits for its turn."""
        self._events.append(event)
        if self._is_admitting:
            return
        self._is_admitting = True
        try:
            while self._events:
                for action in self.admission.on(self._events.popleft(), self.clock()):
                    self._act_for_admission(action)
        finally:
            self._is_admitting = False

    def _members_changed(self) -> None:
        if len(self.admission.queue):
            self._tell_admission(a.ClusterChanged())

    def _act_for_admission(self, action: a.Action) -> None:
        match action:
            case a.Decide(request_id, last):
                self._spawn(self._decide(self._runs[request_id], last), f"decide {request_id}")
            case a.Admit(request_id, admitted):
                run = self._runs[request_id]
                request = run.request
                self._recorder.admitted(request, run.lifecycle, admitted)
                if request.facts.pool == "on":
                    namespace_id, key = request.namespace.namespace_id, request.facts.key
                    self.sessions.record(namespace_id, key, request.hashes, self.clock())
                run.feed(e.Admitted(admitted))
            case a.Refuse(request_id, decision):
                run = self._runs[request_id]
                self._recorder.refused(run.request, decision)
                run.feed(e.Refused(decision))
            case a.Queued(request_id, waiting):
                self.counters["queued"] += 1
                self.prefetch.while_waiting(self._runs[request_id].request, waiting)
            case a.WakeAt(at):
                self._set_timer(at)

    async def _decide(self, run: RequestRun, last: Plan | None) -> None:
        try:
            decided = await self._plan(run.request, last)
        except KvpoolError as error:
            run.feed(e.Failed(error))
            return
        is_busy = len(self.view.in_flight) > 0 or any(
            worker.report is not None and worker.report.running for worker in self._workers
        )
        self._tell_admission(a.Decided(run.request.request_id, decided, is_busy))

    def _set_timer(self, at: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if at is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(at, self._tell_admission, a.Tick())

    # ------------------------------------------------------------ planning

    async def _plan(
        self,
        request: GenerationRequest,
        last: Plan | None = None,
        excluded: frozenset[str] = frozenset(),
        *,
        is_retry: bool = False,
    ) -> Plan:
        """Decide where the request runs now, on one look-up.

        Args:
            last: an earlier plan; its look-up is used again while it is fresh.
        """
        facts, namespace = request.facts, request.namespace
        found, looked_up_at = None, self.clock()
        if facts.pool == "on":
            if last is not None and looked_up_at - last.looked_up_at <= LOOK_UP_FRESH_S:
                found, looked_up_at = last.found, last.looked_up_at
            else:
                found = await self._lookups.find(namespace.namespace_id, request.hashes)
        # No await below this line, so that the decision matches one state of the cluster.
        inputs = self.view.inputs(namespace.tenant)
        choice = last.choice if last is not None else None
        if last is None and not is_retry:
            choice = routing_choice(facts, found, inputs, self.rules.choose)
        where = Where(
            namespace.namespace_id,
            namespace.layout.layers,
            self._feeds.leading(namespace.namespace_id, request.hashes),
            self._stores_itself,
        )
        return plan(
            facts,
            where,
            found,
            inputs,
            self.clock(),
            looked_up_at=looked_up_at,
            choice=choice,
            is_rolled_back=self.rules.is_rolled_back,
            excluded=excluded,
            is_retry=is_retry,
        )

    def _stores_itself(self, worker_id: str) -> bool:
        worker = self._workers.get(worker_id)
        return worker is not None and is_engine_server(worker.descriptor)

    # ------------------------------------------------------------ what runs need

    async def call(self, run: RequestRun, action: e.Call) -> e.Event:
        """Carry out a call of a lifecycle; return the event that answers it.

        Raises:
            KvpoolError: the call failed.
        """
        request = run.request
        match action:
            case e.Schedule(excluded, last):
                return e.Scheduled(await self._plan(request, last, excluded, is_retry=True))
            case e.LookUp():
                found = await self._lookups.find(request.namespace.namespace_id, request.hashes)
                return e.LookedUp(found)
            case e.Reserve():
                return await self._calls.reserve(request, action)
            case e.SendPrefill():
                return await self._calls.prefill(request, action)
            case e.SendGenerate():
                return await self._calls.generate(run, action)

    def act(self, run: RequestRun, action: e.Action) -> None:
        """Carry out an action of a lifecycle that concerns others than its client."""
        request, in_flight = run.request, self.view.in_flight
        match action:
            case e.Assign(decision):
                in_flight.assigned(decision, self.clock())
            case e.MarkPrefilled():
                in_flight.prefilled(request.request_id, self.clock())
                self._tell_admission(a.ClusterChanged())
            case e.Unassign():
                in_flight.finished(request.request_id)
            case e.Replicate(decision):
                self._hot_replication.offer(request, decision)
            case e.Promote(admitted):
                self.prefetch.offer(request, admitted)
            case e.Observe(worker_id, reply):
                observe_costs(self.view.cost, worker_id, reply)
            case e.ReportMiss(node_id, block):
                lost = request.hashes[block : block + 1]
                self._lookups.record_misses(node_id, request.namespace.namespace_id, lost)
            case e.Count(name):
                self.counters[name] += 1
            case e.FellBack():
                self._recorder.fell_back(request, action)
            case e.RecordSlo(is_ttft_met, is_tpot_met):
                self._on_slo_recorded(is_ttft_met, is_tpot_met)
            case e.AbortReservation():
                self._spawn(self._calls.abort(action), f"abort {request.request_id}")
            case e.Finish():
                self._runs.pop(request.request_id, None)
                self._tell_admission(a.Left(request.request_id))
                if action.status != "refused":
                    self._recorder.ended(request, run.lifecycle)

    def _spawn(self, work: Any, name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _refused(decision: Decision) -> KvpoolError:
    if decision.reason == "stopping":
        return Unavailable("the conductor is stopping")
    if decision.reason in NO_WORKER_REASONS:
        return Unavailable(
            f"no worker can serve this request: {decision.reason}", hint="kvpool stats"
        )
    return Refused(decision)
