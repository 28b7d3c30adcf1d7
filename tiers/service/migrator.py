"""Moves blocks between HBM, DRAM and NVMe beside the traffic: the store plans, threads do the I/O.

Every move verifies the checksum of what it read before the copy may be read (invariant 5). A move is the
migrator's own from the moment it begins: whoever asked for it may leave, the slots stay held until the I/O is over,
and its true result reaches the store. A device that refuses a write gets no more of them; one that refuses a read
is given up with its blocks, and the store says so to the index. The others go on, at the end DRAM alone; nobody's
request fails for it.
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
from tiers.service.move_io import MoveIo
from tiers.store.blocks import Migration
from tiers.store.store import Store

log = structlog.get_logger(__name__)

BATCH_BLOCKS = 16  # demoted together, for each device; their slots are held meanwhile
LOST_AT_ONCE = 4096  # slots of a lost device given up in one go: a few milliseconds
TICK_S = 0.25
POLL_S = 0.01  # for blocks that somebody else brings where they are wanted
HBM_DEMOTIONS = -1  # stands for a device's number where blocks go from hbm to dram
HBM_THREADS = 2  # copies to and from hbm at once; each has pinned memory of its own


class Migrator:
    """Carries out the store's moves.

    Args:
        devices: the NVMe tier, whose numbers are the arena ids there; None where the node has none.
        hbm: the HBM tier; None where the node has none.
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
        self._io = MoveIo(ArenaSet.of(arenas), self.devices, hbm, clock)
        self._hbm_threads = ThreadPoolExecutor(HBM_THREADS, thread_name_prefix="kvpool-hbm")
        self._clock = clock
        self.read_speed, self.write_speed = self._io.read_speed, self._io.write_speed
        self._queue = ByteQueue()  # promotions, by move id
        self._promotions: dict[tuple[bytes, bytes], dict[int, asyncio.Future[int]]] = {}
        self._wake = asyncio.Event()
        self._demotions: defaultdict[int, set[int]] = defaultdict(set)  # move ids, by device
        self._defect: BaseException | None = None

    @property
    def devices(self) -> Devices:
        """The NVMe tier's devices; none where the node has no such tier."""
        return self._devices if self._devices is not None else Devices([])

    @property
    def is_disk_failed(self) -> bool:
        """There is an NVMe tier, and nothing can be written to it any more."""
        return self._devices is not None and not self._devices.can_write

    @property
    def can_promote(self) -> bool:
        """Some of the NVMe tier can be read: after a failed write, what stands there is still good."""
        return self._devices is None or self._devices.can_read

    # ------------------------------------------------------------ namespaces

    def record_namespace(self, namespace: Namespace) -> None:
        """Have a namespace's definition written to the disk, so that its blocks can be found again.

        Returns at once. What fails is logged and counted; blocks of the namespace are not demoted before
        its record is written.
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
        """There may be something to demote."""
        self._wake.set()

    async def run(self) -> None:
        """Expire and demote until cancelled.

        Raises:
            StoreCorrupt, or whatever else a move met that no disk and no caller can be blamed for.
        """
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._wake.wait()
            self._wake.clear()
            await asyncio.sleep(0)  # requests come in between, however much there is to do
            if self._defect is not None:
                raise self._defect
            self._store.expire(self._clock())
            if self._store.failed_arenas.drop_some(LOST_AT_ONCE):
                self._wake.set()
            self._demote()

    def _demote(self) -> None:
        """Begin a batch for each device that has done with the one before: one that hangs holds up no other."""
        free = [d.number for d in self.devices if d.state == "ok" and not self._demotions[d.number]]
        sources = [Tier.HBM] if self._has_hbm and not self._demotions[HBM_DEMOTIONS] else []
        if free:
            sources.append(Tier.DRAM)
        if not sources:
            return
        self._store.migrations.rest_devices(d.number for d in self.devices if d.number not in free)
        batch = BATCH_BLOCKS * max(1, len(free))
        for move in self._store.migrations.plan_demotions(batch, self._clock(), sources):
            is_to_disk = move.target_tier == Tier.NVME
            under_way = self._demotions[move.target.arena_id if is_to_disk else HBM_DEMOTIONS]
            under_way.add(move.migration_id)
            self._begin(move).add_done_callback(
                partial(self._demoted, under_way, move.migration_id)
            )
        if self._store.migrations.has_more:
            self._wake.set()

    def _demoted(self, under_way: set[int], migration_id: int, _work: asyncio.Future[int]) -> None:
        under_way.discard(migration_id)
        if not under_way:
            self._wake.set()

    # ------------------------------------------------------------ promotion

    def begin(self, moves: Sequence[Migration]) -> list[asyncio.Future[int]]:
        """Start moves that somebody waits for; they go on to their end whatever becomes of the caller.

        Returns what is done when each has ended; wait for these, never cancel them. Those from a device that
        is lost are cancelled instead.
        """
        hopeless = [
            move
            for move in moves
            if move.source_tier == Tier.NVME and self._device(move).state == "failed"
        ]
        self._store.cancel_migrations(hopeless, self._clock())
        return [self._begin(move) for move in moves if move not in hopeless]

    async def promote(self, moves: Sequence[Migration]) -> None:
        """Bring blocks where they are wanted; when this returns every move has ended, one way or the other."""
        works = self.begin(moves)
        if works:
            await asyncio.wait(works)

    async def wait_for_run(
        self, namespace_id: bytes, hashes: Sequence[bytes], timeout_s: float
    ) -> None:
        """Until every promotion of these blocks that is under way has ended, or the time is over."""
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
        """Promotions under way or waiting."""
        return self._queue.size_bytes

    def disk_waits(
        self, namespace_id: bytes, hashes: Sequence[bytes], tiers: Sequence[Tier]
    ) -> list[float] | None:
        """Seconds until each block of a leading run stands in DRAM, as if its promotion began now.

        Args:
            tiers: where each stands, from `Store.lookup`.

        Returns:
            None while the disk's speed is not known and something would have to be read.
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

    def _device(self, move: Migration) -> Device:
        place = move.source if move.source_tier == Tier.NVME else move.target
        return self.devices[place.arena_id]

    def _begin(self, move: Migration) -> asyncio.Future[int]:
        namespace = self._store.namespaces[move.namespace_id]
        is_read = move.source_tier == Tier.NVME
        if is_read:
            device = self._device(move)
            submitted = device.readers.submit(self._io.read, device, move, namespace)
        elif move.target_tier == Tier.NVME:
            writers = self._device(move).writers
            submitted = writers.submit(self._io.write, move, namespace)
        else:
            submitted = self._hbm_threads.submit(self._io.copy, move)
        work = asyncio.wrap_future(submitted)
        if move.target_tier != Tier.NVME:
            self._promotions.setdefault(_block(move), {})[move.migration_id] = work
        if is_read:
            self._queue.enter(move.migration_id, move.length)
        # Before anybody can wait for it: whoever does finds the store settled.
        work.add_done_callback(lambda ended: self._settle(move, ended))
        return work

    def _settle(self, move: Migration, work: asyncio.Future[int]) -> None:
        self._queue.leave(move.migration_id)
        works = self._promotions.get(_block(move), {})
        if works.pop(move.migration_id, None) is not None and not works:
            del self._promotions[_block(move)]
        try:
            self._finish(move, work)
        except KvpoolError as defect:
            self._fail(defect)

    def _finish(self, move: Migration, work: asyncio.Future[int]) -> None:
        now = self._clock()
        if work.cancelled():  # it never began: the migrator was closed
            self._store.cancel_migrations([move], now)
            return
        error = work.exception()
        self._store.finish_migration(
            move.migration_id, error is None, now, None if error is not None else work.result()
        )
        if error is None:
            is_up = move.target_tier < move.source_tier
            self.counters["bytes_promoted" if is_up else "bytes_demoted"] += move.length
        elif isinstance(error, ChecksumMismatch):
            self.counters["corrupt_blocks"] += 1
            log.error("dropping a corrupt block", block=move.block_hash.hex(), error=str(error))
            self._store.drop(move.namespace_id, move.block_hash, "checksum", now)
        elif isinstance(error, DeviceFailed):
            self.counters["hbm_errors"] += 1
            log.error("the device refused a copy", error=str(error))
        elif Tier.NVME in (move.source_tier, move.target_tier):
            self._handle_io_error(error, self._device(move), is_read=move.source_tier == Tier.NVME)
        else:
            self._fail(error)

    def _handle_io_error(self, error: BaseException, device: Device, *, is_read: bool) -> None:
        if isinstance(error, NvmeFailed):
            self.counters["disk_errors"] += 1
            self._give_up(device, is_read=is_read, error=str(error))
        elif isinstance(error, KvpoolError):  # one record or place that the files refuse
            self.counters["disk_refusals"] += 1
            log.error("the NVMe files refused a move", error=str(error))
        else:
            self._fail(error)

    def _give_up(self, device: Device, *, is_read: bool, error: str) -> None:
        """Use a device no more after an error: for nothing where reads fail, else to read alone."""
        if device.state == "failed" or (device.state == "read_only" and not is_read):
            return
        said = {"directory": str(device.directory), "device": device.identity, "error": error}
        if is_read:
            device.state = "failed"
            self.counters["devices_lost"] += 1
            self._store.failed_arenas.fail(Tier.NVME, device.number)
            self._store.failed_arenas.drop_some(LOST_AT_ONCE)
            self._wake.set()  # for the rest of it
            log.error("an NVMe device cannot be read: its blocks are lost", **said)
        else:
            device.state = "read_only"
            self.counters["devices_read_only"] += 1
            self._store.failed_arenas.close(Tier.NVME, device.number)
            log.error("an NVMe device cannot be written: it is only read from now on", **said)

    def _fail(self, defect: BaseException) -> None:
        """Have the owner of `run` see it."""
        self._defect = self._defect or defect
        self._wake.set()

    def close(self) -> None:
        """Wait for the I/O under way; what has not begun never will. Closes the devices' files."""
        self._hbm_threads.shutdown(wait=True, cancel_futures=True)
        self.devices.close()


def _block(move: Migration) -> tuple[bytes, bytes]:
    return move.namespace_id, move.block_hash
