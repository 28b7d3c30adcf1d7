"""The gateway and the simulator do the same about the same events: every action is compared.

A simulated run tells the events: when each request arrived, what was decided for it, and when and how
each call was answered. The gateway then serves the same arrivals in virtual time, over connections
that answer as the simulated ones did.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.local_cluster import local_cluster
from conductor.cluster.cluster import Cluster
from conductor.gateway.gateway import Gateway
from conductor.gateway.request import GenerationRequest
from conductor.gateway.runner import RequestRun
from conductor.requests import admission as a
from conductor.requests import events as e
from conductor.requests.admission import AdmissionLimits
from conductor.requests.lifecycle import Patience
from conductor.requests.request import Plan
from conductor.requests.request_log import RequestLog
from kvpool.errors import KvpoolError
from kvpool.wire import messages as m
from planner.simulator.policy_cache import cache_factory
from planner.simulator.scenario import Group, Scenario, setup_of
from planner.simulator.setup import Setup
from planner.simulator.simulated_run import FOREVER
from planner.simulator.simulation import Simulation
from planner.simulator.workload import Arrival, Shape, arrivals, synthetic
from planner.sizing.model_presets import model_named
from tests.support.scripted import NAMESPACE, PATIENT
from tests.support.virtual_loop import VirtualLoop, run_virtually

BASE = Scenario(
    model_named("llama-3-70b"),
    (Group(1),),
    (Group(1),),
    gpu="h100",
    tp=8,
    slo_ttft_s=4,
    slo_tpot_s=0.03,
)
SETTLE_S = 5.0
Step = tuple[Any, tuple[Any, ...]]


def _load() -> list[Arrival]:
    shape = Shape(rate=8, prompt_tokens=6000, output_tokens=150, seconds=20)
    return arrivals(synthetic([shape], seed=5, shared_prefixes=4))


class Recording:
    """The steps of a run: of each request, and of admission under the name ""."""

    def __init__(self) -> None:
        self.steps: dict[str, list[Step]] = defaultdict(list)
        self.times: dict[str, list[tuple[float, Any]]] = defaultdict(list)

    def add(self, request_id: str, event: Any, actions: Sequence[Any], now: float) -> None:
        self.steps[request_id].append((event, tuple(actions)))
        self.times[request_id].append((now, event))

    def of_admission(self) -> list[tuple[float, Any, tuple[Any, ...]]]:
        """Its steps; those of one moment in the order of their requests.

        Reports of the cluster are left out, because the gateway hears of them from members. So are
        the times of ticks, which depend on the order of what happens in one moment.
        """
        steps = [
            (now, event, tuple(one for one in actions if not isinstance(one, a.WakeAt)))
            for (now, event), (_, actions) in zip(self.times[""], self.steps[""], strict=True)
            if not isinstance(event, a.ClusterChanged | a.Closed | a.Tick)
        ]
        return sorted(steps, key=lambda step: (step[0], str(step[1])))


class ReplayingGateway(Gateway):
    """The real gateway; schedulers and connections answer as in a simulated run."""

    def __init__(self, cluster: Cluster, setup: Setup, simulated: Recording, into: Recording):
        super().__init__(
            cluster,
            RequestLog(),
            AdmissionLimits(setup.max_active, setup.max_waiting, setup.max_wait_s),
            patience=Patience(FOREVER, FOREVER, FOREVER),
            prefetches=False,
        )
        self._answers = {
            request_id: [
                one for one in times if not isinstance(one[1], e.Tick | e.Admitted | e.Refused)
            ]
            for request_id, times in simulated.times.items()
            if request_id
        }
        self._plans: dict[str, list[Plan]] = defaultdict(list)
        for _, event in simulated.times[""]:
            if isinstance(event, a.Decided):
                self._plans[event.request_id].append(event.plan)
        on = self.admission.on

        def recorded(event: a.Event, now: float) -> list[a.Action]:
            actions = on(event, now)
            into.add("", event, actions, now)
            return actions

        self.admission.on = recorded  # type: ignore[method-assign]
        self._into = into

    async def _plan(self, request: GenerationRequest, *given: Any, **options: Any) -> Plan:
        return self._plans[request.request_id].pop(0)

    async def call(self, run: RequestRun, action: e.Call) -> e.Event:
        answers = self._answers[run.request.request_id]
        while True:
            event: e.Event
            at, event = answers.pop(0)
            await _until(at)
            if isinstance(event, e.Failed):
                raise event.error
            if not isinstance(event, e.Tokens):
                return event
            run.feed(event)

    def watch(self, run: RequestRun) -> None:
        """Record the steps of a run from its start."""
        on, request_id = run.lifecycle.on, run.request.request_id

        def recorded(event: e.Event, now: float) -> list[e.Action]:
            actions = on(event, now)
            self._into.add(request_id, event, actions, now)
            return actions

        run.lifecycle.on = recorded  # type: ignore[method-assign]


async def _until(at: float) -> None:
    loop = asyncio.get_running_loop()
    due = loop.create_future()
    loop.call_at(at, due.set_result, None)
    await due


async def _serve(gateway: ReplayingGateway, simulation: Simulation, arrival: Arrival) -> None:
    await _until(arrival.at_s)
    # Only the lengths matter: decisions and look-ups come from the simulated run.
    request = GenerationRequest(
        simulation.facts(arrival), NAMESPACE, [1] * 8, m.Sampling(arrival.output_tokens)
    )
    try:
        run = await gateway.admit(request)
    except KvpoolError:
        return
    try:
        while await run.next_item() is not None:
            pass
    except KvpoolError:
        pass
    await run.close()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"admission": "none"},
        {"admission": "late"},
        {"serving": "coupled"},
        {"serving": "disaggregated"},
        {"max_waiting": 20, "max_active": 6},
        {"max_waiting": 3, "max_active": 4, "slo_ttft_s": 0, "slo_tpot_s": 0},
    ],
    ids=str,
)
def test_gateway_and_simulator_do_the_same_about_the_same_events(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    of_setup = {k: v for k, v in changes.items() if k.startswith("max_")}
    of_scenario = {k: v for k, v in changes.items() if k not in of_setup}
    setup = replace(setup_of(replace(BASE, **of_scenario)), **of_setup)
    came = _load()
    simulated, served = Recording(), Recording()
    simulation = Simulation(setup, came, cache_factory("prefix-lru"), simulated.add)
    simulation.run()

    async def replay(loop: VirtualLoop) -> None:
        cluster = local_cluster(PATIENT, loop.time)
        gateway = ReplayingGateway(cluster, setup, simulated, served)
        start = RequestRun.__init__

        def watched(run: RequestRun, *given: Any) -> None:
            start(run, *given)
            gateway.watch(run)

        monkeypatch.setattr(RequestRun, "__init__", watched)
        tasks = [asyncio.create_task(_serve(gateway, simulation, arrival)) for arrival in came]
        beat_at = 0.0
        while not all(task.done() for task in tasks):
            gateway._members_changed()
            beat_at += setup.heartbeat_s
            await _until(beat_at)
        await asyncio.gather(*tasks)
        await gateway.close()

    run_virtually(replay)
    for arrival in came:
        assert served.steps[arrival.request_id] == simulated.steps[arrival.request_id]
    ours, theirs = simulated.of_admission(), served.of_admission()
    assert sum(isinstance(event, a.Arrived) for _, event, _ in ours) == len(came)
    assert theirs == ours
