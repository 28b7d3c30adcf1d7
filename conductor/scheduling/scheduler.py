"""The scheduler: where to prefill and decode one request, what to reuse, what to refuse.

A strategy (`conductor.scheduling.strategies`) makes the choice. The default is Mooncake's Algorithm
1 by predicted cost. Under every strategy, a request that no choice would serve within its
objectives is refused on arrival and not after its prefill (early rejection). The load predicted for
the end of the prefill decides.

The simulator runs this code too.
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
    """Decide with the configured strategy.

    Changes nothing; `InFlight.assigned` records the decision.

    Raises:
        ConfigError: no such strategy.
    """
    name = inputs.config.strategy
    return replace(strategy_named(name).decide(request, inputs, now), strategy=name)
