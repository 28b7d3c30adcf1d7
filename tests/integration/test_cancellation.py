"""Callers that give up: memory, slots and promises are as if they had never asked."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvpool import AsyncPool, Layout, Namespace, Pool, hash_chain
from kvpool.client.data.writing import ChainWriter
from kvpool.client.node.grants import WriteReservation
from kvpool.client.node.node_link import NodeLink
from kvpool.errors import DeadlineExceeded
from kvpool.transports import Pieces
from kvpool.transports.shm import ShmTransport
from kvpool.wire.messages import NodeDescriptor
from tests.support.process_cluster import Cluster
from workers.engine.contract import LayerChunk
from workers.service.layer_sender import LayerSender

LAYOUT = Layout("bfloat16", layers=4, kv_heads=8, head_dim=128, block_tokens=64)  # 1 MiB
SPACE = Namespace("tests/cancellation", "r", LAYOUT)
BLOCKS = 96


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    running = Cluster(tmp_path_factory.mktemp("cancellation"))
    with running.supervisor:
        running.start_node("n0", "node.dram_bytes=256MiB", "node.advanced.slab_bytes=4MiB")
        yield running


def chain(seed: int, blocks: int = BLOCKS) -> list[bytes]:
    tokens = np.random.default_rng(seed).integers(0, 50_000, blocks * LAYOUT.block_tokens)
    return hash_chain(SPACE, tokens)


def held(cluster: Cluster) -> tuple[int, int, int]:
    stats = cluster.node_stats("n0")
    [dram] = stats["tiers"]
    return stats["leases"], stats["reservations"], dram["quarantined_bytes"]


async def settled(cluster: Cluster) -> None:
    async with asyncio.timeout(10):
        while held(cluster) != (0, 0, 0):  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(0.05)


async def test_a_cancelled_get_never_touches_the_buffer_again(cluster: Cluster) -> None:
    async with AsyncPool(node=cluster.nodes["n0"]["wire"], host_label="here") as pool:
        hashes = chain(1)
        await pool.put(SPACE, hashes, np.full((BLOCKS, LAYOUT.part_bytes), 7, np.uint8))
        out = np.zeros((BLOCKS, LAYOUT.part_bytes), dtype=np.uint8)
        touched = 0
        for attempt in range(30):
            get = asyncio.create_task(pool.get(SPACE, hashes, out))
            await asyncio.sleep(0.0005 * (attempt % 10))
            get.cancel()
            await asyncio.wait([get])
            touched += bool(out.any())
            out[:] = 0
            await asyncio.sleep(0.005)
            assert not out.any(), f"written after the end of a cancelled get (attempt {attempt})"
        assert touched  # some were cancelled in the middle: the test can see what it looks for
    await settled(cluster)


async def test_cancelled_puts_leave_no_slot_reserved_or_quarantined(cluster: Cluster) -> None:
    data = np.ones((BLOCKS, LAYOUT.part_bytes), np.uint8)
    async with AsyncPool(node=cluster.nodes["n0"]["wire"], host_label="here") as pool:
        await pool.put(SPACE, chain(2, 1), data[:1])
        for attempt in range(20):
            put = asyncio.create_task(pool.put(SPACE, chain(100 + attempt), data))
            await asyncio.sleep(0.0007 * (attempt % 10))
            put.cancel()
            await asyncio.wait([put])
        await settled(cluster)


async def test_a_put_cancelled_between_reservation_and_write_gives_its_slots_back(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve = ChainWriter._reserve_anywhere
    data = np.ones((BLOCKS, LAYOUT.part_bytes), np.uint8)
    async with AsyncPool(node=cluster.nodes["n0"]["wire"], host_label="here") as pool:

        async def reserve_and_leave(
            writer: ChainWriter, node_id: str | None
        ) -> tuple[NodeLink, WriteReservation]:
            reserved = await reserve(writer, node_id)
            asyncio.get_running_loop().call_soon(put.cancel)
            return reserved

        monkeypatch.setattr(ChainWriter, "_reserve_anywhere", reserve_and_leave)
        put = asyncio.create_task(pool.put(SPACE, chain(7), data))
        await asyncio.wait([put])
        assert put.cancelled()
        await settled(cluster)


def test_a_blocking_call_past_its_deadline_has_ended_when_it_returns(cluster: Cluster) -> None:
    hashes = chain(3)
    with Pool(node=cluster.nodes["n0"]["wire"], host_label="here") as pool:
        pool.put(SPACE, hashes, np.full((BLOCKS, LAYOUT.part_bytes), 9, np.uint8))
        out = np.zeros((BLOCKS, LAYOUT.part_bytes), dtype=np.uint8)
        got = pool.get(SPACE, hashes, out, timeout_s=0.002)
        assert got.found < BLOCKS
        out[:] = 0
        assert pool.get(SPACE, hashes[:1], np.zeros_like(out[:1])).found == 1
        assert not out.any()


class SlowShm(ShmTransport):
    """Shared memory behind a slow link, in place of a fabric that is not here."""

    begun: threading.Event
    go_on: threading.Event

    def write(self, node: NodeDescriptor, pieces: Pieces, timeout_s: float) -> None:
        self.begun.set()
        self.go_on.wait(10)
        super().write(node, pieces, timeout_s)


async def test_a_cancelled_sender_gives_its_slots_back_only_after_its_last_write(
    cluster: Cluster,
) -> None:
    async with AsyncPool(node=cluster.nodes["n0"]["wire"], host_label="here") as pool:
        hashes = chain(4, 2)
        await pool.put(SPACE, chain(5, 1), np.zeros((1, LAYOUT.part_bytes), np.uint8))
        [info] = await pool.nodes()
        link: NodeLink = pool.directory.link_to(info.descriptor)
        slow = SlowShm()
        slow.begun, slow.go_on = threading.Event(), threading.Event()
        link.transports.__dict__["dram"] = slow
        reservation: WriteReservation = await link.reserve(
            SPACE, hashes, parent=b"", part=0, ttl_s=30, timeout_s=5
        )
        sender = LayerSender(link, reservation, np.arange(2), LAYOUT, timeout_s=20)
        blocks = np.full((2, LAYOUT.layer_bytes), 5, np.uint8)
        sender.on_layer(LayerChunk(0, 0, blocks))
        await asyncio.to_thread(slow.begun.wait, 10)

        async def request() -> Any:
            try:
                return await sender.commit()
            except BaseException:
                await sender.abort()
                raise

        commit = asyncio.create_task(request())
        await asyncio.sleep(0.05)
        commit.cancel()
        await asyncio.sleep(0.2)
        # Still writing: neither freed nor granted to anybody else.
        assert held(cluster)[1] == 1
        assert not commit.done()
        slow.go_on.set()
        await asyncio.wait([commit])
        assert commit.cancelled()
        await settled(cluster)


async def test_a_write_whose_turn_comes_after_the_reservation_never_begins(
    cluster: Cluster,
) -> None:
    async with AsyncPool(node=cluster.nodes["n0"]["wire"], host_label="here") as pool:
        await pool.put(SPACE, chain(6, 1), np.zeros((1, LAYOUT.part_bytes), np.uint8))
        [info] = await pool.nodes()
        link = pool.directory.link_to(info.descriptor)
        reservation = await link.reserve(
            SPACE, chain(7, 2), parent=b"", part=0, ttl_s=1.0, timeout_s=5
        )
        data = np.full((2, LAYOUT.part_bytes), 3, np.uint8)
        local = data.ctypes.data + np.arange(2, dtype=np.int64) * LAYOUT.part_bytes
        lengths = np.full(2, LAYOUT.part_bytes, dtype=np.int64)
        pieces = Pieces(local, reservation.places, lengths, data)
        threads = link.transports.dram.threads
        turn = threading.Event()
        stalled = [threads.submit(turn.wait, 20) for _ in range(threads._max_workers)]
        writing = asyncio.create_task(
            link.write(pieces, timeout_s=20, deadline=reservation.deadline)
        )
        await asyncio.sleep(max(0.0, reservation.deadline - time.monotonic()) + 0.05)
        assert not writing.done()  # it waits for its turn
        turn.set()
        with pytest.raises(DeadlineExceeded):
            await writing
        assert all(one.result() for one in stalled)
