"""Writeback: which copies of a memory tier are dirty, and how many bytes are clean.

A copy is clean if its block is whole in a lower tier as well: evicting it loses nothing. Every
other whole copy is dirty. Demotion (`migrations`) cleans the coldest dirty copies. This file keeps
the accounts only.
"""

from __future__ import annotations

from collections import deque

from kvpool.blocks.tier import Tier
from tiers.policies import LazyHeap
from tiers.store import eviction
from tiers.store.blocks import Copy
from tiers.store.config import StoreConfig
from tiers.store.victims import TierState


class Writeback:
    """The dirty and clean copies of one tier.

    Args:
        upper: the tier.
        target: the tier that demotion copies to.
        lower: all tiers below, with the target.
        high_watermark: share of the upper tier in use above which demotion begins.
        low_watermark: demotion ends when the share that is not reclaimable is below it.
        is_write_through: demote every block, whatever the watermarks.
    """

    def __init__(
        self,
        upper: TierState,
        target: Tier,
        lower: tuple[Tier, ...],
        high_watermark: float,
        low_watermark: float,
        *,
        is_write_through: bool = False,
    ) -> None:
        self.upper = upper
        self.target = target
        self.lower = lower
        self.is_write_through = is_write_through
        self.clean_bytes = 0  # of the whole upper copies that are clean
        self.cleaning_bytes = 0  # of the upper parts whose demotion is in flight
        # Whole upper copies with none below. Some may be pinned; demotion passes those over.
        self.dirty = LazyHeap[Copy](lambda copy: copy.block.last_use, self._is_dirty)
        self._retry: deque[tuple[float, Copy]] = deque()
        self._high = high_watermark
        self._low = low_watermark

    def shown(self, copy: Copy) -> Copy | None:
        """A copy became whole; returns the upper copy if that made it clean."""
        upper = self._upper_of(copy)
        if upper is None or (copy is not upper and copy.tier not in self.lower):
            return None
        if not self._is_backed(upper):
            self.dirty.offer(upper)
            return None
        if copy is not upper and self._is_backed(upper, but=copy):
            return None  # it was clean before
        self.clean_bytes += upper.size_bytes
        self.dirty.discard(upper)
        return upper

    def hidden(self, copy: Copy) -> None:
        """A whole copy is about to leave."""
        upper = self._upper_of(copy)
        if upper is None or (copy is not upper and copy.tier not in self.lower):
            return
        if copy is upper:
            self.dirty.discard(upper)
            if self._is_backed(upper):
                self.clean_bytes -= upper.size_bytes
        elif not self._is_backed(upper, but=copy):
            self.clean_bytes -= upper.size_bytes
            self.dirty.offer(upper)

    def replaced(self, old: Copy, new: Copy) -> None:
        """Another copy of the same bytes took this one's place in its tier."""
        if old.tier == self.upper.index:
            self.dirty.discard(old)
            if not self._is_backed(new):
                self.dirty.offer(new)

    def retry_later(self, copy: Copy, at: float) -> None:
        """Its demotion failed or found no room: offer it again from `at` on."""
        self.dirty.discard(copy)
        self._retry.append((at, copy))

    def offer_again(self, now: float) -> None:
        """Offer the copies whose wait is over."""
        while self._retry and self._retry[0][0] <= now:
            self.dirty.offer(self._retry.popleft()[1])

    def waiting(self) -> set[Copy]:
        """All copies that will be offered for demotion, now or later (for integrity checks)."""
        return set(self.dirty) | {copy for _, copy in self._retry}

    @property
    def is_due(self) -> bool:
        """Demotion should go on: too few bytes can be reclaimed without a loss."""
        if self.is_write_through:
            return True
        capacity = self.upper.allocator.capacity_bytes
        if self.upper.free_bytes >= (1.0 - self._high) * capacity:
            return False
        return self.reclaimable_bytes + self.cleaning_bytes < (1.0 - self._low) * capacity

    @property
    def reclaimable_bytes(self) -> int:
        """Bytes of the upper tier that are free or clean; some of them may be held now."""
        return self.upper.free_bytes + self.clean_bytes

    def _upper_of(self, copy: Copy) -> Copy | None:
        if copy.tier == self.upper.index:
            return copy
        block = copy.block
        return block.space.visible[self.upper.index].get(block.name)

    def _is_backed(self, upper: Copy, but: Copy | None = None) -> bool:
        block = upper.block
        below = (block.space.visible[tier].get(block.name) for tier in self.lower)
        return any(copy is not None and copy is not but for copy in below)

    def _is_dirty(self, copy: Copy) -> bool:
        return (
            eviction.is_resident(copy)
            and copy.is_whole
            and all(copy.block.copies[tier] is None for tier in self.lower)
        )


def writebacks_of(tiers: dict[Tier, TierState], config: StoreConfig) -> dict[Tier, Writeback]:
    """The writeback of each memory tier that has a tier below it, highest first."""
    made: dict[Tier, Writeback] = {}
    if Tier.HBM in tiers:
        high, low = config.hbm_high_watermark, config.hbm_low_watermark
        made[Tier.HBM] = Writeback(tiers[Tier.HBM], Tier.DRAM, (Tier.DRAM, Tier.NVME), high, low)
    if Tier.NVME in tiers:
        made[Tier.DRAM] = Writeback(
            tiers[Tier.DRAM],
            Tier.NVME,
            (Tier.NVME,),
            config.dram_high_watermark,
            config.dram_low_watermark,
            is_write_through=config.write_through,
        )
    return made
