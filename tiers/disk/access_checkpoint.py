"""What survives a restart besides the blocks: the order of their use, and their protections.

Each NVMe device keeps two checkpoints. `access_order` holds the order of the blocks on that device;
it is written periodically and at the end. `retention` holds all protections of the node; it is
written soon after each change. A kill loses the last moments of both. Blocks from after the last
checkpoint count as used when they were written.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec
import numpy as np
import structlog

from kvpool.blocks.hashing import HASH_BYTES, unpack_hashes
from tiers.disk.atomic_file import read_atomic_file, write_atomic_file
from tiers.disk.devices import Device, Devices
from tiers.disk.manifest import NvmeFailed
from tiers.store.recovery import Access
from tiers.store.retention import Retention
from tiers.store.store import Store

log = structlog.get_logger(__name__)
T = TypeVar("T")

VERSION = 1
SLICE_BLOCKS = 4096  # looked at in one turn of the event loop: a few milliseconds
SETTLE_S = 0.5  # protections come in bursts


class _BlockRun(msgspec.Struct, array_like=True):
    """Blocks of one namespace: packed hashes, and a packed uint64 (tick) or float64 (time) each."""

    namespace_id: bytes
    hashes: bytes
    values: bytes


class _AccessOrder(msgspec.Struct, array_like=True):
    runs: list[_BlockRun]


class _Retention(msgspec.Struct, array_like=True):
    saved_at: float  # wall clock
    runs: list[_BlockRun]


async def restore(devices: Devices, store: Store, now: float, wall: float) -> None:
    """Restore the order and the protections of blocks that were just recovered.

    Args:
        now: monotonic seconds.
        wall: seconds since 1970.
    """
    ticks: dict[tuple[bytes, bytes], int] = {}
    left_s: dict[tuple[bytes, bytes], float] = {}
    latest = 0.0
    for device in devices:
        order = await _read(device, "access_order", _AccessOrder)
        for run in order.runs if order is not None else ():
            for name, tick in _pairs(run, "<u8"):
                key = (run.namespace_id, name)
                ticks[key] = max(ticks.get(key, 0), int(tick))
        saved = await _read(device, "retention", _Retention)
        if (
            saved is not None and saved.saved_at > latest
        ):  # an older one is of a device that was away
            latest = saved.saved_at
            # A clock that was set back does not prolong a protection.
            left_s = {
                (run.namespace_id, name): until - max(wall, saved.saved_at)
                for run in saved.runs
                for name, until in _pairs(run, "<f8")
            }
    store.recovery.restore_accesses([Access(*key, tick) for key, tick in ticks.items()])
    protections = [Retention(*key, now + left) for key, left in left_s.items() if left > 0]
    refused = store.recovery.restore_retentions(protections, now)
    if refused:
        log.error(
            "protections were not restored: they exceed the share for protected blocks",
            blocks=refused,
        )


class AccessCheckpointer:
    """Writes the checkpoints of every device, beside the traffic.

    Args:
        interval_s: between two checkpoints of the access order.
        is_synced: checkpoints survive a power failure.
        on_failure: called when a checkpoint was not written.
    """

    def __init__(
        self,
        store: Store,
        devices: Devices,
        interval_s: float,
        *,
        is_synced: bool,
        on_failure: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._devices = devices
        self._interval_s = interval_s
        self._is_synced = is_synced
        self._on_failure = on_failure
        self._clock = clock
        self._wall = wall
        self._saved_tick = -1
        self._saved_protections = -1

    async def run(self) -> None:
        """Write what has changed, until cancelled."""
        due = self._clock() + self._interval_s
        while True:
            await asyncio.sleep(min(SETTLE_S, self._interval_s))
            await self._write_retention()
            if self._clock() >= due:
                await self._write_access_order()
                due = self._clock() + self._interval_s

    async def close(self) -> None:
        """Write what has changed since the last time."""
        await self._write_retention()
        await self._write_access_order()

    async def _write_access_order(self) -> None:
        tick = self._store.recovery.tick
        if tick == self._saved_tick:
            return
        by_device = {device.number: _BlockValues() for device in self._devices}
        for rows in self._store.recovery.accesses(SLICE_BLOCKS):
            for number, use in rows:
                by_device[number].add(use.namespace_id, use.block_hash, use.tick)
            await asyncio.sleep(0)
        is_kept = True
        for device in self._devices:
            content = msgspec.msgpack.encode(_AccessOrder(by_device[device.number].runs("<u8")))
            is_kept = await self._write(device, "access_order", content) and is_kept
        if is_kept:
            self._saved_tick = tick

    async def _write_retention(self) -> None:
        changes = self._store.retention.changes
        if changes == self._saved_protections:
            return
        values = _BlockValues()
        wall = self._wall()
        ahead = wall - self._clock()
        for number, kept in enumerate(self._store.retention.values()):
            values.add(kept.namespace_id, kept.block_hash, kept.until + ahead)
            if number % SLICE_BLOCKS == SLICE_BLOCKS - 1:
                await asyncio.sleep(0)
        content = msgspec.msgpack.encode(_Retention(wall, values.runs("<f8")))
        is_kept = True
        for device in self._devices:
            is_kept = await self._write(device, "retention", content) and is_kept
        if is_kept:
            self._saved_protections = changes

    async def _write(self, device: Device, name: str, content: bytes) -> bool:
        """Write one checkpoint; returns False if it failed. Skips devices that take no writes."""
        if device.state != "ok":
            return True
        path = device.directory / name
        work = asyncio.create_task(
            write_atomic_file(path, VERSION, content, is_synced=self._is_synced)
        )
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait([work])  # `close` writes the same files
            raise
        except NvmeFailed as error:
            self._on_failure()
            log.error("a checkpoint was not written", device=device.identity, error=str(error))
            return False
        return True


class _BlockValues:
    """Blocks and a number for each, by namespace."""

    def __init__(self) -> None:
        self._by_namespace: dict[bytes, tuple[bytearray, list[float]]] = {}

    def add(self, namespace_id: bytes, block_hash: bytes, value: float) -> None:
        hashes, values = self._by_namespace.setdefault(namespace_id, (bytearray(), []))
        hashes += block_hash
        values.append(value)

    def runs(self, dtype: str) -> list[_BlockRun]:
        return [
            _BlockRun(namespace_id, bytes(hashes), np.array(values, dtype).tobytes())
            for namespace_id, (hashes, values) in self._by_namespace.items()
        ]


async def _read(device: Device, name: str, kind: type[T]) -> T | None:
    """A device's checkpoint; None if it is missing or damaged."""
    content = await read_atomic_file(device.directory / name, VERSION)
    if content is None:
        return None
    try:
        return msgspec.msgpack.decode(content, type=kind)
    except msgspec.MsgspecError as error:
        log.warning(
            "ignored a damaged checkpoint",
            directory=str(device.directory),
            file=name,
            error=str(error),
        )
        return None


def _pairs(run: _BlockRun, dtype: str) -> Iterator[tuple[bytes, float]]:
    """Each hash with its number; nothing if their counts differ."""
    if len(run.hashes) % HASH_BYTES or len(run.hashes) // HASH_BYTES * 8 != len(run.values):
        return iter(())
    return zip(unpack_hashes(run.hashes), np.frombuffer(run.values, dtype).tolist(), strict=True)
