"""The table of blocks and their copies: reserves, fills and frees slots, evicts and drops.

It owns the state of every slot. Leases, reservations and migrations (in files of their own) decide
who holds a copy; this table applies that to slots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from kvpool.blocks.tier import Tier
from tiers.policies import policy_class
from tiers.store import eviction, victims
from tiers.store.access_clock import AccessClock
from tiers.store.arena_allocator import ArenaAllocator
from tiers.store.blocks import NEVER, Block, Copy, EventLog, Ghosts, Space
from tiers.store.config import StoreConfig
from tiers.store.fp8 import Encoding, stored_bytes
from tiers.store.quotas import Accounts
from tiers.store.slab_allocator import Place, StoreCorrupt
from tiers.store.victims import TierState
from tiers.store.writeback import writebacks_of


class BlockTable:
    """Blocks with their copies and slots, in all tiers.

    Args:
        dram: allocates in the arenas that clients read and write.
        nvme: allocates in the slab files; None for a node without a disk tier.
        hbm: allocates in the arena in device memory; None for a node without.
        config: limits, policies and quotas.

    Raises:
        ConfigError: the quotas exceed DRAM.
    """

    def __init__(
        self,
        dram: ArenaAllocator,
        nvme: ArenaAllocator | None,
        hbm: ArenaAllocator | None,
        config: StoreConfig,
    ) -> None:
        self.accounts = Accounts(config.quotas, dram.open_bytes)
        self._parked: list[Copy] = []
        arenas = [(Tier.DRAM, dram, config.eviction)]
        if nvme is not None:
            arenas.append((Tier.NVME, nvme, config.nvme_eviction))
        if hbm is not None:
            arenas.append((Tier.HBM, hbm, config.eviction))
        self.tiers = {
            index: TierState(index, allocator, policy, self.accounts, self._parked)
            for index, allocator, policy in arenas
        }
        self.writebacks = writebacks_of(self.tiers, config)  # by upper tier, highest first
        # Some policy counts uses, so each use must be reported by `note_uses`.
        self.wants_uses = any(policy_class(policy).wants_uses for _, _, policy in arenas)
        # Called when a retained block leaves the node.
        self.on_gone: Callable[[Block], None] = lambda block: None
        self.spaces: dict[bytes, Space] = {}
        self.detached: set[Block] = set()
        self.evicted = Ghosts(config.ghost_hashes)
        self.dropped = Ghosts(config.ghost_hashes)
        self.counters: Counter[str] = Counter()
        self.events = EventLog(config.max_pending_events, self.counters)
        self.failed: set[tuple[Tier, int]] = set()  # (tier, arena id) of unreadable arenas
        self.access_clock = AccessClock()

    # ------------------------------------------------------------ blocks

    def touch(
        self, blocks: Sequence[Block], *, is_use: bool = True, tick: int | None = None
    ) -> None:
        """Record a use, or the arrival, of a run of one chain; its head counts as the most recent.

        Args:
            tick: of the first block, if `advance` gave it for a longer run; None takes new ticks.
        """
        if tick is None:
            tick = self.access_clock.advance(len(blocks))
        for block in blocks:
            block.last_use = tick
            tick -= 1
        if is_use and self.wants_uses:
            self.note_uses(blocks)

    def note_uses(self, blocks: Sequence[Block]) -> None:
        """Report a use to the policies that count uses."""
        for block in blocks:
            for copy in block.copies:
                if copy is not None:
                    self.tiers[copy.tier].queue_of(copy).policy.used(copy)

    @contextmanager
    def shield(self, blocks: Collection[Block]) -> Iterator[None]:
        """While the context is open, none of the blocks is evicted."""
        for block in blocks:
            block.is_shielded = True
        try:
            yield
        finally:
            for block in blocks:
                block.is_shielded = False
            parked, self._parked[:] = self._parked[:], []
            for copy in parked:
                if not copy.block.is_detached and copy.block.copies[copy.tier] is copy:
                    self.offer(copy)

    def block(self, space: Space, name: bytes, parent: bytes) -> Block:
        """The record of a block, created if there is none.

        A known block keeps its parent. A parent that would close a cycle is ignored, since a cycle
        could never be evicted.
        """
        block = space.blocks.get(name)
        if block is None:
            if parent == name or (space.has_children(name) and space.descends(parent, name)):
                parent = b""
            before = space.blocks.get(parent)
            depth = before.depth + 1 if before is not None else 0
            block = space.blocks[name] = Block(
                space, name, parent, self.access_clock.advance(1), depth
            )
        return block

    def forget_if_gone(self, block: Block) -> None:
        """Remove the record of a block that has no copy."""
        if not any(block.copies):
            if block.retained_until != NEVER:
                self.on_gone(block)
            if block.is_detached:
                self.detached.discard(block)
            elif block.space.blocks.get(block.name) is block:
                del block.space.blocks[block.name]

    # ------------------------------------------------------------ slots of a copy

    def hold(
        self,
        block: Block,
        tier_index: Tier,
        part: int,
        colder_than: int | None = None,
    ) -> Place | None:
        """Reserve a slot for one part, and evict if needed; None if no slot can be freed.

        Args:
            colder_than: evict only what was used before this tick.
        """
        copy = block.copies[tier_index] or self._open(Copy(block, tier_index))
        copy.filling += 1  # first, so that neither this copy nor its parent is the victim
        place, reclaimed = victims.make_room(
            self.tiers[tier_index], block.space, colder_than, self.evict
        )
        if reclaimed:
            self.counters["slabs_reclaimed"] += reclaimed
        if place is None:
            copy.filling -= 1
            self.settle_state(copy)
            return None
        self.tiers[copy.tier].enter(copy, part, place)
        return place

    def claim(
        self, block: Block, tier_index: Tier, part: int, place: Place, encoding: Encoding
    ) -> bool:
        """Reserve the slot at a known place for one part (recovery); False if it is taken."""
        tier = self.tiers[tier_index]
        slot_bytes = tier.allocator.slot_size(stored_bytes(block.space.namespace.layout, encoding))
        if not tier.allocator.claim(place, slot_bytes):
            return False
        copy = block.copies[tier_index] or self._open(Copy(block, tier_index, encoding, slot_bytes))
        copy.filling += 1
        self.tiers[copy.tier].enter(copy, part, place)
        return True

    def fill(self, copy: Copy, part: int, checksum: int) -> bool:
        """Turn one part from reserved to committed; True if the copy became whole and visible."""
        block, tier = copy.block, self.tiers[copy.tier]
        slot_bytes = copy.slot_bytes
        tier.reserved_bytes -= slot_bytes
        tier.committed_bytes += slot_bytes
        copy.checksums[part] = checksum
        copy.filling -= 1
        copy.committed += 1
        became_visible = not block.is_detached and copy.is_whole
        if became_visible:
            self._show(copy)
        self.settle_state(copy)
        return became_visible

    def vacate(self, copy: Copy, part: int, *, is_late_write_possible: bool) -> Place:
        """Give up a reserved slot: to quarantine (the caller keeps the place) or free at once."""
        place = copy.places[part]
        if place is None or copy.checksums[part] is not None:
            raise StoreCorrupt(f"part {part} of {copy.block.name.hex()} is not reserved")
        tier = self.tiers[copy.tier]
        slot_bytes = copy.slot_bytes
        tier.reserved_bytes -= slot_bytes
        del tier.owners[place]
        copy.places[part] = None
        copy.filling -= 1
        if is_late_write_possible:  # invariant 2
            tier.quarantined_bytes += slot_bytes
            tier.quarantined_of[place] = copy.block.space.account
            self.counters["quarantined"] += 1
        else:
            tier.quota_table.charge(copy.block.space.account, -slot_bytes)
            tier.allocator.free(place)
        self.settle_state(copy)
        return place

    def resized(self, tier_index: Tier) -> None:
        """Arenas of the tier came or went: recompute what is a share of its bytes."""
        capacity_bytes = self.tiers[tier_index].allocator.open_bytes
        if tier_index == Tier.DRAM:
            self.accounts.resize(capacity_bytes)
        for tier in self.tiers.values():
            tier.quota_table.resize(tier.allocator.open_bytes)

    def settle_state(self, copy: Copy) -> None:
        """A holder let go: free a dropped copy, close an empty one, offer others for eviction."""
        block = copy.block
        if block.is_detached:
            if not eviction.is_held(copy):
                self.tiers[copy.tier].free_committed(copy)
                self._close(copy)
        elif not copy.filling and not copy.committed:
            self._close(copy)
        elif not eviction.is_held(copy):
            self.offer(copy)

    def offer(self, copy: Copy) -> None:
        """The copy may be evictable now, or its rank changed. A needless offer does no harm."""
        self.tiers[copy.tier].queue_of(copy).offer(copy)

    # ------------------------------------------------------------ leaving

    def evict(self, copy: Copy) -> None:
        """Take a copy out of its tier; copies in other tiers stay."""
        tier = self.tiers[copy.tier]
        self.counters["evicted"] += 1
        self.counters[f"evicted:{tier.name}"] += 1
        if eviction.is_soft_pinned(copy):
            self.counters["evicted:soft"] += 1
        tier.evicted_since_scan[copy.slot_bytes] += 1
        tier.queue_of(copy).discard(copy, is_evicted=True)
        self._remove(copy, self.evicted, "evicted")

    def drop_unreadable(self, copy: Copy, reason: str) -> None:
        """The copy cannot be read any more: hide it, and free its slots when nobody holds them.

        A copy that is still being filled is not visible; the end of its migrations removes it
        (`is_unreadable`).
        """
        block = copy.block
        if copy.filling or block.is_detached:
            return
        self.counters["lost_with_device"] += 1
        if copy.reading:
            self.detach(block, reason)
            return
        self._remove(copy, self.dropped, reason)

    def _remove(self, copy: Copy, ghosts: Ghosts, reason: str) -> None:
        """Free the copy's slots; remember the block in `ghosts` if no other copy is visible."""
        block = copy.block
        was_whole = copy.is_whole
        if was_whole:
            self._hide(copy)
        self.tiers[copy.tier].free_committed(copy)
        self._close(copy)
        if was_whole and not any(block.name in names for names in block.space.visible):
            self.counters["lost"] += 1
            ghosts.remember(block, reason)

    def is_unreadable(self, copy: Copy) -> bool:
        """Some part of the copy is in an arena that cannot be read any more."""
        return bool(self.failed) and any(
            place is not None and (copy.tier, place.arena_id) in self.failed
            for place in copy.places
        )

    def detach(self, block: Block, reason: str) -> None:
        """Hide a block at once; slots that are still held are freed when their holders let go."""
        space = block.space
        self.dropped.remember(block, reason)
        self.counters["dropped"] += 1
        copies = [copy for copy in block.copies if copy is not None]
        for copy in copies:
            if copy.is_whole:
                self._hide(copy)
            self.tiers[copy.tier].queue_of(copy).discard(copy)
            self._unlink(copy)
        if block.retained_until != NEVER:
            self.on_gone(block)
        block.is_detached = True
        self.detached.add(block)
        del space.blocks[block.name]
        for copy in copies:
            self.settle_state(copy)

    def discard_partial(self, copy: Copy) -> None:
        """Free the committed parts of a copy that will never be whole."""
        if not copy.is_whole and not eviction.is_held(copy) and copy.committed:
            self.tiers[copy.tier].free_committed(copy)
            self._close(copy)

    # ------------------------------------------------------------ within

    def _open(self, copy: Copy) -> Copy:
        block = copy.block
        block.copies[copy.tier] = copy
        if block.parent and not block.is_detached:  # the twin of a migrating copy has no parent
            children = block.space.children[copy.tier]
            children[block.parent] = children.get(block.parent, 0) + 1
        self._offer_nvme(block, copy.tier)
        return copy

    def _close(self, copy: Copy) -> None:
        block = copy.block
        if block.copies[copy.tier] is not copy:
            return
        block.copies[copy.tier] = None
        self.tiers[copy.tier].queue_of(copy).discard(copy)
        if not block.is_detached:
            self._unlink(copy)
            self._offer_nvme(block, copy.tier)
        self.forget_if_gone(block)

    def _offer_nvme(self, block: Block, changed_tier: Tier) -> None:
        """A DRAM copy came or went, which may change the rank of the copy on NVMe."""
        nvme = block.copies[Tier.NVME]
        if changed_tier == Tier.DRAM and nvme is not None and nvme.committed:
            self.offer(nvme)

    def _unlink(self, copy: Copy) -> None:
        """The parent has one child less, and may be a leaf now."""
        block = copy.block
        if not block.parent:
            return
        children = block.space.children[copy.tier]
        if children[block.parent] > 1:
            children[block.parent] -= 1
            return
        del children[block.parent]
        parent = block.space.blocks.get(block.parent)
        parent_copy = parent.copies[copy.tier] if parent is not None else None
        if parent_copy is not None and not eviction.is_held(parent_copy):
            self.offer(parent_copy)

    def _show(self, copy: Copy) -> None:
        block = copy.block
        block.space.visible[copy.tier][block.name] = copy
        copy.hand_out()
        for writeback in self.writebacks.values():
            cleaned = writeback.shown(copy)
            if cleaned is not None and cleaned is not copy and not eviction.is_held(cleaned):
                self.offer(cleaned)  # it may have been spared as dirty
        self.events.note("stored", copy)

    def _hide(self, copy: Copy) -> None:
        for writeback in self.writebacks.values():
            writeback.hidden(copy)
        del copy.block.space.visible[copy.tier][copy.block.name]
        self.events.note("removed", copy)
