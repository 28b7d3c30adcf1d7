"""Leases between a look-up and the load that may follow it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvpool.engines.sglang.leases import LoadLeases

PAGES = [bytes([i]) * 16 for i in range(8)]


@dataclass(eq=False)
class Pinned:
    """The part of `PinnedBlocks` that leases use."""

    found: int
    deadline: float = float("inf")


@pytest.fixture
def released() -> list[Pinned]:
    return []


@pytest.fixture
def leases(released: list[Pinned]) -> LoadLeases:
    return LoadLeases(released.append, lease_s=10.0, max_pages=6)  # type: ignore[arg-type]


def hold(leases: LoadLeases, asked: list[bytes], found: int, now: float, **fields: float) -> Pinned:
    pinned = Pinned(found, **fields)
    leases.hold(asked, pinned, now)  # type: ignore[arg-type]
    return pinned


def test_a_lease_ends_when_all_its_pages_were_loaded(
    leases: LoadLeases, released: list[Pinned]
) -> None:
    pinned = hold(leases, PAGES[:4], 3, 0)
    leases.loaded(PAGES[:2])
    assert released == []
    leases.loaded(PAGES[2:])
    assert released == [pinned]
    assert len(leases) == 0


def test_a_lease_that_nobody_comes_for_ends_with_its_time(
    leases: LoadLeases, released: list[Pinned]
) -> None:
    long = hold(leases, PAGES[:1], 1, 0)
    short = hold(leases, PAGES[1:2], 1, 0, deadline=3)  # the node granted less
    leases.expire(2.9)
    assert released == []
    leases.expire(3)
    assert released == [short]
    leases.expire(10)
    assert released == [short, long]


def test_nothing_found_is_given_back_at_once(leases: LoadLeases, released: list[Pinned]) -> None:
    pinned = hold(leases, PAGES[:2], 0, 0)
    assert released == [pinned]
    assert len(leases) == 0


def test_a_later_lease_of_the_same_pages_takes_the_place_of_the_earlier_one(
    leases: LoadLeases, released: list[Pinned]
) -> None:
    first = hold(leases, PAGES[:2], 2, 0)
    second = hold(leases, PAGES[:3], 3, 1)
    assert released == [first]
    leases.loaded(PAGES[:3])
    assert released == [first, second]


def test_the_same_question_asked_again_takes_no_second_lease(leases: LoadLeases) -> None:
    hold(leases, PAGES[:2], 2, 0)
    assert leases.holds(PAGES[:2], 1)
    assert not leases.holds(PAGES[:3], 1)
    assert not leases.holds(PAGES[:1], 1)
    assert not leases.holds(PAGES[:2], 6)  # the lease is half over: better a fresh one
    leases.loaded(PAGES[:1])
    assert not leases.holds(PAGES[:2], 1)
    hold(leases, PAGES[4:6], 1, 0)
    assert not leases.holds(PAGES[4:6], 1)  # the missing page may be there by now
    assert not leases.holds([], 1)


def test_of_too_many_pages_the_oldest_are_let_go(
    leases: LoadLeases, released: list[Pinned]
) -> None:
    first = hold(leases, PAGES[:4], 4, 0)
    second = hold(leases, PAGES[4:], 4, 1)
    assert released == [first]
    assert len(leases) == 4
    leases.clear()
    assert released == [first, second]
