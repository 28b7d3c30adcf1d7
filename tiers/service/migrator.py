"""Moves blocks between HBM, DRAM and NVMe beside the traffic: the store plans, threads do the I/O.

Every migration verifies the checksum of what it read before the copy becomes visible (invariant 5).
The migrator owns a migration from its beginning. The caller may leave; the slots stay held until
the I/O has ended, and the store learns the true result. A device that refuses a write gets no more
writes. A device that refuses a read is lost with its blocks, and the store reports that to the
index. The node goes on with the other devices, or with DRAM alone, and no request fails because of
a device.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import structlog

from kvpool.blocks.layout import Namespace
from kvpool.blocks.tier import Tier
from kvpool.errors import ChecksumMismatch, KvpoolError
from tiers.disk.devices import Device, Devices
from tiers.disk.io_stats import ByteQueue
from tiers.disk.manifest import NvmeFailed
from tiers.memory.arena import Arena
from tiers.memory.arena_set import ArenaSet
from tiers.memory.hbm_arena import DeviceArena, DeviceFailed
from tiers.service.migration_io import MigrationIo
from tiers.store.blocks import Migration
from tiers.store.store import Store

log = structlog.get_logger(__name__)

BATCH_BLOCKS = 16  # demoted together, for each device; their slots are held meanwhile
LOST_AT_ONCE = 4096  # slots of a lost device given up in one go: a few milliseconds
TICK_S = 0.25
POLL_S = 0.01  # between two looks at promotions that another part started
HBM_DEMOTIONS = -1  # in place of a device's number: migrations from HBM to DRAM
HBM_THREADS = 2  # copies to and from hbm at once; each has pinned memory of its own


class Migrator:
    """Carries out the store's migrations.

    Args:
        devices: the NVMe tier; their numbers are the arena ids there. None: no such tier.
        hbm: the HBM tier. None: no such tier.
    """

    def __init__(
        self,
        store: Store,
        arenas: ArenaSet | Sequence[Arena],
        devices: Devices | None,
        *,
        hbm: DeviceArena | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._store = store
        self._devices = devices
        self._has_hbm = hbm is not None
        self._io = MigrationIo(ArenaSet.of(arenas), self.devices, hbm, clock)
        self._hbm_threads = ThreadPoolExecutor(HBM_THREADS, thread_name_prefix="kvpool-hbm")
        self._clock = clock
        self.read_speed, self.write_speed = self._io.read_speed, self._io.write_speed
        self._queue = ByteQueue()  # promotions, by migration id
        self._promotions: dict[tuple[bytes, bytes], dict[int, asyncio.Future[int]]] = {}
        self._wake = asyncio.Event()
        self._demotions: defaultdict[int, set[int]] = defaultdict(set)  # migration ids, by device
        self._defect: BaseException | None = None

    @property
    def devices(self) -> Devices:
        """The NVMe tier's devices; empty if the node has no such tier."""
        return self._devices if self._devices is not None else Devices([])

    @property
    def is_disk_failed(self) -> bool:
        """There is an NVMe tier, and no device of it takes writes."""
        return self._devices is not None and not self._devices.can_write

    @property
    def can_promote(self) -> bool:
        """Some device can be read. A device that refused a write still counts."""
        return self._devices is None or self._devices.can_read

    # ------------------------------------------------------------ namespaces

    def record_namespace(self, namespace: Namespace) -> None:
        """Write a namespace's definition to every device, so that a restart finds its blocks.

        Returns at once. A failure is logged and counted. No block of the namespace is demoted
        before the definition is on the device.
        """
        for device in self.devices:
            if device.state == "ok" and not device.knows(namespace.namespace_id):
                submitted = device.writers.submit(device.record_namespace, namespace)
                work = asyncio.wrap_future(submitted)
                work.add_done_callback(partial(self._namespace_recorded, namespace, device))

    def _namespace_recorded(
        self, namespace: Namespace, device: Device, work: asyncio.Future[None]
    ) -> None:
        error = None if work.cancelled() else work.exception()
        if error is None:
            return
        self.counters["namespaces_not_recorded"] += 1
        log.error("a namespace was not recorded", namespace=namespace.name, error=str(error))
        self._handle_io_error(error, device, is_read=False)

    # ------------------------------------------------------------ demotion

    def wake(self) -> None:
        """Look for blocks to demote soon."""
        self._wake.set()

    async def run(self) -> None:
        """Expire and demote until cancelled.

        Raises:
            StoreCorrupt, or any other error of a migration that neither a disk nor a caller caused.
        """
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._wake.wait()
            self._wake.clear()
            await asyncio.sleep(0)  # let requests in
            if self._defect is not None:
                raise self._defect
            self._store.expire(self._clock())
            if self._store.failed_arenas.drop_some(LOST_AT_ONCE):
                self._wake.set()
            self._demote()

    def _demote(self) -> None:
        """Begin a batch for each idle device, so that a device that hangs delays no other."""
        free = [d.number for d in self.devices if d.state == "ok" and not self._demotions[d.number]]
        sources = [Tier.HBM] if self._has_hbm and not self._demotions[HBM_DEMOTIONS] else []
        if free:
            sources.append(Tier.DRAM)
        if not sources:
            return
        resting = [d.number for d in self.devices if d.number not in free]
        batch = BATCH_BLOCKS * max(1, len(free))
        plan = self._store.migrations.plan_demotions(batch, self._clock(), sources, resting)
        for migration in plan.migrations:
            is_to_disk = migration.target_tier == Tier.NVME
            under_way = self._demotions[migration.target.arena_id if is_to_disk else HBM_DEMOTIONS]
            under_way.add(migration.migration_id)
            self._begin(migration).add_done_callback(
                partial(self._demoted, under_way, migration.migration_id)
            )
        if plan.has_more:
            self._wake.set()

    def _demoted(self, under_way: set[int], migration_id: int, _work: asyncio.Future[int]) -> None:
        under_way.discard(migration_id)
        if not under_way:
            self._wake.set()

    # ------------------------------------------------------------ promotion

    def begin(self, migrations: Sequence[Migration]) -> list[asyncio.Future[int]]:
        """Start migrations that a caller waits for. They go on if the caller leaves.

        Migrations from a lost device are cancelled instead.

        Returns:
            A future for each migration that was started. Wait for them; never cancel them.
        """
        hopeless = [
            migration
            for migration in migrations
            if migration.source_tier == Tier.NVME and self._device(migration).state == "failed"
        ]
        self._store.cancel_migrations(hopeless, self._clock())
        return [self._begin(migration) for migration in migrations if migration not in hopeless]

    async def promote(self, migrations: Sequence[Migration]) -> None:
        """Carry out migrations; returns when each has succeeded or failed."""
        works = self.begin(migrations)
        if works:
            await asyncio.wait(works)

    async def wait_for_run(
        self, namespace_id: bytes, hashes: Sequence[bytes], timeout_s: float
    ) -> None:
        """Wait until the running promotions of these blocks have ended, or the time is over."""
        works = [
            work
            for name in hashes
            for work in self._promotions.get((namespace_id, name), {}).values()
        ]
        if works:
            await asyncio.wait(works, timeout=timeout_s)
        else:
            await asyncio.sleep(min(timeout_s, POLL_S))

    # ------------------------------------------------------------ costs

    @property
    def queued_read_bytes(self) -> int:
        """Bytes of the promotions that are running or waiting."""
        return self._queue.size_bytes

    def disk_waits(
        self, namespace_id: bytes, hashes: Sequence[bytes], tiers: Sequence[Tier]
    ) -> list[float] | None:
        """Seconds until each block of a leading run is in DRAM, if its promotion began now.

        Args:
            tiers: the tier of each block, from `Store.lookup`.

        Returns:
            None if a block must be read and the disk's speed is unknown.
        """
        namespace = self._store.namespaces[namespace_id]
        waits: list[float] = []
        own_bytes = 0
        wait_s = 0.0
        for name, tier in zip(hashes, tiers, strict=False):
            if tier == Tier.NVME:
                under_way = self._promotions.get((namespace_id, name), ())
                if under_way:
                    needed = max(map(self._queue.bytes_until, under_way))
                else:
                    own_bytes += namespace.layout.block_bytes
                    needed = self._queue.size_bytes + own_bytes
                operations = len(self._queue) + own_bytes // namespace.layout.part_bytes
                seconds = self._io.read_seconds(needed, operations)
                if seconds is None:
                    return None
                wait_s = max(wait_s, seconds)
            waits.append(wait_s)
        return waits

    # ------------------------------------------------------------ on the event loop

    def _device(self, migration: Migration) -> Device:
        place = migration.source if migration.source_tier == Tier.NVME else migration.target
        return self.devices[place.arena_id]

    def _begin(self, migration: Migration) -> asyncio.Future[int]:
        namespace = self._store.namespaces[migration.namespace_id]
        is_read = migration.source_tier == Tier.NVME
        if is_read:
            device = self._device(migration)
            submitted = device.readers.submit(self._io.read, device, migration, namespace)
        elif migration.target_tier == Tier.NVME:
            writers = self._device(migration).writers
            submitted = writers.submit(self._io.write, migration, namespace)
        else:
            submitted = self._hbm_threads.submit(self._io.copy, migration)
        work = asyncio.wrap_future(submitted)
        if migration.target_tier != Tier.NVME:
            self._promotions.setdefault(_block(migration), {})[migration.migration_id] = work
        if is_read:
            self._queue.enter(migration.migration_id, migration.length)
        # Added before anybody can wait: a waiter finds the store up to date.
        work.add_done_callback(lambda ended: self._settle(migration, ended))
        return work

    def _settle(self, migration: Migration, work: asyncio.Future[int]) -> None:
        self._queue.leave(migration.migration_id)
        works = self._promotions.get(_block(migration), {})
        if works.pop(migration.migration_id, None) is not None and not works:
            del self._promotions[_block(migration)]
        try:
            self._finish(migration, work)
        except KvpoolError as defect:
            self._fail(defect)

    def _finish(self, migration: Migration, work: asyncio.Future[int]) -> None:
        now = self._clock()
        if work.cancelled():  # it never began: the migrator was closed
            self._store.cancel_migrations([migration], now)
            return
        error = work.exception()
        self._store.finish_migration(
            migration.migration_id, error is None, now, None if error is not None else work.result()
        )
        if error is None:
            is_up = migration.target_tier < migration.source_tier
            self.counters["bytes_promoted" if is_up else "bytes_demoted"] += migration.length
        elif isinstance(error, ChecksumMismatch):
            self.counters["corrupt_blocks"] += 1
            log.error(
                "dropping a corrupt block", block=migration.block_hash.hex(), error=str(error)
            )
            self._store.drop(migration.namespace_id, migration.block_hash, "checksum", now)
        elif isinstance(error, DeviceFailed):
            self.counters["hbm_errors"] += 1
            log.error("the device refused a copy", error=str(error))
        elif Tier.NVME in (migration.source_tier, migration.target_tier):
            self._handle_io_error(
                error, self._device(migration), is_read=migration.source_tier == Tier.NVME
            )
        else:
            self._fail(error)

    def _handle_io_error(self, error: BaseException, device: Device, *, is_read: bool) -> None:
        if isinstance(error, NvmeFailed):
            self.counters["disk_errors"] += 1
            self._give_up(device, is_read=is_read, error=str(error))
        elif isinstance(error, KvpoolError):  # the files refuse one record or place
            self.counters["disk_refusals"] += 1
            log.error("the NVMe files refused a migration", error=str(error))
        else:
            self._fail(error)

    def _give_up(self, device: Device, *, is_read: bool, error: str) -> None:
        """Stop writing to a device after an error; stop reading too if a read failed."""
        if device.state == "failed" or (device.state == "read_only" and not is_read):
            return
        facts = {"directory": str(device.directory), "device": device.identity, "error": error}
        if is_read:
            device.state = "failed"
            self.counters["devices_lost"] += 1
            self._store.failed_arenas.fail(Tier.NVME, device.number)
            self._store.failed_arenas.drop_some(LOST_AT_ONCE)
            self._wake.set()  # to drop the rest
            log.error("an NVMe device cannot be read: its blocks are lost", **facts)
        else:
            device.state = "read_only"
            self.counters["devices_read_only"] += 1
            self._store.failed_arenas.close(Tier.NVME, device.number)
            log.error("an NVMe device cannot be written: it is read-only from now on", **facts)

    def _fail(self, defect: BaseException) -> None:
        """End `run` with this error."""
        self._defect = self._defect or defect
        self._wake.set()

    def close(self) -> None:
        """Wait for the running I/O, cancel the rest, and close the devices' files."""
        self._hbm_threads.shutdown(wait=True, cancel_futures=True)
        self.devices.close()


def _block(migration: Migration) -> tuple[bytes, bytes]:
    return migration.namespace_id, migration.block_hash
