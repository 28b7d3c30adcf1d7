"""Least recently used first."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from tiers.policies.base import EvictionPolicy, K, always
from tiers.policies.lazy_heap import LazyHeap


class Lru(EvictionPolicy[K]):
    """By recency alone. A long scan flushes it, and it ignores that blocks form chains."""

    is_by_recency: ClassVar[bool] = True

    def __init__(self, may_go: Callable[[K], bool] = always) -> None:
        self._heap: LazyHeap[K] = LazyHeap(lambda key: key.last_use, may_go)

    def offer(self, key: K) -> None:
        """Add the block, or offer it again."""
        self._heap.offer(key)

    def discard(self, key: K) -> None:
        """Forget the block."""
        self._heap.discard(key)

    def victim(self) -> K | None:
        """The block whose last use is the oldest."""
        return self._heap.lowest()

    def __contains__(self, key: K) -> bool:
        return key in self._heap
