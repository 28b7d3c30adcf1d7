"""When to ask the pool, and when to take a miss for granted because it did not answer just now. No I/O, no clock.

An engine must not wait for a pool that is down: after a failure everything is a miss until a back-off has
passed; then one caller tries, and its outcome decides for all.
"""

from __future__ import annotations

import threading

from kvpool.errors import REFUSALS, DeadlineExceeded, KvpoolError, Unavailable


def says_pool_is_down(error: KvpoolError) -> bool:
    """Whether a call failed because nobody answered it, or will: another one would most likely end alike.

    What is more than `Unavailable` (a node drains, a transfer broke) is the trouble of one node, not of the pool.
    """
    return type(error) in (Unavailable, DeadlineExceeded, *REFUSALS)


class CircuitBreaker:
    """Whether the pool is worth asking; safe to share between threads.

    Args:
        backoff_s: how long a first failure keeps callers away; each further one doubles it.
        max_backoff_s: longest such time.
    """

    def __init__(self, backoff_s: float, max_backoff_s: float) -> None:
        self._first_s = backoff_s
        self._max_s = max_backoff_s
        self._lock = threading.Lock()
        self._backoff_s = 0.0  # 0: it answered last
        self._closed_until = 0.0
        self._is_tried = False  # somebody was sent ahead after a back-off
        self.failures = 0

    @property
    def is_down(self) -> bool:
        """Whether the last word from the pool was that there is none."""
        return self._backoff_s > 0

    def may_ask(self, now: float) -> bool:
        """Whether to call now. After a back-off this is true for one caller a period: it tries for all."""
        with self._lock:
            if not self._backoff_s:
                return True
            if now < self._closed_until:
                return False
            self._closed_until = now + self._backoff_s
            self._is_tried = True
            return True

    def answered(self) -> bool:
        """The pool answered; returns whether it had been down."""
        with self._lock:
            was_down = self._backoff_s > 0
            self._backoff_s = 0.0
            self._is_tried = False
            return was_down

    def failed(self, now: float) -> bool:
        """The pool did not answer; returns whether that is news: it had answered before."""
        with self._lock:
            was_up = not self._backoff_s
            if was_up or self._is_tried:  # of calls that fail together, the first one counts
                self._is_tried = False
                self._backoff_s = min(self._max_s, 2 * self._backoff_s or self._first_s)
                self._closed_until = now + self._backoff_s
            self.failures += 1
            return was_up
