"""The contract of a scheduling strategy."""

from __future__ import annotations

from typing import Protocol

from conductor.scheduling.decision import Decision
from conductor.scheduling.inputs import ScheduleRequest, SchedulingInputs


class Strategy(Protocol):
    """A way to decide for one request.

    Implementations depend on their arguments only. They serve the request, or refuse it with a
    reason; a lack of workers raises nothing.
    """

    def decide(
        self, request: ScheduleRequest, inputs: SchedulingInputs, now: float
    ) -> Decision: ...
