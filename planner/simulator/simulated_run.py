"""Carries out one request's lifecycle in the simulated cluster, as the gateway's runner does."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from conductor.requests import admission as a
from conductor.requests import events as e
from conductor.requests.lifecycle import Patience, RequestLifecycle
from conductor.requests.request import Request
from planner.simulator.run_summary import SimulatedRequest
from planner.simulator.virtual_clock import EventLoop

FOREVER = float("inf")  # simulated workers neither fail nor hang
OnStep = Callable[[str, e.Event | a.Event, Sequence[e.Action | a.Action], float], None]


class Surroundings(Protocol):
    """What a run needs of the simulation."""

    loop: EventLoop
    on_step: OnStep

    def act(self, run: SimulatedRun, action: e.Action) -> None:
        """Carry out an action at the virtual time."""


class SimulatedRun:
    """Carries out one request's lifecycle in the simulated cluster."""

    def __init__(self, simulation: Surroundings, request: SimulatedRequest, facts: Request) -> None:
        self.request = request
        self.lifecycle = RequestLifecycle(facts, Patience(FOREVER, FOREVER, FOREVER))
        request.lifecycle = self.lifecycle
        self._simulation = simulation
        self._events: deque[e.Event] = deque()
        self._is_busy = False
        self._wake_at: float | None = None

    def feed(self, event: e.Event) -> None:
        """Tell the lifecycle what happened, and do what it says; events of actions come after."""
        self._events.append(event)
        if self._is_busy:
            return
        self._is_busy = True
        while self._events:
            happened, now = self._events.popleft(), self._simulation.loop.now
            actions = self.lifecycle.on(happened, now)
            self._simulation.on_step(self.request.arrival.request_id, happened, actions, now)
            for action in actions:
                if isinstance(action, e.WaitUntil):
                    self._wait_until(action.at)
                else:
                    self._simulation.act(self, action)
        self._is_busy = False

    def _wait_until(self, at: float | None) -> None:
        self._wake_at = at
        if at is not None:
            self._simulation.loop.at(at, lambda: self._tick(at))

    def _tick(self, at: float) -> None:
        if at == self._wake_at:
            self._wake_at = None
            self.feed(e.Tick())
