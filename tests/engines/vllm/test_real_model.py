"""vLLM with SmolLM2 on CPU: outputs equal those of vLLM's own hit of the same split.

The last bits of KV depend on how a prompt is cut into chunks. So a hit in the pool is compared with
a hit in vLLM's own prefix cache, not with a cold run. It is compared in float32, where the batch
does not change tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool import Pool, hash_chain
from tests.engines.vllm.engine_process import EngineProcess
from tests.support.process_cluster import Cluster, wait_until
from workers.engine.model_files import default_cache_dir, prepare_model

pytestmark = pytest.mark.model
PAGE = 128  # vLLM's on CPU
DOCUMENT = " ".join(f"Shelf {i} holds book {i * 37 % 101} since {1900 + i}." for i in range(70))


@pytest.fixture(scope="module")
def model() -> Path:
    return prepare_model("smollm2-135m", default_cache_dir())


@pytest.fixture(scope="module")
def tokens(model: Path) -> list[int]:
    from transformers import AutoTokenizer

    return list(AutoTokenizer.from_pretrained(model)(DOCUMENT)["input_ids"])


NODE = ("node.dram_bytes=160MiB", "node.advanced.slab_bytes=8MiB", "node.node_id=phoenix")


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("real-pool"))
    nvme = tmp_path_factory.mktemp("nvme")
    try:
        cluster.start_conductor(
            "conductor.advanced.suspect_after_s=2", "conductor.advanced.dead_after_s=4"
        )
        cluster.start_node("near", *NODE, f"node.nvme_directories={nvme}", "node.nvme_bytes=256MiB")
        cluster.wait_joined(nodes=1)
        cluster.nvme = nvme  # type: ignore[attr-defined]
        yield cluster
    finally:
        cluster.supervisor.stop()


@pytest.fixture(scope="module")
def engines(
    model: Path, pool: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[EngineProcess, EngineProcess]]:
    """Two of one namespace, with chunked prefill; their hash seeds differ."""
    logs = tmp_path_factory.mktemp("engines")
    extra: dict[str, Any] = {
        "conductor": pool.conductor["wire"],
        "host_label": "here",
        "staging_bytes": "12MiB",  # two blocks a buffer: loads and saves take several
        "lookup_deadline_s": 1.0,  # so that a busy machine does not turn a hit into a miss
    }
    started = [
        EngineProcess(
            model,
            extra,
            logs / f"{name}.log",
            env={"PYTHONHASHSEED": seed},
            max_num_batched_tokens=512,
            dtype="float32",
            num_gpu_blocks_override=48,
        )
        for name, seed in (("first", "1"), ("second", "2"))
    ]
    try:
        yield tuple(one.wait_ready() for one in started)  # type: ignore[misc]
    finally:
        for one in started:
            one.close()


@pytest.fixture(scope="module")
def served(
    engines: tuple[EngineProcess, EngineProcess], tokens: list[int]
) -> tuple[list[int], list[list[int]]]:
    """A prompt that the first engine computed and stored, and its output after a local hit."""
    first, _ = engines
    prompt = tokens[: 7 * PAGE + 50]
    assert first.generate([prompt])["external"] == 0
    assert first.call("settle")["blocks_stored"] == 7
    own = first.generate([prompt])
    assert (own["external"], own["local"]) == (0, 7 * PAGE)
    return prompt, own["outputs"]


def test_another_process_finds_what_one_has_computed(
    engines: tuple[EngineProcess, EngineProcess], served: tuple[list[int], list[list[int]]]
) -> None:
    prompt, outputs = served
    found = engines[1].generate([prompt])
    assert (found["external"], found["local"]) == (7 * PAGE, 0)
    assert found["outputs"] == outputs


def test_a_batch_of_overlapping_prompts(
    engines: tuple[EngineProcess, EngineProcess], served: tuple[list[int], list[list[int]]]
) -> None:
    first, second = engines
    prompt, _ = served
    # All share the document's beginning, and the pool has a part of each.
    batch = [[*prompt[: n * PAGE + 30], *range(1000, 1040)] for n in (2, 3, 3, 5)]
    own = first.generate(batch)
    assert (own["external"], own["local"]) == (0, 13 * PAGE)
    assert second.call("reset")
    found = second.generate(batch)
    assert found["external"] + found["local"] == 13 * PAGE
    assert found["external"] >= 5 * PAGE
    assert found["outputs"] == own["outputs"]


def test_after_a_restart_of_the_node_blocks_come_from_nvme(
    engines: tuple[EngineProcess, EngineProcess],
    served: tuple[list[int], list[list[int]]],
    pool: Cluster,
) -> None:
    _, second = engines
    prompt, outputs = served
    wait_until(
        lambda: pool.node_stats("near")["counters"].get("demoted", 0) >= 7, "all are on NVMe"
    )
    pool.kill("near")
    files = f"node.nvme_directories={pool.nvme}"  # type: ignore[attr-defined]
    pool.start_node("again", *NODE, files, "node.nvme_bytes=256MiB")
    epoch = pool.nodes["again"]["epoch"]
    wait_until(
        lambda: epoch in [node["epoch"] for node in pool.stats()["nodes"]],
        "the conductor has met the restarted node",
    )
    with Pool(conductor=pool.conductor["wire"]) as client:
        [space] = client.namespaces()
        hashes = hash_chain(space, prompt)
        wait_until(lambda: client.lookup(space, hashes).found == 7, "the node has told what it has")
    assert second.call("reset")
    found = second.generate([prompt])
    assert found["external"] == 7 * PAGE
    assert found["outputs"] == outputs
    assert pool.node_stats("again")["counters"]["promoted"] >= 7


def test_a_node_killed_in_mid_load(
    engines: tuple[EngineProcess, EngineProcess],
    served: tuple[list[int], list[list[int]]],
    pool: Cluster,
) -> None:
    _, second = engines
    prompt, outputs = served
    before = second.call("metrics").get("loads_failed", 0)
    assert second.call("reset")
    assert second.call("hold_loads", after=1)
    second.send("generate", prompts=[prompt], max_tokens=8)
    assert second.receive() == "held"
    pool.kill("again")
    second.send("go_on")
    found = second.receive()
    assert second.call("metrics")["loads_failed"] == before + 1
    assert found["outputs"] == outputs
    # The pool is gone. vLLM's own cache and computing still work.
    assert second.generate([prompt])["outputs"] == outputs
    assert second.call("reset")
    assert second.generate([prompt[: 2 * PAGE]])["external"] == 0


def test_an_engine_process_exits_without_a_traceback(
    engines: tuple[EngineProcess, EngineProcess], served: tuple[list[int], list[list[int]]]
) -> None:
    # With one process, vLLM shuts its connectors down when no executor accepts work any more.
    first, _ = engines
    first.leave(timeout_s=60)
    assert "Traceback" not in first.log.read_text(errors="replace")
