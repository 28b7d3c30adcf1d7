"""`hazard` with a net under it: a cache that leaves it for a plain policy that would have found clearly more.

Six policies run beside the cache over ids alone. The cache follows one of them, its leader, by making room from what
the leader has let go; so it holds what the leader holds as soon as it has seen as much. A rival takes over once what
it has found beyond the leader's finds pays for the change: as many blocks as the rival holds and the cache does not,
each of which may have to be computed once more. That is renting until the rent equals the price (ski rental: at most
twice the cost of the better choice), and following contents rather than orders is how caches are built that regret
little against several experts (Blum and Burch, "On-line Learning and the Metrical Task System Problem", 2000).

For replays only, as `hazard` is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import ClassVar, Protocol

from planner.replay.fast_policies import PLAIN
from planner.replay.hazard import HazardCache

_GROWTH = 1.3  # a rival's lead grows by so much before the price is counted again


class _Shadow(Protocol):
    """What the guard needs of a policy."""

    evicted: list[int]

    @property
    def resident(self) -> Collection[int]: ...


class GuardedCache:
    """A cache of `capacity` blocks, by their ids.

    Attributes:
        leader: the policy that is followed now.
        changes: how often that was another one.
    """

    name: ClassVar[str] = "guarded"

    def __init__(self, capacity: int, block_tokens: int) -> None:
        self._capacity = capacity
        self._plain = {name: make(capacity) for name, make in PLAIN.items()}
        self._hazard = HazardCache(capacity, block_tokens)
        self._shadows: dict[str, _Shadow] = {**self._plain, HazardCache.name: self._hazard}
        self.leader = HazardCache.name  # untaught it does as LRU does
        self.changes = 0
        # By rival: blocks found beyond the leader's finds, not below zero, and the lead that is to be weighed next.
        self._lead = dict.fromkeys(self._shadows, 0)
        self._weigh_at = dict.fromkeys(self._shadows, 1.0)
        self._resident: set[int] = set()
        # What stands here and not with the leader, oldest first; some may have come back to it since.
        self._surplus: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._resident)

    def __contains__(self, ident: int) -> bool:
        return ident in self._resident

    def access(self, ids: list[int], now_s: float, input_tokens: int, output_tokens: int) -> int:
        """Use a prompt's blocks; returns how many leading ones were here."""
        resident = self._resident
        found = 0
        for ident in ids:
            if ident not in resident:
                break
            found += 1
        finds = {name: cache.access(ids) for name, cache in self._plain.items()}
        finds[HazardCache.name] = self._hazard.access(ids, now_s, input_tokens, output_tokens)
        resident.update(ids)
        self._choose(finds)
        self._make_room(ids)
        return found

    def _choose(self, finds: dict[str, int]) -> None:
        lead, of_leader = self._lead, finds[self.leader]
        for name, found in finds.items():
            lead[name] = max(0, lead[name] + found - of_leader)
        best = max(lead, key=lead.__getitem__)
        if lead[best] < self._weigh_at[best]:
            return
        held = self._shadows[best].resident
        price = sum(1 for ident in held if ident not in self._resident)
        if lead[best] <= price:
            self._weigh_at[best] = min(price + 1.0, _GROWTH * lead[best])
            return
        self.leader = best
        self.changes += 1
        self._lead = dict.fromkeys(lead, 0)
        self._weigh_at = dict.fromkeys(lead, 1.0)
        self._surplus = OrderedDict.fromkeys(i for i in sorted(self._resident) if i not in held)

    def _make_room(self, ids: list[int]) -> None:
        leader = self._shadows[self.leader]
        held, surplus, resident = leader.resident, self._surplus, self._resident
        for ident in (*leader.evicted, *ids):
            if ident in resident and ident not in held:
                surplus[ident] = None
        while len(resident) > self._capacity:
            # The leader holds no more than this cache may, so something here is surplus.
            ident = surplus.popitem(last=False)[0]
            if ident not in held:
                resident.discard(ident)
