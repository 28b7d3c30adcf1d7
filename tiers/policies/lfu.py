"""Least frequently used first."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from tiers.policies.base import EvictionPolicy, K, always
from tiers.policies.lazy_heap import LazyHeap


class Lfu(EvictionPolicy[K]):
    """By uses since arrival, then by recency. Formerly hot blocks stay long."""

    wants_uses: ClassVar[bool] = True

    def __init__(self, may_go: Callable[[K], bool] = always) -> None:
        self._uses: dict[K, int] = {}
        self._heap: LazyHeap[K] = LazyHeap(lambda key: (self._uses[key], key.last_use), may_go)

    def offer(self, key: K) -> None:
        """Add the block without uses, or offer it again."""
        self._uses.setdefault(key, 0)
        self._heap.offer(key)

    def used(self, key: K) -> None:
        """Count a use."""
        if key in self._uses:
            self._uses[key] += 1

    def discard(self, key: K) -> None:
        """Forget the block and its uses."""
        self._heap.discard(key)
        self._uses.pop(key, None)

    def victim(self) -> K | None:
        """The block with the fewest uses."""
        return self._heap.lowest()

    def __contains__(self, key: K) -> bool:
        return key in self._heap
