"""Several arenas behind one allocator: placement, arenas that come and go, and the sums."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvpool.errors import BlockTooLarge, InvalidArgument, NotFound
from tiers.store.arena_allocator import ArenaAllocator, ArenaInUse, Placement, as_arena_allocator
from tiers.store.slab_allocator import Place, SlabAllocator, StoreCorrupt

PAGE = 4096
SLAB = 4 * PAGE


def arena(arena_id: int, slabs: int = 1) -> SlabAllocator:
    return SlabAllocator(slabs * SLAB, SLAB, arena_id)


def pool(*slabs: int, placement: Placement = "fill") -> ArenaAllocator:
    return ArenaAllocator([arena(i, count) for i, count in enumerate(slabs)], placement)


def take(slots: ArenaAllocator, count: int, size: int = PAGE) -> list[Place]:
    places = [slots.allocate(size) for _ in range(count)]
    assert all(place is not None for place in places)
    return [place for place in places if place is not None]


def test_fill_takes_the_first_arena_with_room() -> None:
    slots = pool(1, 1)
    places = take(slots, 5)
    assert [place.arena_id for place in places] == [0, 0, 0, 0, 1]
    slots.free(places[2])
    assert take(slots, 1) == [places[2]]


def test_spread_takes_arenas_in_turn_and_passes_over_full_ones() -> None:
    slots = pool(1, 2, placement="spread")
    assert [place.arena_id for place in take(slots, 8)] == [0, 1] * 4
    assert [place.arena_id for place in take(slots, 4)] == [1] * 4
    assert slots.allocate(PAGE) is None


def test_a_closed_arena_gives_no_slots_and_keeps_those_taken() -> None:
    slots = pool(1, 1)
    kept, _ = take(slots, 2)
    slots.close(0)
    assert [place.arena_id for place in take(slots, 4)] == [1] * 4
    assert slots.allocate(PAGE) is None
    slots.free(kept)
    assert slots.allocate(PAGE) is None
    assert not slots.claim(kept, PAGE)


def test_a_closed_arena_counts_by_what_it_holds() -> None:
    slots = pool(1, 1)
    place, _ = take(slots, 2)
    slots.close(0)
    assert slots.open_bytes == slots.free_bytes == SLAB
    assert (slots.used_bytes, slots.capacity_bytes) == (2 * PAGE, SLAB + 2 * PAGE)
    slots.free(place)
    assert slots.capacity_bytes == SLAB + PAGE


def test_an_arena_is_removed_only_when_closed_and_empty() -> None:
    slots = pool(1, 1)
    (place,) = take(slots, 1)
    with pytest.raises(ArenaInUse, match="close it first"):
        slots.remove(1)
    slots.close(0)
    with pytest.raises(ArenaInUse, match="4096 bytes"):
        slots.remove(0)
    slots.free(place)
    slots.remove(0)
    assert [a.arena_id for a in slots.arenas] == [1]
    with pytest.raises(NotFound):
        slots.close(0)
    with pytest.raises(StoreCorrupt, match="not in arena"):
        slots.free(place)


def test_an_arena_added_later_is_used_at_once_and_may_have_the_id_of_one_that_is_gone() -> None:
    slots = pool(1)
    take(slots, 4)
    assert slots.allocate(PAGE) is None
    slots.add(arena(1))
    take(slots, 4)
    with pytest.raises(InvalidArgument, match="is known"):
        slots.add(arena(1))
    slots.add(arena(2))
    slots.close(2)
    slots.remove(2)
    slots.add(arena(2))
    assert take(slots, 1)[0].arena_id == 2


def test_arenas_with_other_slabs_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="slabs of"):
        pool(1).add(SlabAllocator(2 * SLAB, 2 * SLAB, 1))
    with pytest.raises(InvalidArgument):
        ArenaAllocator([])
    with pytest.raises(BlockTooLarge):
        pool(1, 1).allocate(SLAB + 1)


def test_slabs_are_numbered_through_all_open_arenas() -> None:
    slots = pool(2, 1, 2)
    small = take(slots, 5 * 4)
    assert sorted({slots.slab_of(place) for place in small}) == [0, 1, 2, 3, 4]
    assert all(place in slots.places_in(slots.slab_of(place)) for place in small)
    assert list(slots.slabs_of_others(2 * PAGE)) == [0, 1, 2, 3, 4]
    assert list(slots.slabs_of_others(2 * PAGE, 3, 4)) == [3, 4, 0, 1]
    assert list(slots.slabs_of_others(PAGE)) == []
    slots.close(1)
    assert list(slots.slabs_of_others(2 * PAGE, 1, 100)) == [1, 2, 3, 0]
    assert {place.arena_id for n in range(4) for place in slots.places_in(n)} == {0, 2}


def test_a_lone_arena_is_numbered_as_by_itself() -> None:
    single, slots = arena(0, 4), pool(4)
    for allocate in (single.allocate, slots.allocate):
        for _ in range(9):
            assert allocate(PAGE)
    for start in range(6):
        for count in (None, 1, 3, 9):
            expected = list(single.slabs_of_others(2 * PAGE, start, count))
            assert list(slots.slabs_of_others(2 * PAGE, start, count)) == expected


def test_a_pool_of_a_pool_is_the_same() -> None:
    slots = pool(1)
    assert as_arena_allocator(slots) is slots
    assert as_arena_allocator(arena(7)).arenas[0].arena_id == 7


class PoolMachine(RuleBasedStateMachine):
    """Any order of taking, freeing, adding, closing and removing, compared with a plain record."""

    @initialize(placement=st.sampled_from(["fill", "spread"]))
    def begin(self, placement: Placement) -> None:
        self.slots = pool(2, placement=placement)
        self.taken: dict[Place, int] = {}
        self.open = {0}
        self.closed: set[int] = set()
        self.next_id = 1

    @rule(pages=st.integers(1, 4))
    def allocate(self, pages: int) -> None:
        place = self.slots.allocate(pages * PAGE)
        if place is None:
            return
        assert place.arena_id in self.open
        for other, size in self.taken.items():
            is_apart = (
                other.offset >= place.offset + pages * PAGE or other.offset + size <= place.offset
            )
            assert other.arena_id != place.arena_id or is_apart
        self.taken[place] = pages * PAGE

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(sorted(self.taken)))
        self.slots.free(place)
        del self.taken[place]

    @precondition(lambda self: len(self.open) < 4)
    @rule(slabs=st.integers(1, 3))
    def add(self, slabs: int) -> None:
        self.slots.add(arena(self.next_id, slabs))
        self.open.add(self.next_id)
        self.next_id += 1

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        arena_id = data.draw(st.sampled_from(sorted(self.open)))
        self.slots.close(arena_id)
        self.open.discard(arena_id)
        self.closed.add(arena_id)

    @precondition(lambda self: self.closed)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        arena_id = data.draw(st.sampled_from(sorted(self.closed)))
        if any(place.arena_id == arena_id for place in self.taken):
            with pytest.raises(ArenaInUse):
                self.slots.remove(arena_id)
            return
        self.slots.remove(arena_id)
        self.closed.discard(arena_id)

    @invariant()
    def sums_are_right(self) -> None:
        if not hasattr(self, "slots"):
            return
        self.slots.check_integrity()
        assert self.slots.used_bytes == sum(self.taken.values())
        assert self.slots.capacity_bytes == self.slots.used_bytes + self.slots.free_bytes
        numbered = [
            place for slab in range(self.slots.slab_count) for place in self.slots.places_in(slab)
        ]
        assert sorted(numbered) == sorted(p for p in self.taken if p.arena_id in self.open)
        assert all(place in self.slots.places_in(self.slots.slab_of(place)) for place in numbered)


TestPoolMachine = PoolMachine.TestCase
