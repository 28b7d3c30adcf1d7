"""The process of a pool node: builds the parts, starts them in order, stops them in reverse."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any

import structlog
from msgspec import structs

from kvpool.blocks.layout import Namespace
from kvpool.blocks.tier import Tier
from kvpool.config.loader import NodeConfig
from kvpool.errors import ConfigError, NotFound, brief
from kvpool.security.server_security import is_loopback, secure
from kvpool.serving.grpc import quiet_grpc
from kvpool.serving.http import HttpServer
from kvpool.serving.metrics import new_registry
from kvpool.serving.process import Ready, wait_for_stop
from kvpool.transports import Transports, ucx
from kvpool.transports.nixl_agent import NixlUnavailable
from kvpool.wire import WireServer
from kvpool.wire import messages as m
from kvpool.wire.principal import Principal
from tiers.api.grpc_api import grpc_server
from tiers.api.http_api import http_app
from tiers.api.metrics import NodeCollector
from tiers.memory.arena import Arena
from tiers.memory.arena_set import arena_unit, make_arena
from tiers.memory.fd_server import FdServer
from tiers.memory.nixl_target import NixlTarget
from tiers.service.drain import Drainer
from tiers.service.gc_tuning import keep_collections_short
from tiers.service.identity import identify
from tiers.service.index_reporter import IndexReporter
from tiers.service.prefetch import PrefetchQueue
from tiers.service.replication import Replicator
from tiers.service.resize import Resizer
from tiers.service.service import NodeService
from tiers.service.stats import NodeStats
from tiers.service.storage import NodeStorage, access_checkpointer, open_storage
from tiers.service.tenant_nodes import TenantNodes

log = structlog.get_logger(__name__)


async def run_node(config: NodeConfig, ready: Ready, stop: asyncio.Event) -> None:
    """Run a node until `stop` is set.

    Raises:
        NoSharedMemory, PortInUse, ConfigError: it cannot start as configured.
    """
    quiet_grpc()
    async with contextlib.AsyncExitStack() as stack:
        node = await _Node(config, stack).start()
        await node.start_tenant_nodes()
        ready(node.facts())
        log.info("node ready", **node.facts())
        ended = asyncio.Event()
        drain_s = config.advanced.drain_s if config.drain_on_stop else None
        ending = asyncio.create_task(node.drainer.drain_on_stop(stop, drain_s, ended))
        try:
            await wait_for_stop(ended, node.tasks)
        finally:
            ending.cancel()
            [failure] = await asyncio.gather(ending, return_exceptions=True)
            if isinstance(failure, Exception):
                log.error("draining failed", error=str(failure))
        log.info("node stopping")


class _Node:
    """The parts of one node; each is closed by the exit stack that it was entered on."""

    def __init__(self, config: NodeConfig, stack: contextlib.AsyncExitStack) -> None:
        self._config = config
        self._stack = stack
        self._security = secure(config, "node", keeps_apart=True, only_tenant=config.tenant)
        tokens = self._security.authorizer.tokens
        self._isolated = tokens.isolated_tenants if tokens is not None else frozenset()
        if config.tenant and config.tenant not in self._isolated:
            raise ConfigError(
                "node.tenant names no isolated tenant", hint="see the tokens in node.tokens_path"
            )
        self.tasks: list[asyncio.Task[None]] = []
        self.drainer: Drainer
        self._storage: NodeStorage
        self._shm_path = ""  # of the socket that hands out the arenas
        self._handout: FdServer | None = None
        self._target: NixlTarget | None = None
        self._replicator: Replicator
        self._prefetches: PrefetchQueue
        self._resizer: Resizer
        self._reporter: IndexReporter | None = None
        self._identity = identify(config)

    async def start(self) -> _Node:
        config = self._config
        runtime = self._runtime_directory()
        await self._open_storage()
        self._open_memory(runtime)
        service, stats = self._build_services()
        authorizer, tls = self._security.authorizer, self._security.tls
        port = await self._serve_wire(service, stats)
        http_port = await self._serve_http(service, stats, self._resizer)
        grpc = grpc_server(service, stats, config.advanced.max_frame_bytes, authorizer, tls)
        self._grpc_port = await grpc.start(config.host, config.grpc_port)
        self._stack.push_async_callback(grpc.close)
        self._descriptor = self._describe(port, http_port)
        self._begin(stats)
        return self

    async def _open_storage(self) -> None:
        authorizer = self._security.authorizer
        self._storage = await open_storage(
            self._config, self._identity.epoch, authorizer.may_hold, self._stack
        )
        authorizer.find_namespace = self._storage.store.namespaces.find
        keeper = access_checkpointer(self._config, self._storage)
        if keeper is not None:
            self._stack.push_async_callback(keeper.close)
            self._run(keeper.run(), "access-checkpoints")

    def _open_memory(self, runtime: Path) -> None:
        """Let clients reach the arenas: by shared memory, and by NIXL."""
        identity, arenas = self._identity, self._storage.arenas
        if "shm" in self._config.transports:
            self._shm_path = str(runtime / f"arena-{identity.epoch}.sock")
            self._handout = FdServer(
                self._shm_path,
                identity.node_id,
                identity.epoch,
                tuple(arenas.values()),
                self._security.authorizer.authenticate,
            )
            self._stack.callback(self._handout.close)
        self._target = self._start_nixl()

    def _build_services(self) -> tuple[NodeService, NodeStats]:
        config, target, storage = self._config, self._target, self._storage
        store, arenas, migrator, hbm = storage.store, storage.arenas, storage.migrator, storage.hbm
        replicator = self._replicator = self._make_replicator()
        self._prefetches = PrefetchQueue(store, migrator, config.advanced.max_prefetch_blocks)
        self._resizer = self._make_resizer()
        drainer = self.drainer = Drainer(
            store, lambda: self._descriptor, config.conductor, self._security.credentials
        )
        service = NodeService(
            store,
            arenas,
            migrator,
            hbm=hbm,
            refuse_writers=drainer.refuse_writers,
            refuses_readers=lambda: drainer.refuses_readers,
            on_namespace=self._report_namespace,
            on_grant=target.wake if target is not None else lambda: None,
        )
        stats = NodeStats(
            self._identity,
            store,
            arenas,
            migrator,
            hbm=hbm,
            counters=(service.counters, replicator.counters, self._prefetches.counters),
            peers=replicator.peers,
            ucx=target.ucx if target is not None else (),
        )
        return service, stats

    def _describe(self, port: int, http_port: int) -> m.NodeDescriptor:
        config, identity, target = self._config, self._identity, self._target
        is_offered = {"shm": bool(self._shm_path), "nixl": target is not None}
        return m.NodeDescriptor(
            identity.node_id,
            identity.epoch,
            identity.host,
            f"{config.announced_host}:{port}",
            f"{config.announced_host}:{http_port}",
            self._described(self._storage.arenas.values()),
            self._shm_path,
            target.agent_name if target else "",
            target.metadata if target else b"",
            [name for name in config.transports if is_offered[name]],
            config.tenant,
            list(target.ucx) if target else [],
        )

    def _begin(self, stats: NodeStats) -> None:
        """Start the work that goes on in the background."""
        config = self._config
        self._run(self._storage.migrator.run(), "migrator")
        self._run(self._prefetches.run(), "prefetch")
        self._run(self._resizer.run(), "resizer")
        self._run(keep_collections_short(), "collections")
        self.tasks += self._security.tasks()
        if config.conductor is not None:
            self._reporter = IndexReporter(
                self._identity,
                self._storage.store,
                stats.read,
                config.conductor,
                self._descriptor,
                is_draining=lambda: self.drainer.is_draining,
                credentials=self._security.credentials,
            )
            self._run(self._reporter.run(), "reporter")

    def _run(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self.tasks.append(asyncio.create_task(work, name=name))

    async def _serve_wire(self, service: NodeService, stats: NodeStats) -> int:
        config, identity = self._config, self._identity
        wire = WireServer(
            "node",
            identity.node_id,
            identity.epoch,
            {
                **service.handlers(),
                m.Describe: lambda _r, _s: self._descriptor,
                m.NodeStats: lambda _r, s: stats.read(s.principal),
                m.Replicate: lambda r, s: self._replicate(r, s.principal),
                m.Prefetch: lambda r, _s: self._prefetches.prefetch(r),
                m.ResizeDram: lambda r, _s: self._resizer.resize(r),
                m.Drain: lambda r, _s: self.drainer.drain(r),
            },
            on_hello=service.client_connected,
            max_frame_bytes=config.advanced.max_frame_bytes,
            authorizer=self._security.authorizer,
            tls=self._security.context,
        )
        port = await wire.listen(config.host, config.wire_port)
        self._stack.push_async_callback(wire.close)
        return port

    async def _serve_http(self, service: NodeService, stats: NodeStats, resizer: Resizer) -> int:
        config, security = self._config, self._security
        registry = new_registry()
        registry.register(NodeCollector(stats))
        app = http_app(
            service,
            stats,
            resizer,
            registry,
            self._not_ready,
            config.advanced.max_frame_bytes,
            security.authorizer,
            self._notice,
        )
        http = HttpServer(app, config.host, config.http_port, security.tls)
        await http.start()
        self._stack.push_async_callback(http.close)
        return http.port

    async def start_tenant_nodes(self) -> None:
        """Start the nodes of the isolated tenants, unless this is one of them."""
        config = self._config
        if config.tenant or not self._isolated or not config.advanced.isolated_dram_bytes:
            return
        tenant_nodes = TenantNodes(config, self._identity.node_id, self._isolated)
        self.tasks += await tenant_nodes.start()
        self._stack.push_async_callback(tenant_nodes.stop)

    def _make_replicator(self) -> Replicator:
        config, identity = self._config, self._identity
        transports = Transports(
            f"copies-{identity.node_id}-{identity.epoch}",
            forced=config.transports[0] if len(config.transports) == 1 else "auto",
            loopback_only=is_loopback(config.host),
            token=config.token.get_secret_value(),
            is_rdma_required=config.require_rdma,
        )
        replicator = Replicator(
            identity.node_id,
            identity.host,
            self._storage.store,
            self._storage.arenas,
            transports,
            self._storage.migrator.wake,
            credentials=self._security.credentials,
        )
        self._stack.push_async_callback(replicator.close)
        return replicator

    def _make_resizer(self) -> Resizer:
        config, storage = self._config, self._storage
        resizer = Resizer(
            storage.store,
            storage.arenas,
            lambda arena_id, size_bytes: make_arena(config, arena_id, size_bytes),
            self._announce,
            storage.migrator.begin,
            lambda: not storage.migrator.is_disk_failed,
            slab_bytes=config.advanced.slab_bytes,
            unit_bytes=arena_unit(config),
        )
        self._stack.callback(resizer.close)
        return resizer

    async def _replicate(self, request: m.Replicate, principal: Principal) -> m.ReplicateReply:
        self.drainer.refuse_writers()
        if not principal.sees_all:
            source = await self._known_node(request.source.node_id)
            request = structs.replace(request, source=source)
        return await self._replicator.replicate(request)

    def _report_namespace(self, namespace: Namespace) -> None:
        if self._reporter is not None:
            self._reporter.add_namespace(namespace)

    async def _announce(self, arenas: Sequence[Arena]) -> None:
        """Register the arenas with NIXL, offer their descriptors, and tell the conductor."""
        if self._target is not None:
            await asyncio.to_thread(self._target.update, arenas)
        if self._handout is not None:
            await asyncio.to_thread(self._handout.offer, arenas)
        await self._replicator.forget_gone_arenas()
        self._descriptor = structs.replace(
            self._descriptor,
            arenas=self._described(arenas),
            nixl_metadata=self._target.metadata if self._target else b"",
        )
        if self._reporter is not None:
            self._reporter.announce(self._descriptor)

    async def _known_node(self, node_id: str) -> m.NodeDescriptor:
        """A node as the conductor describes it.

        A tenant's own description could send our token to any address, so it is not used.

        Raises:
            NotFound: no such node, or no conductor to ask.
        """
        if self._reporter is not None:
            for info in await self._reporter.nodes():
                if info.descriptor.node_id == node_id:
                    return info.descriptor
        raise NotFound(f"node {brief(node_id)} is not known here")

    def facts(self) -> dict[str, object]:
        """What the process prints when it is ready."""
        node = self._descriptor
        return {
            "kind": "node",
            "id": node.node_id,
            "epoch": node.epoch,
            "host_label": node.host,
            "wire": node.address,
            "http": node.http_address,
            "grpc": f"{self._config.announced_host}:{self._grpc_port}",
            "transports": node.transports,
        }

    def _not_ready(self) -> str:
        if self._reporter is not None and not self._reporter.is_joined:
            return "not joined to the conductor"
        return ""

    def _runtime_directory(self) -> Path:
        if self._config.advanced.runtime_dir is not None:
            self._config.advanced.runtime_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            return self._config.advanced.runtime_dir
        path = Path(tempfile.mkdtemp(prefix="kvpool-"))  # mode 0700
        self._stack.callback(shutil.rmtree, path, ignore_errors=True)
        return path

    def _described(self, arenas: Iterable[Arena]) -> list[m.Arena]:
        described = [m.Arena(arena.arena_id, arena.size_bytes, arena.base) for arena in arenas]
        if (hbm := self._storage.hbm) is not None:
            described.append(
                m.Arena(hbm.arena_id, hbm.size_bytes, hbm.base, hbm.kind, hbm.device_id, Tier.HBM)
            )
        return described

    def _start_nixl(self) -> NixlTarget | None:
        if "nixl" not in self._config.transports:
            return None
        name = f"node-{self._identity.node_id}-{self._identity.epoch}"
        store, hbm = self._storage.store, self._storage.hbm
        try:
            target = NixlTarget(
                name,
                tuple(self._storage.arenas.values()),
                lambda: bool(store.leases or store.reservations),
                loopback_only=is_loopback(self._config.host),
                lasting=(hbm,) if hbm else (),
            )
        except NixlUnavailable as error:
            if self._config.transports == ("nixl",) or self._config.require_rdma:
                raise ConfigError(
                    f"transport nixl is needed as configured, and it does not work: {error}"
                ) from error
            log.warning("going on without NIXL: other hosts cannot read here", error=str(error))
            return None
        self._stack.callback(target.close)
        if self._config.require_rdma:
            ucx.require_rdma(target.ucx, "node")
        elif self._goes_over_tcp(target.ucx):
            log.warning("no RDMA: other hosts are reached over TCP", ucx=list(target.ucx))
        return target

    def _goes_over_tcp(self, resources: Sequence[str]) -> bool:
        """Whether other hosts reach this node over TCP; a node on loopback serves none."""
        return not is_loopback(self._config.host) and not any(map(ucx.is_rdma, resources))

    def _notice(self) -> str:
        if self._target is None or not self._goes_over_tcp(self._target.ucx):
            return ""
        return "no RDMA: other hosts are reached over TCP (" + ", ".join(self._target.ucx) + ")"
