"""A node whose disk is slower than computing: callers learn what a hit costs, and may decline it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conductor.server import run_conductor
from kvpool import AsyncPool, hash_chain
from kvpool.blocks.tier import Tier
from kvpool.config.loader import ConductorConfig, NodeConfig
from tests.support.process_cluster import LAYOUT, NAMESPACE
from tiers.disk.slab_file import NvmeFiles
from tiers.server import run_node

SIZE = LAYOUT.part_bytes
BLOCKS = 24
READY = 6  # blocks that are in memory as well
READ_S = 0.03  # of one block on the slow disk
HASHES = hash_chain(NAMESPACE, np.arange(BLOCKS * LAYOUT.block_tokens))
DATA = np.random.default_rng(1).integers(0, 256, (BLOCKS, SIZE), dtype=np.uint8)


@asynccontextmanager
async def serving(run: Any, config: Any) -> AsyncIterator[dict[str, Any]]:
    """A server in this process, so that its disk can be made slow."""
    facts: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    task = asyncio.create_task(run(config, facts.set_result, stop))
    try:
        await asyncio.wait([task, facts], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
        yield facts.result()
    finally:
        stop.set()
        await task


def free_ports(kind: Any, **settings: Any) -> Any:
    return kind(wire_port=0, http_port=0, grpc_port=0, **settings)


async def until(claim: Any, what: str) -> None:
    deadline = time.monotonic() + 15
    while not await claim():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.01)


@asynccontextmanager
async def slow_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AsyncPool]:
    """A conductor and a restarted node: the chain is on its disk, and its head in memory too."""
    node = {
        **{"node_id": "a", "host_label": "here", "transports": ("shm",)},
        **{"dram_bytes": 32 << 20, "advanced": {"slab_bytes": 1 << 20}},
        **{"nvme_directories": (tmp_path / "nvme",), "nvme_bytes": 16 << 20},
    }
    quick = free_ports(ConductorConfig, advanced={"heartbeat_s": 0.1})
    async with serving(run_conductor, quick) as conductor:
        node["conductor"] = address = conductor["wire"]
        async with (
            serving(run_node, free_ports(NodeConfig, **node)) as facts,
            AsyncPool(node=facts["wire"], host_label="here") as pool,
            AsyncPool(conductor=address) as viewer,
        ):

            async def written() -> bool:
                tiers = [t for n in (await viewer.stats()).nodes for t in n.tiers]
                return [t.blocks for t in tiers if t.tier == Tier.NVME] == [BLOCKS]

            await pool.put(NAMESPACE, HASHES, DATA)
            await until(written, "all is on the disk")
        async with (
            serving(run_node, free_ports(NodeConfig, **node)),
            AsyncPool(conductor=address, host_label="here") as pool,
        ):

            async def recovered() -> bool:
                return (await pool.lookup(NAMESPACE, HASHES)).found == BLOCKS

            await until(recovered, "the index knows what the disk holds")
            slow_down(monkeypatch)
            head = np.empty((READY, SIZE), np.uint8)
            assert (await pool.get(NAMESPACE, HASHES[:READY], head)).found == READY
            yield pool


def slow_down(monkeypatch: pytest.MonkeyPatch) -> None:
    read, turn = NvmeFiles.read, threading.Lock()

    def slowly(self: NvmeFiles, place: Any, out: Any) -> None:
        with turn:  # a device that does one thing at a time
            time.sleep(READ_S)
            read(self, place, out)

    monkeypatch.setattr(NvmeFiles, "read", slowly)


async def test_who_sets_a_limit_gets_the_ready_prefix_at_once_and_who_sets_none_gets_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with slow_pool(tmp_path, monkeypatch) as pool:
        out = np.zeros_like(DATA)
        began = time.monotonic()
        got = await pool.get(NAMESPACE, HASHES, out, max_wait_s=READ_S / 2)
        took_s = time.monotonic() - began
        assert (got.found, got.miss_reason) == (READY, "declined_cost")
        assert (out[:READY] == DATA[:READY]).all()
        slow_s = (BLOCKS - READY) * READ_S
        assert got.wait_s == pytest.approx(slow_s, rel=0.5)
        assert took_s < slow_s / 2
        assert got.waited_s < slow_s / 2
        # Declined is not missing: the copy stays trusted, and it was not moved.
        assert len(pool.directory.negative_cache) == 0
        again = await pool.get(NAMESPACE, HASHES, out, max_wait_s=READ_S / 2)
        assert (again.found, again.miss_reason) == (READY, "declined_cost")

        async def counted() -> bool:
            nodes = (await pool.stats()).nodes
            return [node.counters.get("miss:declined_cost") for node in nodes] == [2]

        await until(counted, "each was counted with its reason")

        pinned = await pool.pin(NAMESPACE, HASHES, part=0, max_wait_s=READ_S / 2)
        assert (pinned.found, pinned.miss_reason) == (READY, "declined_cost")
        assert pinned.wait_s == pytest.approx(slow_s, rel=0.5)
        pinned.release()

        patient = await pool.get(NAMESPACE, HASHES, out)
        assert (patient.found, patient.miss_reason) == (BLOCKS, "")
        assert (out == DATA).all()
        assert patient.waited_s == pytest.approx(patient.wait_s, rel=0.6)
        assert patient.waited_s >= slow_s * 0.9


async def test_a_call_that_cannot_end_in_time_says_so_instead_of_timing_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with slow_pool(tmp_path, monkeypatch) as pool:
        slow_s = (BLOCKS - READY) * READ_S
        out = np.zeros_like(DATA)
        began = time.monotonic()
        got = await pool.get(NAMESPACE, HASHES, out, timeout_s=slow_s * 0.4)
        assert time.monotonic() - began < slow_s * 0.8
        assert READY <= got.found < BLOCKS
        assert got.miss_reason == "declined_deadline"
        assert (out[: got.found] == DATA[: got.found]).all()
        assert len(pool.directory.negative_cache) == 0


async def test_a_lookup_says_what_the_disk_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with slow_pool(tmp_path, monkeypatch) as pool:

        async def priced() -> bool:
            return (await pool.lookup(NAMESPACE, HASHES)).wait_s > 0

        await until(priced, "the conductor heard of the disk's speed")
        found = await pool.lookup(NAMESPACE, HASHES)
        assert found.wait_s == pytest.approx((BLOCKS - READY) * READ_S, rel=0.5)
        [segment] = found.segments
        assert (segment.tier, segment.ready) == (Tier.NVME, READY)
        assert (await pool.lookup(NAMESPACE, HASHES[:READY])).wait_s == 0.0
        [nvme] = [t for t in (await pool.stats()).nodes[0].tiers if t.tier == Tier.NVME]
        assert nvme.read_bytes_per_s == pytest.approx(SIZE / READ_S, rel=0.5)
        async with AsyncPool(node=(await pool.nodes())[0].descriptor.address) as direct:
            own = await direct.lookup(NAMESPACE, HASHES)
            assert own.wait_s == pytest.approx(found.wait_s, rel=0.5)
