"""Runs a simulation: requests arrive, the real scheduler decides, and simulated engines and links carry it out.

The steps are the gateway's (`conductor.gateway.gateway`): look the chain up, decide, reserve near
the decode instance, prefill and send layer by layer, decode. Measurements go back to the cost
model. Equal inputs give equal results.
"""

from __future__ import annotations

from collections.abc import Sequence

from conductor.gateway.admission import LOOK_AHEAD, TRANSIENT_REASONS
from conductor.gateway.admission_queue import AdmissionQueue, Ticket
from conductor.index.segments import cut
from conductor.roles.controller import Instance as RoleInstance
from conductor.roles.controller import RoleController
from conductor.routing.rules import Facts, choose
from conductor.routing.service import pool_facts
from conductor.scheduling.decision import Decision
from conductor.scheduling.hot_blocks import HotBlocks
from conductor.scheduling.scheduler import ScheduleRequest, schedule
from kvpool.blocks.records import Segment
from kvpool.blocks.tier import Tier
from planner.simulator.cluster_state import ClusterState
from planner.simulator.instance import Instance, Prompt
from planner.simulator.network import Network
from planner.simulator.pool import Pool
from planner.simulator.run_summary import SimulatedRequest, SimulationRun
from planner.simulator.setup import Cache, CacheFactory, Setup
from planner.simulator.virtual_clock import EventLoop
from planner.simulator.workload import Arrival

NAMESPACE_ID = b"kvpool-simulated"
ROLE_STEP_S = 1.0
QUEUE_TICK_S = 0.1


class Simulation:
    """One run of one setup over one list of arrivals.

    Args:
        make_cache: eviction policies of nodes and engines.
    """

    def __init__(self, setup: Setup, arrivals: Sequence[Arrival], make_cache: CacheFactory) -> None:
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
        self._queue = AdmissionQueue(setup.max_waiting)
        self._waiting: dict[str, SimulatedRequest] = {}
        self._open = len(self.requests)
        self._active = 0

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

    def _arrive(self, request: SimulatedRequest) -> None:
        if not len(self._queue) and self._active < self.setup.max_active:
            decision = self._decide(request)
            if not decision.is_refused:
                self._start(request, decision)
                return
            if (
                decision.reason not in TRANSIENT_REASONS
                or not self._active
                or not self.setup.max_waiting
            ):
                self._refuse(request, decision.reason)
                return
        self._wait(request)

    def _wait(self, request: SimulatedRequest) -> None:
        """Wait in the queue, as in the gateway's admission."""
        now, setup = self.loop.now, self.setup
        start_by = now + min(setup.max_wait_s, setup.slo_ttft_s or setup.max_wait_s)
        request_id = request.arrival.request_id
        entry = self._queue.enqueue(Ticket(request_id, "normal", now, start_by), now)
        if entry.refused:
            self._refuse(request, entry.refused)
            return
        self._waiting[request_id] = request
        if len(self._queue) == 1:
            self.loop.at(now + QUEUE_TICK_S, self._serve_queue)

    def _serve_queue(self) -> None:
        now = self.loop.now
        for ticket in self._queue.expire(now):
            self._refuse(self._waiting.pop(ticket.request_id), "queue_deadline")
        for ticket in self._queue.in_order(LOOK_AHEAD):
            if self._active >= self.setup.max_active:
                break
            request = self._waiting[ticket.request_id]
            decision = self._decide(request)
            if not decision.is_refused:
                self._queue.started(ticket.request_id, now)
                del self._waiting[ticket.request_id]
                self._start(request, decision)
            elif decision.reason not in TRANSIENT_REASONS:
                self._queue.leave(ticket.request_id)
                del self._waiting[ticket.request_id]
                self._refuse(request, decision.reason)
        if len(self._queue):
            self.loop.at(now + QUEUE_TICK_S, self._serve_queue)

    def _refuse(self, request: SimulatedRequest, reason: str, *, is_wasted: bool = False) -> None:
        request.refused = reason
        request.is_wasted = is_wasted
        self._open -= 1
        self._report_attainment(request, is_late=reason == "ttft_slo", is_slow=reason == "tpot_slo")

    # ------------------------------------------------------------ deciding

    def _decide(self, request: SimulatedRequest) -> Decision:
        arrival, setup = request.arrival, self.setup
        found = self.pool.find(arrival.hashes if setup.serving == "pooled" else ())
        near = {found.hosts[h.node_id] for holders in found.holders for h in holders}
        segments = {host: found.segments(host) for host in near}
        segments[""] = found.segments("")
        schedule_request = ScheduleRequest(
            arrival.request_id,
            NAMESPACE_ID,
            arrival.prompt_tokens,
            setup.block_tokens,
            setup.block_bytes,
            setup.layers,
            segments,
            engine_blocks=self._engine_blocks(arrival.hashes),
            output_tokens=arrival.output_tokens,
            ttft_s=setup.slo_ttft_s,
            tpot_s=0.0 if setup.tpot_check == "decode" else setup.slo_tpot_s,
            mode=self._mode(arrival, segments),
        )
        decision = schedule(schedule_request, self.state.scheduling_inputs(), self.loop.now)
        request.decision = decision
        return decision

    def _mode(self, arrival: Arrival, segments: dict[str, list[Segment]]) -> str:
        if self.setup.serving == "coupled":
            return "local"
        if self.setup.routing is None:
            return ""
        found = max((sum(s.count for s in run) for run in segments.values()), default=0)
        facts = Facts(
            key=arrival.request_id,
            prompt_tokens=arrival.prompt_tokens,
            found_tokens=found * self.setup.block_tokens,
            output_tokens=arrival.output_tokens,
        )
        return choose(self.setup.routing, pool_facts(self.state.scheduling_inputs(), facts)).mode

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

    def _start(self, request: SimulatedRequest, decision: Decision) -> None:
        self._active += 1
        self.state.in_flight.assigned(decision, self.loop.now)
        self._replicate(request, decision)
        if self.setup.slo_ttft_s and self._controller is not None:
            due = request.arrival.at_s + self.setup.slo_ttft_s
            self.loop.at(due, lambda: self._report_overdue(request))
        if decision.mode == "disaggregated":
            self._remote(request, decision)
        else:
            self._local(request, decision)

    def _remote(self, request: SimulatedRequest, decision: Decision) -> None:
        """Prefill at one instance, send layer by layer, load and decode at another."""
        assert decision.prefill is not None
        assert decision.decode is not None
        arrival, setup, state = request.arrival, self.setup, self.state
        prefiller, decoder = self._specs[decision.prefill], self._specs[decision.decode]
        target = decision.target_node or ""
        target_host = self.pool.hosts[target]
        full = len(arrival.hashes)
        new_bytes = (full - decision.reuse_blocks) * setup.block_bytes
        state.reserve_bytes(decision.target_node, new_bytes)
        resident = 0  # leading blocks that the pool has when the prefill begins
        prompt: Prompt

        def fetch() -> float:
            nonlocal resident
            ready, have, resident = self._read(
                request, decision.reuse_blocks, prefiller.worker_id, prefiller.host
            )
            prompt.reused = have * setup.block_tokens
            prompt.new = max(1, (full - have) * setup.block_tokens)
            return ready

        def prefilled(began: float) -> float:
            now = self.loop.now
            request.reused_tokens = prompt.reused
            request.computed_tokens += prompt.new
            state.cost.observe_prefill(prefiller.worker_id, prompt.new, prompt.reused, now - began)
            self._keep(prefiller.worker_id, arrival.hashes)
            size = max(0, full - resident) * setup.block_bytes
            starts = began if setup.is_overlapped else now
            layers = setup.layers if setup.is_overlapped else 1
            arrives = self.network.stream(starts, now, prefiller.host, target_host, size, layers)
            self.loop.at(arrives, lambda: sent(now))
            return now if setup.is_overlapped else arrives

        def sent(computed_at: float) -> None:
            now = self.loop.now
            state.reserve_bytes(decision.target_node, -new_bytes)
            if setup.serving == "pooled":
                self.pool.store(target, arrival.hashes)
            state.in_flight.prefilled(arrival.request_id, now)
            size = max(0, full - resident) * setup.block_bytes
            if size and prefiller.host != target_host and not setup.is_overlapped:
                state.cost.observe_transfer(size, now - computed_at, same_host=False)
            loaded = self.network.transfer(now, target_host, decoder.host, size)
            own = self._leading(self._engines[decoder.worker_id], arrival.hashes)
            if setup.serving == "pooled" and own < resident:
                loaded = max(loaded, self._fetch(now, arrival, own, resident, decoder.host))
            self.loop.at(loaded, tail)

        def tail() -> None:
            left = max(1, arrival.prompt_tokens - full * setup.block_tokens)
            self._decode(request, decision, left, arrival.prompt_tokens - left)

        prompt = Prompt(
            arrival.request_id, max(1, full * setup.block_tokens), 0, 0, prefilled, fetch
        )
        self.instances[prefiller.worker_id].add(prompt)

    def _local(self, request: SimulatedRequest, decision: Decision) -> None:
        """Read what pays, and compute the rest at the decode instance."""
        assert decision.decode is not None
        arrival, setup = request.arrival, self.setup
        spec = self._specs[decision.decode]
        ready, have, _ = self._read(request, decision.reuse_blocks, spec.worker_id, spec.host)
        reused = min(have * setup.block_tokens, arrival.prompt_tokens - 1)

        def begin() -> None:
            self._decode(request, decision, arrival.prompt_tokens - reused, reused)

        self.loop.at(ready, begin)

    def _decode(self, request: SimulatedRequest, decision: Decision, new: int, reused: int) -> None:
        """Compute the rest of the prompt at the decode instance, and decode."""
        assert decision.decode is not None
        arrival, setup, state = request.arrival, self.setup, self.state
        instance, spec = self.instances[decision.decode], self._specs[decision.decode]
        is_local = decision.mode == "local"
        context = arrival.prompt_tokens + arrival.output_tokens // 2
        if (
            setup.tpot_check != "scheduler"
            and not is_local
            and 0 < setup.slo_tpot_s < instance.tpot_with(context)
        ):
            self._end(request)
            self._refuse(request, "tpot_slo", is_wasted=True)
            return

        def first(began: float) -> float:
            now = self.loop.now
            request.first_at = now
            request.computed_tokens += new
            if is_local:
                request.reused_tokens = reused
                state.in_flight.prefilled(arrival.request_id, now)
                state.cost.observe_prefill(spec.worker_id, new, reused, now - began)
                self._keep(spec.worker_id, arrival.hashes)
                node = self._node_of(spec.host)
                if setup.serving == "pooled" and node is not None:
                    self.pool.store(node, arrival.hashes)
            if setup.slo_ttft_s and request.ttft_s > setup.slo_ttft_s:
                self._report_attainment(request, is_late=True, is_slow=False)
            return now

        def finished() -> None:
            request.finished_at = self.loop.now
            self._open -= 1
            is_late = bool(setup.slo_ttft_s and request.ttft_s > setup.slo_ttft_s)
            is_slow = bool(setup.slo_tpot_s and request.tpot_s > setup.slo_tpot_s)
            self._report_attainment(request, is_late=is_late, is_slow=is_slow)
            self._end(request)

        instance.add(
            Prompt(
                arrival.request_id,
                new,
                reused,
                arrival.output_tokens,
                first,
                finished=finished,
            )
        )

    def _end(self, request: SimulatedRequest) -> None:
        self._active -= 1
        self.state.in_flight.finished(request.arrival.request_id)

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
        self.loop.at(now + self.setup.heartbeat_s, self._heartbeat)

    def _report_overdue(self, request: SimulatedRequest) -> None:
        if request.first_at < 0 and not request.refused:
            self._report_attainment(request, is_late=True, is_slow=False)

    def _report_attainment(
        self, request: SimulatedRequest, *, is_late: bool, is_slow: bool
    ) -> None:
        """Report once per request to the role controller which objectives were met.

        As `conductor.gateway.slo_attainment` does.
        """
        if self._controller is None or request.is_attainment_reported:
            return
        request.is_attainment_reported = True
        is_local = request.decision is not None and request.decision.mode == "local"
        self._controller.ended(
            self.loop.now,
            is_ttft_met=not is_late or is_local,
            is_tpot_met=not is_slow and not (is_late and is_local),
        )

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
