"""Fast textbook policies over bare block ids, for blocks of one size.

Each gives the same hits as its namesake in `tiers.policies` under `BlockCache`, many times as fast;
a property test checks this. A prompt's blocks are used head first, and any block may be evicted for
any other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from typing import ClassVar

from tiers.policies.s3fifo import MOST_USES, SMALL_SHARE, WORTHY_USES


class PlainCache(ABC):
    """At most `capacity` ids under one policy.

    Attributes:
        resident: the ids in the cache.
        evicted: the ids that the last access evicted, in order.
    """

    name: ClassVar[str]
    resident: Collection[int]

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.evicted: list[int] = []

    def access(self, chain: Sequence[int]) -> int:
        """Use a prompt's ids. Returns how many leading ones were in the cache."""
        resident = self.resident
        found = 0
        for ident in chain:
            if ident not in resident:
                break
            found += 1
        self.evicted.clear()
        self.use(chain)
        return found

    @abstractmethod
    def use(self, chain: Sequence[int]) -> None:
        """Use each id, and add those that are missing."""


class PlainLru(PlainCache):
    """An ordered dict, the least recent first."""

    name = "lru"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.resident: OrderedDict[int, None] = OrderedDict()

    def use(self, chain: Sequence[int]) -> None:
        resident, evicted = self.resident, self.evicted
        renew = resident.move_to_end
        room = self.capacity - len(resident)
        for ident in chain:
            if ident in resident:
                renew(ident)
                continue
            resident[ident] = None
            if room:
                room -= 1
            else:
                evicted.append(resident.popitem(last=False)[0])


class PlainFifo(PlainCache):
    """A dict in the order of insertion."""

    name = "fifo"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.resident: OrderedDict[int, None] = OrderedDict()

    def use(self, chain: Sequence[int]) -> None:
        resident, evicted = self.resident, self.evicted
        room = self.capacity - len(resident)
        for ident in chain:
            if ident not in resident:
                if room:
                    room -= 1
                else:
                    evicted.append(resident.popitem(last=False)[0])
                resident[ident] = None


class PlainLfu(PlainCache):
    """For each number of uses since insertion, a queue by recency."""

    name = "lfu"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.resident: dict[int, int] = {}
        self._queues: list[OrderedDict[int, None]] = [OrderedDict()]
        self._fewest = 0  # all queues before this one are empty

    def use(self, chain: Sequence[int]) -> None:
        resident, queues = self.resident, self._queues
        for ident in chain:
            uses = resident.get(ident)
            if uses is None:
                if len(resident) == self.capacity:
                    while not queues[self._fewest]:
                        self._fewest += 1
                    victim = queues[self._fewest].popitem(last=False)[0]
                    del resident[victim]
                    self.evicted.append(victim)
                uses = self._fewest = 0
            else:
                del queues[uses][ident]
                uses += 1
                if uses == len(queues):
                    queues.append(OrderedDict())
            resident[ident] = uses
            queues[uses][ident] = None


class PlainS3Fifo(PlainCache):
    """Two queues, and ghosts of the ids that were evicted from the small one."""

    name = "s3fifo"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.resident: dict[int, int] = {}  # uses since the id took its place in a queue
        self._small: deque[int] = deque()
        self._main: deque[int] = deque()
        self._ghosts: OrderedDict[int, None] = OrderedDict()

    def use(self, chain: Sequence[int]) -> None:
        resident, ghosts = self.resident, self._ghosts
        for ident in chain:
            uses = resident.get(ident)
            if uses is not None:
                if uses < MOST_USES:
                    resident[ident] = uses + 1
                continue
            if len(resident) == self.capacity:
                self._evict()
            if ident in ghosts:
                del ghosts[ident]
                self._main.append(ident)
            else:
                self._small.append(ident)
            resident[ident] = 0

    def _evict(self) -> None:
        resident, ghosts, small = self.resident, self._ghosts, self._small
        from_small = len(small) >= SMALL_SHARE * len(resident)
        if from_small:
            self._promote()
            from_small = bool(small)
        elif not self._turn_main():
            self._promote()
            from_small = True
        if from_small:
            victim = small.popleft()
        else:
            self._turn_main()
            victim = self._main.popleft()
        del resident[victim]
        self.evicted.append(victim)
        if from_small:
            ghosts[victim] = None
            while len(ghosts) > len(resident) + 1:
                ghosts.popitem(last=False)

    def _promote(self) -> None:
        """Move used ids from the head of the small queue to the main queue."""
        resident, small = self.resident, self._small
        while small and resident[small[0]] >= WORTHY_USES:
            ident = small.popleft()
            resident[ident] = 0
            self._main.append(ident)

    def _turn_main(self) -> bool:
        """Bring an unused id to the head of the main queue. Returns False if it is empty."""
        resident, main = self.resident, self._main
        while main and resident[main[0]]:
            resident[main[0]] -= 1
            main.rotate(-1)
        return bool(main)


class PlainArc(PlainCache):
    """Two queues by recency, each with ghosts. `tiers.policies.arc` says what differs from the paper."""

    name = "arc"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.resident: dict[int, bool] = {}  # whether it was seen again
        self._once: OrderedDict[int, None] = OrderedDict()
        self._again: OrderedDict[int, None] = OrderedDict()
        self._once_ghosts: OrderedDict[int, None] = OrderedDict()
        self._again_ghosts: OrderedDict[int, None] = OrderedDict()
        self._target = 0.0

    def use(self, chain: Sequence[int]) -> None:
        resident, once, again = self.resident, self._once, self._again
        for ident in chain:
            is_again = resident.get(ident)
            if is_again:
                again.move_to_end(ident)
            elif is_again is not None:
                del once[ident]
                again[ident] = None
                resident[ident] = True
            else:
                if len(resident) == self.capacity:
                    self._evict()
                resident[ident] = is_again = self._is_back(ident)
                (again if is_again else once)[ident] = None

    def _evict(self) -> None:
        once, again = self._once, self._again
        first = once if len(once) > self._target else again
        queue = first or (again if first is once else once)
        size = len(self.resident)
        victim = queue.popitem(last=False)[0]
        del self.resident[victim]
        self.evicted.append(victim)
        once_ghosts, again_ghosts = self._once_ghosts, self._again_ghosts
        (again_ghosts if queue is again else once_ghosts)[victim] = None
        while once_ghosts and len(once) + len(once_ghosts) > size:
            once_ghosts.popitem(last=False)
        while len(once_ghosts) + len(again_ghosts) > size:
            (again_ghosts or once_ghosts).popitem(last=False)

    def _is_back(self, ident: int) -> bool:
        once, again = len(self._once_ghosts), len(self._again_ghosts)
        if ident in self._once_ghosts:
            self._target = min(self._target + max(1.0, again / once), len(self.resident) + 1.0)
            del self._once_ghosts[ident]
            return True
        if ident in self._again_ghosts:
            self._target = max(0.0, self._target - max(1.0, once / again))
            del self._again_ghosts[ident]
            return True
        return False


PLAIN: dict[str, type[PlainCache]] = {
    cache.name: cache for cache in (PlainLru, PlainLfu, PlainFifo, PlainS3Fifo, PlainArc)
}
