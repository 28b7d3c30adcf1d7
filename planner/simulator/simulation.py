"""Runs a simulation: requests arrive, and simulated engines and links carry out what is decided.

What happens to a request is decided where the gateway decides it: by `AdmissionControl`, `plan` and
`RequestLifecycle` (`conductor.requests`). This module carries their actions out on a virtual clock,
as `conductor.gateway` does over connections. Equal inputs give equal results.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from conductor.index.segments import cut
from conductor.requests import admission as a
from conductor.requests import events as e
from conductor.requests.admission import AdmissionControl, AdmissionLimits
from conductor.requests.measurements import observe_costs
from conductor.requests.planning import Where, plan, routing_choice
from conductor.requests.reports import DecodeReport, PrefillReport
from conductor.requests.request import Objectives, Plan, Request
from conductor.roles.controller import Instance as RoleInstance
from conductor.roles.controller import RoleController
from conductor.routing.rules import choose
from conductor.scheduling.decision import Decision
from conductor.scheduling.hot_blocks import HotBlocks
from kvpool.blocks.tier import Tier
from kvpool.errors import KvpoolError
from planner.simulator.cluster_state import ClusterState
from planner.simulator.instance import Instance, Prompt
from planner.simulator.network import Network
from planner.simulator.pool import Pool
from planner.simulator.run_summary import SimulatedRequest, SimulationRun
from planner.simulator.setup import Cache, CacheFactory, Setup
from planner.simulator.simulated_run import FOREVER, OnStep, SimulatedRun
from planner.simulator.virtual_clock import EventLoop
from planner.simulator.workload import Arrival

NAMESPACE_ID = b"kvpool-simulated"
ROLE_STEP_S = 1.0


class TooSlow(KvpoolError):
    """A decode instance refuses a request whose prompt was computed: it would decode too slowly."""

    code = "tpot_slo"


class Simulation:
    """One run of one setup over one list of arrivals.

    Args:
        make_cache: eviction policies of nodes and engines.
        on_step: called with the request ("": admission), the event, the actions and the time of
            each step of a lifecycle or of admission.
    """

    def __init__(
        self,
        setup: Setup,
        arrivals: Sequence[Arrival],
        make_cache: CacheFactory,
        on_step: OnStep = lambda _request_id, _event, _actions, _now: None,
    ) -> None:
        self.on_step = on_step
        self.setup = setup
        self.loop = EventLoop()
        self.network = Network(setup.same_host, setup.other_host)
        self.pool = Pool(setup.nodes, NAMESPACE_ID, make_cache)
        self.state = ClusterState(setup, NAMESPACE_ID)
        self.requests = [SimulatedRequest(arrival) for arrival in arrivals]
        self.result = SimulationRun(self.requests, 0.0, self.network.moved, {})
        self.instances: dict[str, Instance] = {}
        self._specs = {spec.worker_id: spec for spec in setup.instances}
        self._engines: dict[str, Cache | None] = {}
        for spec in setup.instances:
            self.instances[spec.worker_id] = Instance(
                self.loop,
                spec.worker_id,
                spec.role,
                spec.cost,
                self.state.sequence_kv_tokens(spec),
                setup.chunk_tokens,
                setup.max_sequences,
            )
            blocks = int(spec.kv_capacity_tokens * setup.engine_share) // setup.block_tokens
            self._engines[spec.worker_id] = make_cache(blocks) if blocks else None
        self._controller = RoleController(setup.roles) if setup.roles is not None else None
        self._hot = HotBlocks()
        limits = AdmissionLimits(setup.max_active, setup.max_waiting, setup.max_wait_s)
        self._admission = AdmissionControl(limits, setup.scheduling.strategy)
        self._admission_events: deque[a.Event] = deque()
        self._is_admitting = False
        self._admission_wake_at: float | None = None
        self._runs: dict[str, SimulatedRun] = {}
        self._open = len(self.requests)

    def run(self) -> SimulationRun:
        """Run until every request has been served or refused."""
        for request in self.requests:
            self.loop.at(request.arrival.at_s, lambda r=request: self._arrive(r))  # type: ignore[misc]
        self.loop.at(0.0, self._heartbeat)
        if self._controller is not None:
            self.loop.at(ROLE_STEP_S, self._step_roles)
        self.loop.run(lambda: self._open == 0)
        result = self.result
        result.end_s = self.loop.now
        result.dollars_per_hour = self.setup.dollars_per_hour
        result.busy = {
            name: (one.prefill_busy_s, one.decode_busy_s) for name, one in self.instances.items()
        }
        result.counters["events"] = self.loop.calls
        result.counters["evicted_blocks"] = self.pool.evicted_blocks
        return result

    # ------------------------------------------------------------ admission

    def facts(self, arrival: Arrival) -> Request:
        """A request as the gateway would see it."""
        setup = self.setup
        return Request(
            arrival.request_id,
            arrival.prompt_tokens,
            setup.block_tokens,
            setup.block_bytes,
            arrival.output_tokens,
            arrival.at_s,
            FOREVER,
            arrival.at_s,
            Objectives(setup.slo_ttft_s, setup.slo_tpot_s),
            mode="local" if setup.serving == "coupled" else "",
            key=arrival.request_id,
        )

    def _arrive(self, request: SimulatedRequest) -> None:
        run = self._runs[request.arrival.request_id] = SimulatedRun(
            self, request, self.facts(request.arrival)
        )
        self._tell_admission(a.Arrived(run.lifecycle.request))

    def _tell_admission(self, event: a.Event) -> None:
        self._admission_events.append(event)
        if self._is_admitting:
            return
        self._is_admitting = True
        while self._admission_events:
            happened, now = self._admission_events.popleft(), self.loop.now
            actions = self._admission.on(happened, now)
            self.on_step("", happened, actions, now)
            for action in actions:
                self._act_for_admission(action)
        self._is_admitting = False

    def _act_for_admission(self, action: a.Action) -> None:
        match action:
            case a.Decide(request_id, last):
                run = self._runs[request_id]
                decided = self._plan(run, last)
                is_busy = len(self.state.in_flight) > 0 or any(
                    instance.running for instance in self.instances.values()
                )
                self._tell_admission(a.Decided(request_id, decided, is_busy))
            case a.Admit(request_id, admitted):
                self._runs[request_id].feed(e.Admitted(admitted))
            case a.Refuse(request_id, decision):
                self._runs[request_id].feed(e.Refused(decision))
            case a.WakeAt(at):
                self._admission_wake_at = at
                if at is not None:
                    self.loop.at(at, lambda: self._admission_tick(at))
            case a.Queued():
                pass  # the simulated disks are read when a request runs

    def _admission_tick(self, at: float) -> None:
        if at == self._admission_wake_at:
            self._admission_wake_at = None
            self._tell_admission(a.Tick())

    def _plan(self, run: SimulatedRun, last: Plan | None) -> Plan:
        setup, arrival, request = self.setup, run.request.arrival, run.lifecycle.request
        inputs, now = self.state.scheduling_inputs(), self.loop.now
        found = self.pool.find(arrival.hashes if setup.serving == "pooled" else ())
        choice = last.choice if last is not None else None
        if last is None and setup.routing is not None:
            rules = setup.routing
            choice = routing_choice(request, found, inputs, lambda facts: choose(rules, facts))
        if setup.tpot_check == "decode":
            request = replace(request, objectives=Objectives(setup.slo_ttft_s))
        where = Where(NAMESPACE_ID, setup.layers, self._engine_blocks(arrival.hashes))
        return plan(request, where, found, inputs, now, looked_up_at=now, choice=choice)

    def _engine_blocks(self, hashes: Sequence[bytes]) -> dict[str, int]:
        found = {}
        for worker_id, engine in self._engines.items():
            count = self._leading(engine, hashes)
            if count:
                found[worker_id] = count
        return found

    @staticmethod
    def _leading(engine: Cache | None, hashes: Sequence[bytes]) -> int:
        count = 0
        if engine is not None:
            for block in hashes:
                if block not in engine:
                    break
                count += 1
        return count

    # ------------------------------------------------------------ carrying out

    def act(self, run: SimulatedRun, action: e.Action) -> None:
        """Carry out an action of a lifecycle."""
        state, now = self.state, self.loop.now
        request, lifecycle = run.request, run.lifecycle
        request_id = request.arrival.request_id
        match action:
            case e.Assign(decision):
                state.in_flight.assigned(decision, now)
            case e.MarkPrefilled():
                state.in_flight.prefilled(request_id, now)
                self._tell_admission(a.ClusterChanged())
            case e.Unassign():
                state.in_flight.finished(request_id)
            case e.Replicate(decision):
                self._replicate(request, decision)
            case e.Reserve(node_id, _, start, _):
                missing = range(start, len(request.arrival.hashes))
                state.reserve_bytes(node_id, len(missing) * self.setup.block_bytes)
                run.feed(e.Reserved(len(missing), missing, ()))
            case e.SendPrefill(_, _, grant, _):
                self._prefill(run, grant or 0)
            case e.SendGenerate():
                if lifecycle.measured.is_prefilled_remotely:
                    self._load(run)
                else:
                    self._read_here(run)
            case e.Observe(worker_id, reply):
                observe_costs(state.cost, worker_id, reply)
            case e.RecordSlo(is_ttft_met, is_tpot_met):
                if self._controller is not None:
                    self._controller.ended(now, is_ttft_met=is_ttft_met, is_tpot_met=is_tpot_met)
            case e.Finish(status, error):
                self._finish(run, status, error)

    def _finish(self, run: SimulatedRun, status: str, error: KvpoolError | None) -> None:
        request, lifecycle = run.request, run.lifecycle
        if status == "ok":
            request.finished_at = self.loop.now
        elif lifecycle.refusal is not None:
            request.refused = lifecycle.refusal.reason
        else:
            assert error is not None
            request.refused, request.is_wasted = error.code, True
        lifecycle.token_ids.clear()  # a run has a million of them
        self._open -= 1
        del self._runs[request.arrival.request_id]
        self._tell_admission(a.Left(request.arrival.request_id))

    def _prefill(self, run: SimulatedRun, granted: int) -> None:
        """Prefill at one instance, and send layer by layer to the node that granted the blocks."""
        request, decision = run.request, run.lifecycle.decision
        assert decision is not None
        assert decision.prefill is not None
        arrival, setup = request.arrival, self.setup
        prefiller = self._specs[decision.prefill]
        target = decision.target_node or ""
        target_host = self.pool.hosts[target]
        full = len(arrival.hashes)
        prompt: Prompt

        def fetch() -> float:
            ready, have, request.resident = self._read(
                request, decision.reuse_blocks, prefiller.worker_id, prefiller.host
            )
            prompt.reused = have * setup.block_tokens
            prompt.new = max(1, (full - have) * setup.block_tokens)
            return ready

        def prefilled(began: float) -> float:
            now = self.loop.now
            request.computed_tokens += prompt.new
            self._keep(prefiller.worker_id, arrival.hashes)
            size = max(0, full - request.resident) * setup.block_bytes
            starts = began if setup.is_overlapped else now
            layers = setup.layers if setup.is_overlapped else 1
            arrives = self.network.stream(starts, now, prefiller.host, target_host, size, layers)
            self.loop.at(arrives, lambda: sent(began, now))
            return now if setup.is_overlapped else arrives

        def sent(began: float, computed_at: float) -> None:
            now = self.loop.now
            self.state.reserve_bytes(decision.target_node, -granted * setup.block_bytes)
            if setup.serving == "pooled":
                self.pool.store(target, arrival.hashes)
            size = max(0, full - request.resident) * setup.block_bytes
            if size and prefiller.host != target_host and not setup.is_overlapped:
                self.state.cost.observe_transfer(size, now - computed_at, same_host=False)
            phases = {"prefill_compute_time": computed_at - began}
            run.feed(e.Prefilled(PrefillReport(prompt.reused, prompt.new, granted, phases)))

        prompt = Prompt(
            arrival.request_id, max(1, full * setup.block_tokens), 0, 0, prefilled, fetch
        )
        self.instances[prefiller.worker_id].add(prompt)

    def _load(self, run: SimulatedRun) -> None:
        """Bring what another instance computed to the decode instance, which computes the tail."""
        request, decision = run.request, run.lifecycle.decision
        assert decision is not None
        assert decision.decode is not None
        arrival, setup, now = request.arrival, self.setup, self.loop.now
        decoder = self._specs[decision.decode]
        full, resident = len(arrival.hashes), request.resident
        size = max(0, full - resident) * setup.block_bytes
        target_host = self.pool.hosts[decision.target_node or ""]
        loaded = self.network.transfer(now, target_host, decoder.host, size)
        own = self._leading(self._engines[decoder.worker_id], arrival.hashes)
        if setup.serving == "pooled" and own < resident:
            loaded = max(loaded, self._fetch(now, arrival, own, resident, decoder.host))
        new = max(1, arrival.prompt_tokens - full * setup.block_tokens)
        self.loop.at(loaded, lambda: self._decode(run, new, arrival.prompt_tokens - new))

    def _read_here(self, run: SimulatedRun) -> None:
        """Read what pays, and compute the rest at the decode instance."""
        request, decision = run.request, run.lifecycle.decision
        assert decision is not None
        assert decision.decode is not None
        spec = self._specs[decision.decode]
        ready, have, _ = self._read(request, decision.reuse_blocks, spec.worker_id, spec.host)
        prompt_tokens = request.arrival.prompt_tokens
        reused = min(have * self.setup.block_tokens, prompt_tokens - 1)
        self.loop.at(ready, lambda: self._decode(run, prompt_tokens - reused, reused))

    def _decode(self, run: SimulatedRun, new: int, reused: int) -> None:
        """Compute the rest of the prompt at the decode instance, and decode."""
        request, lifecycle, decision = run.request, run.lifecycle, run.lifecycle.decision
        assert decision is not None
        assert decision.decode is not None
        arrival, setup = request.arrival, self.setup
        instance, spec = self.instances[decision.decode], self._specs[decision.decode]
        is_remote = lifecycle.measured.is_prefilled_remotely
        context = arrival.prompt_tokens + arrival.output_tokens // 2
        if (
            setup.tpot_check != "scheduler"
            and is_remote
            and 0 < setup.slo_tpot_s < instance.tpot_with(context)
        ):
            run.feed(e.Failed(TooSlow("the decode instance is too busy")))
            return
        phases: dict[str, float] = {}

        def first(began: float) -> float:
            now = self.loop.now
            request.first_at = now
            request.computed_tokens += new
            if not is_remote:
                phases["prefill_compute_time"] = now - began
                self._keep(spec.worker_id, arrival.hashes)
                node = self._node_of(spec.host)
                if setup.serving == "pooled" and node is not None:
                    self.pool.store(node, arrival.hashes)
            run.feed(e.Tokens(range(1), 1))
            return now

        def finished() -> None:
            if arrival.output_tokens > 1:
                more = arrival.output_tokens - 1
                run.feed(e.Tokens(range(more), more))
            run.feed(e.Decoded(DecodeReport("length", reused, 0, new, phases=phases)))

        instance.add(
            Prompt(arrival.request_id, new, reused, arrival.output_tokens, first, finished=finished)
        )

    # ------------------------------------------------------------ blocks

    def _read(
        self, request: SimulatedRequest, wanted: int, worker_id: str, host: str
    ) -> tuple[float, int, int]:
        """Bring leading blocks to an engine. Returns when they arrive, how many, and how many the pool has."""
        arrival, now = request.arrival, self.loop.now
        own = self._leading(self._engines[worker_id], arrival.hashes)
        resident = 0
        if self.setup.serving == "pooled":
            resident = len(self.pool.find(arrival.hashes).holders)
        have = max(own, min(wanted, resident)) if wanted > own else min(own, len(arrival.hashes))
        if have < wanted:
            self.result.counters["stale_blocks"] += wanted - have
        if have * self.setup.block_tokens >= arrival.prompt_tokens:
            have -= 1  # at least one token is computed
        ready = now
        if have > own:
            ready = self._fetch(now, arrival, own, have, host)
        return ready, max(0, have), resident

    def _fetch(self, now: float, arrival: Arrival, start: int, end: int, host: str) -> float:
        """Move blocks [start, end) from their nodes to `host`. Returns the time at which they have arrived."""
        setup, ready = self.setup, now
        for segment in cut(self.pool.find(arrival.hashes).segments(host), end):
            stop = segment.start + segment.count
            count = stop - max(start, segment.start)
            if count <= 0:
                continue
            begins = now
            slow = stop - max(start, segment.start + segment.ready)
            if segment.tier == Tier.NVME and slow > 0:
                rate = self.pool.nodes[segment.node_id].nvme_bytes_per_s
                size = slow * setup.block_bytes
                begins = self.network.read_disk(now, segment.node_id, size, rate)
            source = self.pool.hosts[segment.node_id]
            size = count * setup.block_bytes
            arrives = self.network.transfer(begins, source, host, size)
            self.state.cost.observe_transfer(size, arrives - begins, same_host=source == host)
            ready = max(ready, arrives)
            self.pool.read(segment.node_id, arrival.hashes[:stop])
        return ready

    def _keep(self, worker_id: str, chain: Sequence[bytes]) -> None:
        """The engine keeps the prompt's blocks in its own prefix cache."""
        engine = self._engines[worker_id]
        if engine is not None and chain:
            engine.use(chain)

    def _node_of(self, host: str) -> str | None:
        return next((n.node_id for n in self.setup.nodes if n.host == host), None)

    def _replicate(self, request: SimulatedRequest, decision: Decision) -> None:
        """Copy blocks that were requested twice to nodes near the work, in the background."""
        now, hashes = self.loop.now, request.arrival.hashes
        for copy in decision.replicate:
            run = hashes[copy.start : copy.start + copy.count]
            start, count = self._hot.requested(copy.target, run, now)
            if not count:
                continue
            self._hot.copying(copy.target, run[start : start + count], now)
            chain = hashes[: copy.start + start + count]
            size = count * self.setup.block_bytes
            source, target = self.pool.hosts[copy.source], self.pool.hosts[copy.target]
            arrives = self.network.transfer(now, source, target, size)
            self.result.counters["replicated_blocks"] += count
            self.loop.at(arrives, lambda n=copy.target, c=chain: self.pool.store(n, c))  # type: ignore[misc]

    # ------------------------------------------------------------ measuring and roles

    def _heartbeat(self) -> None:
        now = self.loop.now
        for instance in self.instances.values():
            self.state.take_heartbeat(instance, now)
        self.state.report_disk_queues(self.network, now)
        self._tell_admission(a.ClusterChanged())
        self.loop.at(now + self.setup.heartbeat_s, self._heartbeat)

    def _step_roles(self) -> None:
        assert self._controller is not None
        now = self.loop.now
        seen = [
            RoleInstance(
                worker.worker_id,
                worker.role,
                worker.load.running,
                worker.load.places,
                worker.load.queued_prefill_tokens,
                worker.role != "both",
            )
            for worker in self.state.workers.values()
        ]
        move = self._controller.step(seen, now).move
        if move is not None:
            self.instances[move.worker_id].role = move.role
            self.state.set_role(self._specs[move.worker_id], move.role)
            change = {"at_s": round(now, 3), "worker": move.worker_id, "role": move.role}
            self.result.role_changes.append(change | {"reason": move.reason})
        self.loop.at(now + ROLE_STEP_S, self._step_roles)
