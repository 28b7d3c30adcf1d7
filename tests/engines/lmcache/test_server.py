"""LMCache's real multi-process server, started as in docs/lmcache.md, and its real client."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from lmcache.cli.commands.bench.server_bench.client import ServerBenchClient
from lmcache.cli.commands.bench.server_bench.config import BenchConfig

from tests.support.process_cluster import Cluster, wait_until

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/lmcache.md").read_text()


def documented(command: str) -> list[str]:
    """The arguments of a command of the page."""
    [block] = re.findall(rf"^{command} .*?[^\\]\n(?=\S|```)", PAGE, re.M | re.S)
    return shlex.split(block.replace("\\\n", " "))


LMCACHE = str(Path(sys.executable).parent / "lmcache")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "LMCACHE_DISABLE_BANNER": "1"}


def at(cluster: Cluster, adapter: str) -> str:
    """The page's adapter, for the pool of `cluster`."""
    here = adapter.replace("127.0.0.1:7800", cluster.conductor["wire"])
    return here.replace('"revision"', '"host_label": "here", "revision"')


@dataclass
class Server:
    """A running server and where it listens."""

    process: subprocess.Popen[bytes]
    rpc: str
    http: str

    def adapter(self) -> dict[str, Any]:
        """What the server says of our adapter."""
        status = httpx.get(f"{self.http}/status", timeout=10).json()
        [found] = status["storage_manager"]["l2_adapters"]
        return dict(found)


@pytest.fixture(scope="module")
def server(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    ports = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as free:
            ports.append(free.getsockname()[1])
    arguments = documented("lmcache server")
    replaced = {"5555": str(ports[0]), "8080": str(ports[1]), "20": "0.05"}
    arguments = [replaced.get(argument, argument) for argument in arguments]
    arguments[-1] = at(cluster, arguments[-1])
    arguments += ["--supported-transfer-mode", "auto", "--no-l1-use-lazy", "--chunk-size", "32"]
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [LMCACHE, *arguments[1:]], stdout=out, stderr=subprocess.STDOUT, env=ENVIRONMENT
        )
    running = Server(process, f"tcp://127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}")

    def is_up() -> bool:
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            return httpx.get(f"{running.http}/status", timeout=2).status_code == 200
        except httpx.TransportError:
            return False

    try:
        wait_until(is_up, "the server is up", 600)
        yield running
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        finally:
            process.kill()


@pytest.fixture
def client(server: Server) -> Iterator[ServerBenchClient]:
    """Two tensor-parallel ranks with paged KV of their own."""
    config = BenchConfig(
        rpc_url=server.rpc,
        http_url=server.http,
        mode="cpu",
        transfer_mode="auto",
        tp_size=2,
        use_mla=False,
        num_tokens=256,
        kvcache_shape_spec="(2,64,16,2,32):bfloat16:4",
        num_blocks=64,
        block_size=16,
    )
    made = ServerBenchClient(config, log=print)
    made.start()
    try:
        yield made
    finally:
        made.close()


def test_a_prompt_that_left_l1_is_loaded_from_the_pool_by_all_ranks(
    server: Server, client: ServerBenchClient
) -> None:
    cold = client.create_request(1, "cold", "cold")
    assert client.lookup(cold).hit_chunks == 0
    written = client.compute_checksums(cold, 0, 256)
    assert client.store(cold, 0, 256).succeeded
    client.end_session(cold)
    wait_until(
        lambda: server.adapter()["counters"].get("stored") == 16, "8 chunks of 2 ranks stored"
    )
    cleared = httpx.post(f"{server.http}/cache/clear", timeout=10).json()
    assert cleared["status"] == "ok"

    warm = client.create_request(1, "warm", "warm")
    client.zero_destination(warm, 0, 256)
    assert client.compute_checksums(warm, 0, 256) != written
    assert client.lookup(warm).is_full_hit
    assert client.retrieve(warm, 0, 256).succeeded
    assert client.compute_checksums(warm, 0, 256) == written
    client.end_session(warm)
    adapter = server.adapter()
    assert adapter["counters"]["loaded"] == 16
    assert adapter["is_healthy"]
    wait_until(lambda: not server.adapter()["locked_key_count"], "nothing stays locked")


def test_the_server_lists_and_deletes_objects_of_the_pool(
    server: Server, client: ServerBenchClient
) -> None:
    request = client.create_request(2, "listed", "cold")
    client.lookup(request)
    before = len(httpx.get(f"{server.http}/cache/objects", timeout=10).json()["entries"])
    assert client.store(request, 0, 256).succeeded
    client.end_session(request)

    def listed() -> list[dict[str, Any]]:
        found = httpx.get(f"{server.http}/cache/objects", timeout=10).json()["entries"]
        return list(found)

    wait_until(lambda: len(listed()) == before + 16, "all are listed")
    keys = [entry["key"] for entry in listed()]
    body = {"tier": "all", "keys": keys, "force": True}
    reply = httpx.request("DELETE", f"{server.http}/cache/objects", json=body, timeout=10)
    assert reply.json()["ok"], reply.text
    wait_until(lambda: not listed(), "none is left")
    again = client.create_request(2, "again", "warm")
    assert client.lookup(again).hit_chunks == 0


def test_lmcaches_own_benchmark_of_adapters_verifies_what_it_loads(cluster: Cluster) -> None:
    arguments = documented("lmcache bench l2")
    arguments[arguments.index("--num-keys") + 1] = "4"
    arguments[-1] = at(cluster, arguments[-1])
    ran = subprocess.run(
        [LMCACHE, *arguments[1:], "--format", "json"],
        capture_output=True,
        text=True,
        timeout=60,
        env=ENVIRONMENT,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    text = ran.stdout
    metrics = json.loads(text[text.index("{\n") : text.rindex("}") + 1])["metrics"]
    operations = {m["operation"]: m for m in metrics.values() if "operation" in m}
    assert operations["Store"]["total_success"] == operations["Load"]["total_success"] == 16
