"""Orders uses by ticks, and knows when a tick was given out (recent ones to a second or so)."""

from __future__ import annotations

from bisect import bisect_left

SAMPLE_S = 1.0
MAX_SAMPLES = 16_384


class AccessClock:
    """Gives out ticks (later is larger) and samples (tick, time), denser for the recent past."""

    def __init__(self) -> None:
        self.tick = 0  # the last one that was given out
        self._ticks: list[int] = []
        self._times: list[float] = []  # monotonic seconds

    def advance(self, count: int) -> int:
        """Take `count` ticks for a run; returns the last one, which is for the head of the run."""
        self.tick += count
        return self.tick

    def advance_to(self, tick: int) -> None:
        """Give out only ticks after this one."""
        self.tick = max(self.tick, tick)

    def sample(self, now: float) -> None:
        """Record that the last tick was given out by `now` (monotonic seconds)."""
        tick = self.tick
        if self._times and now - self._times[-1] < SAMPLE_S:
            self._ticks[-1] = tick
            return
        if self._times and tick == self._ticks[-1]:
            return
        self._ticks.append(tick)
        self._times.append(now)
        if len(self._times) > MAX_SAMPLES:
            old = MAX_SAMPLES // 2
            self._ticks = self._ticks[:old:2] + self._ticks[old:]
            self._times = self._times[:old:2] + self._times[old:]

    def age_s(self, tick: int, now: float) -> float:
        """Seconds since `tick` was given out; too few by at most the distance of two samples."""
        at = bisect_left(self._ticks, tick)
        return max(0.0, now - self._times[at]) if at < len(self._times) else 0.0
