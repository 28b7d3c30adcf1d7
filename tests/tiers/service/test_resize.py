"""How a node comes from the arenas that it has to the size that it shall have."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.errors import InvalidArgument, NoRoom, NoSharedMemory, Unavailable
from kvpool.wire import messages as m
from tiers.memory.arena import Arena
from tiers.memory.arena_set import ArenaSet
from tiers.service.resize import ResizePlan, Resizer, plan_resize
from tiers.store.slab_allocator import SlabAllocator
from tiers.store.store import Store

SLAB = 1 << 20


def test_growing_adds_what_is_missing() -> None:
    assert plan_resize({0: 8, 1: 8}, 27, 2) == ResizePlan((), 10)
    assert plan_resize({0: 8}, 8, 2) == ResizePlan((), 0)


def test_shrinking_retires_the_newest_arenas_that_can_go_whole() -> None:
    assert plan_resize({0: 8, 1: 8, 2: 4}, 8, 2) == ResizePlan((2, 1), 0)
    assert plan_resize({0: 8, 1: 4, 2: 8}, 16, 2) == ResizePlan((1,), 0)


def test_an_arena_in_which_the_target_lies_is_replaced_by_a_smaller() -> None:
    assert plan_resize({0: 16}, 6, 2) == ResizePlan((0,), 6)
    assert plan_resize({0: 16, 1: 8}, 14, 2) == ResizePlan((1, 0), 14)


def test_less_than_one_slab_is_refused() -> None:
    for target in (-5, 0, 1):
        with pytest.raises(InvalidArgument, match="drain"):
            plan_resize({0: 8}, target, 2)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 300))
def test_every_target_is_reached_exactly(units: list[int], target: int) -> None:
    sizes = {number: count * 4 for number, count in enumerate(units)}
    plan = plan_resize(sizes, target * 4 + 3, 4)
    left = sum(size for number, size in sizes.items() if number not in plan.retire)
    assert left + plan.add_bytes == target * 4
    assert len(set(plan.retire)) == len(plan.retire)


class Node:
    """A store over one arena, and a resizer whose announcements may be refused."""

    def __init__(self, make: Callable[[int, int], Arena] = Arena) -> None:
        self.arenas = ArenaSet([Arena(0, 4 * SLAB)])
        self.store = Store(SlabAllocator(4 * SLAB, SLAB, 0))
        self.refuses = False
        self.announced: list[list[int]] = []
        self.heard = asyncio.Event()
        self.resizer = Resizer(
            self.store,
            self.arenas,
            make,
            self.announce,
            lambda moves: [],
            lambda: False,
            slab_bytes=SLAB,
            unit_bytes=SLAB,
        )

    async def announce(self, arenas: Sequence[Arena]) -> None:
        if self.refuses:
            raise Unavailable("no conductor")
        self.announced.append([arena.arena_id for arena in arenas])
        self.heard.set()


async def test_an_arena_that_cannot_be_announced_is_not_used_and_not_kept() -> None:
    node = Node()
    node.refuses = True
    with pytest.raises(Unavailable):
        await node.resizer.resize(m.ResizeDram(8 * SLAB))
    assert list(node.arenas) == [0]
    assert node.store.inspection.tiers()[0].capacity_bytes == 4 * SLAB
    node.refuses = False
    reply = await node.resizer.resize(m.ResizeDram(8 * SLAB))
    assert reply == m.ResizeDramReply(4 * SLAB, 8 * SLAB, 0)
    assert node.announced == [[0, 2]]  # the number is not used again
    node.resizer.close()
    node.arenas.close()


async def test_an_empty_arena_is_announced_as_gone_and_closed() -> None:
    node = Node()
    work = asyncio.create_task(node.resizer.run())
    try:
        reply = await node.resizer.resize(m.ResizeDram(2 * SLAB))
        assert (reply.capacity_bytes, reply.evacuating_bytes) == (2 * SLAB, 4 * SLAB)
        async with asyncio.timeout(60):
            while len(node.announced) < 2:
                node.heard.clear()
                await node.heard.wait()
        assert list(node.arenas) == [1]
        assert node.announced == [[0, 1], [1]]
        with pytest.raises(NoSharedMemory):
            await node.resizer.resize(m.ResizeDram(1 << 60))
        assert list(node.arenas) == [1]
    finally:
        work.cancel()
        node.resizer.close()
        node.arenas.close()


async def test_what_was_begun_ends_although_its_caller_has_left() -> None:
    may_go_on = threading.Event()

    def make(arena_id: int, size_bytes: int) -> Arena:
        may_go_on.wait(60)
        return Arena(arena_id, size_bytes)

    node = Node(make)
    caller = asyncio.create_task(node.resizer.resize(m.ResizeDram(8 * SLAB)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    with pytest.raises(NoRoom, match="is running"):
        await node.resizer.resize(m.ResizeDram(6 * SLAB))
    may_go_on.set()
    async with asyncio.timeout(60):
        await node.heard.wait()
    assert list(node.arenas) == list(node.store.inspection.arena_bytes()) == [0, 1]
    reply = await node.resizer.resize(m.ResizeDram(4 * SLAB))  # no other resize is running
    assert reply.capacity_bytes == 4 * SLAB
    node.resizer.close()
    node.arenas.close()
