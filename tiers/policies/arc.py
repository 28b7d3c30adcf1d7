"""ARC: blocks used once and blocks used again, in a proportion that follows their ghosts.

Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache" (FAST'03).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import ClassVar

from tiers.policies.base import EvictionPolicy, K, always
from tiers.policies.lazy_heap import LazyHeap


class Arc(EvictionPolicy[K]):
    """Two orders of recency, T1 (used once) and T2 (used again); `_target` is T1's intended size.

    A block that returns after its eviction from T1 shows that T1 was too small; from T2, that T2
    was. The paper has a cache of fixed size. Here the size is the number of resident blocks, since
    a slot size has no capacity of its own in a node. A policy does not know for which block it
    makes room. So where sizes are equal, it does not favour a returning ghost of T2 as the paper
    does.
    """

    wants_uses: ClassVar[bool] = True

    def __init__(self, may_go: Callable[[K], bool] = always) -> None:
        self._is_again: dict[K, bool] = {}  # True: in T2
        self._once: LazyHeap[K] = LazyHeap(lambda key: key.last_use, may_go)
        self._again: LazyHeap[K] = LazyHeap(lambda key: key.last_use, may_go)
        self._once_count = 0
        self._target = 0.0
        # Evicted from T1 and from T2, oldest first: B1 and B2.
        self._once_ghosts: OrderedDict[Hashable, None] = OrderedDict()
        self._again_ghosts: OrderedDict[Hashable, None] = OrderedDict()

    def offer(self, key: K) -> None:
        """Add the block, or offer it again; a new one that was evicted recently enters T2."""
        if key not in self._is_again:
            self._is_again[key] = is_again = self._is_back(key.ident)
            self._once_count += not is_again
        (self._again if self._is_again[key] else self._once).offer(key)

    def used(self, key: K) -> None:
        """Move the block to T2."""
        if self._is_again.get(key) is False:
            self._is_again[key] = True
            self._once_count -= 1
            if key in self._once:
                self._once.discard(key)
                self._again.offer(key)

    def discard(self, key: K) -> None:
        """Remove the block from T1 or T2."""
        is_again = self._is_again.pop(key, None)
        if is_again is None:
            return
        self._once_count -= not is_again
        self._once.discard(key)
        self._again.discard(key)

    def evicted(self, key: K) -> None:
        """Remove the block and keep its ghost, as many ghosts as resident blocks at most."""
        is_again = self._is_again.get(key)
        if is_again is None:
            return
        size = len(self._is_again)
        self.discard(key)
        (self._again_ghosts if is_again else self._once_ghosts)[key.ident] = None
        while self._once_ghosts and self._once_count + len(self._once_ghosts) > size:
            self._once_ghosts.popitem(last=False)
        while len(self._once_ghosts) + len(self._again_ghosts) > size:
            (self._again_ghosts or self._once_ghosts).popitem(last=False)

    def victim(self) -> K | None:
        """The least recent block of T1 if T1 is larger than its target, else of T2."""
        first, second = self._again, self._once
        if self._once_count and self._once_count > self._target:
            first, second = second, first
        victim = first.lowest()
        return victim if victim is not None else second.lowest()

    def __contains__(self, key: K) -> bool:
        return key in self._once or key in self._again

    # ------------------------------------------------------------ within

    def _is_back(self, ident: Hashable) -> bool:
        """True for a ghost; adapts the target."""
        once, again = len(self._once_ghosts), len(self._again_ghosts)
        if ident in self._once_ghosts:
            self._target += max(1.0, again / once)
            self._target = min(self._target, float(len(self._is_again) + 1))
            del self._once_ghosts[ident]
            return True
        if ident in self._again_ghosts:
            self._target = max(0.0, self._target - max(1.0, once / again))
            del self._again_ghosts[ident]
            return True
        return False
