"""Allocates slots in several arenas, which come and go while slots are taken.

A `SlabAllocator` allocates in one arena; this one chooses the arena. An arena leaves in two steps:
`close` ends allocation there, and `remove` forgets it after its last slot is freed. Taken slots of
a closed arena count as capacity, its free room does not: capacity is what is taken plus what can be
taken.

Slabs are numbered through all open arenas, in the order in which those were added. The numbers hold
until an arena comes or goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Literal

from kvpool.errors import InvalidArgument, KvpoolError, NotFound
from tiers.store.slab_allocator import Place, SlabAllocator, StoreCorrupt

Placement = Literal["fill", "spread"]


class ArenaInUse(KvpoolError):
    """An arena has taken slots, or is open: it cannot be removed now."""

    code = "arena_in_use"
    retryable = True
    http_status = 409


class ArenaAllocator:
    """Slots in arenas with different `arena_id`; has the interface of a `SlabAllocator`.

    Args:
        allocators: the first arenas, at least one; all later ones must have their slab size and
            alignment.
        placement: "fill" takes the first arena with room, so that the last ones are easy to give
            back; "spread" takes them in turn, so that every disk or memory bank shares the work.

    Attributes:
        allocate: takes a slot for so many bytes in an open arena; None if no arena has room for
            this size. Raises BlockTooLarge: more than a slab.
        free: returns a slot. Raises StoreCorrupt: no slot is taken there.

    Raises:
        InvalidArgument: no allocator, two with one id, or two with unequal slabs.
    """

    # Attributes, not methods, so that a single arena is called without an extra call (65 ns of
    # 450).
    allocate: Callable[[int], Place | None]
    free: Callable[[Place], None]

    def __init__(self, allocators: Sequence[SlabAllocator], placement: Placement = "fill") -> None:
        if not allocators:
            raise InvalidArgument("there is no arena to allocate in")
        if placement not in ("fill", "spread"):
            raise InvalidArgument(f"placement {placement!r}", hint="fill or spread")
        self.placement: Placement = placement
        self.slab_bytes = allocators[0].slab_bytes
        self.alignment = allocators[0].alignment
        self._like = allocators[0]  # for slot sizes, which are equal in all arenas
        self._arenas: dict[int, SlabAllocator] = {}
        self._open: list[SlabAllocator] = []
        self.closed: set[int] = set()  # ids of closed arenas; to be read only
        self.resting: frozenset[int] = frozenset()  # ids of arenas that `rest` named
        self._next = 0  # number of the open arena where "spread" goes on
        for allocator in allocators:
            self.add(allocator)

    # ------------------------------------------------------------ arenas

    def add(self, allocator: SlabAllocator) -> None:
        """Add an arena; slots come from it at once.

        Raises:
            InvalidArgument: its id is taken, or its slab size or alignment differs.
        """
        if allocator.arena_id in self._arenas:
            raise InvalidArgument(f"arena {allocator.arena_id} is known")
        if (allocator.slab_bytes, allocator.alignment) != (self.slab_bytes, self.alignment):
            raise InvalidArgument(
                f"arena {allocator.arena_id} has slabs of {allocator.slab_bytes} bytes aligned to "
                f"{allocator.alignment}, the others {self.slab_bytes} to {self.alignment}"
            )
        self._arenas[allocator.arena_id] = allocator
        self._open.append(allocator)
        self._wire()

    def close(self, arena_id: int) -> None:
        """End allocation in an arena; taken slots stay until they are freed.

        Raises:
            NotFound: no such arena.
        """
        arena = self._arena(arena_id)
        if arena in self._open:
            self._open.remove(arena)
            self.closed.add(arena_id)
            self._next = 0
            self._wire()

    def rest(self, arena_ids: Iterable[int]) -> None:
        """Allocate nothing in these arenas until the next call, which names others or none.

        Has no effect while there is only one arena.
        """
        self.resting = frozenset(arena_ids)

    def remove(self, arena_id: int) -> None:
        """Forget a closed arena that holds nothing.

        Raises:
            NotFound: no such arena. ArenaInUse: it is open, or has taken slots.
        """
        arena = self._arena(arena_id)
        if arena in self._open:
            raise ArenaInUse(f"arena {arena_id} is open", hint="close it first")
        if arena.used_bytes:
            raise ArenaInUse(f"arena {arena_id} holds {arena.used_bytes} bytes")
        del self._arenas[arena_id]
        self.closed.discard(arena_id)
        self._wire()

    @property
    def arenas(self) -> tuple[SlabAllocator, ...]:
        """All arenas, with closed ones."""
        return tuple(self._arenas.values())

    def is_open(self, arena_id: int) -> bool:
        """The arena allocates; False for closed and unknown arenas."""
        arena = self._arenas.get(arena_id)
        return arena is not None and arena in self._open

    # ------------------------------------------------------------ slots

    def slot_size(self, size_bytes: int) -> int:
        """Bytes that a slot for `size_bytes` takes, as `SlabAllocator.slot_size`.

        Raises:
            BlockTooLarge: more than a slab. InvalidArgument: not positive.
        """
        return self._like.slot_size(size_bytes)

    def slots_per_slab(self, slot_bytes: int) -> int:
        """How many slots of this size a slab holds."""
        return self._like.slots_per_slab(slot_bytes)

    def claim(self, place: Place, slot_bytes: int) -> bool:
        """Take the slot at a known place (recovery); False if it is not available."""
        arena = self._arenas.get(place.arena_id)
        return arena is not None and arena in self._open and arena.claim(place, slot_bytes)

    # ------------------------------------------------------------ slabs of open arenas

    @property
    def slab_count(self) -> int:
        """Slabs of the open arenas; their numbers are below this."""
        return sum(arena.slab_count for arena in self._open)

    def slab_of(self, place: Place) -> int:
        """Number of the slab that `place` lies in.

        Raises:
            StoreCorrupt: the place is in no open arena.
        """
        first = 0
        for arena in self._open:
            if arena.arena_id == place.arena_id:
                return first + arena.slab_of(place)
            first += arena.slab_count
        raise StoreCorrupt(f"{place} is in no open arena")

    def slabs_of_others(
        self, slot_bytes: int, start: int = 0, count: int | None = None
    ) -> Iterator[int]:
        """Numbers of the slabs with slots of another size, as `SlabAllocator.slabs_of_others`."""
        if len(self._open) == 1:
            return self._open[0].slabs_of_others(slot_bytes, start, count)
        slabs = self.slab_count
        looked_at = slabs if count is None else min(count, slabs)
        return chain.from_iterable(
            (first + slab for slab in arena.slabs_of_others(slot_bytes, local, length))
            for first, arena, local, length in self._stretches(start, looked_at)
        )

    def places_in(self, slab: int) -> list[Place]:
        """The slots taken in one slab.

        Raises:
            InvalidArgument: no open arena has a slab of that number.
        """
        for _, arena, local, _ in self._stretches(slab, 1):
            return arena.places_in(local)
        raise InvalidArgument(f"slab {slab} of {self.slab_count}")

    def _stretches(self, start: int, count: int) -> Iterator[tuple[int, SlabAllocator, int, int]]:
        """`count` slabs from number `start` on, wrapping around.

        Yields (number of the arena's first slab, arena, start within it, length).
        """
        slabs = self.slab_count
        at = start % slabs if slabs else 0
        while slabs and count > 0:
            first = 0
            for arena in self._open:
                if first <= at < first + arena.slab_count:
                    length = min(count, first + arena.slab_count - at)
                    yield first, arena, at - first, length
                    count -= length
                    at += length
                    if count <= 0:
                        return
                first += arena.slab_count
            at = 0

    # ------------------------------------------------------------ accounting

    @property
    def open_bytes(self) -> int:
        """Capacity of the open arenas: what is left when the closed ones are gone."""
        return sum(arena.capacity_bytes for arena in self._open)

    @property
    def capacity_bytes(self) -> int:
        """Bytes that are taken or can be taken."""
        return self.used_bytes + self.free_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes in slots, also of closed arenas."""
        return sum(arena.used_bytes for arena in self._arenas.values())

    @property
    def free_bytes(self) -> int:
        """Bytes of the open arenas that are in no slot."""
        return sum(arena.free_bytes for arena in self._open)

    @property
    def empty_slabs(self) -> int:
        """Slabs of open arenas that belong to no slot size."""
        return sum(arena.empty_slabs for arena in self._open)

    def check_integrity(self) -> None:
        """Recount everything from scratch.

        Raises:
            StoreCorrupt: a count or a list contradicts the slabs.
        """
        for arena in self._arenas.values():
            arena.check_integrity()

    def _wire(self) -> None:
        is_lone = len(self._arenas) == len(self._open) == 1
        self.allocate = self._open[0].allocate if is_lone else self._allocate
        self.free = self._open[0].free if is_lone else self._free

    def _allocate(self, slot_bytes: int) -> Place | None:
        arenas = self._open
        if self.placement == "spread" and arenas:
            start = self._next
            arenas = arenas[start:] + arenas[:start]
            self._next = (start + 1) % len(arenas)
        for arena in arenas:
            place = arena.allocate(slot_bytes) if arena.arena_id not in self.resting else None
            if place is not None:
                return place
        self._like.slot_size(slot_bytes)  # raises also if no arena is open
        return None

    def _free(self, place: Place) -> None:
        arena = self._arenas.get(place.arena_id)
        if arena is None:
            raise StoreCorrupt(f"{place} is in no arena")
        arena.free(place)

    def _arena(self, arena_id: int) -> SlabAllocator:
        arena = self._arenas.get(arena_id)
        if arena is None:
            raise NotFound(f"there is no arena {arena_id}")
        return arena


def as_arena_allocator(allocator: SlabAllocator | ArenaAllocator) -> ArenaAllocator:
    """The allocator itself, or one over a single arena."""
    return allocator if isinstance(allocator, ArenaAllocator) else ArenaAllocator([allocator])
