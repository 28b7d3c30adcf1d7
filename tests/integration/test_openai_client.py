"""OpenAI's Python client that leaves while a prompt is prefilled elsewhere: all of it is undone, down to the slots."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.support.process_cluster import Cluster, wait_until

ENGINE = (
    "worker.model_name=fake",
    "worker.block_tokens=32",
    "fake_engine.bytes_per_token=1024",
    "fake_engine.prefill_token_s=0.02",  # 640 tokens: 13 s
    "fake_engine.tpot_base_s=0.05",
)
PROMPT = [int(at * 7919 % 50_000) for at in range(640)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    running = Cluster(tmp_path)
    with running.supervisor:
        running.start_conductor(
            "conductor.advanced.heartbeat_s=0.2", "conductor.advanced.min_remote_prefill_tokens=64"
        )
        running.start_node("n0", "node.advanced.quarantine_s=1", "node.advanced.grace_s=0.2")
        for role in ("prefill", "decode"):
            running.launch_fake_worker(role, role, *ENGINE)
        for role in ("prefill", "decode"):
            running.ready_worker(role)
        running.wait_joined(nodes=1, workers=2)
        yield running


def held(cluster: Cluster) -> dict[str, int]:
    """What the node has promised to somebody."""
    stats = cluster.node_stats("n0")
    [dram] = [tier for tier in stats["tiers"] if tier["tier"] == "dram"]
    names = ("reserved_bytes", "quarantined_bytes", "pinned_bytes")
    return {name: dram[name] for name in names} | {
        "leases": stats["leases"],
        "reservations": stats["reservations"],
    }


def is_idle(cluster: Cluster) -> bool:
    stats = cluster.stats()
    return all(worker["load"]["running"] == 0 for worker in stats["workers"])


def test_leaving_during_a_remote_prefill_gives_every_slot_back(cluster: Cluster) -> None:
    free = cluster.node_stats("n0")["tiers"][0]["free_bytes"]
    api = OpenAI(
        base_url=f"http://{cluster.conductor['http']}/v1",
        api_key="unused",
        max_retries=0,
        timeout=60,
    )
    ask: Any = {"model": "fake", "prompt": PROMPT, "max_tokens": 16}
    ask["extra_body"] = {"kvpool": {"prefill": "remote"}}
    with api.completions.create(stream=True, **ask) as stream:
        wait_until(lambda: held(cluster)["reservations"] == 1, "slots are reserved for the prefill")
        assert held(cluster)["reserved_bytes"] > 0
        assert stream.response.headers["x-kvpool-mode"] == "disaggregated"
    wait_until(lambda: not any(held(cluster).values()), "the node holds nothing for anybody", 20)
    wait_until(lambda: is_idle(cluster), "no worker is busy", 20)
    assert cluster.node_stats("n0")["tiers"][0]["free_bytes"] == free
    assert cluster.stats()["counters"]["requests:cancelled"] == 1
    api.close()


def test_leaving_during_the_answer_ends_the_decode_and_keeps_the_blocks(cluster: Cluster) -> None:
    api = OpenAI(base_url=f"http://{cluster.conductor['http']}/v1", api_key="unused", max_retries=0)
    ask: Any = {"model": "fake", "prompt": PROMPT[:100], "max_tokens": 2000}
    ask["extra_body"] = {"kvpool": {"prefill": "remote"}}
    with api.completions.create(stream=True, **ask) as stream:
        next(iter(stream))
    wait_until(lambda: is_idle(cluster), "the decode stopped", 20)
    wait_until(lambda: not any(held(cluster).values()), "the node holds nothing for anybody", 20)
    assert cluster.node_stats("n0")["tiers"][0]["blocks"] == 3  # of use to the next request
    api.close()
