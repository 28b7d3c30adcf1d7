"""The process of a pool node: puts the parts together, starts them in order, stops them in reverse."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path

import structlog
from msgspec import structs

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
from tiers.api.http_api import grpc_server, http_app
from tiers.api.metrics import NodeCollector
from tiers.disk import access_checkpoint
from tiers.disk.devices import Devices, open_devices
from tiers.memory.arena import Arena, ArenaServer
from tiers.memory.arena_set import ArenaSet, arena_unit, make_arena, make_arenas
from tiers.memory.hbm_arena import HBM_ARENA_ID, DeviceArena
from tiers.memory.nixl_target import NixlTarget
from tiers.service.drain import Drainer
from tiers.service.gc_tuning import keep_collections_short
from tiers.service.index_reporter import IndexReporter
from tiers.service.migrator import Migrator
from tiers.service.prefetch import PrefetchQueue
from tiers.service.replication import Replicator
from tiers.service.resize import Resizer
from tiers.service.service import NodeIdentity, NodeService
from tiers.service.tenant_nodes import TenantNodes
from tiers.store.arena_allocator import ArenaAllocator
from tiers.store.slab_allocator import SlabAllocator
from tiers.store.store import Store, StoreConfig

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
        self._security = secure(config, "node", keeps_apart=True, lent_to=config.tenant)
        tokens = self._security.authorizer.tokens
        self._isolated = tokens.isolated_tenants if tokens is not None else frozenset()
        if config.tenant and config.tenant not in self._isolated:
            raise ConfigError(
                "node.tenant names no isolated tenant", hint="see the tokens in node.tokens_path"
            )
        self.tasks: list[asyncio.Task[None]] = []
        self._reporter: IndexReporter | None = None
        self._handout: ArenaServer | None = None
        self._target: NixlTarget | None = None
        self._hbm: DeviceArena | None = None
        self._replicator: Replicator
        self.drainer: Drainer
        # Microseconds since 1970: grows with every start, also across reboots.
        self._identity = NodeIdentity(_node_id(config), time.time_ns() // 1000, config.host_label)

    async def start(self) -> _Node:
        config, stack, identity = self._config, self._stack, self._identity
        advanced = config.advanced
        runtime = self._runtime_directory()
        arenas = make_arenas(config)
        stack.callback(arenas.close)
        hbm = self._hbm = self._open_hbm()
        devices = self._open_nvme()
        store = Store(
            ArenaAllocator(
                [
                    SlabAllocator(a.size_bytes, advanced.slab_bytes, a.arena_id)
                    for a in arenas.values()
                ],
                "spread" if len(advanced.numa_nodes) > 1 else "fill",
            ),
            devices.slots(advanced.slab_bytes) if devices else None,
            StoreConfig(
                grace_s=advanced.grace_s,
                max_lease_s=advanced.lease_s,
                max_reservation_s=advanced.reservation_s,
                quarantine_s=advanced.quarantine_s,
                dram_high_watermark=advanced.high_watermark,
                dram_low_watermark=advanced.low_watermark,
                hbm_high_watermark=advanced.hbm_high_watermark,
                hbm_low_watermark=advanced.hbm_low_watermark,
                write_through=advanced.write_through,
                eviction=config.eviction,
                nvme_eviction=advanced.nvme_eviction,
                nvme_dtype=advanced.nvme_dtype,
                retention_share=advanced.retention_share,
                quotas=config.quotas,
                max_pending_events=1_000_000 if config.conductor else 1,  # else nobody reads them
                first_id=identity.epoch,  # ids of an earlier life name nothing here
            ),
            hbm=SlabAllocator(hbm.size_bytes, advanced.slab_bytes, hbm.arena_id) if hbm else None,
        )
        migrator = Migrator(store, arenas, devices, hbm=hbm)
        stack.callback(migrator.close)
        service = NodeService(identity, store, arenas, migrator, lambda: self._descriptor, hbm=hbm)
        if devices is not None:
            count = devices.recover_into(store, time.monotonic())
            migrator.counters["namespaces_not_recovered"] += len(devices.unrecovered)
            access_checkpoint.restore(devices, store, time.monotonic(), time.time())
            log.info("recovered blocks from NVMe", parts=count, devices=devices.states())
            self._drop_isolated(store)
            service.on_namespace.append(migrator.record_namespace)
            self._start_access_checkpoints(store, devices, migrator)
        shm_path = ""
        if "shm" in config.transports:
            shm_path = str(runtime / f"arena-{identity.epoch}.sock")
            self._handout = ArenaServer(
                shm_path,
                identity.node_id,
                identity.epoch,
                tuple(arenas.values()),
                self._security.authorizer.authenticate,
            )
            stack.callback(self._handout.close)
        target = self._target = self._start_nixl(arenas, service)
        if target is not None:
            service.on_grant = target.wake
            service.ucx = target.ucx

        security = self._security
        security.authorizer.find_namespace = store.namespaces.find
        wire = WireServer(
            "node",
            identity.node_id,
            identity.epoch,
            max_frame_bytes=advanced.max_frame_bytes,
            authorizer=security.authorizer,
            tls=security.context,
        )
        service.expose(wire)
        self._beside(service, arenas, wire)
        port = await wire.listen(config.host, config.wire_port)
        stack.push_async_callback(wire.close)
        registry = new_registry()
        registry.register(NodeCollector(service))
        authorizer = security.authorizer
        app = http_app(
            service, registry, self._not_ready, advanced.max_frame_bytes, authorizer, self._notice
        )
        http = HttpServer(app, config.host, config.http_port, security.tls)
        await http.start()
        stack.push_async_callback(http.close)
        grpc = grpc_server(service, advanced.max_frame_bytes, authorizer, security.tls)
        self._grpc_port = await grpc.start(config.host, config.grpc_port)
        stack.push_async_callback(grpc.close)
        self._descriptor = m.NodeDescriptor(
            identity.node_id,
            identity.epoch,
            identity.host,
            f"{config.announced_host}:{port}",
            f"{config.announced_host}:{http.port}",
            self._described(arenas.values()),
            shm_path,
            target.agent_name if target else "",
            target.metadata if target else b"",
            [
                name
                for name in config.transports
                if (name == "shm" and shm_path) or (name == "nixl" and target)
            ],
            config.tenant,
            list(service.ucx),
        )
        self.tasks.append(asyncio.create_task(migrator.run(), name="migrator"))
        self.tasks += security.tasks()
        self.tasks.append(asyncio.create_task(keep_collections_short(), name="collections"))
        if config.conductor is not None:
            self._reporter = IndexReporter(
                service, config.conductor, self._descriptor, security.credentials
            )
            self._reporter.is_draining = lambda: self.drainer.is_draining
            self.tasks.append(asyncio.create_task(self._reporter.run(), name="reporter"))
        return self

    async def start_tenant_nodes(self) -> None:
        """Start the nodes of the isolated tenants, unless this is one of them."""
        config = self._config
        if config.tenant or not self._isolated or not config.advanced.isolated_dram_bytes:
            return
        tenant_nodes = TenantNodes(config, self._identity.node_id, self._isolated)
        self.tasks += await tenant_nodes.start()
        self._stack.push_async_callback(tenant_nodes.stop)

    def _start_access_checkpoints(self, store: Store, devices: Devices, migrator: Migrator) -> None:
        def count_failure() -> None:
            migrator.counters["checkpoints_not_written"] += 1

        keeper = access_checkpoint.AccessCheckpointer(
            store,
            devices,
            self._config.advanced.access_checkpoint_s,
            is_synced=self._config.advanced.fsync != "never",
            on_failure=count_failure,
        )
        self._stack.push_async_callback(keeper.close)
        self.tasks.append(asyncio.create_task(keeper.run(), name="access-checkpoints"))

    def _beside(self, service: NodeService, arenas: ArenaSet, wire: WireServer) -> None:
        """The parts that work beside the service: copies from other nodes, prefetch, resizing, draining."""
        config, identity = self._config, self._identity
        transports = Transports(
            f"copies-{identity.node_id}-{identity.epoch}",
            forced=config.transports[0] if len(config.transports) == 1 else "auto",
            loopback_only=is_loopback(config.host),
            token=config.token.get_secret_value(),
            is_rdma_required=config.require_rdma,
        )
        replicator = self._replicator = Replicator(
            identity.node_id,
            identity.host,
            service.store,
            arenas,
            transports,
            service.migrator.wake,
            credentials=self._security.credentials,
        )
        self._stack.push_async_callback(replicator.close)
        service.peers = replicator.peers
        prefetches = PrefetchQueue(
            service.store, service.migrator, config.advanced.max_prefetch_blocks
        )
        self.tasks.append(asyncio.create_task(prefetches.run(), name="prefetch"))
        resizer = Resizer(
            service.store,
            arenas,
            lambda arena_id, size_bytes: make_arena(config, arena_id, size_bytes),
            self._announce,
            service.migrator.begin,
            lambda: not service.migrator.is_disk_failed,
            slab_bytes=config.advanced.slab_bytes,
            unit_bytes=arena_unit(config),
        )
        self._stack.callback(resizer.close)
        self.tasks.append(asyncio.create_task(resizer.run(), name="resizer"))
        service.resize = resizer.resize
        self.drainer = Drainer(
            service.store,
            lambda: self._descriptor,
            config.conductor,
            self._security.credentials,
        )
        service.refuse_writers = self.drainer.refuse_writers
        service.refuses_readers = lambda: self.drainer.refuses_readers
        service.more_counters += [replicator.counters, prefetches.counters]

        async def replicate(request: m.Replicate, principal: Principal) -> m.ReplicateReply:
            self.drainer.refuse_writers()
            if not principal.sees_all:
                source = await self._known_node(request.source.node_id)
                request = structs.replace(request, source=source)
            return await replicator.replicate(request)

        wire.handle(m.Replicate, lambda r, s: replicate(r, s.principal))
        wire.handle(m.Prefetch, lambda r, _s: prefetches.prefetch(r))
        wire.handle(m.ResizeDram, lambda r, _s: resizer.resize(r))
        wire.handle(m.Drain, lambda r, _s: self.drainer.drain(r))

    async def _announce(self, arenas: Sequence[Arena]) -> None:
        """Have everybody who reaches into the node's memory know what there is of it now."""
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

        What a tenant says of another node is no reason to go there and show it our token.

        Raises:
            NotFound: no such node, or no conductor to ask.
        """
        if self._reporter is not None:
            for info in await self._reporter.nodes():
                if info.descriptor.node_id == node_id:
                    return info.descriptor
        raise NotFound(f"node {brief(node_id)} is not known here")

    def facts(self) -> dict[str, object]:
        """What a starter needs to know."""
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
        if (hbm := self._hbm) is not None:
            described.append(
                m.Arena(hbm.arena_id, hbm.size_bytes, hbm.base, hbm.kind, hbm.device_id, Tier.HBM)
            )
        return described

    def _open_hbm(self) -> DeviceArena | None:
        config = self._config
        if not config.hbm_bytes:
            return None
        size = config.hbm_bytes - config.hbm_bytes % config.advanced.slab_bytes
        hbm = DeviceArena(HBM_ARENA_ID, size, config.advanced.hbm_device)
        self._stack.callback(hbm.close)
        return hbm

    def _open_nvme(self) -> Devices | None:
        config = self._config
        if not config.nvme_directories:
            return None
        devices = open_devices(
            config.nvme_directories,
            config.nvme_bytes,
            fsync=config.advanced.fsync,
            fsync_interval_s=config.advanced.fsync_interval_s,
        )
        self._stack.callback(devices.close)
        return devices

    def _drop_isolated(self, store: Store) -> None:
        """What was stored before its tenant was isolated shall not come back into memory that others reach."""
        foreign = {
            namespace.namespace_id
            for namespace in store.namespaces
            if not self._security.authorizer.may_hold(namespace.tenant)
        }
        for namespace_id, _, block_hash in list(store.inspection.snapshot() if foreign else ()):
            if namespace_id in foreign:
                store.drop(namespace_id, block_hash, "isolated", time.monotonic())

    def _start_nixl(self, arenas: ArenaSet, service: NodeService) -> NixlTarget | None:
        if "nixl" not in self._config.transports:
            return None
        name = f"node-{self._identity.node_id}-{self._identity.epoch}"
        try:
            target = NixlTarget(
                name,
                tuple(arenas.values()),
                service.is_busy,
                loopback_only=is_loopback(self._config.host),
                lasting=(self._hbm,) if self._hbm else (),
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
        """Between hosts; what listens on this one alone has no need of RDMA."""
        return not is_loopback(self._config.host) and not any(map(ucx.is_rdma, resources))

    def _notice(self) -> str:
        if self._target is None or not self._goes_over_tcp(self._target.ucx):
            return ""
        return "no RDMA: other hosts are reached over TCP (" + ", ".join(self._target.ucx) + ")"


def _node_id(config: NodeConfig) -> str:
    """The configured id, else one kept with the data, else a fresh UUID."""
    if config.node_id is not None:
        return config.node_id
    keeps = [config.data_dir] if config.data_dir else list(config.nvme_directories)
    paths = [keep / "node_id" for keep in keeps]
    node_id = next((path.read_text().strip() for path in paths if path.is_file()), "")
    node_id = node_id or str(uuid.uuid4())
    for path in paths:  # with each device: any of them may be missing at the next start
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not path.exists():
                path.write_text(node_id)
    return node_id
