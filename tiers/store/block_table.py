"""Which copies stand in which tier: taking slots, filling them, evicting, dropping, and the accounting.

The part of the store that owns every slot's state. Leases, reservations and moves (their own files) say
who holds what; here is what that means for slots. Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from kvpool.blocks.tier import Tier
from tiers.policies import policy_class
from tiers.store import eviction, victims
from tiers.store.arena_allocator import ArenaAllocator
from tiers.store.blocks import NEVER, Block, Copy, Ghosts, Space, StoreEvent
from tiers.store.config import StoreConfig
from tiers.store.eviction import EvictionQueue
from tiers.store.fp8 import Encoding, stored_bytes
from tiers.store.quotas import Accounts
from tiers.store.slab_allocator import Place, StoreCorrupt
from tiers.store.victims import TierState
from tiers.store.writeback import Writeback

VICTIMS_IN_VAIN = 16  # for one slot, where their own are of no use as their arena rests
LEAVES_AT_A_TIME = 64  # between two looks for a slab that came free


class BlockTable:
    """Blocks, their copies and slots over all tiers.

    Args:
        dram: slots of the arenas that clients read and write.
        nvme: slots of the slab files; None where the node has no disk tier.
        hbm: slots of the arena in device memory; None where the node has none.
        config: limits, policies and quotas.

    Raises:
        ConfigError: the quotas exceed dram.
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
        self.writebacks = _writebacks(self.tiers, config)  # by upper tier, highest first
        # Some policy goes by uses: whoever touches blocks says so (`note_uses`).
        self.wants_uses = any(policy_class(policy).wants_uses for _, _, policy in arenas)
        self.on_gone: Callable[[Block], None] = lambda block: (
            None
        )  # a protected block left the node
        self.spaces: dict[bytes, Space] = {}
        self.detached: set[Block] = set()
        self.evicted = Ghosts(config.ghost_hashes)
        self.dropped = Ghosts(config.ghost_hashes)
        self._events: deque[StoreEvent] = deque(maxlen=config.max_pending_events)
        self.counters: Counter[str] = Counter()
        self.failed: set[tuple[Tier, int]] = (
            set()
        )  # (tier, arena id) of what cannot be read any more
        self._tick = 0

    # ------------------------------------------------------------ blocks

    def advance(self, count: int) -> int:
        """Take `count` ticks of recency for a run; its head gets the last of them, which is returned."""
        self._tick += count
        return self._tick

    @property
    def tick(self) -> int:
        """The last tick of recency that was given out."""
        return self._tick

    def advance_to(self, tick: int) -> None:
        """Give out later ticks than this one from now on."""
        self._tick = max(self._tick, tick)

    def touch(
        self, blocks: Sequence[Block], *, is_use: bool = True, tick: int | None = None
    ) -> None:
        """Note a use, or the arrival, of a run of one chain: its head counts as the most recent.

        Args:
            tick: of the first of them, where `advance` gave it for the longer run that they are a part of.
        """
        if tick is None:
            tick = self.advance(len(blocks))
        for block in blocks:
            block.last_use = tick
            tick -= 1
        if is_use and self.wants_uses:
            self.note_uses(blocks)

    def note_uses(self, blocks: Sequence[Block]) -> None:
        """Tell the policies that count uses."""
        for block in blocks:
            for copy in block.copies:
                if copy is not None:
                    self._queue(copy).policy.used(copy)

    @contextmanager
    def shield(self, blocks: Collection[Block]) -> Iterator[None]:
        """Within it, none of the blocks is evicted."""
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
        """The record of a block, made anew when nothing is known of it.

        The parent that came first stays. A parent that would close a circle is not believed: a circle
        could never be evicted.
        """
        block = space.blocks.get(name)
        if block is None:
            if parent == name or (_has_children(space, name) and _descends(space, parent, name)):
                parent = b""
            self._tick += 1
            before = space.blocks.get(parent)
            depth = before.depth + 1 if before is not None else 0
            block = space.blocks[name] = Block(space, name, parent, self._tick, depth)
        return block

    def forget_if_gone(self, block: Block) -> None:
        """Drop the record of a block that stands nowhere."""
        if not any(block.copies):
            if block.retained_until != NEVER:
                self.on_gone(block)
            if block.is_detached:
                self.detached.discard(block)
            elif block.space.blocks.get(block.name) is block:
                del block.space.blocks[block.name]

    def take_events(self) -> list[StoreEvent]:
        """Events since the last call, in order."""
        events = list(self._events)
        self._events.clear()
        return events

    # ------------------------------------------------------------ slots of a copy

    def hold(
        self,
        block: Block,
        tier_index: Tier,
        part: int,
        colder_than: int | None = None,
    ) -> Place | None:
        """Reserve a slot for one part, evicting when needed; None when no slot can be had.

        Args:
            colder_than: evict only what was used before this tick.
        """
        copy = self._open(block, tier_index)
        copy.filling += 1  # before room is made: neither this copy nor its parent may be the victim
        place = self._make_room(self.tiers[tier_index], block.space, colder_than)
        if place is None:
            copy.filling -= 1
            self.settle_state(copy)
            return None
        self._enter(copy, part, place)
        return place

    def claim(
        self, block: Block, tier_index: Tier, part: int, place: Place, encoding: Encoding
    ) -> bool:
        """Reserve the slot at a known place for one part (recovery); False when it cannot be had."""
        tier = self.tiers[tier_index]
        slot_bytes = tier.allocator.slot_size(stored_bytes(block.space.namespace.layout, encoding))
        if not tier.allocator.claim(place, slot_bytes):
            return False
        if block.copies[tier_index] is None:
            self._enter_copy(Copy(block, tier_index, encoding, slot_bytes))
        copy = self._open(block, tier_index)
        copy.filling += 1
        self._enter(copy, part, place)
        return True

    def fill(self, copy: Copy, part: int, checksum: int) -> bool:
        """Reserved to committed; True when the copy became whole and visible by it."""
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

    def end_quarantine(self, tier_index: Tier, place: Place, slot_bytes: int) -> None:
        """Nobody can write to the slot any more: it is free."""
        tier = self.tiers[tier_index]
        tier.quarantined_bytes -= slot_bytes
        tier.quota_table.charge(tier.quarantined_of.pop(place), -slot_bytes)
        tier.allocator.free(place)

    def exchange_places(self, copy: Copy, twin: Copy) -> None:
        """Two copies of one block, in one tier and with the same parts, take over each other's slots."""
        owners = self.tiers[copy.tier].owners
        for owner, places in ((copy, twin.places), (twin, copy.places)):
            owners.update((place, owner) for place in places if place is not None)
        copy.places, twin.places = twin.places, copy.places
        if copy.is_whole:
            self._hand_out(copy)

    def replace(self, copy: Copy, twin: Copy) -> None:
        """A whole copy of the same bytes takes the place of a pinned one, which lives on for its leases alone."""
        block, remnant = copy.block, twin.block
        self._queue(copy).discard(copy)
        copy.block, twin.block = remnant, block
        remnant.copies[copy.tier], block.copies[copy.tier] = copy, twin
        block.space.visible[copy.tier][block.name] = twin
        self._hand_out(twin)
        for writeback in self.writebacks.values():
            writeback.replaced(copy, twin)

    def resized(self, tier_index: Tier) -> None:
        """Arenas of the tier came or went: what is a share of its bytes changes with them."""
        capacity_bytes = self.tiers[tier_index].allocator.open_bytes
        if tier_index == Tier.DRAM:
            self.accounts.resize(capacity_bytes)
        for tier in self.tiers.values():
            tier.quota_table.resize(tier.allocator.open_bytes)

    def settle_state(self, copy: Copy) -> None:
        """After a holder let go: free a dropped copy, close an empty one, offer others for eviction."""
        block = copy.block
        if block.is_detached:
            if not eviction.is_held(copy):
                self._free_committed(copy)
                self._close(copy)
        elif not copy.filling and not copy.committed:
            self._close(copy)
        elif not eviction.is_held(copy):
            self.offer(copy)

    def offer(self, copy: Copy) -> None:
        """The copy may have become evictable, or changed its rank; offering in vain does no harm."""
        self._queue(copy).offer(copy)

    def unpin_run(self, copies: Sequence[Copy]) -> None:
        """One lease less on the copies of a run of one namespace."""
        if not copies:
            return
        space = copies[0].block.space
        policies = {index: tier.queue(space).policy for index, tier in self.tiers.items()}
        freed = freed_of_hbm = 0
        for copy in copies:
            copy.pins -= 1
            if copy.pins:
                continue
            freed += 1
            if copy.tier == Tier.HBM:
                freed_of_hbm += 1
            block = copy.block
            if block.copies[copy.tier] is not copy:
                raise StoreCorrupt(f"pinned block {block.name.hex()} left {copy.tier}")
            # Most copies were never asked to go while they were pinned, and still have their place.
            if (
                block.is_detached
                or block.retained_until != NEVER
                or copy not in policies[copy.tier]
            ):
                self.settle_state(copy)
        self.note_pins(space, freed_of_hbm - freed, -freed_of_hbm)

    def note_pins(self, space: Space, of_dram: int, of_hbm: int) -> None:
        """So many copies of each tier are pinned now, or (less than none) no more."""
        for index, count in ((Tier.DRAM, of_dram), (Tier.HBM, of_hbm)):
            if count:
                self.tiers[index].pinned_bytes += count * space.slot_bytes[index] * space.tp_size

    # ------------------------------------------------------------ leaving

    def evict(self, copy: Copy) -> None:
        """Take a copy out of its tier; the block lives on where it has another."""
        block, tier = copy.block, self.tiers[copy.tier]
        self.counters["evicted"] += 1
        self.counters[f"evicted:{tier.name}"] += 1
        if eviction.is_soft_pinned(copy):
            self.counters["evicted:soft"] += 1
        tier.evicted_since_scan[copy.slot_bytes] += 1
        self._queue(copy).discard(copy, is_evicted=True)
        was_whole = copy.is_whole
        if was_whole:
            self._hide(copy)
        self._free_committed(copy)
        self._close(copy)
        if was_whole and not any(block.name in names for names in block.space.visible):
            self.counters["lost"] += 1
            self.evicted.remember(block, "evicted")

    def drop_unreadable(self, copy: Copy, reason: str) -> None:
        """The copy cannot be read any more: hide it, and free its slots as soon as nobody holds them.

        While it is filled it is not to be seen; the end of its moves is the end of it (see `is_lost`).
        """
        block = copy.block
        if copy.filling or block.is_detached:
            return
        self.counters["lost_with_device"] += 1
        if copy.reading:
            self.detach(block, reason)
            return
        was_whole = copy.is_whole
        if was_whole:
            self._hide(copy)
        self._free_committed(copy)
        self._close(copy)
        if was_whole and not any(block.name in names for names in block.space.visible):
            self.counters["lost"] += 1
            self.dropped.remember(block, reason)

    def is_unreadable(self, copy: Copy) -> bool:
        """Some part of the copy stands where nothing can be read any more."""
        return bool(self.failed) and any(
            place is not None and (copy.tier, place.arena_id) in self.failed
            for place in copy.places
        )

    def detach(self, block: Block, reason: str) -> None:
        """Hide a block from everybody at once; slots that are still held go when they are let go."""
        space = block.space
        self.dropped.remember(block, reason)
        self.counters["dropped"] += 1
        copies = [copy for copy in block.copies if copy is not None]
        for copy in copies:
            if copy.is_whole:
                self._hide(copy)
            self._queue(copy).discard(copy)
            self._unlink(copy)
        if block.retained_until != NEVER:
            self.on_gone(block)
        block.is_detached = True
        self.detached.add(block)
        del space.blocks[block.name]
        for copy in copies:
            self.settle_state(copy)

    def discard_partial(self, copy: Copy) -> None:
        """Free what was committed of a copy that will never be whole."""
        if not copy.is_whole and not eviction.is_held(copy) and copy.committed:
            self._free_committed(copy)
            self._close(copy)

    # ------------------------------------------------------------ within

    def _queue(self, copy: Copy) -> EvictionQueue:
        return self.tiers[copy.tier].queue_of(copy)

    def _open(self, block: Block, tier_index: Tier) -> Copy:
        copy = block.copies[tier_index]
        if copy is None:
            copy = Copy(block, tier_index)
            self._enter_copy(copy)
        return copy

    def _enter_copy(self, copy: Copy) -> None:
        block = copy.block
        block.copies[copy.tier] = copy
        if block.parent and not block.is_detached:  # the twin of one that moves has no family
            children = block.space.children[copy.tier]
            children[block.parent] = children.get(block.parent, 0) + 1
        self._offer_nvme(block, copy.tier)

    def _close(self, copy: Copy) -> None:
        block = copy.block
        if block.copies[copy.tier] is not copy:
            return
        block.copies[copy.tier] = None
        self._queue(copy).discard(copy)
        if not block.is_detached:
            self._unlink(copy)
            self._offer_nvme(block, copy.tier)
        self.forget_if_gone(block)

    def _offer_nvme(self, block: Block, changed_tier: Tier) -> None:
        """A dram copy came or went, which may change the rank of the one in nvme."""
        nvme = block.copies[Tier.NVME]
        if changed_tier == Tier.DRAM and nvme is not None and nvme.committed:
            self.offer(nvme)

    def _unlink(self, copy: Copy) -> None:
        """One child less for the parent, which may be a leaf now."""
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

    def _enter(self, copy: Copy, part: int, place: Place) -> None:
        tier = self.tiers[copy.tier]
        slot_bytes = copy.slot_bytes
        tier.reserved_bytes += slot_bytes
        tier.quota_table.charge(copy.block.space.account, slot_bytes)
        tier.owners[place] = copy
        copy.places[part] = place

    def _free_committed(self, copy: Copy) -> None:
        tier = self.tiers[copy.tier]
        slot_bytes = copy.slot_bytes
        for part, place in enumerate(copy.places):
            if place is not None and copy.checksums[part] is not None:
                del tier.owners[place]
                tier.allocator.free(place)
                tier.committed_bytes -= slot_bytes
                tier.quota_table.charge(copy.block.space.account, -slot_bytes)
                copy.places[part] = copy.checksums[part] = None
                copy.committed -= 1

    def _show(self, copy: Copy) -> None:
        block = copy.block
        block.space.visible[copy.tier][block.name] = copy
        self._hand_out(copy)
        for writeback in self.writebacks.values():
            cleaned = writeback.shown(copy)
            if cleaned is not None and cleaned is not copy and not eviction.is_held(cleaned):
                self.offer(cleaned)  # it may have been spared until now
        self._note("stored", copy)

    @staticmethod
    def _hand_out(copy: Copy) -> None:
        copy.whole_places = tuple(place for place in copy.places if place is not None)
        copy.whole_checksums = tuple(c for c in copy.checksums if c is not None)

    def _hide(self, copy: Copy) -> None:
        for writeback in self.writebacks.values():
            writeback.hidden(copy)
        del copy.block.space.visible[copy.tier][copy.block.name]
        self._note("removed", copy)

    def _note(self, kind: str, copy: Copy) -> None:
        block = copy.block
        if len(self._events) == self._events.maxlen:
            self.counters["events_lost"] += 1
        self._events.append(StoreEvent(kind, block.space.namespace_id, block.name, copy.tier))

    # ------------------------------------------------------------ making room

    def _make_room(self, tier: TierState, space: Space, colder_than: int | None) -> Place | None:
        slot_bytes = space.slot_bytes[tier.index]
        place = tier.allocator.allocate(slot_bytes)
        if place is None:
            tier.look_further()
        in_vain = 0
        while place is None:
            if tier.allocator.resting and in_vain > VICTIMS_IN_VAIN:
                return None
            in_vain += 1
            found = victims.victims(tier, space, colder_than)
            if found:
                is_slab = found[0].slot_bytes != slot_bytes
                self.counters["slabs_reclaimed"] += is_slab
                for copy in found:
                    self.evict(copy)
            elif not self._thin_out_others(tier, space, colder_than):
                return None
            place = tier.allocator.allocate(slot_bytes)
        return place

    def _thin_out_others(self, tier: TierState, space: Space, colder_than: int | None) -> bool:
        """Evict some of the coldest leaves of other slot sizes; False when that can lead nowhere."""
        evicted = 0
        for copy in victims.leaves_of_others(tier, space, colder_than):
            self.evict(copy)
            evicted += 1
            if evicted == LEAVES_AT_A_TIME:
                break
        return evicted > 0


def _writebacks(tiers: dict[Tier, TierState], config: StoreConfig) -> dict[Tier, Writeback]:
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


def _has_children(space: Space, name: bytes) -> bool:
    return any(name in children for children in space.children)


def _descends(space: Space, name: bytes, ancestor: bytes) -> bool:
    """Whether the known parents of `name` lead to `ancestor`."""
    while name and name != ancestor:
        block = space.blocks.get(name)
        name = block.parent if block is not None else b""
    return name == ancestor and bool(name)
