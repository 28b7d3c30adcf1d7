"""A pool of real processes, and a model directory, shared by the tests of vLLM's connector."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.engines.vllm.harness import Engine, write_model
from tests.support.process_cluster import Cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("vllm-pool"))
    try:
        cluster.start_conductor()
        cluster.start_node("near")
        cluster.wait_joined(nodes=1)
        yield cluster
    finally:
        cluster.supervisor.stop()


@pytest.fixture(scope="session")
def hollow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "hollow")


@pytest.fixture
def engine(
    cluster: Cluster, hollow_model: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Engine]]:
    """Makes engines whose blocks no other test can see; closes them."""
    made: list[Engine] = []

    def make(extra: dict[str, Any] | None = None, **options: Any) -> Engine:
        settings = {
            "conductor": cluster.conductor["wire"],
            "host_label": "here",
            "tenant": request.node.name,
            "lookup_deadline_s": 1.0,  # so that a busy machine does not turn a hit into a miss
        }
        settings |= extra or {}
        if settings.get("node"):
            del settings["conductor"]
        made.append(Engine(hollow_model, settings, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
