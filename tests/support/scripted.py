"""A conductor in this process with scripted workers, on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx

from benchmarks.local_cluster import local_cluster
from conductor.cluster.cluster import Cluster
from conductor.engine_servers.discovery import EngineServers
from conductor.gateway.gateway import Gateway
from conductor.gateway.http_api import HttpApi
from conductor.gateway.metrics import ConductorCollector, RequestMetrics
from conductor.gateway.request import GenerationRequest
from conductor.index.memory import complete
from conductor.members.membership import MembershipConfig
from conductor.requests.admission import AdmissionLimits
from conductor.requests.lifecycle import Patience
from conductor.requests.request import Request
from conductor.requests.request_log import RequestLog
from conductor.roles.actuator import RoleActuator
from conductor.roles.controller import RoleController
from kvpool.blocks.layout import Layout, Namespace
from kvpool.config.settings import ConductorAdvanced, ConductorConfig
from kvpool.errors import Overloaded
from kvpool.serving.http import HttpServer
from kvpool.serving.metrics import new_registry
from kvpool.wire import Final, WireServer
from kvpool.wire import messages as m

NAMESPACE = Namespace("m", "r", Layout("bfloat16", 2, 2, 8, block_tokens=4))
# Nobody falls silent because the machine is busy.
PATIENT = MembershipConfig(
    heartbeat_s=0.05, suspect_after_s=30.0, dead_after_s=60.0, sweep_s=0.05, stall_s=5.0
)
# For tests about silence.
QUICK = MembershipConfig(
    heartbeat_s=0.05, suspect_after_s=0.4, dead_after_s=1.5, sweep_s=0.05, stall_s=5.0
)
TICK_S = 0.05


class LetterTokenizer:
    """Token ids are code points."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def encode_more(self, text: str) -> list[int]:
        return self.encode(text)

    def encode_chat(
        self, messages: Sequence[dict[str, Any]], options: dict[str, Any] | None = None
    ) -> list[int]:
        return self.encode("".join(message["content"] for message in messages))

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))


def report(
    reason: str = "", pool_tokens: int = 0, computed: int = 1, fallback: str = ""
) -> m.GenerateReply:
    return m.GenerateReply(reason, pool_tokens, 0, computed, fallback, {}, {}, 0)


class ScriptedWorker:
    """Answers `Generate` with `text`, one letter per token, `pause_s` apart.

    `hangs` makes it like a stopped process: it takes requests, replies nothing and sends no
    heartbeats. With `hangs_at` it begins to hang before that token.
    """

    def __init__(self, worker_id: str, role: str = "decode", epoch: int = 1) -> None:
        self.worker_id = worker_id
        self.epoch = epoch
        self.role = role
        self.text = "abcdefgh"
        self.pause_s = 0.0
        self.pool_tokens = 0
        self.declines = False  # finds every hit too dear
        self.hangs = False
        self.hangs_at: int | None = None
        self.beats_anyway = False  # heartbeats go on while it hangs
        self.is_silent = False  # no heartbeats, but it works
        self.places = 0  # more requests at once are refused; 0: any number is taken
        self.tells_places = True
        self.running = 0
        self.seen: list[m.Message] = []
        self._resumed = asyncio.Event()
        self.wire = WireServer("worker", worker_id, 1)
        self.wire.handle(m.Generate, lambda request, _session: self._generate(request))
        self.wire.handle(m.Prefill, lambda request, _session: self._prefill(request))

    async def join(self, cluster: Cluster) -> None:
        port = await self.wire.listen("127.0.0.1", 0)
        descriptor = m.WorkerDescriptor(
            self.worker_id, self.epoch, self.role, "h", f"127.0.0.1:{port}", NAMESPACE, "m", 4096
        )
        complete(cluster.worker_reports.join(m.WorkerJoin(descriptor)))

    def beat(self, cluster: Cluster) -> None:
        if self.beats_anyway or not (self.hangs or self.is_silent):
            places = self.places if self.tells_places else 0
            load = m.WorkerLoad(self.running, 0, 0, 0, 0.0, 0.0, places=places)
            cluster.worker_reports.heartbeat(m.WorkerHeartbeat(self.worker_id, self.epoch, load))

    async def _prefill(self, request: m.Prefill) -> m.PrefillReply:
        self.seen.append(request)
        with self._running():
            await self._hang()
        return m.PrefillReply(0, 1, 0, {}, {}, {})

    async def _generate(self, request: m.Generate) -> AsyncIterator[Any]:
        self.seen.append(request)
        with self._running():
            for at, letter in enumerate(self.text[: request.sampling.max_tokens]):
                self.hangs = self.hangs or at == self.hangs_at
                await self._hang()
                so_far = report("", self.pool_tokens) if at == 0 else None
                yield m.GenerateChunk([ord(letter)], so_far)
                await asyncio.sleep(self.pause_s)
        declined = f"pool_read:{m.DECLINED_COST}" if self.declines else ""
        yield Final(report("length", self.pool_tokens, fallback=declined))

    async def _hang(self) -> None:
        if self.hangs:
            await self._resumed.wait()

    def resume(self) -> None:
        """Stop hanging, also in requests that hang now."""
        self.hangs, self.hangs_at = False, None
        self._resumed.set()

    @contextlib.contextmanager
    def _running(self) -> Any:
        if self.places and self.running >= self.places:
            raise Overloaded(f"{self.running} requests are in work here", retry_after_s=1.0)
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1


class Conductor:
    """The conductor of a test, with its HTTP API on a real port."""

    def __init__(self, workers: Sequence[ScriptedWorker], **settings: Any) -> None:
        self.workers = list(workers)
        self.tokenizer: Any = settings.pop("tokenizer", LetterTokenizer())
        membership = settings.pop("membership", PATIENT)
        of_section = ConductorAdvanced.model_fields
        advanced = {name: settings.pop(name) for name in list(settings) if name in of_section}
        self.config = ConductorConfig(**settings, advanced=advanced)
        self.cluster = local_cluster(membership)
        self.gateway = Gateway(
            self.cluster,
            RequestLog(),
            AdmissionLimits(
                self.config.max_active_requests,
                self.config.advanced.max_queued_requests,
                self.config.advanced.max_queue_wait_s,
            ),
            patience=Patience(
                self.config.advanced.prefill_timeout_s,
                self.config.advanced.first_token_timeout_s,
                self.config.advanced.max_queue_wait_s,
            ),
            replications_at_once=self.config.advanced.replications_at_once,
        )
        self.http: httpx.AsyncClient
        self.port = 0

    async def ask(self, **changes: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json=asked(**changes))

    @property
    def counters(self) -> dict[str, int]:
        return dict(self.cluster.counters)


def generation_request(prompt: list[int], **facts: Any) -> GenerationRequest:
    """A request as the gateway's HTTP API makes it, without the HTTP."""
    now = time.monotonic()
    layout = NAMESPACE.layout
    given = {"received_at": now, "deadline": now + 60, "tokenized_at": now, "max_tokens": 1} | facts
    return GenerationRequest(
        Request("r", len(prompt), layout.block_tokens, layout.block_bytes, **given),
        NAMESPACE,
        prompt,
        m.Sampling(given["max_tokens"]),
    )


def asked(**changes: Any) -> dict[str, Any]:
    return {"prompt": [65] * 10, "max_tokens": 8, "temperature": 0, **changes}


@contextlib.asynccontextmanager
async def conductor(*workers: ScriptedWorker, **settings: Any) -> AsyncIterator[Conductor]:
    """Run a conductor with these workers until the block ends."""
    running = Conductor(workers, **settings)
    registry = new_registry()
    roles = RoleActuator(
        running.cluster.members.workers,
        running.gateway.connections,
        running.cluster.counters,
        RoleController(),
        is_active=False,
        clock=time.monotonic,
    )
    registry.register(
        ConductorCollector(
            running.cluster.members,
            running.cluster.overview,
            running.cluster.counters,
            running.gateway,
            roles,
        )
    )
    api = HttpApi(
        running.config,
        running.cluster.overview,
        running.gateway,
        running.gateway.request_log,
        running.tokenizer,
        RequestMetrics(registry),
        roles,
    )
    server = HttpServer(api.app(registry, lambda: ""), "127.0.0.1", 0)
    await server.start()
    running.port = server.port
    for worker in workers:
        await worker.join(running.cluster)
    engines = EngineServers(
        running.cluster.members,
        running.cluster.own_worker_reports,
        running.gateway.connections,
        running.cluster.counters,
        running.config.engines,
        running.tokenizer.encode_more if running.tokenizer else None,
        running.config.advanced.engine_check_s,
    )

    async def live() -> None:
        while True:
            for worker in running.workers:
                worker.beat(running.cluster)
            complete(running.cluster.sweep())
            await asyncio.sleep(TICK_S)

    life = asyncio.gather(live(), engines.run())
    url = f"http://127.0.0.1:{server.port}"
    async with httpx.AsyncClient(base_url=url, timeout=20) as client:
        running.http = client
        try:
            yield running
        finally:
            life.cancel()
            await asyncio.gather(life, return_exceptions=True)
            await running.gateway.close()
            for worker in running.workers:
                await worker.wire.close()
            await server.close(0.2)
