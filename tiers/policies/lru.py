"""Least recently used first."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from tiers.policies.base import EvictionPolicy, K, always
from tiers.policies.lazy_heap import LazyHeap


class Lru(EvictionPolicy[K]):
    """Recency alone. A long scan flushes it, and by itself it does not know that blocks form chains."""

    is_by_recency: ClassVar[bool] = True

    def __init__(self, may_go: Callable[[K], bool] = always) -> None:
        self._heap: LazyHeap[K] = LazyHeap(lambda key: key.last_use, may_go)

    def offer(self, key: K) -> None:
        """See `EvictionPolicy`."""
        self._heap.offer(key)

    def discard(self, key: K) -> None:
        """See `EvictionPolicy`."""
        self._heap.discard(key)

    def victim(self) -> K | None:
        """The one whose last use is the longest ago."""
        return self._heap.lowest()

    def __contains__(self, key: K) -> bool:
        return key in self._heap
