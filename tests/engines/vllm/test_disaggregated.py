"""Prefill and decode by two plain vLLM servers behind the gateway, as in docs/vllm.md."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engines.vllm.engine_process import ENVIRONMENT
from tests.support.process_cluster import Cluster, wait_until
from tests.support.waiting import free_port
from workers.engine.model_files import default_cache_dir, prepare_model

pytestmark = pytest.mark.model
PAGE = 128


def _without_shared_metrics(environment: dict[str, str]) -> dict[str, str]:
    """Two servers with one directory for metrics show the sum of both."""
    return {k: v for k, v in environment.items() if k != "PROMETHEUS_MULTIPROC_DIR"}


class Server:
    """`vllm serve` in a session of its own."""

    def __init__(self, model: Path, port: int, role: str, conductor: str, log: Path) -> None:
        transfer = {
            "kv_connector": "KVPoolConnector",
            "kv_connector_module_path": "kvpool.engines.vllm",
            "kv_role": role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "conductor": conductor,
                "host_label": "here",
                "model": "smol",
                "lookup_deadline_s": 1.0,  # so that a busy machine does not turn a hit into a miss
            },
        }
        command = [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            str(model),
        ]
        command += ["--served-model-name", "smol", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--enforce-eager", "--max-model-len", "2048", "--num-gpu-blocks-override", "48"]
        command += ["--kv-transfer-config", json.dumps(transfer)]
        environment = {k: v for k, v in ENVIRONMENT.items() if "MULTIPROCESSING" not in k}
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=_without_shared_metrics(os.environ | environment),
                start_new_session=True,
            )
        self.url = f"http://127.0.0.1:{port}"

    def complete(self, prompt: list[int], max_tokens: int) -> Any:
        body = {"model": "smol", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=300).json()
        return answer["choices"][0]

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics", timeout=10).text
        return sum(float(v) for v in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))

    def stop(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)


@pytest.fixture(scope="module")
def servers(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Cluster, Server, Server]]:
    model = prepare_model("smollm2-135m", default_cache_dir())
    logs = tmp_path_factory.mktemp("servers")
    cluster = Cluster(tmp_path_factory.mktemp("pd-pool"))
    ports = free_port(), free_port()
    # Neither revision nor layout: they are what the servers' connectors register.
    entries = [
        {"url": f"http://127.0.0.1:{port}", "role": role, "host_label": "here", "model": "smol"}
        for port, role in zip(ports, ("prefill", "decode"), strict=True)
    ]
    started: list[Server] = []
    try:
        cluster.start_conductor(
            f"conductor.engines={json.dumps(entries)}",
            "conductor.advanced.min_remote_prefill_tokens=0",
            "conductor.advanced.engine_check_s=0.5",
            "conductor.advanced.suspect_after_s=10",
            "conductor.advanced.dead_after_s=20",
            model=str(model),
        )
        cluster.start_node("near", "node.dram_bytes=96MiB", "node.advanced.slab_bytes=8MiB")
        wire = cluster.conductor["wire"]
        for port, role in zip(ports, ("kv_producer", "kv_consumer"), strict=True):
            started.append(Server(model, port, role, wire, logs / f"{role}.log"))

        def joined() -> bool:
            assert all(server.process.poll() is None for server in started), logs
            return len(cluster.stats()["workers"]) == 2

        wait_until(joined, "both servers joined", 600)
        yield cluster, started[0], started[1]
    finally:
        for server in started:
            server.stop()
        cluster.supervisor.stop()


def test_the_decode_server_reads_what_the_prefill_server_computed(
    servers: tuple[Cluster, Server, Server],
) -> None:
    cluster, prefill, decode = servers
    prompt = [1000 + (i * 37) % 20_000 for i in range(4 * PAGE + 60)]
    answer = httpx.post(
        f"http://{cluster.conductor['http']}/v1/completions",
        json={
            "model": "smol",
            "prompt": prompt,
            "max_tokens": 6,
            "temperature": 0,
            "ignore_eos": True,
            "kvpool": {"prefill": "remote"},
        },
        timeout=120,
    ).json()
    assert not answer["kvpool"].get("fallback_reason"), answer
    assert prefill.metric("vllm:external_prefix_cache_hits_total") == 0
    assert prefill.metric("kvpool_vllm_blocks_stored_total") == 4
    assert decode.metric("vllm:external_prefix_cache_hits_total") == 4 * PAGE
    assert decode.metric("kvpool_vllm_loaded_tokens_total") == 4 * PAGE
    assert decode.metric("kvpool_vllm_saves_total") == 0
    # The same split of the prompt, out of its own memory.
    again = decode.complete(prompt, 6)
    assert decode.metric("vllm:prefix_cache_hits_total") == 4 * PAGE
    assert again["text"] == answer["choices"][0]["text"]
