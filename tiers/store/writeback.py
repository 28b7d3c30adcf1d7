"""The boundary below a memory tier: which copies would be lost if their room were needed, and how many bytes.

A copy of the upper tier is clean when its block stands whole in some tier below, too: evicting it loses nothing.
Demotion (`moves`) cleans the coldest others. Keeps the books only; pure: no I/O, no clock.
"""

from __future__ import annotations

from collections import deque

from kvpool.blocks.tier import Tier
from tiers.policies import LazyHeap
from tiers.store import eviction
from tiers.store.blocks import Copy
from tiers.store.victims import TierState


class Writeback:
    """What stands above it and not below.

    Args:
        upper: the tier whose copies it is about.
        target: index of the tier that demotion copies them to.
        lower: indexes of all tiers below, the target among them.
        high_watermark: share of the upper tier in use above which demotion begins.
        low_watermark: share that demotion makes dispensable down to.
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
        self.clean_bytes = 0  # of whole upper copies whose block stands whole below, too
        self.cleaning_bytes = 0  # of upper parts whose demotion is under way
        # Whole upper copies without any below. They may be pinned: demotion sets those aside.
        self.dirty = LazyHeap[Copy](lambda copy: copy.block.last_use, self._is_dirty)
        self._retry: deque[tuple[float, Copy]] = deque()
        self._high = high_watermark
        self._low = low_watermark

    def shown(self, copy: Copy) -> Copy | None:
        """A copy became whole; returns the upper one if it became clean by it."""
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
        """A whole copy is about to go."""
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
        """A copy of the same bytes stands for the block in the same tier now."""
        if old.tier == self.upper.index:
            self.dirty.discard(old)
            if not self._is_backed(new):
                self.dirty.offer(new)

    def retry_later(self, copy: Copy, at: float) -> None:
        """Its demotion failed, or found no room: offer it again from then on."""
        self.dirty.discard(copy)
        self._retry.append((at, copy))

    def offer_again(self, now: float) -> None:
        """Take up what has waited long enough."""
        while self._retry and self._retry[0][0] <= now:
            self.dirty.offer(self._retry.popleft()[1])

    def waiting(self) -> set[Copy]:
        """What will be offered for demotion, now or later (for integrity checks)."""
        return set(self.dirty) | {copy for _, copy in self._retry}

    @property
    def is_due(self) -> bool:
        """There is something to clean, or soon will be room wanted that nothing clean can give."""
        if self.is_write_through:
            return True
        capacity = self.upper.allocator.capacity_bytes
        if self.upper.free_bytes >= (1.0 - self._high) * capacity:
            return False
        return self.reclaimable_bytes + self.cleaning_bytes < (1.0 - self._low) * capacity

    @property
    def reclaimable_bytes(self) -> int:
        """Bytes of the upper tier that can be had without a loss, as far as nobody holds them."""
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
