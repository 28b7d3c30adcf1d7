"""The slab allocator: where slots are, which size a slab has, and that nothing leaks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.errors import BlockTooLarge, InvalidArgument
from tests.support.sizes import examples
from tiers.store.slab_allocator import Place, SlabAllocator, StoreCorrupt

PAGE = 4096


def allocator(slabs: int = 4, pages_per_slab: int = 4) -> SlabAllocator:
    return SlabAllocator(slabs * pages_per_slab * PAGE, pages_per_slab * PAGE, arena_id=3)


def test_slots_are_aligned_disjoint_and_fill_the_arena() -> None:
    slots = allocator()
    places = [slots.allocate(PAGE) for _ in range(16)]
    assert sorted(p.offset for p in places if p) == [i * PAGE for i in range(16)]
    assert all(p and p.arena_id == 3 for p in places)
    assert slots.allocate(PAGE) is None
    assert slots.free_bytes == 0


def test_sizes_are_rounded_up_to_the_alignment() -> None:
    slots = allocator()
    assert slots.slot_size(1) == PAGE
    assert slots.slot_size(PAGE + 1) == 2 * PAGE
    slots.allocate(PAGE + 1)
    assert slots.used_bytes == 2 * PAGE


def test_what_is_left_after_whole_slabs_is_not_counted() -> None:
    assert SlabAllocator(9 * PAGE, 4 * PAGE).capacity_bytes == 8 * PAGE


@pytest.mark.parametrize(
    ("capacity", "slab", "alignment"),
    [(PAGE, 4 * PAGE, PAGE), (4 * PAGE, 100, PAGE), (4 * PAGE, PAGE + 1, PAGE), (PAGE, PAGE, 0)],
)
def test_impossible_sizes_are_refused(capacity: int, slab: int, alignment: int) -> None:
    with pytest.raises(InvalidArgument):
        SlabAllocator(capacity, slab, alignment=alignment)


def test_a_slot_larger_than_a_slab_is_refused() -> None:
    slots = allocator()
    with pytest.raises(BlockTooLarge, match="raise slab_bytes"):
        slots.allocate(4 * PAGE + 1)
    with pytest.raises(InvalidArgument):
        slots.allocate(0)


def test_a_slab_serves_one_size_until_its_last_slot_is_freed() -> None:
    slots = allocator(slabs=1)
    first, second = slots.allocate(PAGE), slots.allocate(PAGE)
    assert first is not None
    assert second is not None
    assert slots.allocate(2 * PAGE) is None
    slots.free(first)
    assert slots.allocate(2 * PAGE) is None
    slots.free(second)
    assert slots.empty_slabs == 1
    assert slots.allocate(2 * PAGE) is not None


def test_slabs_of_others_names_what_could_be_reclaimed() -> None:
    slots = allocator(slabs=3)
    small, large = slots.allocate(PAGE), slots.allocate(2 * PAGE)
    assert small is not None
    assert large is not None
    assert list(slots.slabs_of_others(PAGE)) == [slots.slab_of(large)]
    assert slots.places_in(slots.slab_of(large)) == [large]
    assert slots.slots_per_slab(2 * PAGE) == 2


@pytest.mark.parametrize("offset", [PAGE, 2 * PAGE + 1, 100 * PAGE, -PAGE])
def test_freeing_what_is_not_taken_is_an_error(offset: int) -> None:
    slots = allocator()
    slots.allocate(PAGE)
    with pytest.raises(StoreCorrupt):
        slots.free(Place(3, offset))


def test_freeing_twice_or_in_another_arena_is_an_error() -> None:
    slots = allocator()
    place, _ = slots.allocate(PAGE), slots.allocate(PAGE)
    assert place is not None
    with pytest.raises(StoreCorrupt):
        slots.free(Place(0, place.offset))
    slots.free(place)
    with pytest.raises(StoreCorrupt):
        slots.free(place)


def test_a_known_place_can_be_claimed_once_and_only_on_a_slot() -> None:
    slots = allocator()
    assert slots.claim(Place(3, 2 * PAGE), PAGE)
    assert not slots.claim(Place(3, 2 * PAGE), PAGE)
    assert not slots.claim(Place(3, 0), 2 * PAGE)  # the slab has another size now
    assert not slots.claim(Place(3, 5 * PAGE), 2 * PAGE)  # between two slots
    assert not slots.claim(Place(3, 16 * PAGE), PAGE)  # outside
    assert not slots.claim(Place(0, 0), PAGE)
    assert slots.claim(Place(3, 0), PAGE)
    slots.check_integrity()
    rest = {p.offset // PAGE for p in (slots.allocate(PAGE) for _ in range(14)) if p}
    assert rest == set(range(16)) - {0, 2}


def test_a_miscount_is_noticed() -> None:
    slots = allocator()
    slots.allocate(PAGE)
    slots.used_bytes += 1
    with pytest.raises(StoreCorrupt):
        slots.check_integrity()


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(st.tuples(st.sampled_from("afc"), st.integers(1, 4), st.integers(0, 40))))
def test_no_sequence_of_calls_overlaps_or_leaks(calls: list[tuple[str, int, int]]) -> None:
    slots = allocator()
    held: dict[Place, int] = {}
    for verb, pages, pick in calls:
        if verb == "f" and held:
            place = sorted(held)[pick % len(held)]
            del held[place]
            slots.free(place)
        elif verb == "a":
            got = slots.allocate(pages * PAGE)
            if got is not None:
                held[got] = pages
        elif verb == "c":
            place = Place(3, pick * PAGE)
            if slots.claim(place, pages * PAGE):
                assert place not in held
                held[place] = pages
        slots.check_integrity()
        pages_used = [p.offset // PAGE + i for p, count in held.items() for i in range(count)]
        assert len(set(pages_used)) == len(pages_used)
        assert slots.used_bytes == len(pages_used) * PAGE
    for place in list(held):
        slots.free(place)
    assert slots.empty_slabs == 4
    assert slots.free_bytes == slots.capacity_bytes


def test_slabs_of_others_are_looked_at_in_turns() -> None:
    slots = allocator(slabs=4)
    for size in (4 * PAGE, PAGE, 4 * PAGE, 4 * PAGE):
        for _ in range(4 * PAGE // size):
            slots.allocate(size)
    assert list(slots.slabs_of_others(PAGE)) == [0, 2, 3]
    assert list(slots.slabs_of_others(PAGE, 2, 3)) == [2, 3, 0]
    assert list(slots.slabs_of_others(PAGE, 1, 1)) == []
    assert list(slots.slabs_of_others(PAGE, 3, 99)) == [3, 0, 2]
    assert list(slots.slabs_of_others(4 * PAGE)) == [1]
