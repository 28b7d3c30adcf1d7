"""How fast a tier's device reads and writes, measured from its traffic, and the bytes in its queue.

Pure: `now` is an argument, in monotonic seconds. Not thread-safe. Figures cover the time in which
    an operation was running; idle time does not count and does not age them.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

# A measurement loses half its weight after so much busy time, so that a disk that became slow shows
# within a few operations, and after so many operations, so that one that recovered shows too.
HALF_LIFE_S = 1.0
HALF_LIFE_OPERATIONS = 16.0
MIN_OPERATIONS = 4  # before a figure is given; a slow device instead needs
MIN_BUSY_S = 0.25  # so much busy time


@dataclass(slots=True)
class _Depth:
    """Decaying sums over the time in which one operation, or several, were running."""

    busy_s: float = 0.0
    size_bytes: float = 0.0
    operations: float = 0.0  # does not decay
    fresh_operations: float = 0.0  # since busy time last grew: operations that end together

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
    """A running transfer: when it began, and the busy time by then."""

    began: float
    busy_s: tuple[float, float]


class Throughput:
    """One direction of one device: bytes per second while busy, and seconds per operation.

    A device is faster with several operations in its queue. Both speeds are measured; an operation
    counts for each by its share of time.
    """

    def __init__(self) -> None:
        self.operation_s = 0.0  # smoothed duration of one operation; 0 until one ended
        self._depths = (_Depth(), _Depth())  # one operation alone; several
        self._busy_s = [0.0, 0.0]  # since the start
        self._folded_s = [0.0, 0.0]  # the part of it that is in the sums
        self._active = 0
        self._seen = float("-inf")

    def begin(self, now: float) -> Operation:
        """Begin an operation; pass the result to `end`."""
        self._elapse(now)
        self._active += 1
        return Operation(now, (self._busy_s[0], self._busy_s[1]))

    def end(self, operation: Operation, size_bytes: int, now: float) -> None:
        """End an operation that moved `size_bytes` (0: it failed)."""
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
        """The speed with several operations running, as for runs of blocks; 0 while unknown."""
        return self._depths[1].bytes_per_s or self._depths[0].bytes_per_s

    def idle_s(self, now: float) -> float:
        """Seconds since the last operation; infinite if there was none."""
        return 0.0 if self._active else now - self._seen

    def seconds(self, size_bytes: float, operations: int) -> float | None:
        """How long moving `size_bytes` in so many operations takes; None while unknown."""
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
    """The unfinished operations of a device, first in, first out."""

    def __init__(self) -> None:
        self._ends: dict[Hashable, tuple[int, int]] = {}  # key -> (size, position of its end)
        self._entered = 0
        self._left = 0

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def size_bytes(self) -> int:
        """Bytes that are running or waiting."""
        return self._entered - self._left

    def enter(self, key: Hashable, size_bytes: int) -> None:
        """Add an operation at the end."""
        self._entered += size_bytes
        self._ends[key] = (size_bytes, self._entered)

    def leave(self, key: Hashable) -> None:
        """Remove an operation; unknown keys are ignored."""
        size_bytes, _ = self._ends.pop(key, (0, 0))
        self._left += size_bytes

    def bytes_until(self, key: Hashable) -> int:
        """Bytes to move until this operation ends, its own included; 0 for an unknown key.

        Running operations end in any order, so the figure may be off by the operations that run at
        once.
        """
        size_bytes, end = self._ends.get(key, (0, 0))
        return max(size_bytes, end - self._left)
