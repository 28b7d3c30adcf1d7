"""Victim selection: which copies leave a full tier, of one slot size or a whole slab of another.

Rank decides first (`EvictionQueue`), then from which accounts the asking one may take
(`QuotaTable`), then the policy's order. `BlockTable` does the evictions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

from kvpool.blocks.tier import Tier
from tiers.store import eviction
from tiers.store.arena_allocator import ArenaAllocator
from tiers.store.blocks import Copy, Space
from tiers.store.eviction import DOUBLE, PLAIN, SOFT, EvictionQueue
from tiers.store.quotas import Accounts, QuotaTable
from tiers.store.slab_allocator import Place

SLABS_WHEN_DUE = 64  # looked at while this size has victims of its own
EVICTIONS_WHILE_RESTING = 16  # for one slot; victims in resting arenas free no usable slot
LEAVES_AT_A_TIME = 64  # evictions before the next look for a slab that came free
SLABS_AT_MOST = 4096  # looked at otherwise; more would take longer than 5 ms


class TierState:
    """The slots of one tier, their owners, and bytes by state (of slots, so rounded up).

    Args:
        index: the tier.
        allocator: its arenas.
        policy: name of the eviction policy.
        accounts: the share of each account.
        parked: collects copies whose turn came while they were shielded.
    """

    def __init__(
        self,
        index: Tier,
        allocator: ArenaAllocator,
        policy: str,
        accounts: Accounts,
        parked: list[Copy],
    ) -> None:
        self.index = index
        self.name = str(index)
        self.allocator = allocator
        self.reserved_bytes = 0
        self.committed_bytes = 0
        self.pinned_bytes = 0  # of the committed ones
        self.quarantined_bytes = 0
        self.retained_bytes = 0  # promised to retained blocks, resident here or not
        self.owners: dict[Place, Copy] = {}  # a quarantined slot has none
        self.quarantined_of: dict[Place, int] = {}  # the account of each quarantined slot
        self.quota_table = QuotaTable(accounts, allocator.open_bytes)
        self.evicted_since_scan: Counter[int] = Counter()  # by slot size
        self.queues: dict[tuple[int, int], EvictionQueue] = {}  # by slot size and account
        self._look = self._next_look = 0  # number of the first slab to look at for other sizes
        self._policy = policy
        self._parked = parked

    @property
    def free_bytes(self) -> int:
        """Bytes in no other state: all states add up to the capacity (invariant 7)."""
        return (
            self.allocator.capacity_bytes
            - self.reserved_bytes
            - self.committed_bytes
            - self.quarantined_bytes
        )

    def enter(self, copy: Copy, part: int, place: Place) -> None:
        """A slot was taken for one part: it is reserved."""
        self.reserved_bytes += copy.slot_bytes
        self.quota_table.charge(copy.block.space.account, copy.slot_bytes)
        self.owners[place] = copy
        copy.places[part] = place

    def free_committed(self, copy: Copy) -> None:
        """Free the slots of all committed parts."""
        for part, place in enumerate(copy.places):
            if place is not None and copy.checksums[part] is not None:
                del self.owners[place]
                self.allocator.free(place)
                self.committed_bytes -= copy.slot_bytes
                self.quota_table.charge(copy.block.space.account, -copy.slot_bytes)
                copy.places[part] = copy.checksums[part] = None
                copy.committed -= 1

    def end_quarantine(self, place: Place, slot_bytes: int) -> None:
        """No late write can reach the slot any more: it is free."""
        self.quarantined_bytes -= slot_bytes
        self.quota_table.charge(self.quarantined_of.pop(place), -slot_bytes)
        self.allocator.free(place)

    def look_further(self) -> None:
        """From now on, look at the slabs after those of the last look."""
        self._look = self._next_look

    def some_slabs_of_others(self, space: Space, is_due_only: bool) -> Iterator[int]:
        """Some slabs of other sizes, the same until `look_further`: no call scans a large arena."""
        count = SLABS_WHEN_DUE if is_due_only else SLABS_AT_MOST
        slabs = self.allocator.slab_count
        self._next_look = (self._look + count) % slabs if count < slabs else 0
        return self.allocator.slabs_of_others(space.slot_bytes[self.index], self._look, count)

    def queue(self, space: Space) -> EvictionQueue:
        """The queue for copies of a namespace."""
        return self._queue(space.slot_bytes[self.index], space.account)

    def queue_of(self, copy: Copy) -> EvictionQueue:
        """The queue for a copy."""
        return self._queue(copy.slot_bytes, copy.block.space.account)

    def _queue(self, slot_bytes: int, account: int) -> EvictionQueue:
        key = (slot_bytes, account)
        queue = self.queues.get(key)
        if queue is None:
            # Copies on a read-only disk stay evictable: a child must leave before its parent.
            closed = self.allocator.closed if self.index != Tier.NVME else frozenset()
            queue = self.queues[key] = EvictionQueue(self.index, self._policy, self._parked, closed)
        return queue


def make_room(
    tier: TierState, space: Space, colder_than: int | None, evict: Callable[[Copy], None]
) -> tuple[Place | None, int]:
    """Take a slot for a namespace, and call `evict` for victims if needed.

    Returns the place, None if no slot can be freed, and how many slabs of other sizes were emptied
    for it.

    Args:
        colder_than: evict only copies last used before this tick, and none that is retained.
    """
    slot_bytes = space.slot_bytes[tier.index]
    place = tier.allocator.allocate(slot_bytes)
    if place is None:
        tier.look_further()
    evictions = reclaimed = 0
    while place is None:
        if tier.allocator.resting and evictions > EVICTIONS_WHILE_RESTING:
            break
        evictions += 1
        found = victims(tier, space, colder_than)
        if found:
            reclaimed += found[0].slot_bytes != slot_bytes
            for copy in found:
                evict(copy)
        elif not _thin_out_others(tier, space, colder_than, evict):
            break
        place = tier.allocator.allocate(slot_bytes)
    return place, reclaimed


def _thin_out_others(
    tier: TierState, space: Space, colder_than: int | None, evict: Callable[[Copy], None]
) -> bool:
    """Evict some of the coldest leaves of other slot sizes; False if that cannot free a slab."""
    evicted = 0
    for copy in leaves_of_others(tier, space, colder_than):
        evict(copy)
        evicted += 1
        if evicted == LEAVES_AT_A_TIME:
            break
    return evicted > 0


def victims(tier: TierState, space: Space, colder_than: int | None) -> list[Copy]:
    """The next victim of this slot size, or all copies of a slab of another size that is colder.

    Looks at slabs if this size has no victim, and once for every slab's worth of evictions. So a
    busy size outgrows an idle one, at little cost.

    Args:
        colder_than: take only copies last used before this tick, and none that is retained.
    """
    slot_bytes = space.slot_bytes[tier.index]
    is_due = tier.evicted_since_scan[slot_bytes] >= tier.allocator.slots_per_slab(slot_bytes)
    for rank in _ranks(tier, colder_than):
        own = _own(tier, space, rank, colder_than)
        if rank != DOUBLE and (own is None or is_due):
            tier.evicted_since_scan[slot_bytes] = 0
            limit = own.last_use if own is not None else colder_than
            # An account below its quota keeps its own blocks while a borrower has a victim.
            is_own_spared = own is not None and own.block.space.account != space.account
            slab = _coldest_slab_of_others(
                tier,
                space,
                limit,
                rank,
                partial(_is_fair, tier, space, is_own_spared),
                is_due_only=own is not None,
            )
            if slab:
                return slab
        if own is not None:
            return [own]
    if tier.quota_table.is_shared or not tier.quota_table.is_entitled(space.account, slot_bytes):
        return []
    # Otherwise a quota would be void where all slabs are shared with accounts below theirs. An
    # account that loses blocks here takes room from those above their quota in turn.
    worst_rank = _ranks(tier, colder_than)[-1]
    return _coldest_slab_of_others(tier, space, colder_than, worst_rank, lambda _: True)


def leaves_of_others(tier: TierState, space: Space, colder_than: int | None) -> Iterator[Copy]:
    """The coldest leaves of other slot sizes; evict each before asking for the next.

    If chains lie across slabs, no slab can be emptied at once, but leaf by leaf they can. Yields
    nothing if every slab holds a slot that must stay, since then no slab would come free.
    """
    slot_bytes = space.slot_bytes[tier.index]
    ranks = _ranks(tier, colder_than)
    # Fixed at the start: blocks that this account gives up on the way make no new donors.
    donors = set(tier.quota_table.donors(space.account, slot_bytes))
    is_entitled = tier.quota_table.is_entitled(space.account, slot_bytes)
    if not any(
        all(
            (copy := tier.owners.get(place)) is not None
            and copy.block.space.account in donors
            and _may_take(copy, ranks[-1])
            for place in tier.allocator.places_in(index)
        )
        for index in tier.some_slabs_of_others(space, is_due_only=False)
    ):
        return
    while True:
        leaves: list[tuple[int, Copy]] = []
        for (size, account), queue in tier.queues.items():
            is_own = account == space.account
            may_give = is_own or is_entitled or tier.quota_table.is_over(account)
            if size == slot_bytes or account not in donors or not may_give:
                continue
            for rank in ranks:
                copy = queue.candidate(rank)
                if copy is not None and (colder_than is None or copy.last_use < colder_than):
                    leaves.append((rank, copy))
                    break
        if not leaves:
            return
        yield min(leaves, key=lambda leaf: (leaf[0] == SOFT, leaf[1].last_use))[1]


def _ranks(tier: TierState, colder_than: int | None) -> tuple[int, ...]:
    """The ranks that may be evicted, in order. A demotion can wait: it takes no retained block."""
    ranks = (PLAIN, DOUBLE) if tier.index == Tier.NVME else (PLAIN,)
    return (*ranks, SOFT) if tier.retained_bytes and colder_than is None else ranks


def _own(tier: TierState, space: Space, rank: int, colder_than: int | None) -> Copy | None:
    """The next victim of this slot size and rank, from the first account that has one."""
    slot_bytes = space.slot_bytes[tier.index]
    for account in tier.quota_table.donors(space.account, slot_bytes):
        queue = tier.queues.get((slot_bytes, account))
        copy = queue.candidate(rank) if queue is not None else None
        if queue is None or copy is None:
            continue
        if colder_than is None or copy.last_use < colder_than or queue.is_churn_free(rank):
            return copy
    return None


def _may_take(copy: Copy, worst_rank: int) -> bool:
    return (
        eviction.is_takable(copy)
        and not copy.block.is_shielded
        and (worst_rank == SOFT or not eviction.is_soft_pinned(copy))
    )


def _coldest_slab_of_others(
    tier: TierState,
    space: Space,
    colder_than: int | None,
    worst_rank: int,
    is_fair: Callable[[list[Copy]], bool],
    *,
    is_due_only: bool = False,
) -> list[Copy]:
    """All copies of the coldest slab of another size that can be emptied, leaves first."""
    best: list[Copy] = []
    for index in tier.some_slabs_of_others(space, is_due_only):
        copies: dict[Copy, None] = {}
        for place in tier.allocator.places_in(index):
            copy = tier.owners.get(place)
            if (
                copy is None  # quarantined
                or (colder_than is not None and copy.last_use >= colder_than)
                or not _may_take(copy, worst_rank)
            ):
                break
            copies[copy] = None
        else:
            order = _leaves_first(list(copies))
            # If the lengths differ, some descendant is in another slab.
            if len(order) == len(copies) and is_fair(order):
                best, colder_than = order, max(copy.last_use for copy in copies)
    return best


def _is_fair(tier: TierState, space: Space, is_own_spared: bool, copies: list[Copy]) -> bool:
    """Each copy is the namespace's own, or of an account that stays over its quota without it."""
    lost: Counter[int] = Counter()
    for copy in copies:
        account = copy.block.space.account
        if account == space.account:
            if is_own_spared:
                return False
        elif not tier.quota_table.is_over(account, lost[account]):
            return False
        lost[account] += copy.committed * copy.slot_bytes
    return True


def _leaves_first(copies: list[Copy]) -> list[Copy]:
    """The copies in an order in which each can be evicted after those before it (invariant 6)."""
    by_name = {copy.ident: copy for copy in copies}
    waiting = {c: c.block.space.children[c.tier].get(c.block.name, 0) for c in copies}
    ready = [copy for copy, children in waiting.items() if not children]
    order: list[Copy] = []
    while ready:
        copy = ready.pop()
        order.append(copy)
        parent = by_name.get((copy.block.space.namespace_id, copy.block.parent))
        if parent is not None:
            waiting[parent] -= 1
            if not waiting[parent]:
                ready.append(parent)
    return order
