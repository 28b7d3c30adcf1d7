"""Slab allocator of one arena: each slab has slots of one size.

An empty slab has no size. The first slot taken gives it one, and the last slot freed takes it away.
So arenas never fragment across sizes. A size finds no room only if others hold all slabs; the store
then empties one of theirs (`slabs_of_others`). Works with offsets and touches no memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from typing import NamedTuple

from kvpool.errors import BlockTooLarge, InvalidArgument, KvpoolError


class StoreCorrupt(KvpoolError):
    """The node's own records contradict each other: a defect of kvpool, never of a caller."""

    code = "store_corrupt"


class Place(NamedTuple):
    """Where a slot begins: byte `offset` of arena `arena_id`."""

    arena_id: int
    offset: int


class _Slab:
    __slots__ = (
        "fresh",
        "generation",
        "is_listed",
        "returned",
        "slot_bytes",
        "slots",
        "taken",
        "used",
    )

    def __init__(self) -> None:
        self.slot_bytes = 0  # 0: the slab is empty
        self.generation = (
            0  # grows when the slab changes its size, so that old list entries are void
        )
        self.slots = 0
        self.used = 0
        self.fresh = 0  # slots from here on were never taken
        self.returned: list[int] = []
        self.taken = bytearray()
        self.is_listed = False

    def give_to(self, slot_bytes: int, slots: int) -> None:
        self.slot_bytes, self.slots = slot_bytes, slots
        self.generation += 1
        self.used = self.fresh = 0
        self.returned = []
        self.taken = bytearray(slots)
        self.is_listed = False

    def take_back(self) -> None:
        self.give_to(0, 0)


class SlabAllocator:
    """Slots of several sizes in one arena; every call is O(1) or O(log slabs).

    Args:
        capacity_bytes: size of the arena; a rest smaller than a slab is not used.
        slab_bytes: the largest possible slot; a multiple of `alignment`.
        arena_id: part of every `Place`.
        alignment: every offset and slot size is a multiple of it (4096 for O_DIRECT and huge pages
            alike).

    Raises:
        InvalidArgument: the sizes are not positive or not aligned, or one slab does not fit.
    """

    def __init__(
        self, capacity_bytes: int, slab_bytes: int, arena_id: int = 0, alignment: int = 4096
    ) -> None:
        if alignment < 1 or slab_bytes < alignment or slab_bytes % alignment:
            raise InvalidArgument(
                f"slab_bytes={slab_bytes} is not a positive multiple of alignment={alignment}"
            )
        if capacity_bytes < slab_bytes:
            raise InvalidArgument(
                f"an arena of {capacity_bytes} bytes holds no slab of {slab_bytes}",
                hint="raise the capacity or lower slab_bytes",
            )
        self.arena_id = arena_id
        self.slab_bytes = slab_bytes
        self.alignment = alignment
        self.capacity_bytes = capacity_bytes // slab_bytes * slab_bytes
        self.used_bytes = 0  # in slots, so rounded up
        self._slabs = [_Slab() for _ in range(self.capacity_bytes // slab_bytes)]
        self._empty = list(
            range(len(self._slabs))
        )  # heap: low offsets first; some may be taken by now
        # Slabs with room by slot size: heaps of (slab, generation). Void entries are removed
        # lazily.
        self._open: dict[int, list[tuple[int, int]]] = {}

    def slot_size(self, size_bytes: int) -> int:
        """Bytes that a slot for `size_bytes` takes: rounded up to the alignment.

        Raises:
            BlockTooLarge: more than a slab.
            InvalidArgument: not positive.
        """
        if size_bytes < 1:
            raise InvalidArgument(f"a slot of {size_bytes} bytes")
        rounded = -(-size_bytes // self.alignment) * self.alignment
        if rounded > self.slab_bytes:
            raise BlockTooLarge(
                f"a block part of {size_bytes} bytes does not fit a slab of {self.slab_bytes}",
                hint="raise slab_bytes or lower block_tokens",
            )
        return rounded

    def allocate(self, slot_bytes: int) -> Place | None:
        """Take a slot for `slot_bytes` (rounded up); None if no slab of this size has room.

        Raises:
            BlockTooLarge: more than a slab.
        """
        size = self.slot_size(slot_bytes)
        index = self._slab_with_room(size)
        if index is None:
            return None
        slab = self._slabs[index]
        if slab.returned:
            slot = slab.returned.pop()
        else:
            slot = slab.fresh
            slab.fresh += 1
        self._mark_taken(slab, slot)
        return Place(self.arena_id, index * self.slab_bytes + slot * size)

    def claim(self, place: Place, slot_bytes: int) -> bool:
        """Take the slot at a known place (recovery); False if it is taken or no slot is there."""
        size = self.slot_size(slot_bytes)
        index, within = divmod(place.offset, self.slab_bytes)
        slot, rest = divmod(within, size)
        if place.arena_id != self.arena_id or rest or not 0 <= index < len(self._slabs):
            return False
        slab = self._slabs[index]
        if slot >= self.slab_bytes // size or slab.slot_bytes not in (0, size):
            return False
        if not slab.slot_bytes:
            self._give(index, size)
        if slab.taken[slot]:
            return False
        if slot < slab.fresh:
            slab.returned.remove(slot)
        else:
            slab.returned.extend(range(slab.fresh, slot))
            slab.fresh = slot + 1
        self._mark_taken(slab, slot)
        return True

    def free(self, place: Place) -> None:
        """Free a slot; its slab is empty again if this was the last one.

        Raises:
            StoreCorrupt: no slot is taken there.
        """
        index = self.slab_of(place)
        slab = self._slabs[index]
        slot, rest = divmod(place.offset - index * self.slab_bytes, slab.slot_bytes or 1)
        if rest or slot >= slab.slots or not slab.taken[slot]:
            raise StoreCorrupt(f"no slot is taken at {place}")
        slab.taken[slot] = 0
        slab.used -= 1
        self.used_bytes -= slab.slot_bytes
        if not slab.used:
            slab.take_back()
            heappush(self._empty, index)
            return
        slab.returned.append(slot)
        if not slab.is_listed:
            slab.is_listed = True
            heappush(self._open[slab.slot_bytes], (index, slab.generation))

    def slab_of(self, place: Place) -> int:
        """Number of the slab that `place` lies in.

        Raises:
            StoreCorrupt: the place is not of this arena.
        """
        if place.arena_id != self.arena_id or not 0 <= place.offset < self.capacity_bytes:
            raise StoreCorrupt(f"{place} is not in arena {self.arena_id}")
        return place.offset // self.slab_bytes

    def slabs_of_others(
        self, slot_bytes: int, start: int = 0, count: int | None = None
    ) -> Iterator[int]:
        """Numbers of the slabs whose slots have another size.

        Args:
            start: the slab to begin with; after the last one come the first ones.
            count: how many slabs to look at; None for all.
        """
        size = self.slot_size(slot_bytes)
        slabs = len(self._slabs)
        looked_at = slabs if count is None else min(count, slabs)
        numbers = (number % slabs for number in range(start, start + looked_at))
        return (number for number in numbers if self._slabs[number].slot_bytes not in (0, size))

    def places_in(self, slab_index: int) -> list[Place]:
        """The slots taken in one slab."""
        slab = self._slabs[slab_index]
        start = slab_index * self.slab_bytes
        return [
            Place(self.arena_id, start + slot * slab.slot_bytes)
            for slot in range(slab.slots)
            if slab.taken[slot]
        ]

    def slots_per_slab(self, slot_bytes: int) -> int:
        """How many slots of this size a slab holds."""
        return self.slab_bytes // self.slot_size(slot_bytes)

    @property
    def slab_count(self) -> int:
        """Number of slabs."""
        return len(self._slabs)

    @property
    def free_bytes(self) -> int:
        """Bytes in no slot; free slots of any size and unused ends of slabs count."""
        return self.capacity_bytes - self.used_bytes

    @property
    def empty_slabs(self) -> int:
        """Slabs without slots."""
        return sum(not slab.slot_bytes for slab in self._slabs)

    def check_integrity(self) -> None:
        """Recount everything from scratch.

        Raises:
            StoreCorrupt: a count or a list contradicts the slabs.
        """
        used_bytes = 0
        empty = set(self._empty)
        for index, slab in enumerate(self._slabs):
            used_bytes += slab.used * slab.slot_bytes
            where = f"slab {index} of arena {self.arena_id}"
            if slab.used != sum(slab.taken) or (slab.used == 0) != (slab.slot_bytes == 0):
                raise StoreCorrupt(f"{where}: used={slab.used} does not match its slots")
            if not slab.slot_bytes:
                if index not in empty:
                    raise StoreCorrupt(f"{where} is empty and cannot be found")
                continue
            if slab.slots * slab.slot_bytes > self.slab_bytes:
                raise StoreCorrupt(f"{where}: its slots reach past its end")
            unused = set(slab.returned) | set(range(slab.fresh, slab.slots))
            if unused != {i for i in range(slab.slots) if not slab.taken[i]}:
                raise StoreCorrupt(f"{where}: a slot is neither taken nor free")
            listed = (index, slab.generation) in self._open.get(slab.slot_bytes, [])
            if listed != slab.is_listed or (slab.used < slab.slots and not listed):
                raise StoreCorrupt(f"{where} has room and cannot be found")
        if used_bytes != self.used_bytes:
            raise StoreCorrupt(
                f"arena {self.arena_id}: {self.used_bytes} != {used_bytes} bytes used"
            )

    def _slab_with_room(self, size: int) -> int | None:
        opened = self._open.setdefault(size, [])
        while opened:
            index, generation = opened[0]
            slab = self._slabs[index]
            is_current = slab.generation == generation
            if is_current and slab.used < slab.slots:
                return index
            heappop(opened)
            if is_current:
                slab.is_listed = False
        while self._empty:
            index = heappop(self._empty)
            if not self._slabs[index].slot_bytes:
                self._give(index, size)
                return index
        return None

    def _give(self, index: int, size: int) -> None:
        slab = self._slabs[index]
        slab.give_to(size, self.slab_bytes // size)
        slab.is_listed = True
        heappush(self._open.setdefault(size, []), (index, slab.generation))

    def _mark_taken(self, slab: _Slab, slot: int) -> None:
        slab.taken[slot] = 1
        slab.used += 1
        self.used_bytes += slab.slot_bytes
