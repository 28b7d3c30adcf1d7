"""A gateway with its HTTP API on a virtual clock: workers and nodes are scripts, and no process runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.local_cluster import local_cluster
from conductor.gateway.gateway import Gateway
from conductor.gateway.http_api import HttpApi
from conductor.gateway.metrics import RequestMetrics
from conductor.index.memory import MemoryIndex, complete
from conductor.requests.admission import AdmissionLimits
from conductor.requests.lifecycle import Patience
from conductor.requests.request_log import RequestLog
from conductor.roles.actuator import RoleActuator
from conductor.roles.controller import RoleController
from kvpool.blocks.hashing import pack_hashes
from kvpool.blocks.tier import Tier
from kvpool.config.settings import ConductorConfig
from kvpool.errors import KvpoolError
from kvpool.serving.metrics import new_registry
from kvpool.wire import messages as m
from tests.support.scripted import NAMESPACE, PATIENT, report
from tests.support.virtual_loop import VirtualLoop


@dataclass
class VirtualWorker:
    """A worker's script, in virtual seconds.

    `fails_at` raises `error` instead of the token with this number.
    """

    worker_id: str
    role: str = "decode"
    text: str = "abcdefgh"
    prefill_s: float = 0.5
    first_s: float = 0.1
    token_s: float = 0.02
    fails_at: int | None = None
    error: KvpoolError | None = None
    seen: list[m.Message] = field(default_factory=list)
    cancelled: int = 0

    async def call(self, request: m.Message, timeout_s: float, undo: Any = None) -> Any:
        self.seen.append(request)
        assert isinstance(request, m.Prefill)
        await self._working(self.prefill_s)
        if self.error is not None and self.fails_at is None:
            raise self.error
        granted = len(request.grant.indices) // 4 if request.grant is not None else 0
        phases = {"prefill_compute_time": self.prefill_s}
        return m.PrefillReply(0, len(request.token_ids) // 4, granted, phases, {}, {})

    async def send(self, request: m.Message) -> None:
        self.seen.append(request)

    async def stream(self, request: m.Generate, timeout_s: float) -> AsyncGenerator[Any, None]:
        self.seen.append(request)
        for at, letter in enumerate(self.text[: request.sampling.max_tokens]):
            await self._working(self.token_s if at else self.first_s)
            if at == self.fails_at:
                assert self.error is not None
                raise self.error
            yield m.GenerateChunk([ord(letter)], report("") if at == 0 else None)
        yield report("length")

    async def close(self) -> None:
        pass

    async def _working(self, seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


@dataclass
class VirtualNode:
    """A node that grants every reservation after `reserve_s`, and remembers those that are open."""

    node_id: str
    reserve_s: float = 0.001
    open: dict[int, bool] = field(default_factory=dict)
    aborted: list[tuple[int, bool]] = field(default_factory=list)

    async def call(self, request: m.Message, timeout_s: float, undo: Any = None) -> Any:
        if isinstance(request, m.RegisterNamespace):
            return m.NamespaceReply(NAMESPACE.namespace_id)
        assert isinstance(request, m.Reserve)
        await asyncio.sleep(self.reserve_s)
        count = len(request.hashes) // 16
        number = len(self.open) + 1
        self.open[number] = True
        return m.ReserveReply(number, bytes(count), bytes(16 * count), 512, request.ttl_s)

    async def send(self, request: m.Message) -> None:
        assert isinstance(request, m.Abort)
        self.aborted.append((request.reservation_id, request.writer_stopped))

    def stream(self, request: m.Generate, timeout_s: float) -> AsyncGenerator[Any, None]:
        raise NotImplementedError("a node streams nothing")

    async def close(self) -> None:
        pass


class VirtualConductor:
    """The gateway of a test, in the virtual loop."""

    def __init__(self, loop: VirtualLoop, *, patience: Patience | None = None, **settings: Any):
        self.loop = loop
        self.config = ConductorConfig(**settings)
        index = MemoryIndex()
        self.cluster = local_cluster(PATIENT, loop.time, index)
        self.gateway = Gateway(
            self.cluster,
            RequestLog(),
            AdmissionLimits(self.config.max_active_requests, 16, 30.0),
            patience=patience or Patience(),
        )
        registry = new_registry()
        roles = RoleActuator(
            self.cluster.members.workers,
            self.gateway.connections,
            self.cluster.counters,
            RoleController(),
            is_active=False,
            clock=loop.time,
        )
        api = HttpApi(
            self.config,
            self.cluster.overview,
            self.gateway,
            self.gateway.request_log,
            None,
            RequestMetrics(registry),
            roles,
        )
        transport = httpx.ASGITransport(api.app(registry, lambda: ""))
        self.http = httpx.AsyncClient(transport=transport, base_url="http://virtual", timeout=None)
        self.look_ups = 0
        self._count_look_ups(index)

    def add_worker(self, worker: VirtualWorker) -> VirtualWorker:
        address = f"virtual:{worker.worker_id}"
        self.gateway.connections.add(address, worker)
        descriptor = m.WorkerDescriptor(
            worker.worker_id, 1, worker.role, "h", address, NAMESPACE, "m", 4096
        )
        complete(self.cluster.worker_reports.join(m.WorkerJoin(descriptor)))
        return worker

    def add_node(self, node: VirtualNode, hashes: list[bytes] | None = None) -> VirtualNode:
        address = f"virtual:{node.node_id}"
        self.gateway.connections.add(address, node)
        descriptor = m.NodeDescriptor(node.node_id, 1, "h", address)
        complete(self.cluster.node_reports.join(m.NodeJoin(descriptor, [NAMESPACE])))
        events = []
        if hashes:
            packed = pack_hashes(hashes)
            events = [m.BlockEvent("stored", NAMESPACE.namespace_id, packed, Tier.DRAM)]
        complete(
            self.cluster.node_reports.events(m.NodeEvents(node.node_id, 1, 1, events, True, True))
        )
        return node

    async def ask(self, **changes: Any) -> httpx.Response:
        body = {"prompt": [65] * 10, "max_tokens": 8, "temperature": 0, **changes}
        return await self.http.post("/v1/completions", json=body)

    def _count_look_ups(self, index: MemoryIndex) -> None:
        find = index.holders

        def counted(namespace_id: bytes, hashes: Any) -> Any:
            self.look_ups += 1
            return find(namespace_id, hashes)

        index.holders = counted  # type: ignore[method-assign]

    async def close(self) -> None:
        await self.http.aclose()
        await self.gateway.close()
