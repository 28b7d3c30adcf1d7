"""Migrations to and from HBM (on cpu): wrong bytes and failing devices."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from kvpool.blocks.hashing import checksum, pack_hashes
from kvpool.blocks.layout import Layout, Namespace
from kvpool.blocks.tier import Tier
from kvpool.wire import messages as m
from tests.support.waiting import until
from tiers.memory.arena import Arena
from tiers.memory.hbm_arena import HBM_ARENA_ID, DeviceArena, DeviceFailed
from tiers.service.migrator import Migrator
from tiers.service.service import NodeService
from tiers.store.slab_allocator import SlabAllocator
from tiers.store.store import Store, StoreConfig

PAGE = 4096
SLAB = 16 * PAGE
NAMESPACE = Namespace("m", "r", Layout("float16", 1, 1, 16, 64))  # parts of one page
ID = NAMESPACE.namespace_id


def name(i: int) -> bytes:
    return b"n" + i.to_bytes(15, "big")


def content(i: int) -> np.ndarray:
    return np.random.default_rng(i).integers(0, 256, PAGE, dtype=np.uint8)


class Node:
    """A node's parts without its server: one slab of hbm, and dram."""

    def __init__(self) -> None:
        self.arena = Arena(0, 4 * SLAB, prefault=False)
        self.hbm = DeviceArena(HBM_ARENA_ID, SLAB, "cpu")
        self.store = Store(
            SlabAllocator(4 * SLAB, SLAB),
            config=StoreConfig(grace_s=0.0, migration_retry_s=0.0),
            hbm=SlabAllocator(SLAB, SLAB, HBM_ARENA_ID),
        )
        self.migrator = Migrator(self.store, [self.arena], None, hbm=self.hbm)
        self.service = NodeService(self.store, [self.arena], self.migrator, hbm=self.hbm)
        self.store.namespaces.register(NAMESPACE)

    def put(self, count: int, tier: Tier = Tier.HBM) -> None:
        names = [name(i) for i in range(count)]
        granted = self.store.reserve(ID, names, b"", 0, "w", 60.0, 0.0, tier)
        assert len(granted.places) == count
        for i, place in enumerate(granted.places):
            if place.arena_id == HBM_ARENA_ID:
                self.hbm.write_from(place.offset, content(i))
            else:
                self.arena.view(place.offset, PAGE)[:] = content(i)
        sums = [checksum(content(i)) for i in range(count)]
        self.store.commit(granted.reservation_id, sums, 0.0)

    def spoil_hbm(self, i: int) -> None:
        leased = self.store.pin(ID, [name(i)], "x", 1.0, 0.0, None, Tier.HBM)
        assert leased.tiers == [Tier.HBM]
        self.hbm.write_from(leased.places[0].offset, content(99)[:8])
        self.store.leases.release(leased.lease_id)

    async def pin(self, count: int, tier: Tier = Tier.DRAM) -> m.PinReply:
        packed = pack_hashes([name(i) for i in range(count)])
        answer = self.service.pin(m.Pin(ID, packed, 60.0, [], tier), "c")
        return answer if isinstance(answer, m.PinReply) else await answer

    def close(self) -> None:
        self.migrator.close()
        self.hbm.close()
        self.arena.close()


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    yield made
    made.close()


async def test_a_default_pin_waits_for_the_copy_down_and_reads_right_bytes(node: Node) -> None:
    node.put(3)
    reply = await node.pin(3)
    assert (reply.found, set(reply.tiers)) == (3, {Tier.DRAM})
    places = np.frombuffer(reply.places, dtype="<i8").reshape(-1, 2)
    for i, (arena_id, offset) in enumerate(places.tolist()):
        assert arena_id == 0
        assert (node.arena.view(offset, PAGE) == content(i)).all()
    assert node.migrator.counters["bytes_demoted"] == 3 * PAGE


async def test_wrong_bytes_in_hbm_are_dropped_and_never_copied_down(node: Node) -> None:
    node.put(3)
    node.spoil_hbm(1)
    reply = await node.pin(3)
    assert (reply.found, reply.miss_reason) == (1, "checksum")
    assert node.migrator.counters["corrupt_blocks"] == 1
    node.store.check_integrity()


async def test_a_report_of_wrong_bytes_is_verified_in_hbm_too(node: Node) -> None:
    node.put(2)
    report = m.ReportCorrupt(ID, name(0))
    await node.service.inline.verify(report)
    assert node.store.lookup(ID, [name(0)]) == [Tier.HBM]  # a claim is no proof
    node.spoil_hbm(0)
    await node.service.inline.verify(report)
    assert node.store.lookup(ID, [name(0)]) == []


async def test_prefetched_bytes_are_right_in_hbm(node: Node) -> None:
    node.put(2, tier=Tier.DRAM)
    moves, _ = node.store.promote(ID, [name(0), name(1)], 0.0, Tier.HBM)
    await node.migrator.promote(moves)
    leased = node.store.pin(ID, [name(0), name(1)], "c", 1.0, 0.0, None, Tier.HBM)
    assert leased.tiers == [Tier.HBM] * 2
    out = np.empty(PAGE, np.uint8)
    for i, place in enumerate(leased.places):
        node.hbm.read_into(place.offset, out)
        assert (out == content(i)).all()


async def test_cold_blocks_go_down_beside_the_traffic_without_a_disk(node: Node) -> None:
    node.put(16)  # all of hbm, and more than its high watermark
    running = asyncio.create_task(node.migrator.run())
    try:
        await until(lambda: node.store.counters.get("demoted:dram", 0) >= 5, "copied down")
        assert node.store.lookup(ID, [name(i) for i in range(16)]) == [Tier.HBM] * 16
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_device_that_fails_costs_the_wait_and_nothing_else(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.put(1)

    def fail(*_: object) -> None:
        raise DeviceFailed("cuda:0: unspecified launch failure")

    with monkeypatch.context() as patch:
        patch.setattr(node.hbm, "read_into", fail)
        moves = node.store.pin(ID, [name(0)], "c", 1.0, 0.0).promote
        await node.migrator.promote(moves)
        assert node.migrator.counters["hbm_errors"] == 1
        assert node.store.lookup(ID, [name(0)]) == [Tier.HBM]
    assert (await node.pin(1)).found == 1
    node.store.check_integrity()


async def test_inline_reads_come_from_hbm_and_find_wrong_bytes(node: Node) -> None:
    node.put(2)
    reply = await node.service.inline.get(m.GetInline(ID, name(1)), "c")
    assert (reply.tier, reply.data) == (Tier.HBM, content(1).tobytes())
    assert node.store.migration_count == 0
