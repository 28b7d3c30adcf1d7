"""The process of a worker: loads the model, joins the conductor, and serves until it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid

import structlog
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from kvpool.blocks.layout import Namespace
from kvpool.client.async_pool import AsyncPool
from kvpool.config.loader import ClientConfig, FakeEngineConfig, WorkerConfig
from kvpool.errors import ConfigError, KvpoolError
from kvpool.security.server_security import Security, secure
from kvpool.serving.http import HttpServer, base_app
from kvpool.serving.metrics import LATENCY_BUCKETS, new_registry
from kvpool.serving.process import Ready, wait_for_stop
from kvpool.wire import WireServer
from kvpool.wire import messages as m
from workers.engine.contract import Engine
from workers.engine.fake_engine import FakeEngine
from workers.engine.model_files import default_cache_dir, prepare_model
from workers.engine.prefix_cache import LocalPrefixCache
from workers.service.heartbeat import Membership
from workers.service.service import WorkerService

log = structlog.get_logger(__name__)

MAX_BODY_BYTES = 1 << 20
CONNECT_EVERY_S = 2.0


async def run_worker(
    config: WorkerConfig,
    client: ClientConfig,
    fake: FakeEngineConfig,
    ready: Ready,
    stop: asyncio.Event,
) -> None:
    """Run a worker until `stop` is set.

    Raises:
        ConfigError, ModelNotFound, PortInUse: it cannot start as configured.
    """
    security = secure(config, "worker")
    engine = await asyncio.to_thread(load_engine, config, fake)
    salt = config.salt.get_secret_value()
    namespace = engine.namespace(config.tenant, salt, config.advanced.hash_algorithm)
    worker_id = config.worker_id or str(uuid.uuid4())
    epoch = time.time_ns() // 1000
    async with contextlib.AsyncExitStack() as stack:
        pool = await _open_pool(config, client, worker_id, security, stack)
        registry = new_registry()
        service = _make_service(config, engine, namespace, pool, registry)
        stack.callback(service.close)
        wire = WireServer(
            "worker",
            worker_id,
            epoch,
            service.handlers(),
            authorizer=security.authorizer,
            tls=security.context,
        )
        port = await wire.listen(config.host, config.wire_port)
        stack.push_async_callback(wire.close)
        joined = _Joined()
        http = await _start_http(config, registry, stack, joined, security)
        descriptor = _describe(config, engine, namespace, worker_id, epoch, (port, http.port))
        membership = Membership(config.conductor, descriptor, service, security.credentials)
        wire.handle(m.SetRole, lambda request, _session: membership.set_role(request))
        joined.membership = membership
        await service.warm_up()
        tasks = [
            *security.tasks(),
            asyncio.create_task(membership.run(), name="membership"),
            asyncio.create_task(_stay_connected(pool), name="connections"),
        ]
        facts = {
            "kind": "worker",
            "id": worker_id,
            "role": config.role,
            "host_label": config.host_label,
            "wire": descriptor.address,
            "http": descriptor.http_address,
            "model": engine.model_name,
            "namespace": namespace.name,
        }
        ready(facts)
        log.info("worker ready", **facts)
        await wait_for_stop(stop, tasks)
        log.info("worker stopping")


def _describe(
    config: WorkerConfig,
    engine: Engine,
    namespace: Namespace,
    worker_id: str,
    epoch: int,
    ports: tuple[int, int],
) -> m.WorkerDescriptor:
    wire, http = (f"{config.announced_host}:{port}" for port in ports)
    return m.WorkerDescriptor(
        worker_id,
        epoch,
        config.role,
        config.host_label,
        wire,
        namespace,
        engine.model_name,
        min(config.max_model_tokens, engine.max_model_tokens),
        http,
        config.advanced.kv_events,
        config.advanced.kv_replay,
        config.advanced.may_change_role,
    )


async def _open_pool(
    config: WorkerConfig,
    client: ClientConfig,
    worker_id: str,
    security: Security,
    stack: contextlib.AsyncExitStack,
) -> AsyncPool:
    pool = AsyncPool(
        conductor=config.conductor,
        host_label=config.host_label,
        transport=client.transport,
        verify_checksums=client.verify_checksums,
        require_rdma=client.require_rdma,
        client_id=worker_id,
        credentials=security.credentials,
    )
    stack.push_async_callback(pool.close)
    if client.require_rdma:
        await asyncio.to_thread(pool.transports.check_rdma, "client")
    return pool


def _make_service(
    config: WorkerConfig,
    engine: Engine,
    namespace: Namespace,
    pool: AsyncPool,
    registry: CollectorRegistry,
) -> WorkerService:
    phases = Histogram(
        "kvpool_phase_seconds",
        "Seconds of a request by phase",
        ["phase", "role"],
        buckets=LATENCY_BUCKETS,
        registry=registry,
    )
    service = WorkerService(
        engine,
        namespace,
        pool,
        LocalPrefixCache(config.advanced.local_cache_tokens, config.block_tokens),
        max_concurrent=config.max_concurrent,
        on_phase=lambda name, seconds: phases.labels(name, config.role).observe(seconds),
    )
    registry.register(_WorkerCollector(service))
    return service


def load_engine(config: WorkerConfig, fake: FakeEngineConfig) -> Engine:
    """The engine that the settings name, ready for use.

    Raises:
        ConfigError, ModelNotFound: it cannot be loaded as configured.
    """
    if config.engine == "fake":
        return FakeEngine(
            fake, model_name=config.model_name or "", block_tokens=config.block_tokens
        )
    if not config.model:
        raise ConfigError(
            "worker.model is not set", hint="give a model directory, or smollm2-135m to try it out"
        )
    import torch

    from workers.engine.transformers_engine import TransformersEngine

    if config.advanced.threads:
        torch.set_num_threads(config.advanced.threads)
    path = prepare_model(config.model, default_cache_dir())
    return TransformersEngine(
        path,
        model_name=config.model_name or "",
        block_tokens=config.block_tokens,
        device=config.device,
    )


class _Joined:
    """Whether the worker has joined. The membership exists only once the HTTP port is known."""

    membership: Membership | None = None

    def not_ready(self) -> str:
        is_joined = self.membership is not None and self.membership.is_joined
        return "" if is_joined else "not joined to the conductor"


async def _stay_connected(pool: AsyncPool) -> None:
    """Connect to nodes when they join, not when a request first needs them."""
    while True:
        with contextlib.suppress(KvpoolError):  # the membership reports a conductor that is gone
            await pool.connect(timeout_s=10.0)
        await asyncio.sleep(CONNECT_EVERY_S)


async def _start_http(
    config: WorkerConfig,
    registry: CollectorRegistry,
    stack: contextlib.AsyncExitStack,
    joined: _Joined,
    security: Security,
) -> HttpServer:
    app = base_app(
        "kvpool worker",
        registry,
        joined.not_ready,
        max_body_bytes=MAX_BODY_BYTES,
        authorizer=security.authorizer,
    )
    http = HttpServer(app, config.host, config.http_port, security.tls)
    await http.start()
    stack.push_async_callback(http.close)
    return http


class _WorkerCollector(Collector):
    """A worker's load and counters, read when they are scraped."""

    def __init__(self, service: WorkerService) -> None:
        self._service = service

    def collect(self):  # type: ignore[no-untyped-def]
        load = self._service.load.report()
        gauge = GaugeMetricFamily("kvpool_worker_load", "Load of this worker", labels=["what"])
        for name in load.__struct_fields__:
            gauge.add_metric([name], float(getattr(load, name)))
        yield gauge
        events = CounterMetricFamily("kvpool_worker_events", "Counted events", labels=["kind"])
        for kind, value in sorted(self._service.counters.items()):
            events.add_metric([kind], float(value))
        yield events
