"""Which role served a request well: what the role controller learns from. Told once of each request."""

from __future__ import annotations

import time
from collections.abc import Callable

from conductor.gateway.request import Result

JUDGE_AFTER_TOKENS = 16  # TPOT is known well enough by then

OnOutcome = Callable[[bool, bool], None]  # whether prefill and decode met their objectives


class Judge:
    """Requests in work, and who is told whether they met their objectives.

    Args:
        ttft_s, tpot_s: the objectives; 0 is none.
        on_outcome: told of every request served or refused.
    """

    def __init__(self, ttft_s: float, tpot_s: float, on_outcome: OnOutcome) -> None:
        self._ttft_s = ttft_s
        self._tpot_s = tpot_s
        self._on_outcome = on_outcome
        self._waiting: dict[str, tuple[Result, float]] = {}

    def began(self, request_id: str, result: Result, received_at: float) -> None:
        """A request is in work from now on."""
        self._waiting[request_id] = (result, received_at)

    def ended(self, request_id: str) -> None:
        """It is not any more."""
        self._waiting.pop(request_id, None)

    def refused(self, reason: str) -> None:
        """A request was refused; for want of an objective that could not be met counts as missed."""
        if reason in ("ttft_slo", "tpot_slo"):
            self._on_outcome(reason != "ttft_slo", reason != "tpot_slo")

    def progressed(self, result: Result) -> None:
        """Tokens came."""
        if len(result.token_ids) >= JUDGE_AFTER_TOKENS:
            self.judge(result)

    def judge_overdue(self) -> None:
        """Count what waits for its first token beyond its objective as late now, not when it ends.

        A worker that is overwhelmed ends nothing: whoever waits for outcomes would learn of it last.
        """
        now = time.monotonic()
        for result, received_at in self._waiting.values():
            if self._ttft_s and not result.token_ids and now - received_at > self._ttft_s:
                self.judge(result, is_late=True)

    def judge(self, result: Result, *, is_late: bool = False) -> None:
        """Tell once of each request which role served it well; an objective of 0 is none.

        A decode worker that prefilled too late lacks help as much as one that decodes too slowly.
        """
        if result.is_judged:
            return
        result.is_judged = True
        is_late = is_late or bool(self._ttft_s and result.ttft_s > self._ttft_s)
        is_slow = bool(self._tpot_s and result.tpot_s > self._tpot_s)
        is_local = result.decision is not None and result.decision.mode == "local"
        self._on_outcome(not is_late or is_local, not is_slow and not (is_late and is_local))
