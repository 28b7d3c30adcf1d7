"""Long runs, reserved and committed in slices: the same result, with other requests between."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

import pytest

from kvpool.blocks.hashing import pack_hashes
from kvpool.blocks.layout import Layout, Namespace
from kvpool.blocks.records import BlockStatus
from kvpool.blocks.tier import Tier
from kvpool.errors import ReservationGone
from kvpool.wire import WireClient, WireServer
from kvpool.wire import messages as m
from tests.support import pool_model
from tests.support.pool_model import random_walk
from tests.support.waiting import until
from tiers.service.migrator import Migrator
from tiers.service.service import SLICE, NodeService
from tiers.store.blocks import Reservation
from tiers.store.reservation_cursors import ReserveCursor
from tiers.store.slab_allocator import SlabAllocator
from tiers.store.store import Store

NAMESPACE = Namespace("m", "r", Layout("bfloat16", 1, 1, 8, block_tokens=32))
PAGE = 4096
GRANTED, EXISTS, NO_ROOM = BlockStatus.GRANTED, BlockStatus.EXISTS, BlockStatus.NO_ROOM


def chain(blocks: int) -> list[bytes]:
    return [os.urandom(16) for _ in range(blocks)]


class Sliced(Store):
    """Does in slices of two what a store does at once, and looks at itself after each."""

    def reserve(
        self,
        namespace_id: bytes,
        hashes: Sequence[bytes],
        parent: bytes,
        part: int,
        writer_id: str,
        ttl_s: float,
        now: float,
        tier: Tier = Tier.DRAM,
    ) -> Reservation:
        run = self.reservations.begin_reserve(
            namespace_id, hashes, parent, part, writer_id, ttl_s, now, tier
        )
        while not run.is_done:
            self.reserve_some(run, 2, now)
            self.check_integrity()
        return run.result()

    def commit(
        self,
        reservation_id: int,
        checksums: Sequence[int],
        now: float,
        indices: Sequence[int] | None = None,
    ) -> list[bytes]:
        run = self.reservations.begin_commit(reservation_id, checksums, now, indices)
        while not run.is_done:
            self.check_integrity()
            self.reservations.commit_some(run, 2)
        return run.visible


@pytest.mark.parametrize("seed", range(12))
def test_a_store_that_works_in_slices_keeps_every_invariant(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_model, "Store", Sliced)
    random_walk(seed, 300, hbm_slabs=3 if seed % 2 else 0).settle()


class Room:
    """A store with room for so many blocks."""

    def __init__(self, blocks: int) -> None:
        slab = 64 * PAGE
        self.store = Store(SlabAllocator(max(1, blocks // 64) * slab, slab, 0))
        self.space = self.store.namespaces.register(NAMESPACE)

    def put(self, hashes: list[bytes], now: float = 0.0) -> None:
        granted = self.store.reserve(self.space, hashes, b"", 0, "w", 30.0, now)
        self.store.commit(granted.reservation_id, [1] * len(granted.places), now)

    def begin(
        self, hashes: list[bytes], writer: str = "w", ttl_s: float = 30.0, now: float = 0.0
    ) -> ReserveCursor:
        return self.store.reservations.begin_reserve(self.space, hashes, b"", 0, writer, ttl_s, now)

    @property
    def held_bytes(self) -> int:
        [tier] = self.store.inspection.tiers()
        self.store.check_integrity()
        return tier.reserved_bytes + tier.quarantined_bytes


def test_others_may_come_in_between_and_are_granted_what_was_not_yet() -> None:
    room = Room(256)
    names = chain(40)
    mine, theirs = room.begin(names, "a"), room.begin(names, "b")
    room.store.reserve_some(mine, 10, 0.0)
    room.store.reserve_some(theirs, 40, 0.0)
    room.store.reserve_some(mine, 40, 0.0)
    assert mine.statuses == [GRANTED] * 10 + [BlockStatus.IN_PROGRESS] * 30
    assert theirs.statuses == [BlockStatus.IN_PROGRESS] * 10 + [GRANTED] * 30
    assert not set(mine.places) & set(theirs.places)
    room.store.check_integrity()


def test_what_is_here_of_a_run_is_not_evicted_to_make_room_for_an_earlier_slice_of_it() -> None:
    room = Room(128)
    known = chain(64)
    room.put(known)
    room.put(chain(64), 1.0)  # fills the rest, and was used last
    run = room.begin([*chain(64), *known], now=2.0)
    while not run.is_done:
        room.store.reserve_some(run, 8, 2.0)
        assert len(room.store.lookup(room.space, known)) == 64
    assert run.statuses == [GRANTED] * 64 + [EXISTS] * 64


def test_where_room_ends_the_rest_has_none_and_the_run_is_done() -> None:
    room = Room(64)
    run = room.begin(chain(100))
    while not run.is_done:
        room.store.reserve_some(run, 30, 0.0)
    assert run.statuses == [GRANTED] * 64 + [NO_ROOM] * 36
    assert len(run.result().places) == 64


@pytest.mark.parametrize("end", ["gone", "expired", "cancelled"])
def test_a_run_whose_writer_leaves_or_is_too_late_goes_no_further_and_leaks_nothing(
    end: str,
) -> None:
    room = Room(256)
    run = room.begin(chain(100), ttl_s=5.0)
    room.store.reserve_some(run, 30, 0.0)
    now = 6.0 if end == "expired" else 1.0
    if end == "cancelled":
        room.store.reservations.cancel(run, now)
        assert room.held_bytes == 0  # no client learnt of it: no late write is possible
    elif end == "gone":
        room.store.client_gone("w", now)
    with pytest.raises(ReservationGone):
        room.store.reserve_some(run, 30, now)
    room.store.expire(1e6)
    assert room.held_bytes == 0


def test_a_commit_that_has_begun_ends_whatever_becomes_of_its_writer() -> None:
    room = Room(256)
    names = chain(100)
    granted = room.store.reserve(room.space, names, b"", 0, "w", 5.0, 0.0)
    run = room.store.reservations.begin_commit(granted.reservation_id, range(100), 0.0)
    room.store.reservations.commit_some(run, 30)
    assert len(room.store.lookup(room.space, names)) == 30  # in order: a prefix of the chain
    room.store.client_gone("w", 1.0)
    room.store.expire(100.0)
    room.store.check_integrity()
    with pytest.raises(ReservationGone):
        room.store.reservations.begin_commit(granted.reservation_id, [1], 100.0, [50])
    again = room.store.reserve(room.space, names, b"", 0, "x", 5.0, 100.0)
    assert again.statuses == [EXISTS] * 30 + [BlockStatus.IN_PROGRESS] * 70
    while not run.is_done:
        room.store.reservations.commit_some(run, 30)
    assert run.visible == names
    pinned = room.store.pin(room.space, names, "r", 5.0, 100.0)
    assert pinned.checksums == list(range(100))
    room.store.leases.release(pinned.lease_id)
    assert room.held_bytes == 0


async def test_a_node_answers_others_while_it_reserves_commits_and_drops_16_000_blocks() -> None:
    room = Room(20_000)
    small = chain(16)
    room.put(small)
    service = NodeService(room.store, [], Migrator(room.store, [], None))
    server = WireServer("node", "n", 1, service.handlers(), on_hello=service.client_connected)
    address = f"127.0.0.1:{await server.listen('127.0.0.1', 0)}"
    big, other = WireClient(address, "big"), WireClient(address, "other")
    hashes = chain(16_000)
    pin = m.Pin(room.space, pack_hashes(small), 5.0)

    async def served_during(call: asyncio.Task[m.Reply]) -> int:
        """How often the other client was answered until the long call was."""
        count = 0
        while not call.done():
            assert (await other.call(pin, 10.0)).found == 16
            count += 1
        return count

    reserve = m.Reserve(room.space, pack_hashes(hashes), b"", 0, 60.0)
    reserving = asyncio.create_task(big.call(reserve, 60.0))
    assert await served_during(reserving) > 16_000 / SLICE / 4
    granted = reserving.result()
    assert granted.statuses == bytes(16_000)
    sums = bytes(8 * 16_000)
    committing = asyncio.create_task(big.call(m.Commit(granted.reservation_id, sums), 60.0))
    assert await served_during(committing) > 16_000 / SLICE / 4
    assert committing.result().visible == 16_000
    assert len(room.store.lookup(room.space, hashes)) == 16_000
    unwanted = m.DropBlocks(room.space, pack_hashes(hashes[16:]))
    dropping = asyncio.create_task(big.call(unwanted, 60.0))
    assert await served_during(dropping) > 16_000 / SLICE / 4
    assert dropping.result().count == 16_000 - 16
    # Who gives up while it is served holds nothing.
    more = m.Reserve(room.space, pack_hashes(chain(4_000)), b"", 0, 60.0)
    leaving = asyncio.create_task(big.call(more, 60.0))
    assert (await other.call(pin, 10.0)).found == 16
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    await until(lambda: not room.store.reservations, "the reservation is cancelled")
    assert room.held_bytes == 0
    for client in (big, other):
        await client.close()
    await server.close()
