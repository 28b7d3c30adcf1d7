"""The table of conversations: its content and its bounds."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from conductor.gateway.sessions import Sessions
from kvpool.errors import InvalidArgument

A, B = b"a" * 16, b"b" * 16


def chain(blocks: int, start: int = 0) -> list[bytes]:
    return [bytes([start + i]) * 16 for i in range(blocks)]


def test_the_last_chain_of_a_key_is_remembered_for_each_namespace_apart() -> None:
    sessions = Sessions()
    sessions.record(A, "k", chain(2), 0.0)
    sessions.record(B, "k", chain(1, 9), 0.0)
    sessions.record(A, "k", chain(3), 1.0)
    assert sessions.get(A, "k", 2.0) == chain(3)
    assert sessions.get(B, "k", 2.0) == chain(1, 9)
    assert sessions.get(A, "other", 2.0) == []
    assert (len(sessions), sessions.blocks) == (2, 4)


def test_without_a_key_or_a_whole_block_nothing_is_remembered() -> None:
    sessions = Sessions()
    sessions.record(A, "", chain(2), 0.0)
    sessions.record(A, "k", [], 0.0)
    assert len(sessions) == 0


def test_a_session_that_rested_too_long_is_forgotten() -> None:
    sessions = Sessions(ttl_s=10.0)
    sessions.record(A, "k", chain(2), 0.0)
    assert sessions.get(A, "k", 9.9) == chain(2)
    assert sessions.get(A, "k", 10.0) == []
    sessions.record(A, "new", chain(1), 20.0)
    assert (len(sessions), sessions.blocks) == (1, 1)


def test_the_longest_rested_goes_when_there_are_too_many() -> None:
    sessions = Sessions(max_sessions=2)
    for at, key in enumerate(("one", "two", "one", "three")):
        sessions.record(A, key, chain(1), float(at))
    assert [bool(sessions.get(A, key, 4.0)) for key in ("one", "two", "three")] == [
        True,
        False,
        True,
    ]


@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 30), st.floats(0, 5)), max_size=60)
)
# A request without a whole block, at the time limit.
@example([("b", 1, 0.0), *[("a", 0, 5.0)] * 4])
def test_bounds_hold_after_any_sequence(steps: list[tuple[str, int, float]]) -> None:
    sessions = Sessions(ttl_s=20.0, max_sessions=4, max_blocks=50)
    now = 0.0
    for key, blocks, passed in steps:
        now += passed
        sessions.record(A, key, chain(blocks), now)
        assert len(sessions) <= 4
        assert sessions.blocks <= 50
        assert sessions.blocks == sum(len(sessions.get(A, k, now)) for k in "abcdef")


def test_bounds_must_be_positive() -> None:
    with pytest.raises(InvalidArgument):
        Sessions(max_blocks=0)
