"""What the conductor itself costs per request: HTTP, decision, lifecycle and stream, without workers.

    python -m benchmarks.gateway

Workers and nodes answer at once, in this process. Processor time of one request of 4,096 tokens, of which the
pool has 40 blocks of 64, with eight workers and four nodes.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import structlog

from benchmarks.local_cluster import local_cluster
from conductor.gateway.gateway import Gateway
from conductor.gateway.http_api import HttpApi
from conductor.gateway.metrics import RequestMetrics
from conductor.index.memory import complete
from conductor.members.membership import MembershipConfig
from conductor.requests.admission import AdmissionLimits
from conductor.requests.lifecycle import Patience
from conductor.requests.request_log import RequestLog
from conductor.roles.actuator import RoleActuator
from conductor.roles.controller import RoleController
from kvpool.blocks.hashing import hash_chain, pack_hashes
from kvpool.blocks.layout import Layout, Namespace
from kvpool.blocks.tier import Tier
from kvpool.config.settings import ConductorConfig
from kvpool.serving.metrics import new_registry
from kvpool.wire import messages as m

SPACE = Namespace("m", "r", Layout("bfloat16", 32, 8, 128, block_tokens=64))
PROMPT_TOKENS = 4096
PROMPTS = 20
KNOWN_BLOCKS = 40
ROUNDS = 5
REQUESTS = 100  # in a round
CASES = (("local", 1), ("remote", 1), ("local", 64))  # prefill, output tokens


class InstantWorker:
    """Answers at once, and computes nothing."""

    async def call(self, request: Any, timeout_s: float, undo: Any = None) -> Any:
        granted = len(request.grant.indices) // 4 if request.grant is not None else 0
        tokens = len(request.token_ids) // 4
        return m.PrefillReply(0, tokens, granted, {"prefill_compute_time": 0.05}, {}, {})

    async def send(self, request: m.Message) -> None:
        """Ignore it."""

    async def stream(self, request: m.Generate, timeout_s: float) -> AsyncGenerator[Any, None]:
        for at in range(request.sampling.max_tokens):
            so_far = m.GenerateReply("", 0, 0, 1, "", {}, {}, 0) if at == 0 else None
            yield m.GenerateChunk([65], so_far)
        yield m.GenerateReply("length", 0, 0, 1, "", {"prefill_compute_time": 0.05}, {}, 0)

    async def close(self) -> None:
        """Nothing is open."""


class InstantNode(InstantWorker):
    """Grants every reservation at once."""

    async def call(self, request: Any, timeout_s: float, undo: Any = None) -> Any:
        if isinstance(request, m.RegisterNamespace):
            return m.NamespaceReply(SPACE.namespace_id)
        count = len(request.hashes) // 16
        return m.ReserveReply(1, bytes(count), bytes(16 * count), 512, request.ttl_s)


def conductor(prompts: list[list[int]]) -> httpx.AsyncClient:
    """A client of a conductor in this process, whose pool has the beginning of each prompt."""
    never = MembershipConfig(suspect_after_s=3_600, dead_after_s=7_200)
    cluster = local_cluster(never)
    gateway = Gateway(cluster, RequestLog(), AdmissionLimits(4096), patience=Patience())
    for number in range(8):
        role, address = ("prefill", "decode")[number % 2], f"worker:{number}"
        gateway.connections.add(address, InstantWorker())
        worker = m.WorkerDescriptor(
            f"w{number}", 1, role, f"host-{number // 2}", address, SPACE, "m", 1 << 20
        )
        complete(cluster.worker_reports.join(m.WorkerJoin(worker)))
    for number in range(4):
        address = f"node:{number}"
        gateway.connections.add(address, InstantNode())
        node = m.NodeDescriptor(f"n{number}", 1, f"host-{number}", address)
        complete(cluster.node_reports.join(m.NodeJoin(node, [SPACE])))
        events = [
            m.BlockEvent("stored", SPACE.namespace_id, pack_hashes(chain), Tier.DRAM)
            for chain in (hash_chain(SPACE, p)[:KNOWN_BLOCKS] for p in prompts[number::4])
        ]
        complete(cluster.node_reports.events(m.NodeEvents(f"n{number}", 1, 1, events, True, True)))
    registry = new_registry()
    roles = RoleActuator(
        cluster.members.workers,
        gateway.connections,
        cluster.counters,
        RoleController(),
        is_active=False,
        clock=time.monotonic,
    )
    metrics = RequestMetrics(registry)
    config = ConductorConfig()
    api = HttpApi(config, cluster.overview, gateway, gateway.request_log, None, metrics, roles)
    transport = httpx.ASGITransport(api.app(registry, lambda: ""))
    return httpx.AsyncClient(transport=transport, base_url="http://conductor", timeout=None)


async def measure() -> dict[str, float]:
    """Microseconds of processor time per request, the best round of each case."""
    prompts = [[(n * 7919 + at) % 50_000 for at in range(PROMPT_TOKENS)] for n in range(PROMPTS)]
    http = conductor(prompts)
    best: dict[str, float] = {}
    for prefill, output_tokens in CASES:
        name = f"{prefill} prefill, {output_tokens} tokens"
        for _ in range(1 + ROUNDS):  # the first one warms up
            gc.collect()
            began = time.process_time()
            for number in range(REQUESTS):
                body = {
                    "prompt": prompts[number % PROMPTS],
                    "max_tokens": output_tokens,
                    "kvpool": {"prefill": prefill},
                }
                (await http.post("/v1/completions", json=body)).raise_for_status()
            taken_us = (time.process_time() - began) / REQUESTS * 1e6
            best[name] = min(best.get(name, taken_us), taken_us)
    await http.aclose()
    return best


def main() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    for name, taken_us in asyncio.run(measure()).items():
        print(f"{name:28s} {taken_us:7.0f} us per request")


if __name__ == "__main__":
    main()
