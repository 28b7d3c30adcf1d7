"""Keeps engines from waiting for a pool that is down. No I/O, no clock.

After a failure, everything is a miss until a back-off has passed. Then one caller tries, and its
result decides for all callers.
"""

from __future__ import annotations

import threading

from kvpool.errors import REFUSALS, DeadlineExceeded, KvpoolError, Unavailable


def says_pool_is_down(error: KvpoolError) -> bool:
    """Whether `error` means that the whole pool does not answer.

    Subclasses of `Unavailable` (a node drains, a transfer broke) concern one node only.
    """
    return type(error) in (Unavailable, DeadlineExceeded, *REFUSALS)


class CircuitBreaker:
    """Decides whether to call the pool. Threads may share it.

    Args:
        backoff_s: pause after a first failure; each further failure doubles it.
        max_backoff_s: longest pause.
    """

    def __init__(self, backoff_s: float, max_backoff_s: float) -> None:
        self._first_s = backoff_s
        self._max_s = max_backoff_s
        self._lock = threading.Lock()
        self._backoff_s = 0.0  # 0: the last call was answered
        self._closed_until = 0.0
        self._is_tried = False  # one caller is trying after a back-off

    @property
    def is_down(self) -> bool:
        """Whether the last call was not answered."""
        return self._backoff_s > 0

    def may_ask(self, now: float) -> bool:
        """Whether to call now. After a back-off, this is true for one caller per period."""
        with self._lock:
            if not self._backoff_s:
                return True
            if now < self._closed_until:
                return False
            self._closed_until = now + self._backoff_s
            self._is_tried = True
            return True

    def answered(self) -> bool:
        """Record that the pool answered. Returns whether it had been down."""
        with self._lock:
            was_down = self._backoff_s > 0
            self._backoff_s = 0.0
            self._is_tried = False
            return was_down

    def failed(self, now: float) -> bool:
        """Record that the pool did not answer. Returns whether it had answered the call before."""
        with self._lock:
            was_up = not self._backoff_s
            if was_up or self._is_tried:  # of calls that fail together, only the first counts
                self._is_tried = False
                self._backoff_s = min(self._max_s, 2 * self._backoff_s or self._first_s)
                self._closed_until = now + self._backoff_s
            return was_up
