"""What a node keeps its blocks in: memory, devices, and the store that decides about both."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from kvpool.config.loader import NodeConfig
from tiers.disk import access_checkpoint
from tiers.disk.devices import Devices, open_devices
from tiers.memory.arena_set import ArenaSet, make_arenas
from tiers.memory.hbm_arena import HBM_ARENA_ID, DeviceArena
from tiers.service.migrator import Migrator
from tiers.store.arena_allocator import ArenaAllocator
from tiers.store.slab_allocator import SlabAllocator
from tiers.store.store import Store, StoreConfig

log = structlog.get_logger(__name__)


@dataclass(slots=True, frozen=True)
class NodeStorage:
    """The store, what its places point into, and what moves blocks between its tiers."""

    arenas: ArenaSet
    hbm: DeviceArena | None
    devices: Devices | None
    store: Store
    migrator: Migrator


async def open_storage(
    config: NodeConfig,
    epoch: int,
    may_hold: Callable[[str], bool],
    stack: contextlib.AsyncExitStack,
) -> NodeStorage:
    """Make the arenas, open the devices, and recover what they hold into a new store.

    Args:
        epoch: of this start of the node.
        may_hold: whether the node may hold blocks of a tenant; others that it recovers are dropped.
        stack: closes what was opened.

    Raises:
        ConfigError, NoSharedMemory: it cannot be opened as configured.
    """
    arenas = make_arenas(config)
    stack.callback(arenas.close)
    hbm = _open_hbm(config, stack)
    devices = _open_nvme(config, stack)
    store = _make_store(config, epoch, arenas, hbm, devices)
    migrator = Migrator(store, arenas, devices, hbm=hbm)
    stack.callback(migrator.close)
    storage = NodeStorage(arenas, hbm, devices, store, migrator)
    if devices is not None:
        await _recover(store, devices, migrator)
        _drop_tenants(store, may_hold)
    return storage


def access_checkpointer(
    config: NodeConfig, storage: NodeStorage
) -> access_checkpoint.AccessCheckpointer | None:
    """What saves the uses of blocks on disk, so that a restart keeps them; None without a disk."""
    if storage.devices is None:
        return None
    counters = storage.migrator.counters

    def count_failure() -> None:
        counters["checkpoints_not_written"] += 1

    return access_checkpoint.AccessCheckpointer(
        storage.store,
        storage.devices,
        config.advanced.access_checkpoint_s,
        is_synced=config.advanced.fsync != "never",
        on_failure=count_failure,
    )


def _open_hbm(config: NodeConfig, stack: contextlib.AsyncExitStack) -> DeviceArena | None:
    if not config.hbm_bytes:
        return None
    size = config.hbm_bytes - config.hbm_bytes % config.advanced.slab_bytes
    hbm = DeviceArena(HBM_ARENA_ID, size, config.advanced.hbm_device)
    stack.callback(hbm.close)
    return hbm


def _open_nvme(config: NodeConfig, stack: contextlib.AsyncExitStack) -> Devices | None:
    if not config.nvme_directories:
        return None
    devices = open_devices(
        config.nvme_directories,
        config.nvme_bytes,
        fsync=config.advanced.fsync,
        fsync_interval_s=config.advanced.fsync_interval_s,
    )
    stack.callback(devices.close)
    return devices


def _make_store(
    config: NodeConfig,
    epoch: int,
    arenas: ArenaSet,
    hbm: DeviceArena | None,
    devices: Devices | None,
) -> Store:
    advanced = config.advanced
    return Store(
        ArenaAllocator(
            [SlabAllocator(a.size_bytes, advanced.slab_bytes, a.arena_id) for a in arenas.values()],
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
            first_id=epoch,  # ids from before a restart stay unknown
        ),
        hbm=SlabAllocator(hbm.size_bytes, advanced.slab_bytes, hbm.arena_id) if hbm else None,
    )


async def _recover(store: Store, devices: Devices, migrator: Migrator) -> None:
    count = devices.recover_into(store, time.monotonic())
    migrator.counters["namespaces_not_recovered"] += len(devices.unrecovered)
    await access_checkpoint.restore(devices, store, time.monotonic(), time.time())
    log.info("recovered blocks from NVMe", parts=count, devices=devices.states())


def _drop_tenants(store: Store, may_hold: Callable[[str], bool]) -> None:
    """Drop blocks of tenants that the node may not hold: other tenants can reach this memory."""
    foreign = {
        namespace.namespace_id for namespace in store.namespaces if not may_hold(namespace.tenant)
    }
    for namespace_id, _, block_hash in list(store.inspection.snapshot() if foreign else ()):
        if namespace_id in foreign:
            store.drop(namespace_id, block_hash, "isolated", time.monotonic())
