"""Processes that die, freeze or were never there: nothing leaks, nothing lies, every call ends in time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool import AsyncPool, Pool
from kvpool.errors import KvpoolError, LeaseExpired, StaleEpoch, TransferFailed, Unavailable
from tests.support.process_cluster import LAYOUT, NAMESPACE, Cluster, chain, wait_until

SIZE = LAYOUT.part_bytes
QUICK = (
    "node.advanced.grace_s=0.3",
    "node.advanced.quarantine_s=1",
    "node.advanced.lease_s=2",
    "node.advanced.reservation_s=2",
)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    running = Cluster(tmp_path)
    with running.supervisor:
        running.start_conductor(
            "conductor.advanced.heartbeat_s=0.2",
            "conductor.advanced.suspect_after_s=0.8",
            "conductor.advanced.dead_after_s=2",
        )
        yield running


def accounting(cluster: Cluster, name: str = "n0") -> dict[str, int]:
    dram: dict[str, int]
    [dram] = [t for t in cluster.node_stats(name)["tiers"] if t["tier"] == "dram"]
    parts = ("free_bytes", "reserved_bytes", "committed_bytes", "quarantined_bytes")
    assert sum(dram[part] for part in parts) == dram["capacity_bytes"]
    return dram


HOLDER = """
import sys, time, asyncio, numpy as np
from kvpool import AsyncPool, hash_chain
from tests.support.process_cluster import LAYOUT, NAMESPACE
async def main():
    pool = AsyncPool(conductor=sys.argv[1], host_label="here")
    hashes = hash_chain(NAMESPACE, np.arange(8 * LAYOUT.block_tokens))
    await pool.put(NAMESPACE, hashes[:4], np.zeros((4, LAYOUT.part_bytes), np.uint8))
    while (await pool.lookup(NAMESPACE, hashes)).found < 4:
        await asyncio.sleep(0.02)
    pinned = await pool.pin(NAMESPACE, hashes[:4], ttl_s=60)
    link = pinned.held[0][0]
    await link.reserve(NAMESPACE, hashes[4:], parent=hashes[3], part=0, ttl_s=60, timeout_s=5)
    print(pinned.found, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


def test_a_client_killed_with_leases_and_reservations_leaks_nothing(cluster: Cluster) -> None:
    cluster.start_node("n0", *QUICK[:2])  # default lifetimes: only the lost connection can end them
    cluster.wait_joined(nodes=1)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, cluster.conductor["wire"]],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert holder.stdout is not None
    with holder:
        assert holder.stdout.readline().strip() == b"4"
        before = accounting(cluster)
        assert before["pinned_bytes"] > 0
        assert before["reserved_bytes"] > 0
        holder.kill()
    # The write slots go through quarantine before they are free: a late write may still arrive.
    wait_until(lambda: accounting(cluster)["quarantined_bytes"] > 0, "quarantine")
    wait_until(
        lambda: (
            accounting(cluster)["pinned_bytes"] == accounting(cluster)["quarantined_bytes"] == 0
        ),
        "leases ended, quarantine over",
    )
    stats = cluster.node_stats("n0")
    assert (stats["leases"], stats["reservations"]) == (0, 0)
    assert accounting(cluster)["reserved_bytes"] == 0


async def test_a_node_that_dies_between_pin_and_read_is_a_typed_error_or_right_bytes(
    cluster: Cluster,
) -> None:
    cluster.start_node("n0")
    cluster.wait_joined(nodes=1)
    hashes = chain(1, 8)
    data = np.random.default_rng(1).integers(0, 256, (8, SIZE), dtype=np.uint8)
    transport: Any
    for transport, allowed in (("nixl", TransferFailed), ("shm", KvpoolError)):
        if transport == "shm":
            cluster.start_node("n0b")
            cluster.wait_joined(nodes=1)
        name = "n0" if transport == "nixl" else "n0b"
        async with AsyncPool(
            conductor=cluster.conductor["wire"], host_label="here", transport=transport
        ) as pool:
            await pool.put(NAMESPACE, hashes, data)
            while (await pool.lookup(NAMESPACE, hashes)).found < 8:
                pass
            pinned = await pool.pin(NAMESPACE, hashes, part=0, ttl_s=5)
            assert pinned.found == 8
            out = np.zeros_like(data)
            if transport == "shm":
                await pool.read_pinned(pinned, out[:8])  # the memory is mapped from here on
            cluster.kill(name)
            started = time.monotonic()
            try:
                await pool.read_pinned(pinned, out, timeout_s=3)
            except allowed:
                assert transport == "nixl"
            else:
                # Mapped memory outlives its node, so the committed bytes are read.
                assert transport == "shm"
                assert (out == data).all()
            assert time.monotonic() - started < 10
            cluster.supervisor.members.remove(cluster.member(name))
            wait_until(lambda: not cluster.stats()["node_states"], "the dead node is forgotten")


async def test_get_from_a_dead_node_is_a_miss_and_a_restarted_one_serves_again(
    cluster: Cluster,
) -> None:
    cluster.start_node("n0")
    cluster.wait_joined(nodes=1)
    hashes, data = chain(2, 4), np.full((4, SIZE), 7, np.uint8)
    async with AsyncPool(conductor=cluster.conductor["wire"], host_label="here") as pool:
        await pool.put(NAMESPACE, hashes, data)
        while (await pool.lookup(NAMESPACE, hashes)).found < 4:
            pass
        cluster.kill("n0")
        started = time.monotonic()
        got = await pool.get(NAMESPACE, hashes, np.zeros_like(data), timeout_s=3)
        assert (got.found, time.monotonic() - started < 10) == (0, True)
        assert got.miss_reason in ("unavailable", "not_in_index")
        cluster.supervisor.members.remove(cluster.member("n0"))
        wait_until(lambda: not cluster.stats()["node_states"], "the dead node is forgotten")
        with pytest.raises(Unavailable):
            await pool.put(NAMESPACE, hashes, data, timeout_s=2)
        cluster.start_node("n0")
        cluster.wait_joined(nodes=1)
        while not await pool.nodes():  # it remembers for a second that there was none
            pass
        assert (await pool.put(NAMESPACE, hashes, data)).stored == 4


async def test_a_lease_that_ran_out_before_the_read_is_discarded(cluster: Cluster) -> None:
    cluster.start_node("n0", *QUICK)
    cluster.wait_joined(nodes=1)
    hashes, data = chain(3, 2), np.full((2, SIZE), 9, np.uint8)
    async with AsyncPool(node=cluster.nodes["n0"]["wire"], host_label="here") as pool:
        await pool.put(NAMESPACE, hashes, data)
        pinned = await pool.pin(NAMESPACE, hashes, part=0, ttl_s=0.2)
        wait_until(lambda: time.monotonic() > pinned.deadline, "the lease's end")
        with pytest.raises(LeaseExpired):
            await pool.read_pinned(pinned, np.zeros_like(data))


def test_a_node_serves_on_without_conductor_and_reports_all_to_the_next(cluster: Cluster) -> None:
    cluster.start_node("n0")
    cluster.wait_joined(nodes=1)
    hashes, data = chain(4, 5), np.full((5, SIZE), 3, np.uint8)
    address = cluster.conductor["wire"]
    old = cluster.supervisor.members[0]
    os.kill(old.process.pid, signal.SIGKILL)
    old.process.wait(10)
    cluster.supervisor.members.remove(old)
    with Pool(node=cluster.nodes["n0"]["wire"], host_label="here") as pool:
        assert pool.put(NAMESPACE, hashes, data).stored == 5
    with Pool(conductor=address, timeout_s=1) as pool, pytest.raises(Unavailable):
        pool.lookup(NAMESPACE, hashes)
    cluster.start_conductor("conductor.advanced.heartbeat_s=0.2", port=address.rpartition(":")[2])
    cluster.wait_joined(nodes=1)
    with Pool(conductor=address, host_label="here") as pool:
        wait_until(lambda: pool.lookup(NAMESPACE, hashes).found == 5, "the full report")
        out = np.zeros_like(data)
        assert pool.get(NAMESPACE, hashes, out).found == 5
    assert (out == data).all()


def test_a_frozen_node_is_suspect_and_welcome_again(cluster: Cluster) -> None:
    cluster.start_node("n0")
    cluster.wait_joined(nodes=1)
    hashes, data = chain(5, 3), np.full((3, SIZE), 5, np.uint8)
    with Pool(conductor=cluster.conductor["wire"], host_label="here", timeout_s=2) as pool:
        pool.put(NAMESPACE, hashes, data)
        wait_until(lambda: pool.lookup(NAMESPACE, hashes).found == 3, "the index hears of it")
        cluster.kill("n0", signal.SIGSTOP)
        try:
            wait_until(lambda: "suspect" in cluster.stats()["node_states"].values(), "suspicion")
            started = time.monotonic()
            assert pool.get(NAMESPACE, hashes, np.zeros_like(data), timeout_s=1).found == 0
            assert time.monotonic() - started < 10
        finally:
            cluster.kill("n0", signal.SIGCONT)
        wait_until(lambda: "live" in cluster.stats()["node_states"].values(), "welcome back")
        wait_until(
            lambda: pool.get(NAMESPACE, hashes, np.zeros_like(data)).found == 3, "blocks again"
        )


def test_blocks_on_nvme_survive_kill_and_are_verified_when_read(
    cluster: Cluster, tmp_path: Path
) -> None:
    disk = tmp_path / "nvme"
    settings = (f"node.nvme_directories={disk}", "node.nvme_bytes=16MiB")
    cluster.start_node("n0", *settings)
    cluster.wait_joined(nodes=1)
    hashes = chain(6, 20)
    data = np.random.default_rng(6).integers(0, 256, (20, SIZE), dtype=np.uint8)
    with Pool(node=cluster.nodes["n0"]["wire"], host_label="here") as pool:
        pool.put(NAMESPACE, hashes, data)

    def on_disk() -> int:
        return sum(t["blocks"] for t in cluster.node_stats("n0")["tiers"] if t["tier"] == "nvme")

    wait_until(lambda: on_disk() == 20, "written through")
    cluster.kill("n0")
    cluster.supervisor.members.remove(cluster.member("n0"))
    # One byte of the eleventh block rots while nobody looks.
    slabs = disk / "slabs"
    content = slabs.read_bytes()
    at = content.index(data[10].tobytes()[:64])
    with slabs.open("r+b") as file:
        file.seek(at + 5)
        file.write(bytes([content[at + 5] ^ 0xFF]))
    cluster.start_node("n0", *settings)
    cluster.wait_joined(nodes=1)
    with Pool(conductor=cluster.conductor["wire"], host_label="here") as pool:
        wait_until(lambda: pool.lookup(NAMESPACE, hashes).found == 20, "recovered")
        out = np.zeros_like(data)
        got = pool.get(NAMESPACE, hashes, out)
        assert got.found == 10
        assert (out[:10] == data[:10]).all()
        wait_until(lambda: pool.lookup(NAMESPACE, hashes).found == 10, "the index hears of it")
    assert cluster.node_stats("n0")["counters"]["corrupt_blocks"] == 1


def test_reports_of_an_earlier_epoch_of_a_node_are_void(cluster: Cluster) -> None:
    facts = cluster.start_node("n0", "node.node_id=fixed")
    cluster.wait_joined(nodes=1)
    hashes, data = chain(8, 2), np.full((2, SIZE), 1, np.uint8)
    with Pool(conductor=cluster.conductor["wire"], host_label="here") as pool:
        pool.put(NAMESPACE, hashes, data)
        wait_until(lambda: pool.lookup(NAMESPACE, hashes).found == 2, "the index hears of it")
        link_node = pool.nodes()[0].descriptor
        cluster.kill("n0")
        cluster.supervisor.members.remove(cluster.member("n0"))
        again = cluster.start_node("n0", "node.node_id=fixed")
        assert again["epoch"] > facts["epoch"]
        wait_until(lambda: pool.lookup(NAMESPACE, hashes).found == 0, "blocks of the old life go")
        got = pool.get(NAMESPACE, hashes, np.zeros_like(data))
        assert got.found == 0
    assert link_node.epoch == facts["epoch"]
    assert issubclass(StaleEpoch, Unavailable)  # clients treat both as "meet the node afresh"


async def test_a_client_that_outlives_a_nodes_restart_meets_it_afresh(cluster: Cluster) -> None:
    port = cluster.conductor["wire"].rpartition(":")[2]
    settings = ("node.node_id=fixed", f"node.wire_port={int(port) + 1}")
    member = cluster.supervisor.launch("n0", _node_on_fixed_port(cluster, settings))
    cluster.nodes["n0"] = cluster.supervisor.wait_ready(member, 60)
    cluster.wait_joined(nodes=1)
    old = np.full((3, SIZE), 11, np.uint8)
    new = np.full((3, SIZE), 22, np.uint8)
    first, second = chain(9, 3), chain(10, 3)
    async with AsyncPool(
        conductor=cluster.conductor["wire"], host_label="here", verify_checksums=False
    ) as pool:
        await pool.put(NAMESPACE, first, old)
        await pool.get(NAMESPACE, first, np.zeros_like(old))  # the memory is mapped from here on
        cluster.kill("n0")
        cluster.supervisor.members.remove(cluster.member("n0"))
        member = cluster.supervisor.launch("n0", _node_on_fixed_port(cluster, settings))
        again = cluster.supervisor.wait_ready(member, 60)
        assert (again["id"], again["wire"]) == (
            cluster.nodes["n0"]["id"],
            cluster.nodes["n0"]["wire"],
        )
        cluster.nodes["n0"] = again
        cluster.wait_joined(nodes=1)
        async with AsyncPool(conductor=cluster.conductor["wire"], host_label="here") as other:
            await other.put(NAMESPACE, second, new)
            while (await other.lookup(NAMESPACE, second)).found < 3:
                pass
            out = np.zeros_like(new)
            for _ in range(5):
                got = await pool.get(NAMESPACE, second, out)
                assert (out[: got.found] == 22).all()
            assert got.found == 3
            third = chain(12, 2)
            await pool.put(NAMESPACE, third, old[:2], node_id="fixed")
            while (await other.lookup(NAMESPACE, third)).found < 2:
                pass
            assert (await other.get(NAMESPACE, third, out[:2])).found == 2
            assert (out[:2] == 11).all()


def _node_on_fixed_port(cluster: Cluster, settings: tuple[str, ...]) -> list[str]:
    sets = ("node.dram_bytes=32MiB", "node.advanced.slab_bytes=1MiB", *settings)
    flags = [text for setting in sets for text in ("--set", setting)]
    return [
        *(*flags, "node", "--http-port", "0", "--grpc-port", "0", "--host-label", "here"),
        *("--conductor", cluster.conductor["wire"]),
    ]
