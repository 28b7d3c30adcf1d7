"""Which copy goes first: prefix-aware LRU over the copies of one tier and slot size.

A policy is told when a copy may have become evictable (`offer`) and is asked for the coldest one. Recency
is `Block.last_use`, set by pins and commits alone. Nothing is told when a copy is used or pinned: entries
are checked when they reach the top, so that the hot path pays nothing. O(log n) amortised.

Decides only; taking a copy out of its tier is the store's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from heapq import heapify, heappop, heappush, heapreplace

from tiers.blocks import DRAM, Block, Copy

NOBODY: Collection[Block] = frozenset()


def is_held(copy: Copy) -> bool:
    """Somebody reads or writes this copy's slots: a lease, a reservation or a move (invariant 1)."""
    return copy.filling > 0 or copy.reading > 0 or (copy.tier == DRAM and copy.block.pins > 0)


def has_descendant(copy: Copy) -> bool:
    """A child of this block has a copy, or a reserved slot, in the same tier (invariant 6).

    Looking at children is enough: each of them is kept by its own. A gap (a block dropped as corrupt)
    ends the protection, because what stands behind it cannot be reached any more.
    """
    block = copy.block
    return block.name in block.space.children[copy.tier]


def is_standing(copy: Copy) -> bool:
    """The record is still the block's copy in its tier, and has something to evict."""
    block = copy.block
    return not block.is_detached and block.copies[copy.tier] is copy and copy.committed > 0


def is_evictable(copy: Copy) -> bool:
    """The copy stands, nobody holds it, and no descendant needs it."""
    return is_standing(copy) and not is_held(copy) and not has_descendant(copy)


class RecencyHeap:
    """Copies ordered by `Block.last_use`, each in it at most once, checked lazily.

    Args:
        is_wanted: asked when a copy reaches the top; one that fails leaves the heap until it is offered
            again.
    """

    def __init__(self, is_wanted: Callable[[Copy], bool]) -> None:
        self._is_wanted = is_wanted
        self._heap: list[tuple[int, int, Copy]] = []
        self._members: set[Copy] = set()
        self._pushes = 0  # breaks ties, so that records are never compared

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, copy: Copy) -> bool:
        return copy in self._members

    def offer(self, copy: Copy) -> None:
        """Take the copy in, unless it is here."""
        if copy not in self._members:
            self._members.add(copy)
            self._push(copy)

    def discard(self, copy: Copy) -> None:
        """Forget the copy; its entry goes when it reaches the top, or with the next compaction."""
        if copy in self._members:
            self._members.remove(copy)
            if len(self._heap) > 64 and len(self._heap) > 2 * len(self._members):
                self._heap = [entry for entry in self._heap if entry[2] in self._members]
                heapify(self._heap)

    def coldest(self, excluded: Collection[Block] = NOBODY) -> Copy | None:
        """The least recently used copy that is wanted and not of an excluded block; it stays here."""
        aside: list[Copy] = []
        coldest: Copy | None = None
        while self._heap:
            key, _, copy = self._heap[0]
            if copy not in self._members:
                heappop(self._heap)
            elif not self._is_wanted(copy):
                heappop(self._heap)
                self._members.discard(copy)
            elif key != copy.block.last_use:
                self._pushes += 1
                heapreplace(self._heap, (copy.block.last_use, self._pushes, copy))
            elif copy.block in excluded:
                heappop(self._heap)
                aside.append(copy)
            else:
                coldest = copy
                break
        for copy in aside:
            self._push(copy)
        return coldest

    def _push(self, copy: Copy) -> None:
        self._pushes += 1
        heappush(self._heap, (copy.block.last_use, self._pushes, copy))


class EvictionPolicy(ABC):
    """What a tier asks when it needs room for one slot size."""

    @abstractmethod
    def offer(self, copy: Copy) -> None:
        """The copy may have become evictable: committed, unpinned, or its last child left."""

    @abstractmethod
    def discard(self, copy: Copy) -> None:
        """The copy left the tier."""

    @abstractmethod
    def victim(self, protected: Collection[Block] = NOBODY) -> Copy | None:
        """The copy to evict next, never one of a protected block; None when nothing can go."""

    @abstractmethod
    def __contains__(self, copy: Copy) -> bool:
        """The policy would find this copy if it is evictable (for integrity checks)."""


class PrefixLru(EvictionPolicy):
    """Least recently used first, leaves of chains before what they build on."""

    def __init__(self) -> None:
        # Through the module's name at each call, so that a test can take the guard away.
        self._heap = RecencyHeap(lambda copy: is_evictable(copy))

    def offer(self, copy: Copy) -> None:
        """Take the copy in as a candidate."""
        self._heap.offer(copy)

    def discard(self, copy: Copy) -> None:
        """Forget the copy."""
        self._heap.discard(copy)

    def victim(self, protected: Collection[Block] = NOBODY) -> Copy | None:
        """The coldest evictable copy."""
        return self._heap.coldest(protected)

    def __contains__(self, copy: Copy) -> bool:
        return copy in self._heap
