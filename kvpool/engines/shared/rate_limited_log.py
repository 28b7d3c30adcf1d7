"""Warnings at a bounded rate, so that a pool that is down does not fill an engine's log."""

from __future__ import annotations

import logging
import threading

PERIOD_S = 10.0


class RateLimitedLog:
    """Writes one message of each kind per period, and how many it left out since the last one.

    Args:
        name: the logger's name.
        period_s: time between two messages of one kind.
    """

    def __init__(self, name: str, period_s: float = PERIOD_S) -> None:
        self._logger = logging.getLogger(name)
        self._period_s = period_s
        self._lock = threading.Lock()
        self._kinds: dict[str, tuple[float, int]] = {}  # when last written, how many left out since

    def report(
        self, kind: str, text: str, now: float, *, error: BaseException | None = None
    ) -> bool:
        """Log `kvpool: kind: text` unless this kind was logged within the period.

        Returns whether it logged.

        Args:
            kind: one of a few kinds; details belong in `text`.
            now: monotonic seconds.
            error: a defect in kvpool; logged as an error with its traceback instead of a warning.
        """
        with self._lock:
            written_at, left_out = self._kinds.get(kind, (float("-inf"), 0))
            if now - written_at < self._period_s:
                self._kinds[kind] = (written_at, left_out + 1)
                return False
            self._kinds[kind] = (now, 0)
        more = f" (and {left_out} like it since the last such line)" if left_out else ""
        level = logging.WARNING if error is None else logging.ERROR
        self._logger.log(level, "kvpool: %s: %s%s", kind, text, more, exc_info=error)
        return True
