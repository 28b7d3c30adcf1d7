"""Whether prefill and decode met a request's objectives, told once per request. Pure."""

from __future__ import annotations

from conductor.requests.events import Action, RecordSlo
from conductor.requests.measurements import Measurements
from conductor.requests.request import Objectives
from conductor.scheduling.decision import Decision

TPOT_AFTER_TOKENS = 16  # enough tokens for a reliable TPOT


class SloRecord:
    """The objectives of one request, until what became of them was told.

    Args:
        received_at: when its first byte arrived, in monotonic seconds.
    """

    def __init__(self, objectives: Objectives, received_at: float) -> None:
        self._objectives = objectives
        self._received_at = received_at
        self.is_told = False

    def refused(self, reason: str) -> list[Action]:
        """Tell of a refusal. It counts against the objective that could not be met."""
        if reason not in ("ttft_slo", "tpot_slo"):
            return []
        self.is_told = True
        return [RecordSlo(reason != "ttft_slo", reason != "tpot_slo")]

    def due(self, measured: Measurements) -> float | None:
        """When the request is late without a first token; None if that does not matter (any more).

        An overloaded worker finishes nothing, so waiting for completions would tell it too late.
        """
        if not self._objectives.ttft_s or measured.output_tokens or self.is_told:
            return None
        return self._received_at + self._objectives.ttft_s

    def progressed(self, measured: Measurements, decision: Decision | None) -> list[Action]:
        """Tell if the request is late, or has enough tokens for its TPOT."""
        is_late = 0 < self._objectives.ttft_s < measured.ttft_s
        if is_late or measured.output_tokens >= TPOT_AFTER_TOKENS:
            return self.tell(measured, decision)
        return []

    def tell(
        self, measured: Measurements, decision: Decision | None, *, is_late: bool = False
    ) -> list[Action]:
        """Tell which role met its objective, once.

        If a decode worker prefilled by itself and was late, decode missed its objective, not
        prefill.
        """
        if self.is_told:
            return []
        self.is_told = True
        is_late = is_late or 0 < self._objectives.ttft_s < measured.ttft_s
        is_slow = 0 < self._objectives.tpot_s < measured.tpot_s
        is_local = decision is not None and decision.mode == "local"
        return [RecordSlo(not is_late or is_local, not is_slow and not (is_late and is_local))]
