"""Where to prefill, where to decode, what to reuse, what to refuse: the decision for one request.

The way to choose is a strategy (`conductor.scheduling.strategies`), by default Mooncake's Algorithm 1 by predicted
cost. Whatever the strategy, a request that no choice would serve within its objectives is refused now, not
after its prefill (early rejection), by the load predicted for when that prefill ends.

Pure and deterministic: no I/O, no clock, no randomness. The simulator runs this very code.
"""

from __future__ import annotations

from dataclasses import replace

from conductor.scheduling.decision import Candidate, Decision
from conductor.scheduling.in_flight import InFlight
from conductor.scheduling.inputs import (
    IDLE,
    NodeStatus,
    SchedulerConfig,
    ScheduleRequest,
    SchedulingInputs,
    WorkerStatus,
)
from conductor.scheduling.strategies import (
    Strategy,
    refuse,
    register_strategy,
    strategies,
    strategy_named,
)

__all__ = [
    "IDLE",
    "Candidate",
    "Decision",
    "InFlight",
    "NodeStatus",
    "ScheduleRequest",
    "SchedulerConfig",
    "SchedulingInputs",
    "Strategy",
    "WorkerStatus",
    "refuse",
    "register_strategy",
    "schedule",
    "strategies",
]


def schedule(request: ScheduleRequest, inputs: SchedulingInputs, now: float) -> Decision:
    """Decide with the strategy that the policy names. Changes nothing; see `InFlight.assigned`.

    Raises:
        ConfigError: no such strategy.
    """
    name = inputs.config.strategy
    return replace(strategy_named(name).decide(request, inputs, now), strategy=name)
