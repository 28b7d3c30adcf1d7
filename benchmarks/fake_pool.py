"""Starts a pool of real processes to benchmark scheduling: nodes on pretended hosts, and engines that sleep."""

from __future__ import annotations

import time
from collections.abc import Sequence

import httpx

from benchmarks.traffic import MODEL
from kvpool.serving.supervisor import Supervisor

HOSTS = ("h0", "h1", "h2")
ENGINE = (
    "fake_engine.prefill_base_s=0.01",
    "fake_engine.prefill_token_s=2.5e-4",
    "fake_engine.prefill_attention_s=1e-7",
    "fake_engine.tpot_base_s=0.02",
    "fake_engine.tpot_sequence_s=0.001",
    "fake_engine.bytes_per_token=4096",
)


def start_pool(
    supervisor: Supervisor,
    settings: Sequence[str],
    *,
    prefill: int,
    decode: int,
    engine: Sequence[str] = (),
    hosts: Sequence[str] = HOSTS,
    dram: str = "640MiB",
) -> str:
    """Start a conductor, a node on each host, and workers; return the gateway's address.

    Args:
        settings: of the conductor. engine: of the workers, after `ENGINE`.

    Raises:
        RuntimeError: not all workers joined in time.
    """
    free = ("--wire-port", "0", "--http-port", "0")
    conductor = supervisor.start(
        "conductor", [*_sets(settings), "conductor", *free, "--grpc-port", "0"]
    )
    nodes = [
        supervisor.launch(
            f"node-{host}",
            [
                *_sets(("node.advanced.slab_bytes=16MiB",)),
                *("node", *free, "--grpc-port", "0", "--dram", dram),
                *("--host-label", host, "--conductor", conductor["wire"]),
            ],
        )
        for host in hosts
    ]
    for node in nodes:
        supervisor.wait_ready(node, 60)
    roles = ["prefill"] * prefill + ["decode"] * decode
    workers = []
    for number, role in enumerate(roles):
        sets = ("worker.engine=fake", "worker.max_concurrent=256", *ENGINE, *engine)
        workers.append(
            supervisor.launch(
                f"worker-{number}",
                [
                    *_sets((*sets, "worker.max_model_tokens=262144")),
                    *("worker", *free, "--role", role, "--model-name", MODEL),
                    *("--host-label", hosts[number % len(hosts)]),
                    *("--conductor", conductor["wire"]),
                ],
            )
        )
    for worker in workers:
        supervisor.wait_ready(worker, 120)
    address = f"http://{conductor['http']}"
    deadline = time.monotonic() + 30
    while len(httpx.get(f"{address}/v1/stats").json()["workers"]) < len(roles):
        if time.monotonic() > deadline:
            raise RuntimeError("not all workers joined")
        time.sleep(0.1)
    return address


def _sets(settings: Sequence[str]) -> list[str]:
    return [text for setting in settings for text in ("--set", setting)]
