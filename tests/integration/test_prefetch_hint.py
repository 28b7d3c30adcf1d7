"""An agent says that it is about to come back, and finds all of its conversation in DRAM. Real nodes, disks, wire."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from kvpool import Pool, hash_chain
from kvpool.blocks.tier import Tier
from tests.support.process_cluster import Cluster, wait_until

BLOCK_TOKENS = 32
BLOCKS = 20  # of 32 KiB: of three such prompts a node's DRAM holds two
ENGINE = (
    f"worker.block_tokens={BLOCK_TOKENS}",
    "fake_engine.bytes_per_token=1024",
    "fake_engine.prefill_token_s=0.0001",
)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Two hosts with a node each, whose DRAM is small; a worker on the first."""
    running = Cluster(tmp_path)
    with running.supervisor:
        running.start_conductor(
            "conductor.advanced.heartbeat_s=0.2",
            "conductor.advanced.suspect_after_s=3",
            "conductor.advanced.always_reuse=true",
        )
        for name in ("a", "b"):
            running.launch_node(
                name,
                "node.dram_bytes=2MiB",
                "node.advanced.slab_bytes=1MiB",
                f"node.nvme_directories={tmp_path / name}",
                "node.nvme_bytes=64MiB",
                host=f"host-{name}",
            )
        running.launch_fake_worker("w", "both", *ENGINE, host="host-a")
        for name in ("a", "b"):
            running.ready_node(name)
        running.ready_worker("w")
        running.wait_joined(nodes=2, workers=1)
        yield running


def prompt(seed: int) -> list[int]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 50_000, BLOCKS * BLOCK_TOKENS + 5).tolist()  # type: ignore[no-any-return]


def ask(cluster: Cluster, tokens: list[int], key: str = "") -> dict[str, Any]:
    url = f"http://{cluster.conductor['http']}/v1/completions"
    headers = {"X-Kvpool-Key": key} if key else {}
    body = {"prompt": tokens, "max_tokens": 2, "kvpool": {"prefill": "local"}}
    response = httpx.post(url, json=body, headers=headers, timeout=60)
    assert response.status_code == 200, response.text
    report: dict[str, Any] = response.json()["kvpool"]
    return report


class Where:
    """In which tier, and on which node, the index sees a prompt's blocks."""

    def __init__(self, cluster: Cluster, tokens: list[int]) -> None:
        self._space = cluster.served()
        self._hashes = hash_chain(self._space, tokens)
        self._pool = Pool(conductor=cluster.conductor["wire"], host_label="host-a")

    def tiers(self) -> set[Tier]:
        found = self._pool.lookup(self._space, self._hashes)
        return {s.tier for s in found.segments} if found.found == len(self._hashes) else set()

    def nodes(self) -> set[str]:
        return {s.node_id for s in self._pool.lookup(self._space, self._hashes).segments}

    def close(self) -> None:
        self._pool.close()


def push_out(cluster: Cluster, where: Where, first_seed: int) -> None:
    """Serve other prompts until none of these blocks is in DRAM."""
    for seed in range(first_seed, first_seed + 12):
        if where.tiers() == {Tier.NVME}:
            # No block of it is in DRAM, not even a leading one of a segment.
            report = where._pool.lookup(where._space, where._hashes)
            if all(segment.ready == 0 for segment in report.segments):
                return
        ask(cluster, prompt(seed))
    wait_until(lambda: where.tiers() == {Tier.NVME}, "the prompt was pushed out of DRAM")


def hint(cluster: Cluster, **body: Any) -> dict[str, Any]:
    url = f"http://{cluster.conductor['http']}/v1/prefetch"
    response = httpx.post(url, json=body, timeout=30)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_after_a_hint_a_conversation_is_found_in_dram_and_without_on_the_disk(
    cluster: Cluster,
) -> None:
    tokens = prompt(1)
    ask(cluster, tokens, key="agent")
    where = Where(cluster, tokens)
    wait_until(lambda: where.tiers(), "stored")
    push_out(cluster, where, 100)
    unprepared = ask(cluster, [*tokens, 1, 2, 3])
    assert unprepared["tokens_by_tier"] == {"nvme": BLOCKS * BLOCK_TOKENS}
    wait_until(lambda: Tier.DRAM in where.tiers(), "the index hears that reading promoted it")

    push_out(cluster, where, 200)
    answer = hint(cluster, key="agent")
    assert (answer["blocks"], answer["found"], answer["host"]) == (BLOCKS, BLOCKS, "host-a")
    assert answer["promoting"] + answer["resident"] == BLOCKS
    assert answer["promoting"] > 0
    assert answer["declined"] == 0, answer
    wait_until(lambda: where.tiers() == {Tier.DRAM}, "the index hears that it was promoted")
    prepared = ask(cluster, [*tokens, 1, 2, 3], key="agent")
    assert prepared["tokens_by_tier"] == {"dram": BLOCKS * BLOCK_TOKENS}
    counters = cluster.stats()["counters"]
    assert counters["prefetch:promoting"] >= answer["promoting"]
    where.close()


def test_a_hint_moves_blocks_to_the_host_of_the_worker_that_would_read_them(
    cluster: Cluster,
) -> None:
    space, tokens = cluster.served(), prompt(2)
    # Stored on the other host by somebody else, with the bytes that the engine will check.
    ask(cluster, tokens)
    where = Where(cluster, tokens)
    wait_until(lambda: where.tiers(), "stored")
    node_a, node_b = cluster.nodes["a"]["id"], cluster.nodes["b"]["id"]
    hashes = hash_chain(space, tokens)
    with Pool(conductor=cluster.conductor["wire"], host_label="host-b") as pool:
        moved = pool.replicate(space, hashes, to=node_b)
        assert moved.stored == BLOCKS
    cluster.kill("a")
    cluster.supervisor.members.remove(cluster.member("a"))
    wait_until(lambda: where.nodes() == {node_b}, "the first host's node is forgotten", 30)
    other = ("node.dram_bytes=8MiB", "node.advanced.slab_bytes=1MiB")
    cluster.start_node("a", *other, host="host-a")  # comes back with nothing
    cluster.wait_joined(nodes=2, workers=1)
    answer = hint(cluster, prompt=tokens)
    assert (answer["copying"], answer["declined"], answer["host"]) == (BLOCKS, 0, "host-a"), answer
    node_a = cluster.nodes["a"]["id"]
    wait_until(lambda: where.nodes() == {node_a}, "copied to the worker's host", 30)
    done = ask(cluster, tokens)
    assert done["tokens_by_tier"] == {"dram": BLOCKS * BLOCK_TOKENS}
    assert list(done["bytes_read"]) == ["shm"]
    where.close()
