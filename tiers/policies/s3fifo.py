"""S3-FIFO: a small queue for new blocks, a main one for used blocks, and ghosts of evicted ones.

Yang et al., "FIFO Queues Are All You Need for Cache Eviction" (SOSP'23). Most blocks of a scan are
never used again. They leave through the small queue and do not touch the main one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import ClassVar

from tiers.policies.base import EvictionPolicy, K, always
from tiers.policies.lazy_heap import LazyHeap

SMALL_SHARE = 0.1  # of the resident bytes, as in the paper
MOST_USES = 3
WORTHY_USES = 2  # in the small queue, to enter the main one


class _Place:
    """The place of a block in the queues."""

    __slots__ = ("is_main", "size_bytes", "turn", "uses")

    def __init__(self, is_main: bool, turn: int, size_bytes: int) -> None:
        self.is_main = is_main
        self.turn = turn
        self.size_bytes = size_bytes
        self.uses = 0  # at this place, MOST_USES at most


class S3Fifo(EvictionPolicy[K]):
    """New blocks leave quickly; used blocks get a second chance.

    The queues are heaps by turn, so that a block that was set aside keeps its turn. The small queue
    is bounded by a share of the resident bytes, because a slot size has no capacity of its own in a
    node.
    """

    wants_uses: ClassVar[bool] = True

    def __init__(self, may_go: Callable[[K], bool] = always) -> None:
        self._places: dict[K, _Place] = {}
        self._turns = 0
        self._small: LazyHeap[K] = LazyHeap(lambda key: self._places[key].turn, may_go)
        self._main: LazyHeap[K] = LazyHeap(lambda key: self._places[key].turn, may_go)
        self._small_bytes = 0
        self._total_bytes = 0
        self._ghosts: dict[Hashable, None] = {}  # as many as resident blocks, oldest first

    def offer(self, key: K) -> None:
        """Add the block or offer it again; a ghost that returns enters the main queue."""
        place = self._places.get(key)
        if place is None:
            is_main = key.ident in self._ghosts
            if is_main:
                del self._ghosts[key.ident]
            self._turns += 1
            place = self._places[key] = _Place(is_main, self._turns, key.size_bytes)
            self._total_bytes += place.size_bytes
            self._small_bytes += 0 if is_main else place.size_bytes
        self._queue(place).offer(key)

    def used(self, key: K) -> None:
        """Count a use, up to `MOST_USES`."""
        place = self._places.get(key)
        if place is not None and place.uses < MOST_USES:
            place.uses += 1

    def discard(self, key: K) -> None:
        """Remove the block from its queue."""
        place = self._places.get(key)
        if place is None:
            return
        self._queue(place).discard(key)
        del self._places[key]
        self._total_bytes -= place.size_bytes
        self._small_bytes -= 0 if place.is_main else place.size_bytes

    def evicted(self, key: K) -> None:
        """Remove the block; one that left through the small queue becomes a ghost."""
        place = self._places.get(key)
        self.discard(key)
        if place is not None and not place.is_main:
            self._ghosts[key.ident] = None
            while len(self._ghosts) > len(self._places) + 1:
                del self._ghosts[next(iter(self._ghosts))]

    def victim(self) -> K | None:
        """The first unused block of the small queue if that is full, else of the main queue."""
        if self._is_small_full():
            newcomer = self._newcomer()
            return newcomer if newcomer is not None else self._unused_of_main()
        unused = self._unused_of_main()
        return unused if unused is not None else self._newcomer()

    def __contains__(self, key: K) -> bool:
        return key in self._small or key in self._main

    # ------------------------------------------------------------ within

    def _is_small_full(self) -> bool:
        return self._small_bytes >= SMALL_SHARE * self._total_bytes

    def _newcomer(self) -> K | None:
        """The first little used block of the small queue; those before it enter the main queue."""
        while (key := self._small.lowest()) is not None:
            place = self._places[key]
            if place.uses < WORTHY_USES:
                return key
            self._small.discard(key)
            self._small_bytes -= place.size_bytes
            place.is_main = True
            self._requeue(key, place, uses=0)
        return None

    def _unused_of_main(self) -> K | None:
        while (key := self._main.lowest()) is not None:
            place = self._places[key]
            if not place.uses:
                return key
            self._requeue(key, place, uses=place.uses - 1)
        return None

    def _requeue(self, key: K, place: _Place, *, uses: int) -> None:
        self._turns += 1
        place.turn = self._turns
        place.uses = uses
        self._main.offer(key)

    def _queue(self, place: _Place) -> LazyHeap[K]:
        return self._main if place.is_main else self._small
