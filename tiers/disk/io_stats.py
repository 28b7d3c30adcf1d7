"""How fast a tier's device reads or writes, learnt from its own traffic, and the bytes queued before it.

Measures, decides nothing. Pure: `now` is monotonic seconds and given; not thread-safe. Idle time
neither counts nor makes anything older: figures are over the time in which something was under way.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

# What was seen loses half its weight with so much busy time (so that a disk that became slow is
# seen through within a few operations) and with so many operations (so that one that recovered is,
# too).
HALF_LIFE_S = 1.0
HALF_LIFE_OPERATIONS = 16.0
MIN_OPERATIONS = 4  # before anything is said; or, of a slow device,
MIN_BUSY_S = 0.25  # so much time in which it worked


@dataclass(slots=True)
class _Depth:
    """Decaying sums over the time in which one, or in which several, were under way."""

    busy_s: float = 0.0
    size_bytes: float = 0.0
    operations: float = 0.0  # not decaying: evidence once seen
    fresh_operations: float = (
        0.0  # since time was last taken in: those that end together count as one lot
    )

    def add(self, busy_s: float, size_bytes: float, operations: float) -> None:
        if busy_s > 0:
            keep = 0.5 ** (busy_s / HALF_LIFE_S + self.fresh_operations / HALF_LIFE_OPERATIONS)
            self.busy_s = self.busy_s * keep + busy_s
            self.size_bytes *= keep
            self.fresh_operations = 0.0
        self.size_bytes += size_bytes
        self.operations += operations
        self.fresh_operations += operations

    @property
    def bytes_per_s(self) -> float:
        is_enough = self.operations >= MIN_OPERATIONS or self.busy_s >= MIN_BUSY_S
        return self.size_bytes / self.busy_s if is_enough and self.busy_s > 0 else 0.0


@dataclass(slots=True, frozen=True)
class Operation:
    """One transfer under way: when it began, and what had been busy by then."""

    began: float
    busy_s: tuple[float, float]


class Throughput:
    """One direction of one device: bytes per second while it works, and seconds that one operation takes.

    A device that is asked for one thing at a time gives less than one that is asked for many: both
        are learnt, an operation counting to each for the share of its time.
    """

    def __init__(self) -> None:
        self.operation_s = 0.0  # smoothed, from the thread's begin to its end; 0 until one ended
        self._depths = (_Depth(), _Depth())  # alone; beside others
        self._busy_s = [0.0, 0.0]  # ever
        self._folded_s = [0.0, 0.0]  # of these, what the sums have
        self._active = 0
        self._seen = float("-inf")

    def begin(self, now: float) -> Operation:
        """An operation begins; hand what is returned to `end`."""
        self._elapse(now)
        self._active += 1
        return Operation(now, (self._busy_s[0], self._busy_s[1]))

    def end(self, operation: Operation, size_bytes: int, now: float) -> None:
        """It is over, having moved `size_bytes` (0: it failed)."""
        self._elapse(now)
        self._active -= 1
        spent = [self._busy_s[i] - operation.busy_s[i] for i in (0, 1)]
        total = sum(spent)
        for i, depth in enumerate(self._depths):
            fresh_s = self._busy_s[i] - self._folded_s[i]
            self._folded_s[i] = self._busy_s[i]
            share = spent[i] / total if total > 0 else 0.0
            depth.add(fresh_s, size_bytes * share, share if size_bytes else 0.0)
        if size_bytes:
            took_s = now - operation.began
            self.operation_s += (took_s - self.operation_s) * (0.2 if self.operation_s else 1.0)

    @property
    def bytes_per_s(self) -> float:
        """With several operations under way, which is how runs are moved; 0 while unknown."""
        return self._depths[1].bytes_per_s or self._depths[0].bytes_per_s

    def idle_s(self, now: float) -> float:
        """Since something was last under way; infinite when nothing ever was."""
        return 0.0 if self._active else now - self._seen

    def seconds(self, size_bytes: float, operations: int) -> float | None:
        """What moving `size_bytes` in so many operations takes; None while unknown."""
        if size_bytes <= 0:
            return 0.0
        alone, beside = (depth.bytes_per_s for depth in self._depths)
        rate = (beside or alone) if operations > 1 else (alone or beside)
        return size_bytes / rate if rate else None

    def _elapse(self, now: float) -> None:
        if self._active:
            self._busy_s[self._active > 1] += max(0.0, now - self._seen)
        self._seen = now


class ByteQueue:
    """What was handed to a device and is not over, first in, first out."""

    def __init__(self) -> None:
        self._ends: dict[Hashable, tuple[int, int]] = {}  # key -> (size, position of its end)
        self._entered = 0
        self._left = 0

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def size_bytes(self) -> int:
        """All that is under way or waiting."""
        return self._entered - self._left

    def enter(self, key: Hashable, size_bytes: int) -> None:
        """Something takes its place at the end."""
        self._entered += size_bytes
        self._ends[key] = (size_bytes, self._entered)

    def leave(self, key: Hashable) -> None:
        """It is over; unknown keys are ignored."""
        size_bytes, _ = self._ends.pop(key, (0, 0))
        self._left += size_bytes

    def bytes_until(self, key: Hashable) -> int:
        """Bytes still to move until it is over, its own included; 0 when it is not here.

        Several are under way at once and end in any order, so this may be off by as many
        operations.
        """
        size_bytes, end = self._ends.get(key, (0, 0))
        return max(size_bytes, end - self._left)
