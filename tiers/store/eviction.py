"""Which copies may leave a tier, and the orders in which those of one slot size and account do.

The guards say whether a copy may go at all; the policy (`tiers.policies`) says which goes first. Nothing is told
when a copy is pinned: candidates are checked when their turn comes, so that the hot path pays nothing.

Decides only; taking a copy out of its tier is the store's.
"""

from __future__ import annotations

from collections.abc import Set

from kvpool.blocks.tier import Tier
from tiers.policies import EvictionPolicy, LazyHeap, create
from tiers.store.blocks import FOREVER, NEVER, Copy

PLAIN = 0  # in the policy's order
DOUBLE = 1  # an nvme copy of a block that stands in dram too: by recency, see `Shelf`
SOFT = 2  # protected for a while: only when nothing else can go, by recency


def is_held(copy: Copy) -> bool:
    """Somebody reads or writes this copy's slots: a lease, a reservation or a move (invariant 1)."""
    return copy.filling > 0 or copy.reading > 0 or copy.pins > 0


def has_descendant(copy: Copy) -> bool:
    """A child of this block has a copy, or a reserved slot, in the same tier (invariant 6).

    Looking at children is enough: each of them is kept by its own. A gap (a block dropped as corrupt)
    ends the protection, because what stands behind it cannot be reached any more.
    """
    block = copy.block
    return block.name in block.space.children[copy.tier]


def is_resident(copy: Copy) -> bool:
    """The record is still the block's copy in its tier, and has something to evict."""
    block = copy.block
    return not block.is_detached and block.copies[copy.tier] is copy and copy.committed > 0


def is_hard_pinned(copy: Copy) -> bool:
    """The block is protected without an end: it is never evicted."""
    return copy.block.retained_until == FOREVER and copy.tier != Tier.HBM


def is_soft_pinned(copy: Copy) -> bool:
    """The block is protected for a while: it goes only when nothing else can."""
    return NEVER < copy.block.retained_until < FOREVER and copy.tier != Tier.HBM


def is_spared(copy: Copy) -> bool:
    """The only copy of a block, in hbm: it goes down first, and only then from here.

    Unless the tier below had no room for it, all there being used since, and it is not used again. A
    protected block is promised to stay on the node, not in hbm: it waits for that room however long.
    """
    if copy.tier != Tier.HBM or not copy.is_whole or has_backing(copy):
        return False
    block = copy.block
    return block.retained_until != NEVER or copy.refused_use != block.last_use


def has_backing(copy: Copy) -> bool:
    """The block stands whole in some other tier as well."""
    return any(c is not None and c is not copy and c.is_whole for c in copy.block.copies)


def is_takable(copy: Copy) -> bool:
    """The copy stands, nobody holds it, and it is not to be kept; descendants are another matter."""
    return (
        is_resident(copy) and not is_held(copy) and not is_hard_pinned(copy) and not is_spared(copy)
    )


def is_evictable(copy: Copy) -> bool:
    """The copy may be taken, and no descendant needs it."""
    return is_takable(copy) and not has_descendant(copy)


def is_in_arenas(copy: Copy, arena_ids: Set[int]) -> bool:
    """Some part of the copy has its slot in one of the arenas."""
    return any(place is not None and place.arena_id in arena_ids for place in copy.places)


class EvictionQueue:
    """The candidates of one tier, slot size and account, by rank: plain ones first, protected ones last.

    A policy that goes by anything but recency would let the disk be rewritten for ever: a block of dram whose
    copy left nvme is to be written again, and takes the place of another such. So copies of that kind
    are ranked behind, and by recency (see `Room`).

    Args:
        tier_index: the tier.
        policy: name of the policy for plain copies.
        parked: takes the copies whose turn came while they were shielded; offer them again after it.
        closed: ids of the tier's arenas, kept up by their owner, where an eviction would make no room.

    Raises:
        ConfigError: no policy has that name.
    """

    def __init__(
        self, tier_index: Tier, policy: str, parked: list[Copy], closed: Set[int] = frozenset()
    ) -> None:
        self._parked = parked
        self._closed = closed
        self.policy: EvictionPolicy[Copy] = create(policy, lambda copy: self._may_go(copy, PLAIN))
        self._is_double_apart = tier_index == Tier.NVME and not self.policy.is_by_recency
        self._by_rank = {DOUBLE: self._recent_last(DOUBLE), SOFT: self._recent_last(SOFT)}

    def rank(self, copy: Copy) -> int:
        """PLAIN, DOUBLE or SOFT, as of now."""
        if is_soft_pinned(copy):
            return SOFT
        if self._is_double_apart and copy.block.copies[Tier.DRAM] is not None:
            return DOUBLE
        return PLAIN

    def offer(self, copy: Copy) -> None:
        """The copy may have become evictable, or changed its rank."""
        # The policy is told of all, so that each has its place in the order from the start.
        self.policy.offer(copy)
        rank = self.rank(copy)
        if rank != PLAIN:
            self._by_rank[rank].offer(copy)

    def discard(self, copy: Copy, *, is_evicted: bool = False) -> None:
        """The copy left the tier."""
        if is_evicted:
            self.policy.evicted(copy)
        else:
            self.policy.discard(copy)
        for heap in self._by_rank.values():
            heap.discard(copy)

    def candidate(self, rank: int) -> Copy | None:
        """The first evictable copy of that rank."""
        return self.policy.victim() if rank == PLAIN else self._by_rank[rank].lowest()

    def is_churn_free(self, rank: int) -> bool:
        """Copies of that rank stand in this tier alone: their room is never asked for by themselves again."""
        return rank == PLAIN and self._is_double_apart

    def __contains__(self, copy: Copy) -> bool:
        """The copy would be found if it is evictable (for integrity checks)."""
        rank = self.rank(copy)
        return copy in (self.policy if rank == PLAIN else self._by_rank[rank])

    def _may_go(self, copy: Copy, rank: int) -> bool:
        if copy.block.is_shielded:
            self._parked.append(copy)
            return False
        if self._closed and is_in_arenas(copy, self._closed):
            return False
        return is_evictable(copy) and self.rank(copy) == rank

    def _recent_last(self, rank: int) -> LazyHeap[Copy]:
        return LazyHeap(lambda copy: copy.block.last_use, lambda copy: self._may_go(copy, rank))
