"""The virtual clock: runs calls by time, and calls of equal time in the order in which they were scheduled."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Call = Callable[[], None]


class EventLoop:
    """Runs calls at their times; `now` is seconds since the start."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls = 0
        self._heap: list[tuple[float, int, Call]] = []
        self._count = 0

    def at(self, when: float, call: Call) -> None:
        """Schedule `call` at `when`. A time in the past means now, after the calls that are already due."""
        self._count += 1
        heapq.heappush(self._heap, (max(when, self.now), self._count, call))

    def run(self, is_done: Callable[[], bool]) -> None:
        """Run until no call is left or `is_done()`."""
        while self._heap and not is_done():
            when, _, call = heapq.heappop(self._heap)
            self.now = when
            self.calls += 1
            call()
