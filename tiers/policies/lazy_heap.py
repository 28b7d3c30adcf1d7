"""A heap that checks its entries when they reach the top, so that uses and pins need no update."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class LazyHeap(Generic[T]):
    """Items by `priority`, lowest first, each at most once. O(log n) amortised.

    Args:
        priority: current value of an item; it may grow while the item is in the heap, never fall.
        may_go: called when an item reaches the top; False removes the item until it is offered
            again.
    """

    def __init__(self, priority: Callable[[T], Any], may_go: Callable[[T], bool]) -> None:
        self._priority = priority
        self._may_go = may_go
        self._heap: list[tuple[Any, int, T]] = []
        self._members: set[T] = set()
        self._pushes = 0  # breaks ties, so that items are never compared

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[T]:
        return iter(self._members)

    def __contains__(self, item: T) -> bool:
        return item in self._members

    def offer(self, item: T) -> None:
        """Add the item unless it is here."""
        if item not in self._members:
            self._members.add(item)
            self._push(item)

    def discard(self, item: T) -> None:
        """Remove the item; its entry goes when it reaches the top or at the next compaction."""
        if item in self._members:
            self._members.remove(item)
            if len(self._heap) > 64 and len(self._heap) > 2 * len(self._members):
                self._heap = [entry for entry in self._heap if entry[2] in self._members]
                heapify(self._heap)

    def lowest(self, excluded: Callable[[T], bool] | None = None) -> T | None:
        """The first item that may leave and is not excluded; it stays in the heap."""
        aside: list[T] = []
        lowest: T | None = None
        while self._heap:
            priority, _, item = self._heap[0]
            if item not in self._members:
                heappop(self._heap)
                continue
            current = self._priority(item)
            if not self._may_go(item):
                heappop(self._heap)
                self._members.discard(item)
            elif priority != current:
                self._pushes += 1
                heapreplace(self._heap, (current, self._pushes, item))
            elif excluded is not None and excluded(item):
                heappop(self._heap)
                aside.append(item)
            else:
                lowest = item
                break
        for item in aside:
            self._push(item)
        return lowest

    def _push(self, item: T) -> None:
        self._pushes += 1
        heappush(self._heap, (self._priority(item), self._pushes, item))
