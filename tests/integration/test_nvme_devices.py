"""A real node over several directories: kill -9, a device that breaks, fp8, and both ways of writing back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import numpy.typing as npt
import pytest

from kvpool import Pool, hash_chain
from tests.support.process_cluster import LAYOUT, NAMESPACE, Cluster, wait_until
from tiers.store.fp8 import decode, encode, stored_bytes

SIZE = LAYOUT.part_bytes
BLOCKS = 24
PAGE = 4096


def chain(seed: int, blocks: int = BLOCKS) -> list[bytes]:
    tokens = np.random.default_rng(seed).integers(0, 50_000, blocks * LAYOUT.block_tokens)
    return hash_chain(NAMESPACE, tokens)


def numbers(seed: int, blocks: int = BLOCKS) -> npt.NDArray[np.uint8]:
    """Blocks of bfloat16 around 1."""
    values = np.random.default_rng(seed).normal(size=(blocks, SIZE // 2)).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


HASHES, DATA = chain(1), numbers(1)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    running = Cluster(tmp_path)
    with running.supervisor:
        running.start_conductor(
            "conductor.advanced.heartbeat_s=0.2", "conductor.advanced.suspect_after_s=1"
        )
        yield running


def disks(cluster: Cluster) -> list[Path]:
    return [cluster.directory / f"nvme{i}" for i in range(3)]


def start(cluster: Cluster, *settings: str, directories: list[Path] | None = None) -> None:
    listed = ",".join(map(str, directories or disks(cluster)))
    defaults = (f"node.nvme_directories=[{listed}]", "node.nvme_bytes=12MiB")
    cluster.start_node("a", *defaults, *settings)
    # Not `wait_joined`: the conductor may still list the node that was killed.
    url = f"http://{cluster.nodes['a']['http']}/readyz"
    wait_until(lambda: httpx.get(url, timeout=10).is_success, "joined, with its full report")


def killed(cluster: Cluster) -> None:
    cluster.kill("a")
    cluster.supervisor.members.remove(cluster.member("a"))


def client(cluster: Cluster) -> Pool:
    return Pool(conductor=cluster.conductor["wire"], host_label="here")


def tier(cluster: Cluster, name: str) -> dict[str, int]:
    tiers = cluster.node_stats("a")["tiers"]
    found: dict[str, int] = next(t for t in tiers if t["tier"] == name)
    return found


def counters(cluster: Cluster) -> dict[str, float]:
    found: dict[str, float] = cluster.node_stats("a")["counters"]
    return found


def put_and_clean(cluster: Cluster, blocks: int = BLOCKS) -> None:
    with client(cluster) as pool:
        pool.put(NAMESPACE, HASHES, DATA)
    wait_until(lambda: tier(cluster, "nvme")["blocks"] == blocks, "written through")


def read(cluster: Cluster) -> npt.NDArray[np.uint8]:
    out = np.zeros_like(DATA)
    with client(cluster) as pool:
        wait_until(lambda: pool.lookup(NAMESPACE, HASHES).found == BLOCKS, "known")
        result = pool.get(NAMESPACE, HASHES, out)
        assert (result.found, result.verified, result.miss_reason) == (BLOCKS, BLOCKS, "")
    return out


def test_blocks_on_several_devices_survive_kill_and_another_order(cluster: Cluster) -> None:
    start(cluster)
    node_id = cluster.nodes["a"]["id"]
    put_and_clean(cluster)
    killed(cluster)
    start(cluster, directories=disks(cluster)[::-1])
    assert cluster.nodes["a"]["id"] == node_id
    assert (read(cluster) == DATA).all()
    promoted = counters(cluster)["promoted"]
    assert promoted == BLOCKS


def test_a_device_that_breaks_is_reported_to_the_index_and_the_rest_goes_on(
    cluster: Cluster,
) -> None:
    start(cluster)
    put_and_clean(cluster)
    killed(cluster)
    start(cluster)
    with client(cluster) as pool:
        wait_until(lambda: pool.lookup(NAMESPACE, HASHES).found == BLOCKS, "known")
        os.truncate(disks(cluster)[1] / "slabs", 0)  # every read there ends early now
        out = np.zeros_like(DATA)
        result = pool.get(NAMESPACE, HASHES, out)
        assert result.found < BLOCKS
        assert (out[: result.found] == DATA[: result.found]).all()
        left = BLOCKS - BLOCKS // 3
        assert tier(cluster, "nvme")["blocks"] == left

        def known() -> list[bytes]:
            return [name for name in HASHES if pool.lookup(NAMESPACE, [name]).found]

        wait_until(lambda: len(known()) == left, "the index was told")
        for name in known():
            row = np.zeros((1, SIZE), np.uint8)
            one = pool.get(NAMESPACE, [name], row)
            assert (one.found, one.miss_reason) == (1, "")
            assert (row[0] == DATA[HASHES.index(name)]).all()
        metrics = httpx.get(f"http://{cluster.nodes['a']['http']}/metrics", timeout=10).text
        assert f'kvpool_nvme_failed{{directory="{disks(cluster)[1]}"}} 1.0' in metrics
        assert f'kvpool_nvme_failed{{directory="{disks(cluster)[0]}"}} 0.0' in metrics
        # The engine computes the lost ones again; they go to the devices that are left.
        pool.put(NAMESPACE, HASHES, DATA)
        wait_until(lambda: tier(cluster, "nvme")["blocks"] == BLOCKS, "written to the others")
    killed(cluster)
    start(cluster)
    assert (read(cluster) == DATA).all()


def test_a_node_without_any_device_left_serves_from_dram(cluster: Cluster) -> None:
    start(cluster)
    put_and_clean(cluster)
    killed(cluster)
    start(cluster)
    with client(cluster) as pool:
        wait_until(lambda: pool.lookup(NAMESPACE, HASHES).found == BLOCKS, "known")
        for disk in disks(cluster):
            os.truncate(disk / "slabs", 0)
        for name in HASHES:
            assert pool.get(NAMESPACE, [name], np.zeros((1, SIZE), np.uint8)).found == 0
        assert tier(cluster, "nvme")["blocks"] == tier(cluster, "nvme")["capacity_bytes"] == 0
        pool.put(NAMESPACE, HASHES, DATA)
    assert (read(cluster) == DATA).all()


def test_fp8_halves_what_is_written_and_survives_a_restart_without_the_setting(
    cluster: Cluster,
) -> None:
    start(cluster, "node.advanced.nvme_dtype=fp8")
    put_and_clean(cluster)
    slot = -(-stored_bytes(LAYOUT, "fp8") // PAGE) * PAGE
    assert tier(cluster, "nvme")["committed_bytes"] == BLOCKS * slot < DATA.nbytes
    assert (read(cluster) == DATA).all()  # DRAM has the exact bytes
    killed(cluster)
    start(cluster, "node.advanced.nvme_dtype=as_is")
    expected = np.empty_like(DATA)
    for row, target in zip(DATA, expected, strict=True):
        decode(LAYOUT, encode(LAYOUT, row), target)
    assert (read(cluster) == expected).all()
    assert not (expected == DATA).all()


def test_write_back_writes_nothing_until_dram_fills_and_then_the_coldest(cluster: Cluster) -> None:
    # 1 MiB of DRAM is one slab: 42 blocks of this layout.
    start(
        cluster,
        "node.advanced.write_through=false",
        "node.dram_bytes=1MiB",
        "node.advanced.high_watermark=0.8",
        "node.advanced.low_watermark=0.5",
    )
    with client(cluster) as pool:
        pool.put(NAMESPACE, HASHES, DATA)  # 24 of 42: below the watermark
        more, data = chain(2, 16), numbers(2, 16)
        assert tier(cluster, "nvme")["blocks"] == 0
        assert counters(cluster).get("demoted", 0) == 0
        pool.put(NAMESPACE, more, data)  # 40 of 42
        wait_until(lambda: tier(cluster, "nvme")["blocks"] > 0, "the coldest are written")
        # Now far more than fits: the blocks that were in DRAM come back from disk.
        wait_until(lambda: tier(cluster, "nvme")["blocks"] >= 19, "half of DRAM can be had")
        third, data = chain(3, 18), numbers(3, 18)
        pool.put(NAMESPACE, third, data)
    assert counters(cluster).get("lost", 0) == 0
    assert (read(cluster) == DATA).all()
