"""Processes that pause for longer than any allowed silence, and then go on: nothing is lost."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from kvpool import Pool
from tests.support.process_cluster import LAYOUT, NAMESPACE, Cluster, chain, wait_until

SIZE = LAYOUT.part_bytes
SETTINGS = (
    "conductor.advanced.heartbeat_s=0.2",
    "conductor.advanced.suspect_after_s=0.8",
    "conductor.advanced.dead_after_s=2",
)

FAKE = ("worker.engine=fake", "fake_engine.bytes_per_token=64")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    running = Cluster(tmp_path)
    with running.supervisor:
        running.start_conductor(*SETTINGS)
        yield running


def stand_still(cluster: Cluster, name: str, for_s: float) -> None:
    cluster.kill(name, signal.SIGSTOP)
    until = time.monotonic() + for_s
    wait_until(lambda: time.monotonic() > until, "the stall", for_s + 10)
    cluster.kill(name, signal.SIGCONT)


def test_a_stall_of_the_conductor_expires_nobody_and_erases_nothing(cluster: Cluster) -> None:
    for name in ("n0", "n1"):
        cluster.start_node(name)
    cluster.wait_joined(nodes=2)
    hashes, data = chain(1, 6), np.full((6, SIZE), 3, np.uint8)
    with Pool(conductor=cluster.conductor["wire"], host_label="here") as pool:
        pool.put(NAMESPACE, hashes, data)
        wait_until(lambda: pool.lookup(NAMESPACE, hashes).found == 6, "the index hears of it")
        gaps = cluster.stats()["counters"].get("event_gaps", 0)
        stand_still(cluster, cluster.supervisor.members[0].name, 10)
        until = time.monotonic() + 3  # longer than `dead_after_s`
        while time.monotonic() < until:
            stats = cluster.stats()
            assert sorted(stats["node_states"].values()) == ["live", "live"]
            assert stats["index_blocks"] == 6
            assert pool.lookup(NAMESPACE, hashes).found == 6
            time.sleep(0.05)
        assert cluster.stats()["counters"].get("event_gaps", 0) == gaps
        log = cluster.supervisor.members[0].log_path.read_text()
    assert log.count("node joined") == 2  # nobody had to join again
    assert "is dead" not in log


def test_a_node_frozen_beyond_its_death_comes_back_without_stale_blocks(cluster: Cluster) -> None:
    cluster.start_node("n0", "node.dram_bytes=2MiB")
    cluster.wait_joined(nodes=1)
    old, data = chain(2, 3), np.full((3, SIZE), 5, np.uint8)
    with Pool(conductor=cluster.conductor["wire"], host_label="here", timeout_s=3) as pool:
        pool.put(NAMESPACE, old, data)
        wait_until(lambda: pool.lookup(NAMESPACE, old).found == 3, "the index hears of it")
        # It fills up while nobody listens: what it held before the freeze is evicted right after it.
        cluster.kill("n0", signal.SIGSTOP)
        wait_until(lambda: not cluster.stats()["node_states"], "it is given up")
        assert pool.lookup(NAMESPACE, old).found == 0
        cluster.kill("n0", signal.SIGCONT)
        with Pool(node=cluster.nodes["n0"]["wire"], host_label="here") as direct:
            for seed in range(10, 60):
                direct.put(NAMESPACE, chain(seed, 3), data)
        wait_until(lambda: "live" in cluster.stats()["node_states"].values(), "welcome back")

        def agrees() -> bool:
            held = sum(tier["blocks"] for tier in cluster.node_stats("n0")["tiers"])
            return bool(0 < held == cluster.stats()["index_blocks"])

        wait_until(agrees, "the index holds what the node holds, and nothing else")
        with Pool(node=cluster.nodes["n0"]["wire"], host_label="here") as direct:
            assert pool.lookup(NAMESPACE, old).found == direct.lookup(NAMESPACE, old).found


def test_a_frozen_worker_is_routed_around_and_welcomed_back(cluster: Cluster) -> None:
    for name in ("w0", "w1"):
        cluster.launch_worker(name, "both", Path("none"), *FAKE)
    for name in ("w0", "w1"):
        cluster.ready_worker(name)
    cluster.wait_joined(nodes=0, workers=2)
    url = f"http://{cluster.conductor['http']}/v1/completions"

    def ask(tokens: int = 40) -> str:
        body = {"prompt": list(range(tokens)), "max_tokens": 4, "temperature": 0}
        answer = httpx.post(url, json=body, timeout=30)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["kvpool"]["decode_worker"])

    def states() -> dict[str, str]:
        return {w["descriptor"]["worker_id"]: w["state"] for w in cluster.stats()["workers"]}

    frozen = cluster.workers["w0"]["id"]
    cluster.kill("w0", signal.SIGSTOP)
    try:
        ask()  # before the conductor knows: whichever it chose, it is answered
        wait_until(lambda: states().get(frozen) != "live", "it is suspect")
        assert {ask(40 + i) for i in range(4)} == {cluster.workers["w1"]["id"]}
        wait_until(lambda: frozen not in states(), "it is given up")
    finally:
        cluster.kill("w0", signal.SIGCONT)
    wait_until(lambda: states().get(frozen) == "live", "welcome back")
    cluster.kill("w1")
    assert ask(50) == frozen
