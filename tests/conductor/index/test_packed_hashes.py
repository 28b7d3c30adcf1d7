"""The bag of hashes behaves as a set does, and frees what was removed."""

from __future__ import annotations

import gc
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.index import packed_hashes
from conductor.index.packed_hashes import CHUNK, PackedHashes


def h(number: int) -> bytes:
    return number.to_bytes(16, "big")


steps = st.lists(
    st.one_of(
        st.tuples(st.just("toggle"), st.integers(0, 15)),
        st.tuples(st.just("tidy"), st.just(0)),
    ),
    max_size=80,
)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_hashes, "CHUNK", 4)
    monkeypatch.setattr(packed_hashes, "MIN_NOTES", 2)


@given(steps)
def test_a_bag_holds_what_a_set_would(script: list[tuple[str, int]]) -> None:
    bag, model = PackedHashes(), set[bytes]()
    for step, number in script:
        if step == "tidy":
            bag.tidy()
        elif h(number) in model:
            bag.remove(h(number))
            model.discard(h(number))
        else:
            bag.add(h(number))
            model.add(h(number))
        assert len(bag) == len(model)
        assert Counter(bag) == Counter(model)
    taken: list[bytes] = []
    while not bag.is_exhausted:
        taken += bag.pop_some(3)
    assert model <= set(taken)
    assert len(bag) == 0


def test_hashes_added_and_removed_again_and_again_take_no_more_memory() -> None:
    bag = PackedHashes()
    for number in range(20):
        bag.add(h(number))
    for life in range(2_000):
        bag.add(h(100 + life))
        bag.remove(h(100 + life))
        bag.remove(h(life % 20))
        bag.add(h(life % 20))
        if bag.is_untidy:
            bag.tidy()
    stored = sum(map(len, bag._chunks)) + len(bag._gone) + len(bag._leaving)
    assert len(bag) == 20
    assert stored < 120


def test_the_cyclic_collector_does_not_visit_full_chunks() -> None:
    """Otherwise each full collection would visit every hash of the index."""
    bag = PackedHashes()
    hashes = [number.to_bytes(16, "big") for number in range(3 * CHUNK + 10)]
    for one in hashes:
        bag.add(one)
    gc.collect()
    assert sum(map(gc.is_tracked, bag._chunks)) == 1
    for one in hashes[: 2 * CHUNK]:
        bag.remove(one)
    while bag.is_untidy:
        bag.tidy()
    bag.add(b"x" * 16)
    gc.collect()
    assert sorted(bag) == sorted([*hashes[2 * CHUNK :], b"x" * 16])
    assert sum(map(gc.is_tracked, bag._chunks)) == 1
