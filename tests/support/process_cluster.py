"""Real processes for the tests: a conductor, nodes and workers on free loopback ports."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np

from kvpool import Pool, hash_chain
from kvpool.blocks.layout import Layout, Namespace
from kvpool.serving.supervisor import Member, Supervisor
from tests.support.fork_server import ForkedSupervisor
from tests.support.sizes import IS_FULL

START_S = 240.0  # a hang, even for a machine that has much else to do
FREE_PORTS = ("--wire-port", "0", "--http-port", "0")
# Three layers of two heads: 24 KiB a block, so that whole tests move a few MiB.
LAYOUT = Layout("bfloat16", layers=3, kv_heads=2, head_dim=32, block_tokens=32)
NAMESPACE = Namespace("tests/model", "revision-1", LAYOUT)


def wait_until(claim: Callable[..., Any], what: str, timeout_s: float = 60.0) -> Any:
    """Poll until `claim()` is truthy; returns that value. Fails with `what` after the deadline."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = claim()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.02)


def chain(seed: int, blocks: int, namespace: Namespace = NAMESPACE) -> list[bytes]:
    """Hashes of a random prompt of so many blocks; another prompt for every seed."""
    count = blocks * namespace.layout.block_tokens
    return hash_chain(namespace, np.random.default_rng(seed).integers(0, 50_000, count))


def some_bytes(seed: int, blocks: int, size: int = LAYOUT.part_bytes) -> np.ndarray:
    """Random contents of so many blocks, a row each."""
    return np.random.default_rng(seed).integers(0, 256, (blocks, size), dtype=np.uint8)


class Cluster:
    """A pool of real processes. Close it with `supervisor.stop()`."""

    def __init__(self, directory: Path, *, env: dict[str, str] | None = None) -> None:
        self.supervisor = (Supervisor if IS_FULL else ForkedSupervisor)(directory / "logs", env)
        self.directory = directory
        self.conductor: dict[str, Any] = {}
        self.nodes: dict[str, dict[str, Any]] = {}
        self.workers: dict[str, dict[str, Any]] = {}
        self.http = httpx.Client(timeout=10)  # replaced where tokens or TLS are asked for
        self.scheme = "http"

    def start_conductor(self, *settings: str, port: str = "0", model: str = "") -> dict[str, Any]:
        arguments = [*_sets(settings), "conductor", "--wire-port", port, "--http-port", "0"]
        arguments += ["--grpc-port", "0", *(["--model", model] if model else [])]
        self.conductor = self.supervisor.start(f"conductor-{time.time_ns()}", arguments, START_S)
        return self.conductor

    def launch_node(self, name: str, *settings: str, host: str = "here") -> Member:
        defaults = ("node.dram_bytes=32MiB", "node.advanced.slab_bytes=1MiB")
        arguments = [*_sets((*defaults, *settings)), "node", *FREE_PORTS, "--grpc-port", "0"]
        arguments += ["--host-label", host, "--conductor", self.conductor.get("wire", "none")]
        return self.supervisor.launch(name, arguments)

    def start_node(self, name: str, *settings: str, host: str = "here") -> dict[str, Any]:
        self.launch_node(name, *settings, host=host)
        return self.ready_node(name)

    def ready_node(self, name: str) -> dict[str, Any]:
        self.nodes[name] = self.supervisor.wait_ready(self.member(name), START_S)
        return self.nodes[name]

    def launch_worker(
        self, name: str, role: str, model: Path, *settings: str, host: str = "here"
    ) -> Member:
        defaults = (f"worker.block_tokens={LAYOUT.block_tokens}", "worker.advanced.threads=1")
        arguments = [*_sets((*defaults, *settings)), "worker", *FREE_PORTS, "--role", role]
        arguments += ["--model", str(model), "--model-name", "tiny", "--host-label", host]
        arguments += ["--conductor", self.conductor["wire"]]
        return self.supervisor.launch(name, arguments)

    def launch_fake_worker(
        self, name: str, role: str, *settings: str, host: str = "here"
    ) -> Member:
        """A worker whose engine sleeps instead of computing."""
        arguments = [*_sets(("worker.engine=fake", *settings)), "worker", *FREE_PORTS]
        arguments += ["--role", role, "--host-label", host, "--conductor", self.conductor["wire"]]
        return self.supervisor.launch(name, arguments)

    def ready_worker(self, name: str) -> dict[str, Any]:
        self.workers[name] = self.supervisor.wait_ready(self.member(name), START_S)
        return self.workers[name]

    def member(self, name: str) -> Member:
        return next(member for member in self.supervisor.members if member.name == name)

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to a process; after SIGKILL wait for its end."""
        process = self.member(name).process
        os.kill(process.pid, number)
        if number == signal.SIGKILL:
            process.wait(10)

    def stats(self) -> dict[str, Any]:
        url = f"{self.scheme}://{self.conductor['http']}/v1/stats"
        stats: dict[str, Any] = self.http.get(url).json()
        return stats

    def node_stats(self, name: str) -> dict[str, Any]:
        url = f"{self.scheme}://{self.nodes[name]['http']}/v1/stats"
        stats: dict[str, Any] = self.http.get(url).json()
        return stats

    def is_settled(self, name: str) -> bool:
        """Nothing on the node is leased, pinned, reserved or in quarantine; the rest makes the whole."""
        stats = self.node_stats(name)
        for tier in stats["tiers"]:
            held = tier["pinned_bytes"] + tier["reserved_bytes"] + tier["quarantined_bytes"]
            if held or tier["free_bytes"] + tier["committed_bytes"] != tier["capacity_bytes"]:
                return False
        return not stats["leases"] and not stats["reservations"]

    def wait_joined(self, *, nodes: int, workers: int = 0) -> None:
        """Wait until so many are live, and until each running node is known by its present epoch."""
        running = {m.name for m in self.supervisor.members if m.process.poll() is None}
        epochs = {f["id"]: f["epoch"] for name, f in self.nodes.items() if name in running}

        def joined() -> bool:
            stats = self.stats()
            live = [s for s in stats["node_states"].values() if s == "live"]
            known = {node["node_id"]: node["epoch"] for node in stats["nodes"]}
            is_known = all(known.get(node_id) == epoch for node_id, epoch in epochs.items())
            return is_known and len(live) == nodes and len(stats["workers"]) == workers

        wait_until(joined, f"{nodes} nodes and {workers} workers joined")

    def served(self) -> Namespace:
        """The namespace of the workers, which all serve one."""
        descriptor = self.stats()["workers"][0]["descriptor"]
        return msgspec.convert(descriptor["namespace"], Namespace)

    def wait_indexed(self, tokens: Sequence[int]) -> None:
        """Wait until the index has every whole block of a prompt that was served.

        Their writer finds them earlier. All others, and the scheduler, use the index.
        """
        space = self.served()
        hashes = hash_chain(space, tokens)
        with Pool(conductor=self.conductor["wire"]) as pool:
            wait_until(
                lambda: pool.lookup(space, hashes).found == len(hashes),
                "the prompt is in the index",
            )


def _sets(settings: tuple[str, ...]) -> list[str]:
    return [text for setting in settings for text in ("--set", setting)]
