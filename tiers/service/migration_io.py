"""The byte copies of migrations between tiers, done in threads. They also measure the disk's speed.

Every copy verifies the checksum of what it read (invariant 5).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import numpy as np

from kvpool.blocks.hashing import checksum
from kvpool.blocks.layout import Namespace
from kvpool.blocks.tier import Tier
from kvpool.errors import ChecksumMismatch
from tiers.disk.devices import Device, Devices
from tiers.disk.io_stats import Throughput
from tiers.memory.arena_set import ArenaSet
from tiers.memory.hbm_arena import DeviceArena
from tiers.store.blocks import Migration
from tiers.store.fp8 import Octets
from tiers.store.slab_allocator import Place, StoreCorrupt


class MigrationIo:
    """Copies the bytes of migrations. Each method blocks, and returns the copy's checksum.

    Args:
        hbm: the HBM tier; None if the node has none.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        arenas: ArenaSet,
        devices: Devices,
        hbm: DeviceArena | None,
        clock: Callable[[], float],
    ) -> None:
        self._arenas = arenas
        self._devices = devices
        self._hbm = hbm
        self._clock = clock
        self._speed_lock = threading.Lock()
        self.read_speed, self.write_speed = Throughput(), Throughput()

    def read_seconds(self, size_bytes: float, operations: int) -> float | None:
        """How long reading `size_bytes` in so many operations takes; None while unknown."""
        with self._speed_lock:
            return self.read_speed.seconds(size_bytes, operations)

    def write(self, migration: Migration, namespace: Namespace) -> int:
        """From DRAM to NVMe. Raises: as `Devices.write_part`."""
        data = self._view(migration.source, migration)
        with self._timed(self.write_speed, migration.length):
            return self._devices.write_part(migration, namespace, data)

    def read(self, device: Device, migration: Migration, namespace: Namespace) -> int:
        """From NVMe to DRAM, or through host memory to HBM.

        Raises:
            DeviceFailed: the HBM device refused. Others: as `Device.read_part`.
        """
        is_for_hbm = migration.target_tier == Tier.HBM
        target = (
            np.empty(migration.length, np.uint8)
            if is_for_hbm
            else self._view(migration.target, migration)
        )
        with self._timed(self.read_speed, migration.length):
            found = device.read_part(migration, namespace, target)
        if is_for_hbm:
            self._device_memory.write_from(migration.target.offset, target)
        return found

    def copy(self, migration: Migration) -> int:
        """Between DRAM and HBM. The bytes are verified in DRAM.

        Raises:
            ChecksumMismatch: they are not what was committed. DeviceFailed: the device refused.
        """
        if migration.source_tier == Tier.HBM:
            data = self._view(migration.target, migration)
            self._device_memory.read_into(migration.source.offset, data)
        else:
            data = self._view(migration.source, migration)
        if checksum(data) != migration.checksum:
            where = migration.source_tier
            raise ChecksumMismatch(f"part {migration.part} in {where} is not what was committed")
        if migration.target_tier == Tier.HBM:
            self._device_memory.write_from(migration.target.offset, data)
        return migration.checksum

    def _view(self, place: Place, migration: Migration) -> Octets:
        return self._arenas[place.arena_id].view(place.offset, migration.length)

    @property
    def _device_memory(self) -> DeviceArena:
        if self._hbm is None:
            raise StoreCorrupt("a migration names hbm, and the node has none")
        return self._hbm

    @contextlib.contextmanager
    def _timed(self, speed: Throughput, size_bytes: int) -> Iterator[None]:
        with self._speed_lock:
            operation = speed.begin(self._clock())
        moved = 0
        try:
            yield
            moved = size_bytes
        finally:
            with self._speed_lock:
                speed.end(operation, moved, self._clock())
