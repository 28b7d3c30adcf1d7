"""`guarded`: a cache that follows `hazard`, and switches to a plain policy that would have found clearly more.

Six policies run beside the cache over ids alone. The cache follows one of them, its leader: it
evicts what the leader has evicted, so it soon holds what the leader holds. Another policy becomes
the leader once its lead in blocks found pays for the switch. The price is the number of blocks that
it holds and the cache does not, because each may have to be computed again. This is the ski-rental
rule: rent until the rent equals the price; the cost is at most twice that of the better choice.
Following contents instead of eviction orders bounds the regret against several experts (Blum and
Burch, "On-line Learning and the Metrical Task System Problem", 2000).

For replays only, like `hazard`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import ClassVar, Protocol

from planner.replay.fast_policies import PLAIN
from planner.replay.hazard import HazardCache

_GROWTH = 1.3  # a lead must grow by this factor before the price is counted again


class _Shadow(Protocol):
    """The part of a policy that the guard uses."""

    evicted: list[int]

    @property
    def resident(self) -> Collection[int]: ...


class GuardedCache:
    """A cache of `capacity` blocks, by their ids.

    Attributes:
        leader: the policy that the cache follows now.
        changes: how often the leader changed.
    """

    name: ClassVar[str] = "guarded"

    def __init__(self, capacity: int, block_tokens: int) -> None:
        self._capacity = capacity
        self._plain = {name: make(capacity) for name, make in PLAIN.items()}
        self._hazard = HazardCache(capacity, block_tokens)
        self._shadows: dict[str, _Shadow] = {**self._plain, HazardCache.name: self._hazard}
        self.leader = HazardCache.name  # which acts as LRU before it has learned
        self.changes = 0
        # By policy: blocks found beyond those of the leader (at least 0), and the lead to compare
        # with the price next.
        self._lead = dict.fromkeys(self._shadows, 0)
        self._weigh_at = dict.fromkeys(self._shadows, 1.0)
        self._resident: set[int] = set()
        # Blocks that the cache holds and the leader does not, oldest first; the leader may hold
        # some again.
        self._surplus: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._resident)

    def __contains__(self, ident: int) -> bool:
        return ident in self._resident

    def access(self, ids: list[int], now_s: float, input_tokens: int, output_tokens: int) -> int:
        """Use a prompt's blocks. Returns how many leading ones were in the cache."""
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
            # The leader holds at most `capacity` blocks, so this cache has a surplus.
            ident = surplus.popitem(last=False)[0]
            if ident not in held:
                resident.discard(ident)
