"""Greedy-Dual-Size-Frequency: evicts first what saves the least time per byte.

Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy"
(1998). The cost of a block is the prefill time that a hit saves. It grows with the block's depth in
the chain (`prefill_cost`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from tiers.policies.base import EvictionPolicy, K, always
from tiers.policies.lazy_heap import LazyHeap


class Gdsf(EvictionPolicy[K]):
    """By `age + uses * cost / bytes`, where `age` is the value of the last evicted block.

    Each use adds to the current age, so that formerly hot blocks become cold.

    Args:
        may_go: called when a block's turn has come; False sets the block aside.
        cost: prefill time that a hit on a block saves; None for the block's own `cost`.
    """

    wants_uses: ClassVar[bool] = True

    def __init__(
        self, may_go: Callable[[K], bool] = always, cost: Callable[[K], float] | None = None
    ) -> None:
        self._cost = cost or (lambda key: key.cost)
        self._age = 0.0
        self._uses: dict[K, int] = {}  # with the arrival
        self._values: dict[K, float] = {}
        # Recency decides between equal values.
        self._heap: LazyHeap[K] = LazyHeap(lambda key: (self._values[key], key.last_use), may_go)

    def offer(self, key: K) -> None:
        """Add the block with one use, or offer it again."""
        if key not in self._uses:
            self._uses[key] = 0
            self.used(key)
        self._heap.offer(key)

    def used(self, key: K) -> None:
        """Count a use and compute the block's value at the current age."""
        uses = self._uses.get(key)
        if uses is not None:
            self._uses[key] = uses + 1
            self._values[key] = self._age + (uses + 1) * self._cost(key) / key.size_bytes

    def discard(self, key: K) -> None:
        """Forget the block and its uses."""
        self._heap.discard(key)
        self._uses.pop(key, None)
        self._values.pop(key, None)

    def evicted(self, key: K) -> None:
        """Forget the block and raise the age to its value."""
        # A parent that became free late may have a lower value than earlier victims: the age never
        # falls.
        self._age = max(self._age, self._values.get(key, 0.0))
        self.discard(key)

    def victim(self) -> K | None:
        """The block that saves the least time per byte."""
        return self._heap.lowest()

    def __contains__(self, key: K) -> bool:
        return key in self._heap
