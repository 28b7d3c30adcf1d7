"""First in, first out."""

from __future__ import annotations

from collections.abc import Callable

from tiers.policies.base import EvictionPolicy, K, always
from tiers.policies.lazy_heap import LazyHeap


class Fifo(EvictionPolicy[K]):
    """In the order of arrival, whatever was used since: the baseline for all others."""

    def __init__(self, may_go: Callable[[K], bool] = always) -> None:
        self._arrivals: dict[K, int] = {}
        self._arrived = 0
        self._heap: LazyHeap[K] = LazyHeap(self._arrivals.__getitem__, may_go)

    def offer(self, key: K) -> None:
        """Add the block at the end of the queue, or offer it again."""
        if key not in self._arrivals:
            self._arrived += 1
            self._arrivals[key] = self._arrived
        self._heap.offer(key)

    def discard(self, key: K) -> None:
        """Forget the block and its arrival."""
        self._heap.discard(key)
        self._arrivals.pop(key, None)

    def victim(self) -> K | None:
        """The block that arrived first."""
        return self._heap.lowest()

    def __contains__(self, key: K) -> bool:
        return key in self._heap
