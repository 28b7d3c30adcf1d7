"""Greedy-Dual-Size-Frequency: what saves the least time per byte goes first.

Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy" (1998). Here
the cost of a block is the prefill time that a hit on it saves, which grows with its depth in the chain
(`prefill_cost`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from tiers.policies.base import EvictionPolicy, K, always
from tiers.policies.lazy_heap import LazyHeap


class Gdsf(EvictionPolicy[K]):
    """By `age + uses * cost / bytes`, where `age` is the value of the last one evicted.

    The age, taken in at each use, lets once hot blocks grow cold.

    Args:
        may_go: see `EvictionPolicy`.
        cost: prefill time that a hit on a block saves; None: what the block says itself.
    """

    wants_uses: ClassVar[bool] = True

    def __init__(
        self, may_go: Callable[[K], bool] = always, cost: Callable[[K], float] | None = None
    ) -> None:
        self._cost = cost or (lambda key: key.cost)
        self._age = 0.0
        self._uses: dict[K, int] = {}  # arrival included
        self._values: dict[K, float] = {}
        # Chains of equal worth are told apart by recency.
        self._heap: LazyHeap[K] = LazyHeap(lambda key: (self._values[key], key.last_use), may_go)

    def offer(self, key: K) -> None:
        """See `EvictionPolicy`."""
        if key not in self._uses:
            self._uses[key] = 0
            self.used(key)
        self._heap.offer(key)

    def used(self, key: K) -> None:
        """One use more, at the present age."""
        uses = self._uses.get(key)
        if uses is not None:
            self._uses[key] = uses + 1
            self._values[key] = self._age + (uses + 1) * self._cost(key) / key.size_bytes

    def discard(self, key: K) -> None:
        """See `EvictionPolicy`."""
        self._heap.discard(key)
        self._uses.pop(key, None)
        self._values.pop(key, None)

    def evicted(self, key: K) -> None:
        """Everything else is that much closer to its end."""
        # A parent that came free late may be worth less than what went before it: age never goes back.
        self._age = max(self._age, self._values.get(key, 0.0))
        self.discard(key)

    def victim(self) -> K | None:
        """The one that saves the least time per byte."""
        return self._heap.lowest()

    def __contains__(self, key: K) -> bool:
        return key in self._heap
