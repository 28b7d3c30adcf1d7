"""A node that is started again on its files goes on as if it had not ended: real processes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvpool import Pool
from tests.chaos.keyed import NAMESPACE, contents, prompt
from tests.support.process_cluster import Cluster, wait_until

# Twenty blocks on NVMe, which all are written to at once.
SETTINGS = (
    *("node.dram_bytes=2400KiB", "node.advanced.slab_bytes=240KiB", "node.nvme_bytes=480KiB"),
    *("node.transports=shm", "node.node_id=phoenix", "node.advanced.access_checkpoint_s=0.2"),
)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    running = Cluster(tmp_path)
    with running.supervisor:
        yield running


def demoted(cluster: Cluster, name: str) -> float:
    return float(cluster.node_stats(name)["counters"].get("demoted", 0))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["kill", "stop"])
def test_the_order_of_use_and_protection_outlast_a_restart(
    cluster: Cluster, tmp_path: Path, number: signal.Signals
) -> None:
    disk = tmp_path / "disk"
    settings = (*SETTINGS, f"node.nvme_directories={disk}")
    cluster.start_node("first", *settings)
    blocks = [prompt(i, 1) for i in range(20)]
    used, unused, protected = blocks[:10], blocks[10:19], blocks[19]
    with Pool(node=cluster.nodes["first"]["wire"], host_label="here") as pool:
        for i, hashes in enumerate(blocks, 1):
            pool.put(NAMESPACE, hashes, contents(hashes))
            wait_until(lambda i=i: demoted(cluster, "first") == i, "it stands on NVMe")
        pool.protect(NAMESPACE, protected, ttl_s=None)
        for hashes in used:
            assert pool.get(NAMESPACE, hashes, np.zeros_like(contents(hashes))).found == 1
        checkpoint = disk / "access_order"
        since = checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0
        # One more use, so that a checkpoint is written that has all the others.
        assert pool.get(NAMESPACE, used[0], np.zeros_like(contents(used[0]))).found == 1
    if number == signal.SIGKILL:  # what it knew a moment ago
        wait_until(
            lambda: checkpoint.exists() and checkpoint.stat().st_mtime_ns > since,
            "a later checkpoint",
        )
        wait_until((disk / "retention").exists, "the protections")
    cluster.kill("first", number)
    cluster.member("first").process.wait(20)
    cluster.start_node("second", *settings)
    with Pool(node=cluster.nodes["second"]["wire"], host_label="here") as pool:
        for i in range(9):
            hashes = prompt(100 + i, 1)
            pool.put(NAMESPACE, hashes, contents(hashes))
            wait_until(lambda i=i: demoted(cluster, "second") == i + 1, "it stands on NVMe")
        found = [pool.lookup(NAMESPACE, hashes).found for hashes in blocks]
    assert found == [1] * len(used) + [0] * len(unused) + [1]
