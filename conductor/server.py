"""The conductor's process: builds its parts, starts them in order, stops them in reverse order."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from conductor.cluster.cluster import Cluster
from conductor.cluster.members import Members
from conductor.cluster.pool_state import LocalState
from conductor.engine_servers.discovery import EngineServers
from conductor.gateway.gateway import Gateway
from conductor.gateway.grpc_api import grpc_server
from conductor.gateway.http_api import HttpApi, no_tokenizer
from conductor.gateway.metrics import ConductorCollector, RequestMetrics
from conductor.gateway.sessions import Sessions
from conductor.gateway.tokenizer import Tokenizer
from conductor.index.block_history import BlockHistory
from conductor.index.memory import MemoryIndex
from conductor.members.membership import MembershipConfig
from conductor.requests.admission import AdmissionLimits
from conductor.requests.lifecycle import Patience
from conductor.requests.request_log import RequestLog
from conductor.roles.actuator import RoleActuator
from conductor.roles.controller import RoleController, RoleLimits
from conductor.routing.rules_file import RulesFile
from conductor.routing.service import RulesService
from conductor.scheduling.cost_model import CostModel
from conductor.scheduling.cost_profile import read_profile
from conductor.scheduling.inputs import DynamoOptions, SglangOptions
from conductor.scheduling.scheduler import SchedulerConfig
from kvpool.blocks.hashing import token_bytes
from kvpool.config.loader import ConductorConfig
from kvpool.errors import ConfigError
from kvpool.security.server_security import Security, secure
from kvpool.serving.grpc import quiet_grpc
from kvpool.serving.http import HttpServer
from kvpool.serving.metrics import new_registry
from kvpool.serving.process import Ready, wait_for_stop
from kvpool.wire import WireServer
from kvpool.wire import messages as m
from kvpool.wire.credentials import Credentials

if TYPE_CHECKING:
    from conductor.redis.state import RedisState

log = structlog.get_logger(__name__)

GRPC_MESSAGE_BYTES = 8 << 20
SWEEP_S = 0.25


@dataclass(slots=True)
class _Parts:
    """What a conductor is built from."""

    config: ConductorConfig
    security: Security
    tokenizer: Tokenizer | None
    cluster: Cluster
    shared: RedisState | None  # the cluster's state, if it is shared through Redis
    rules: RulesFile
    gateway: Gateway
    roles: RoleActuator
    engine_servers: EngineServers


async def run_conductor(config: ConductorConfig, ready: Ready, stop: asyncio.Event) -> None:
    """Run a conductor until `stop` is set.

    Raises:
        PortInUse, ModelNotFound, ConfigError: it cannot start with this configuration.
    """
    quiet_grpc()
    parts = await _build(config)
    async with contextlib.AsyncExitStack() as stack:
        if parts.shared is not None:
            stack.push_async_callback(parts.shared.redis.close)
        stack.push_async_callback(parts.gateway.close)
        stack.push_async_callback(parts.cluster.engine_feeds.close)
        facts = {
            "kind": "conductor",
            "id": parts.cluster.conductor_id,
            "wire": f"{config.announced_host}:{await _listen_wire(parts, stack)}",
            "http": f"{config.announced_host}:{await _listen_http(parts, stack)}",
            "grpc": f"{config.announced_host}:{await _listen_grpc(parts, stack)}",
        }
        if parts.shared is not None:
            parts.shared.shared.address = facts["wire"]
        tasks = _begin(parts)
        ready(facts)
        log.info("conductor ready", **facts)
        await wait_for_stop(stop, tasks)
        log.info("conductor stopping")


async def _build(config: ConductorConfig) -> _Parts:
    """Build the parts of a conductor without starting any."""
    advanced = config.advanced
    security = secure(config, "conductor")
    tokenizer = None
    if config.model_path is not None:
        tokenizer = await asyncio.to_thread(Tokenizer, config.model_path)
    tokens = security.authorizer.tokens
    cluster, shared = _build_cluster(config, tokens.isolated_tenants if tokens else frozenset())
    rules = RulesFile(config.rules_path, cluster.counters)
    await rules.load()
    controller = RoleController(
        RoleLimits(
            window_s=advanced.roles_window_s,
            min_requests=advanced.roles_min_requests,
            hold_s=advanced.roles_hold_s,
            cooldown_s=advanced.roles_cooldown_s,
        )
    )
    gateway = _build_gateway(config, cluster, rules, security.credentials, controller)
    roles = RoleActuator(
        cluster.members.workers,
        gateway.connections,
        cluster.counters,
        controller,
        is_active=config.move_roles,
        clock=cluster.clock,
    )
    security.authorizer.find_namespace = cluster.members.namespaces.get
    security.authorizer.find_worker = cluster.overview.tenant_of_worker
    engine_servers = EngineServers(
        cluster.members,
        cluster.own_worker_reports,
        gateway.connections,
        cluster.counters,
        config.engines,
        tokenizer.encode_more if tokenizer else None,
        advanced.engine_check_s,
    )
    return _Parts(
        config, security, tokenizer, cluster, shared, rules, gateway, roles, engine_servers
    )


def _build_cluster(
    config: ConductorConfig, isolated_tenants: frozenset[str]
) -> tuple[Cluster, RedisState | None]:
    """The cluster, and its state if it is shared through Redis."""
    advanced = config.advanced
    membership = MembershipConfig(
        heartbeat_s=advanced.heartbeat_s,
        suspect_after_s=advanced.suspect_after_s,
        dead_after_s=advanced.dead_after_s,
        sweep_s=SWEEP_S,
    )
    conductor_id = str(uuid.uuid4())
    members = Members.none_yet(membership, time.monotonic())
    index = MemoryIndex(max_blocks=advanced.max_index_blocks)
    counters: Counter[str] = Counter()
    shared = None
    if config.index == "redis":
        shared = share_through_redis(config, conductor_id, members, index, counters)
    cluster = Cluster(
        conductor_id,
        time.time_ns() // 1000,
        members,
        shared or LocalState(index),
        scheduler_config(config),
        counters=counters,
        history=BlockHistory(advanced.remembered_blocks),
        cost=CostModel(read_profile(config.profile)) if config.profile is not None else None,
        isolated_tenants=isolated_tenants,
    )
    return cluster, shared


def _build_gateway(
    config: ConductorConfig,
    cluster: Cluster,
    rules: RulesFile,
    credentials: Credentials,
    roles: RoleController,
) -> Gateway:
    advanced = config.advanced
    return Gateway(
        cluster,
        RequestLog(),
        AdmissionLimits(
            config.max_active_requests,
            advanced.max_queued_requests,
            advanced.max_queue_wait_s,
        ),
        patience=Patience(
            advanced.prefill_timeout_s,
            advanced.first_token_timeout_s,
            advanced.max_queue_wait_s,
        ),
        replications_at_once=advanced.replications_at_once,
        prefetches=advanced.prefetch,
        sessions=Sessions(advanced.session_ttl_s, advanced.max_sessions),
        rules=rules,
        credentials=credentials,
        on_slo_recorded=lambda ttft, tpot: roles.ended(
            cluster.clock(), is_ttft_met=ttft, is_tpot_met=tpot
        ),
    )


async def _listen_wire(parts: _Parts, stack: contextlib.AsyncExitStack) -> int:
    """Start the wire server; return its port."""
    cluster, security = parts.cluster, parts.security
    rules = RulesService(parts.rules)
    wire = WireServer(
        "conductor",
        cluster.conductor_id,
        cluster.epoch,
        {
            **cluster.handlers(),
            m.RulesChange: lambda request, _session: rules.change(request),
            m.RulesExplain: lambda request, _session: rules.explain(request, cluster.view.inputs()),
            m.Tokenize: lambda request, _session: _tokenize(parts.tokenizer, request),
        },
        authorizer=security.authorizer,
        tls=security.context,
    )
    port = await wire.listen(parts.config.host, parts.config.wire_port)
    stack.push_async_callback(wire.close)
    return port


async def _listen_http(parts: _Parts, stack: contextlib.AsyncExitStack) -> int:
    """Start the HTTP server; return its port."""
    config, cluster, gateway = parts.config, parts.cluster, parts.gateway
    registry = new_registry()
    registry.register(
        ConductorCollector(
            cluster.members, cluster.overview, cluster.counters, gateway, parts.roles
        )
    )
    api = HttpApi(
        config,
        cluster.overview,
        gateway,
        gateway.request_log,
        parts.tokenizer,
        RequestMetrics(registry),
        parts.roles,
        parts.security.authorizer,
    )
    app = api.app(registry, lambda: "")
    http = HttpServer(app, config.host, config.http_port, parts.security.tls)
    await http.start()
    stack.push_async_callback(http.close)
    return http.port


async def _listen_grpc(parts: _Parts, stack: contextlib.AsyncExitStack) -> int:
    """Start the gRPC server; return its port."""
    security = parts.security
    grpc = grpc_server(parts.cluster, GRPC_MESSAGE_BYTES, security.authorizer, security.tls)
    port = await grpc.start(parts.config.host, parts.config.grpc_port)
    stack.push_async_callback(grpc.close)
    return port


def _begin(parts: _Parts) -> list[asyncio.Task[None]]:
    """Start the work that goes on in the background."""
    tasks = [
        asyncio.create_task(_sweep(parts.cluster), name="sweep"),
        asyncio.create_task(parts.roles.run(), name="roles"),
        *parts.security.tasks(),
    ]
    if parts.config.rules_path is not None:
        tasks.append(asyncio.create_task(parts.rules.watch(), name="routing rules"))
    if parts.config.engines:
        tasks.append(asyncio.create_task(parts.engine_servers.run(), name="engine servers"))
    if parts.shared is not None:
        tasks.append(asyncio.create_task(_tend(parts.shared), name="shared state"))
    return tasks


def share_through_redis(
    config: ConductorConfig,
    conductor_id: str,
    members: Members,
    index: MemoryIndex,
    counters: Counter[str],
) -> RedisState:
    """Build the state of a pool that is shared through Redis, without connecting.

    Raises:
        ConfigError: `conductor.redis_url` is not valid, or the Redis client is not installed.
    """
    try:
        from conductor.redis.client import RedisClient, RedisTarget
        from conductor.redis.state import RedisState
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"conductor.index is redis, but {error.name} is not installed",
            hint="pip install 'kvpool[server,redis]'",
        ) from error
    target = RedisTarget(
        config.redis_url,
        config.redis_mode,
        config.advanced.redis_sentinel_name,
        config.redis_username,
        config.redis_password.get_secret_value() or None,
    )
    return RedisState(
        RedisClient(target, timeout_s=config.advanced.redis_timeout_s),
        conductor_id,
        members,
        index,
        counters,
        pool=config.pool,
        max_blocks=config.advanced.max_index_blocks,
    )


async def _tokenize(tokenizer: Tokenizer | None, request: m.Tokenize) -> m.TokenizeReply:
    if tokenizer is None:
        raise no_tokenizer()
    encode = tokenizer.encode_system if request.is_system_prompt else tokenizer.encode
    return m.TokenizeReply(bytes(token_bytes(await asyncio.to_thread(encode, request.text))))


def scheduler_config(config: ConductorConfig) -> SchedulerConfig:
    """The scheduler's part of the configuration."""
    advanced = config.advanced
    return SchedulerConfig(
        strategy=config.strategy,
        admission=config.admission,
        seed=advanced.strategy_seed,
        min_remote_prefill_tokens=advanced.min_remote_prefill_tokens,
        balancing_threshold=advanced.balancing_threshold,
        stall_weight=advanced.stall_weight,
        always_reuse=advanced.always_reuse,
        dynamo=DynamoOptions(
            advanced.dynamo_engine_credit,
            advanced.dynamo_host_credit,
            advanced.dynamo_remote_credit,
            advanced.dynamo_disk_credit,
            advanced.dynamo_prefill_scale,
            advanced.dynamo_temperature,
        ),
        sglang=SglangOptions(advanced.sglang_imbalance_requests, advanced.sglang_imbalance_ratio),
    )


async def _sweep(cluster: Cluster) -> None:
    while True:
        await asyncio.sleep(SWEEP_S)
        await cluster.sweep()


async def _tend(shared: RedisState) -> None:
    while True:
        await shared.tend()
        await asyncio.sleep(SWEEP_S)
