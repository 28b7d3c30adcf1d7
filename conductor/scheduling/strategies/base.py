"""What a strategy is: the way to decide for one request. One file for each beside this one."""

from __future__ import annotations

from typing import Protocol

from conductor.scheduling.decision import Decision
from conductor.scheduling.inputs import ScheduleRequest, SchedulingInputs


class Strategy(Protocol):
    """A way to decide. Must be pure, and serve or refuse with a reason; never raise for lack of workers."""

    def decide(
        self, request: ScheduleRequest, inputs: SchedulingInputs, now: float
    ) -> Decision: ...
