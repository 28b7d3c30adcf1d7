"""The NVMe tier's devices: each has a directory, a slab file, a manifest and threads.


Each device is self-contained: its manifest lists the blocks on it. A place's `arena_id` is the
device's number since this start. At the next start, devices may come in another order or be
missing; the blocks on the others are found. A device that refuses a write is read-only from then
on; one that refuses a read is lost.

Parts are encoded and decoded here (`tiers.store.fp8`). The store decides about blocks.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Literal

import numpy as np
import structlog

from kvpool.blocks.hashing import checksum
from kvpool.blocks.layout import Namespace
from kvpool.errors import ChecksumMismatch, ConfigError, KvpoolError
from tiers.disk.manifest import NvmeFailed, sync_directory
from tiers.disk.slab_file import FsyncPolicy, NvmeFiles
from tiers.store.arena_allocator import ArenaAllocator
from tiers.store.blocks import Migration
from tiers.store.fp8 import Octets, decode, encode, stored_bytes
from tiers.store.slab_allocator import SlabAllocator
from tiers.store.store import Store

log = structlog.get_logger(__name__)

THREADS = 8  # per device, half for writes; 4 threads reach 0.7 to 1.0 of it (benchmarks/disk.py)
State = Literal["ok", "read_only", "failed"]


class Device:
    """One directory of the NVMe tier, and the threads that work on it.

        Reads and writes have separate threads: a promotion, which a request waits for, never queues
            behind
    demotions. Each device has its own threads: a slow device delays no other.

        Args:
            number: the `arena_id` of its places.
            files: open; closed by `close`, or at once if the constructor fails.
            threads: how many operations run at once, half of them writes; at least one each.

        Raises:
            NvmeFailed: the directory's identity cannot be read or written.
    """

    def __init__(self, number: int, files: NvmeFiles, *, threads: int = THREADS) -> None:
        self.number = number
        self.files = files
        self.directory = files.directory
        try:
            self.identity, self.is_new = _identity(files)
        except NvmeFailed:
            files.close()
            raise
        self.state: State = "ok"
        writers = max(1, threads // 2)
        self.writers = ThreadPoolExecutor(writers, thread_name_prefix=f"kvpool-disk-write-{number}")
        self.readers = ThreadPoolExecutor(
            max(1, threads - writers), thread_name_prefix=f"kvpool-disk-read-{number}"
        )
        self._recorded: set[bytes] = set()  # namespace ids that the manifest has

    def knows(self, namespace_id: bytes) -> bool:
        """Whether the namespace's definition is on this device."""
        return namespace_id in self._recorded

    # Called in threads.

    def record_namespace(self, namespace: Namespace) -> None:
        """Write a namespace's definition to this device, before any block of it.

        Raises:
            NvmeFailed: the disk refused.
        """
        # May run in two threads at once: recording it again changes nothing.
        namespace_id = namespace.namespace_id
        if namespace_id not in self._recorded:
            self.files.record_namespace(namespace)
            self._recorded.add(namespace_id)

    def write_part(self, migration: Migration, namespace: Namespace, data: Octets) -> int:
        """Write and record one part; returns the checksum of the bytes on disk.

        Raises:
            NvmeFailed: the disk refused.
            ChecksumMismatch: `data` is not what was committed.
        """
        if checksum(data) != migration.checksum:
            raise ChecksumMismatch(f"part {migration.part} in memory is not what was committed")
        self.record_namespace(namespace)  # a restart forgets blocks of unknown namespaces
        stored, stored_sum = data, migration.checksum
        if migration.encoding == "fp8":
            stored = encode(namespace.layout, data)
            stored_sum = checksum(stored)
        self.files.write(migration.target, stored)
        self.files.record_put(
            migration.namespace_id,
            migration.block_hash,
            migration.parent,
            migration.part,
            migration.target,
            len(stored),
            stored_sum,
            migration.encoding,
        )
        return stored_sum

    def read_part(self, migration: Migration, namespace: Namespace, out: Octets) -> int:
        """Read one part into `out`; returns the checksum of the bytes in `out`.

        Raises:
            NvmeFailed: the disk refused.
            ChecksumMismatch: the bytes on disk are not those that were written (invariant 5).
        """
        stored = out
        if migration.encoding == "fp8":
            stored = np.empty(stored_bytes(namespace.layout, "fp8"), dtype=np.uint8)
        self.files.read(migration.source, stored)
        if checksum(stored) != migration.checksum:
            with suppress(NvmeFailed):  # the checksum finds a stale record again
                self.files.record_removed(migration.namespace_id, migration.block_hash)
            raise ChecksumMismatch(f"part {migration.part} on NVMe is not what was written")
        if migration.encoding != "fp8":
            return migration.checksum
        decode(namespace.layout, stored, out)
        return checksum(out)

    def close(self) -> None:
        """Wait for the running I/O and cancel the rest.

        Raises:
            NvmeFailed: the last sync failed.
        """
        for pool in (self.readers, self.writers):
            pool.shutdown(wait=True, cancel_futures=True)
        self.files.close()


class Devices:
    """All devices of a node, by number.

    Args:
        missing: directories that could not be opened, with the reason.
    """

    def __init__(self, devices: Sequence[Device], missing: dict[Path, str] | None = None) -> None:
        self._by_number = {device.number: device for device in devices}
        self.missing = missing or {}
        self.unrecovered: dict[
            str, str
        ] = {}  # namespaces that `recover_into` skipped, with the reason

    def __iter__(self) -> Iterator[Device]:
        return iter(self._by_number.values())

    def __getitem__(self, number: int) -> Device:
        return self._by_number[number]

    @property
    def can_write(self) -> bool:
        """Whether some device takes writes."""
        return self.writable > 0

    @property
    def writable(self) -> int:
        """How many devices take writes."""
        return sum(device.state == "ok" for device in self)

    @property
    def can_read(self) -> bool:
        """Whether some device can be read."""
        return any(device.state != "failed" for device in self)

    def states(self) -> dict[str, State]:
        """State of each directory, including those that could not be opened."""
        states: dict[str, State] = {str(device.directory): device.state for device in self}
        states.update((str(directory), "failed") for directory in self.missing)
        return states

    def slots(self, slab_bytes: int) -> ArenaAllocator:
        """An allocator over all devices, which takes them in turn."""
        return ArenaAllocator(
            [SlabAllocator(d.files.capacity_bytes, slab_bytes, d.number) for d in self], "spread"
        )

    def recover_into(self, store: Store, now: float) -> int:
        """Add the blocks on the devices to a new store. Reads verify each part later.

        Blocks with a missing part are forgotten. Namespaces that no longer fit this node, or each
        other, are skipped (see `unrecovered`): their blocks stay on disk until something overwrites
        them.

        Returns:
            How many parts the store took.


        Raises:
            NvmeFailed: a disk refused.
        """
        known: set[bytes] = set()
        for namespace in {n.namespace_id: n for d in self for n in d.files.namespaces()}.values():
            try:
                known.add(store.namespaces.register(namespace))
            except KvpoolError as error:
                self.unrecovered[namespace.name] = str(error)
                log.error(
                    "a namespace on NVMe is left out", namespace=namespace.name, error=str(error)
                )
        count = 0
        for device in self:
            for entry in device.files.recover():
                if entry.namespace_id not in known:
                    continue
                count += store.recovery.recover_part(
                    entry.namespace_id,
                    entry.block_hash,
                    entry.parent,
                    entry.part,
                    entry.place._replace(arena_id=device.number),  # its number since this start
                    entry.checksum,
                    entry.encoding,
                )
        for namespace_id, block_hash in store.recovery.discard_partial():
            self.record_removed(namespace_id, block_hash)
        return count

    def write_part(self, migration: Migration, namespace: Namespace, data: Octets) -> int:
        """`Device.write_part` on the migration's target. The other devices forget the part.

        A lost device may be back at the next start, with an older copy.
        """
        stored_sum = self[migration.target.arena_id].write_part(migration, namespace, data)
        for device in self:
            if device.number != migration.target.arena_id:
                device.files.forget(migration.namespace_id, migration.block_hash, migration.part)
        return stored_sum

    def record_removed(self, namespace_id: bytes, block_hash: bytes) -> None:
        """Remove a block from every device's manifest, so that no restart finds it.


        Raises:
            NvmeFailed: a disk refused.
        """
        for device in self:
            device.files.record_removed(namespace_id, block_hash)

    def close(self) -> None:
        """Close all devices, even if one fails."""
        for device in self:
            try:
                device.close()
            except NvmeFailed as error:
                log.error(
                    "closing an NVMe device failed",
                    directory=str(device.directory),
                    error=str(error),
                )


def open_devices(
    directories: Sequence[Path],
    total_bytes: int,
    *,
    fsync: FsyncPolicy = "interval",
    fsync_interval_s: float = 1.0,
) -> Devices:
    """Open every directory with an equal share of `total_bytes`.

    Directories that fail are logged and skipped, unless all fail.


    Raises:
        NvmeFailed: none of them can be used.
        ConfigError: one of them belongs to another node, or two are the same device.
    """
    opened: list[Device] = []
    missing: dict[Path, str] = {}
    failure: NvmeFailed | None = None
    try:
        for number, directory in enumerate(directories):
            try:
                files = NvmeFiles(
                    directory,
                    total_bytes // len(directories),
                    fsync=fsync,
                    fsync_interval_s=fsync_interval_s,
                )
                opened.append(Device(number, files))
            except NvmeFailed as error:
                failure = error
                missing[directory] = str(error)
                log.error("an NVMe device is left out", directory=str(directory), error=str(error))
        if failure is not None and not opened:
            raise failure
        _require_distinct(opened)
    except (NvmeFailed, ConfigError):
        Devices(opened).close()
        raise
    if any(device.is_new for device in opened) and not all(device.is_new for device in opened):
        log.warning(
            "some NVMe devices are new and some are not: is a disk not mounted?",
            directories=[str(device.directory) for device in opened if device.is_new],
        )
    return Devices(opened, missing)


def _require_distinct(devices: Sequence[Device]) -> None:
    by_identity: dict[str, Device] = {}
    for device in devices:
        other = by_identity.setdefault(device.identity, device)
        if other is not device:
            raise ConfigError(
                f"{device.directory} and {other.directory} are the same device {device.identity}",
                hint="one is a copy of the other: remove its files, or take it off the list",
            )


def _identity(files: NvmeFiles) -> tuple[str, bool]:
    """The directory's UUID, and whether the directory is new."""
    path = files.directory / "device"
    try:
        with suppress(FileNotFoundError):
            return str(uuid.UUID(path.read_text().strip())), False
        identity = str(uuid.uuid4())
        beside = path.with_suffix(".new")
        beside.write_text(identity + "\n")
        beside.rename(path)
        sync_directory(files.directory)
    except (OSError, ValueError) as error:
        raise NvmeFailed(f"cannot read or write {path}: {error}") from error
    return identity, not files.namespaces()
