"""Which copies may leave a tier, and the order in which they leave, per slot size and account.

The guards decide whether a copy may leave at all; the policy (`tiers.policies`) decides which one
leaves first. A pin updates no queue: candidates are checked when their turn comes, so that pins
stay fast. The block table does the evictions.
"""

from __future__ import annotations

from collections.abc import Set

from kvpool.blocks.tier import Tier
from tiers.policies import EvictionPolicy, LazyHeap, create
from tiers.store.blocks import FOREVER, NEVER, Copy

PLAIN = 0  # in the policy's order
DOUBLE = 1  # a copy on NVMe of a block that is in DRAM too: by recency (`EvictionQueue`)
SOFT = 2  # soft pinned: by recency, and only if nothing else can leave


def is_held(copy: Copy) -> bool:
    """A lease, a reservation or a migration uses this copy's slots (invariant 1)."""
    return copy.filling > 0 or copy.reading > 0 or copy.pins > 0


def has_descendant(copy: Copy) -> bool:
    """A child of this block has a copy, or a reserved slot, in the same tier (invariant 6).

    Children are enough: each of them is kept by its own. A gap (a block that was dropped as
    corrupt) ends that, because blocks behind a gap cannot be reached any more.
    """
    block = copy.block
    return block.name in block.space.children[copy.tier]


def is_resident(copy: Copy) -> bool:
    """The record is still the block's copy in its tier, and has committed parts."""
    block = copy.block
    return not block.is_detached and block.copies[copy.tier] is copy and copy.committed > 0


def is_hard_pinned(copy: Copy) -> bool:
    """The block is never evicted from this tier."""
    return copy.block.retained_until == FOREVER and copy.tier != Tier.HBM


def is_soft_pinned(copy: Copy) -> bool:
    """The block is evicted from this tier only if nothing else can be."""
    return NEVER < copy.block.retained_until < FOREVER and copy.tier != Tier.HBM


def is_spared(copy: Copy) -> bool:
    """The only copy of a block is in HBM: it is demoted before it may be evicted.

    A copy that the tier below refused, because all blocks there were used more recently, is not
    spared unless it was used again. A retained block always is: it must stay on the node, though
    not in HBM.
    """
    if copy.tier != Tier.HBM or not copy.is_whole or has_backing(copy):
        return False
    block = copy.block
    return block.retained_until != NEVER or copy.refused_use != block.last_use


def has_backing(copy: Copy) -> bool:
    """The block is whole in another tier as well."""
    return any(c is not None and c is not copy and c.is_whole for c in copy.block.copies)


def is_takable(copy: Copy) -> bool:
    """The copy is resident, nobody holds it, and nothing but a descendant keeps it."""
    return (
        is_resident(copy) and not is_held(copy) and not is_hard_pinned(copy) and not is_spared(copy)
    )


def is_evictable(copy: Copy) -> bool:
    """The copy may leave now: it is takable and has no descendant in its tier."""
    return is_takable(copy) and not has_descendant(copy)


def is_in_arenas(copy: Copy, arena_ids: Set[int]) -> bool:
    """Some part of the copy is in one of the arenas."""
    return any(place is not None and place.arena_id in arena_ids for place in copy.places)


class EvictionQueue:
    """The candidates of one tier, slot size and account, soft pinned ones last.

    A policy that uses more than recency could rewrite the disk for ever: a block of DRAM whose copy
    left NVMe is written again, and takes the place of another such block. So copies of blocks that
    are in DRAM rank behind the others, and by recency.

    Args:
        tier_index: the tier.
        policy: name of the policy for plain copies.
        parked: collects copies whose turn came while they were shielded; offer them again
            afterwards.
        closed: ids of arenas where an eviction frees no usable slot; the allocator keeps the set up
            to date.

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
        """PLAIN, DOUBLE or SOFT."""
        if is_soft_pinned(copy):
            return SOFT
        if self._is_double_apart and copy.block.copies[Tier.DRAM] is not None:
            return DOUBLE
        return PLAIN

    def offer(self, copy: Copy) -> None:
        """The copy may have become evictable, or its rank changed."""
        # The policy gets every copy, so that each has its place in the order from its arrival.
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
        """Copies of that rank are in this tier only: an evicted one is not written again."""
        return rank == PLAIN and self._is_double_apart

    def __contains__(self, copy: Copy) -> bool:
        """The copy would be found once it is evictable (for integrity checks)."""
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
