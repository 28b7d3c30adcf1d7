"""vLLM itself with SmolLM2 on CPU: outputs are equal token by token to vLLM's own hit of the same split.

bf16 depends on how a prompt is cut into pieces, so a hit in the pool is compared with a hit in vLLM's own
prefix cache, never with a cold run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.engine_process import EngineProcess
from tests.integration.cluster import Cluster
from workers.model_files import default_cache_dir, prepare_model

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


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("real-pool"))
    try:
        cluster.start_conductor()
        nvme = tmp_path_factory.mktemp("nvme")
        cluster.start_node(
            "near",
            "node.dram_bytes=192MiB",
            "node.slab_bytes=16MiB",
            f"node.nvme_directory={nvme}",
            "node.nvme_bytes=512MiB",
        )
        cluster.wait_joined(nodes=1)
        yield cluster
    finally:
        cluster.fleet.stop()


@pytest.fixture(scope="module")
def engines(
    model: Path, roomy: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[EngineProcess, EngineProcess]]:
    """Two of one namespace: chunked prefill, and hash seeds that are not those of the other."""
    logs = tmp_path_factory.mktemp("engines")
    extra: dict[str, Any] = {"conductor": roomy.conductor["wire"], "host_label": "here"}
    extra["staging_bytes"] = "6MiB"  # several buffers a load
    started = [
        EngineProcess(
            model,
            extra,
            logs / f"{name}.log",
            env={"PYTHONHASHSEED": seed},
            max_num_batched_tokens=512,
        )
        for name, seed in (("first", "1"), ("second", "2"))
    ]
    try:
        yield tuple(one.wait_ready() for one in started)  # type: ignore[misc]
    finally:
        for one in started:
            one.close()


def test_another_process_finds_what_one_has_computed(
    engines: tuple[EngineProcess, EngineProcess], tokens: list[int]
) -> None:
    first, second = engines
    prompt = tokens[: 7 * PAGE + 50]
    cold = first.generate([prompt])
    assert cold["external"] == 0
    assert first.call("settle")["blocks_stored"] == 7
    own = first.generate([prompt])
    assert (own["external"], own["local"]) == (0, 7 * PAGE)
    found = second.generate([prompt])
    assert (found["external"], found["local"]) == (7 * PAGE, 0)
    assert found["outputs"] == own["outputs"]
