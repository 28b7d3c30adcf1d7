"""A real pool, and backends that SGLang's own factory has loaded by name."""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.process_cluster import Cluster

collect_ignore_glob = []
if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob = ["test_*.py"]
else:  # before the tests' own imports of SGLang
    from tests.engines.sglang.real import storage_config

LOADED = {
    "backend_name": "kvpool",
    "module_path": "kvpool.engines.sglang",
    "class_name": "KVPoolStorage",
    "interface_v1": 1,
}
_names = itertools.count(1)

MakeBackend = Callable[..., Any]


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A conductor and a node, for tests that leave them alone."""
    running = Cluster(tmp_path_factory.mktemp("sglang"))
    with running.supervisor:
        running.start_conductor()
        running.start_node("n0")
        running.wait_joined(nodes=1)
        yield running


class OtherProcess:
    """See `rank_process`; started beside the first tests, as importing SGLang takes seconds."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.engines.sglang.rank_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONHASHSEED": "12345", "OMP_NUM_THREADS": "1"},
        )
        self._is_ready = False

    def ask(self, **question: Any) -> Any:
        """The process's answer to one question."""
        assert self._process.stdin is not None
        if not self._is_ready:
            assert self._answer() == "ready"
            self._is_ready = True
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the other process has ended"
        return json.loads(line)

    def stop(self) -> None:
        """End it; one that nobody has asked anything may still be importing."""
        assert self._process.stdin is not None
        if not self._is_ready:
            self._process.kill()
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()


@pytest.fixture(scope="session", autouse=True)
def other_process() -> Iterator[OtherProcess]:
    """Another process that uses the same pool."""
    other = OtherProcess()
    yield other
    other.stop()


@pytest.fixture
def settings(cluster: Cluster, revision: str) -> dict[str, Any]:
    """The extra config of an instance of the test's own model."""
    conductor = cluster.conductor["wire"]
    return LOADED | {"revision": revision, "host_label": "here", "conductor": conductor}


@pytest.fixture
def revision() -> str:
    """A model revision of the test's own, so that tests find nothing of each other."""
    return f"revision-{next(_names)}"


@pytest.fixture
def make_backend(settings: dict[str, Any]) -> Iterator[MakeBackend]:
    """Makes backends as SGLang does: `make_backend(pool, side={}, extra={}, **config_fields)`.

    A setting of None is left out.
    """
    from sglang.srt.mem_cache.storage import StorageBackendFactory

    made: list[Any] = []

    def make(
        pool: Any,
        *,
        side: dict[Any, Any] | None = None,
        extra: dict[str, Any] | None = None,
        **fields: Any,
    ) -> Any:
        told = {k: v for k, v in (settings | (extra or {})).items() if v is not None}
        config = storage_config(told, **fields)
        backend = StorageBackendFactory.create_backend("dynamic", config, pool)
        made.append(backend)
        backend.register_mem_pool_host(pool)
        for name, side_pool in (side or {}).items():
            backend.register_mem_host_pool_v2(side_pool, name)
        backend.on_host_pools_registered()
        return backend

    yield make
    for backend in made:
        backend.close()


def keys(count: int, prompt: str = "a") -> list[str]:
    """Page keys as SGLang makes them: hex digests that cover all pages before."""
    return [hashlib.sha256(f"{prompt}/{i}".encode()).hexdigest() for i in range(count)]
