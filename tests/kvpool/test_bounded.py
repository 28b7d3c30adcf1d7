"""Bounded dictionaries and moving averages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.bounded import BoundedDict, ExpiringDict
from kvpool.errors import InvalidArgument
from kvpool.smoothing import smoothed


@given(st.integers(1, 5), st.lists(st.tuples(st.integers(0, 8), st.integers())))
def test_a_bounded_dict_keeps_the_keys_written_last(
    capacity: int, writes: list[tuple[int, int]]
) -> None:
    bounded: BoundedDict[int, int] = BoundedDict(capacity)
    expected: list[tuple[int, int]] = []
    for key, value in writes:
        bounded[key] = value
        expected = [(k, v) for k, v in expected if k != key] + [(key, value)]
        expected = expected[-capacity:]
        assert list(bounded.items()) == expected


def test_a_bounded_dict_needs_room_for_one_key() -> None:
    with pytest.raises(InvalidArgument):
        BoundedDict(0)


def test_entries_of_an_expiring_dict_end_in_the_order_in_which_they_were_written() -> None:
    held: ExpiringDict[str, int] = ExpiringDict(3)
    for key, end in (("a", 1.0), ("b", 2.0), ("a", 3.0), ("c", 4.0), ("d", 5.0)):
        held[key] = (0, end)
    assert list(held) == ["a", "c", "d"]
    held.expire(2.9)
    assert list(held) == ["a", "c", "d"]
    held.expire(4.0)
    assert list(held) == ["d"]
    held.expire(100.0)
    assert not held


def test_the_first_measurement_is_the_average_and_later_ones_move_it_by_their_weight() -> None:
    assert smoothed(0.0, 10.0) == 10.0
    assert smoothed(10.0, 20.0, weight=0.2) == pytest.approx(12.0)
