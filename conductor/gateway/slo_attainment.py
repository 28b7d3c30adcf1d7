"""SLO attainment: whether prefill and decode met each request's objectives."""

from __future__ import annotations

import time
from collections.abc import Callable

from conductor.gateway.request import GenerationResult

TPOT_AFTER_TOKENS = 16  # enough tokens for a reliable TPOT

# (prefill met its objective, decode met its objective)
OnSloRecorded = Callable[[bool, bool], None]


class SloAttainment:
    """Records once per request whether it met its objectives.

    Args:
        ttft_s, tpot_s: the objectives; 0 means none.
        on_slo_recorded: called once for every request that was served, or refused for an objective.
    """

    def __init__(self, ttft_s: float, tpot_s: float, on_slo_recorded: OnSloRecorded) -> None:
        self._ttft_s = ttft_s
        self._tpot_s = tpot_s
        self._on_slo_recorded = on_slo_recorded
        self._active: dict[str, tuple[GenerationResult, float]] = {}

    def began(self, request_id: str, result: GenerationResult, received_at: float) -> None:
        """Track a request that starts to run."""
        self._active[request_id] = (result, received_at)

    def ended(self, request_id: str) -> None:
        """Stop tracking a request."""
        self._active.pop(request_id, None)

    def refused(self, reason: str) -> None:
        """Record a refusal. It counts against the objective that could not be met."""
        if reason in ("ttft_slo", "tpot_slo"):
            self._on_slo_recorded(reason != "ttft_slo", reason != "tpot_slo")

    def progressed(self, result: GenerationResult) -> None:
        """Record the request if it has enough tokens for its TPOT."""
        if len(result.token_ids) >= TPOT_AFTER_TOKENS:
            self.record(result)

    def record_overdue(self) -> None:
        """Record requests that still wait for their first token after the TTFT objective as late.

        An overloaded worker finishes nothing, so waiting for completions would detect it too late.
        """
        now = time.monotonic()
        for result, received_at in self._active.values():
            if self._ttft_s and not result.token_ids and now - received_at > self._ttft_s:
                self.record(result, is_late=True)

    def record(self, result: GenerationResult, *, is_late: bool = False) -> None:
        """Report which role met its objective, once per request.

        If a decode worker prefilled by itself and was late, decode missed its objective, not
        prefill.
        """
        if result.is_slo_recorded:
            return
        result.is_slo_recorded = True
        is_late = is_late or bool(self._ttft_s and result.ttft_s > self._ttft_s)
        is_slow = bool(self._tpot_s and result.tpot_s > self._tpot_s)
        is_local = result.decision is not None and result.decision.mode == "local"
        self._on_slo_recorded(not is_late or is_local, not is_slow and not (is_late and is_local))
