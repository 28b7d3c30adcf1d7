"""Least frequently used first."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from tiers.policies.base import EvictionPolicy, K, always
from tiers.policies.lazy_heap import LazyHeap


class Lfu(EvictionPolicy[K]):
    """By uses since arrival, the less recent first among equals. What was hot once stays long."""

    wants_uses: ClassVar[bool] = True

    def __init__(self, may_go: Callable[[K], bool] = always) -> None:
        self._uses: dict[K, int] = {}
        self._heap: LazyHeap[K] = LazyHeap(lambda key: (self._uses[key], key.last_use), may_go)

    def offer(self, key: K) -> None:
        """See `EvictionPolicy`."""
        self._uses.setdefault(key, 0)
        self._heap.offer(key)

    def used(self, key: K) -> None:
        """One use more."""
        if key in self._uses:
            self._uses[key] += 1

    def discard(self, key: K) -> None:
        """See `EvictionPolicy`."""
        self._heap.discard(key)
        self._uses.pop(key, None)

    def victim(self) -> K | None:
        """The one with the fewest uses."""
        return self._heap.lowest()

    def __contains__(self, key: K) -> bool:
        return key in self._heap
