"""Scattered pages over real NIXL: packed on the way where that is faster, the same bytes in any case."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool import AsyncPool, hash_chain
from kvpool.client.node.grants import ReadLease
from kvpool.transports import Pieces
from kvpool.transports.nixl import NixlTransport
from kvpool.transports.staging import MAX_BUFFERS
from tests.support.process_cluster import LAYOUT, NAMESPACE, Cluster

SIZE = LAYOUT.part_bytes  # 24 KiB
BLOCKS = 24
PAGES = 12  # of a block, 2 KiB each
PAGE = SIZE // PAGES


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    running = Cluster(tmp_path)
    with running.supervisor:
        running.start_node("n0")
        yield running


def pages_of(memory: np.ndarray, places: np.ndarray, seed: int) -> tuple[Pieces, np.ndarray]:
    """Pages all over `memory`, in the order of the blocks' bytes; and their numbers."""
    count = len(places) * PAGES
    numbers = np.random.default_rng(seed).permutation(memory.size // PAGE)[:count]
    at = np.tile(np.arange(PAGES, dtype=np.int64) * PAGE, len(places))
    there = np.repeat(places, PAGES, axis=0)
    there[:, 1] += at
    lengths = np.full(count, PAGE, dtype=np.int64)
    local = memory.ctypes.data + numbers.astype(np.int64) * PAGE
    return Pieces(local, there, lengths, memory, PAGES), numbers


async def leased(pool: AsyncPool, hashes: list[bytes]) -> tuple[Any, ReadLease]:
    pinned = await pool.pin(NAMESPACE, hashes, part=0, ttl_s=30)
    link, lease, _ = pinned.held[0]
    assert lease.found == len(hashes)
    return link, lease


class Unpacked(NixlTransport):
    """Sends every piece as it is."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(name, pack_below_bytes=0, **options)


@pytest.mark.parametrize("is_packing", [True, False])
async def test_pages_are_written_and_read_whole_whatever_way_they_take(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, is_packing: bool
) -> None:
    if not is_packing:
        monkeypatch.setattr("kvpool.transports.select.NixlTransport", Unpacked)
    hashes = hash_chain(NAMESPACE, np.arange(BLOCKS * LAYOUT.block_tokens))
    memory = np.random.default_rng(7).integers(0, 256, 2 * BLOCKS * SIZE, dtype=np.uint8)
    address = cluster.nodes["n0"]["wire"]
    async with AsyncPool(node=address, host_label="elsewhere", transport="nixl") as pool:
        await pool.register(NAMESPACE)
        link = await pool.directory.only_link(float("inf"))
        slots = await link.reserve(NAMESPACE, hashes, parent=b"", part=0, ttl_s=30, timeout_s=5)
        pieces, numbers = pages_of(memory, slots.places, seed=1)
        sums = await link.write(pieces, timeout_s=10, deadline=slots.deadline)
        assert len(sums) == BLOCKS
        await link.commit(slots.reservation_id, sums, timeout_s=5)
        written = memory.reshape(-1, PAGE)[numbers].reshape(BLOCKS, SIZE)

        whole = np.zeros((BLOCKS, SIZE), np.uint8)
        assert (await pool.get(NAMESPACE, hashes, whole)).verified == BLOCKS
        assert (whole == written).all()

        out = np.zeros_like(memory)
        _, lease = await leased(pool, hashes)
        pieces, numbers = pages_of(out, lease.places, seed=2)
        transport = link.transports.dram
        assert isinstance(transport, NixlTransport)
        taken: list[object] = []
        take = transport.staging.take

        def counted_take() -> Any:
            taken.append(1)
            return take()

        monkeypatch.setattr(transport.staging, "take", counted_take)
        assert (transport.read_and_sum(link.node, pieces, 10) == lease.checksums).all()
        assert (out.reshape(-1, PAGE)[numbers].reshape(BLOCKS, SIZE) == written).all()
        others = np.setdiff1d(np.arange(2 * BLOCKS * PAGES), numbers)
        assert not out.reshape(-1, PAGE)[others].any()  # nothing beside them
        out[:] = 0
        transport.read(link.node, pieces, 10)
        assert (out.reshape(-1, PAGE)[numbers].reshape(BLOCKS, SIZE) == written).all()
        assert len(taken) == (2 if is_packing else 0)
        assert transport.staging._made == 1  # used again and again
        assert transport.staging.free == MAX_BUFFERS
