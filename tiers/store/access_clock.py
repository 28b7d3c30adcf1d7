"""When a tick was given out: within a second or so for recent ones, less exactly for old ones. Bounded."""

from __future__ import annotations

from bisect import bisect_left

SAMPLE_S = 1.0
MAX_SAMPLES = 16_384


class AccessClock:
    """Samples of (tick, time), denser for the recent past."""

    def __init__(self) -> None:
        self._ticks: list[int] = []
        self._times: list[float] = []  # monotonic seconds

    def note(self, tick: int, now: float) -> None:
        """Record that `tick` is the last one given out by `now` (monotonic seconds)."""
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
