"""The NVMe tier's devices: a directory with slab file, manifest and threads for each, used side by side.

Each is whole by itself: its manifest says what stands on it, and a place's `arena_id` is its number
    in this life of the node. So devices may come in another order, or one may be missing, at the
    next start: what stands on the others is found. A device that refuses a write is only read from
    then on; one that refuses a read is lost.

Encodes and decodes parts (`tiers.store.fp8`) on the way. Decides nothing about blocks: that is the
store's.
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

THREADS = 8  # of one device, half of them for writes; two and two make 0.7 to 1.0 of it (benchmarks/disk.py)
State = Literal["ok", "read_only", "failed"]


class Device:
    """One directory of the NVMe tier, and the threads that work on it.

    Reads and writes have threads of their own, so that no promotion, which a request waits for,
    ever queues behind demotions, for which nobody does; and so has each device, so that a slow one
    holds up no other.

    Args:
        number: goes into every place as `arena_id`.
        files: opened; closed by `close`, or at once when this fails.
        threads: how many operations may be under way at once, half of them writes; at least one
            each.

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
        """The namespace's definition is on this device."""
        return namespace_id in self._recorded

    # Called in threads.

    def record_namespace(self, namespace: Namespace) -> None:
        """Have a namespace's definition on this device, before any block of it.

        Raises:
            NvmeFailed: the disk refused.
        """
        # Perhaps in two threads at once: recording it again changes nothing.
        namespace_id = namespace.namespace_id
        if namespace_id not in self._recorded:
            self.files.record_namespace(namespace)
            self._recorded.add(namespace_id)

    def write_part(self, move: Migration, namespace: Namespace, data: Octets) -> int:
        """Write and record one part; returns the checksum of the bytes on disk.

        Raises:
            NvmeFailed: the disk refused.
            ChecksumMismatch: `data` is not what was committed.
        """
        if checksum(data) != move.checksum:
            raise ChecksumMismatch(f"part {move.part} in memory is not what was committed")
        self.record_namespace(namespace)  # a block that none explains could never be recovered
        stored, stored_sum = data, move.checksum
        if move.encoding == "fp8":
            stored = encode(namespace.layout, data)
            stored_sum = checksum(stored)
        self.files.write(move.target, stored)
        self.files.record_put(
            move.namespace_id,
            move.block_hash,
            move.parent,
            move.part,
            move.target,
            len(stored),
            stored_sum,
            move.encoding,
        )
        return stored_sum

    def read_part(self, move: Migration, namespace: Namespace, out: Octets) -> int:
        """Read one part into `out`; returns the checksum of what is there now.

        Raises:
            NvmeFailed: the disk refused.
            ChecksumMismatch: the bytes on disk are not those that were written (invariant 5).
        """
        stored = out
        if move.encoding == "fp8":
            stored = np.empty(stored_bytes(namespace.layout, "fp8"), dtype=np.uint8)
        self.files.read(move.source, stored)
        if checksum(stored) != move.checksum:
            with suppress(NvmeFailed):  # a record too many is found out again
                self.files.record_removed(move.namespace_id, move.block_hash)
            raise ChecksumMismatch(f"part {move.part} on NVMe is not what was written")
        if move.encoding != "fp8":
            return move.checksum
        decode(namespace.layout, stored, out)
        return checksum(out)

    def close(self) -> None:
        """Wait for the I/O under way; what has not begun never will.

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
        self.unrecovered: dict[str, str] = {}  # namespaces that `recover_into` left out, and why

    def __iter__(self) -> Iterator[Device]:
        return iter(self._by_number.values())

    def __getitem__(self, number: int) -> Device:
        return self._by_number[number]

    @property
    def can_write(self) -> bool:
        """Some device takes blocks."""
        return self.writable > 0

    @property
    def writable(self) -> int:
        """How many devices take blocks."""
        return sum(device.state == "ok" for device in self)

    @property
    def can_read(self) -> bool:
        """Some device gives blocks."""
        return any(device.state != "failed" for device in self)

    def states(self) -> dict[str, State]:
        """State of each directory, those that could not be opened included."""
        states: dict[str, State] = {str(device.directory): device.state for device in self}
        states.update((str(directory), "failed") for directory in self.missing)
        return states

    def slots(self, slab_bytes: int) -> ArenaAllocator:
        """Room on all of them, taken in turn."""
        return ArenaAllocator(
            [SlabAllocator(d.files.capacity_bytes, slab_bytes, d.number) for d in self], "spread"
        )

    def recover_into(self, store: Store, now: float) -> int:
        """Offer what stands on them to a new store; each part is verified when it is read.

        Returns how many parts it took in. Blocks of which some part is missing are forgotten.
        Namespaces that do not fit this node any more, or each other, are left out (see
        `unrecovered`): their blocks stay on disk until something else is written there.

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
                    entry.place._replace(arena_id=device.number),  # as of this life
                    entry.checksum,
                    entry.encoding,
                )
        for namespace_id, block_hash in store.recovery.discard_partial():
            self.record_removed(namespace_id, block_hash)
        return count

    def write_part(self, move: Migration, namespace: Namespace, data: Octets) -> int:
        """`Device.write_part` on the move's target; no other device tells of the part at the next start.

        A lost device may be back by then, with an older copy or none.
        """
        stored_sum = self[move.target.arena_id].write_part(move, namespace, data)
        for device in self:
            if device.number != move.target.arena_id:
                device.files.forget(move.namespace_id, move.block_hash, move.part)
        return stored_sum

    def record_removed(self, namespace_id: bytes, block_hash: bytes) -> None:
        """A block must not come back: its parts may stand on any device.

        Raises:
            NvmeFailed: a disk refused.
        """
        for device in self:
            device.files.record_removed(namespace_id, block_hash)

    def close(self) -> None:
        """Close them all, whatever happens to one of them."""
        for device in self:
            try:
                device.close()
            except NvmeFailed as error:
                log.error(
                    "an NVMe device did not close well",
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

    Of several, those that fail are left out and said so: the node goes on with the others.

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
            "new NVMe devices beside known ones: is a disk not mounted?",
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
    """The UUID kept in the directory, and whether nothing stood there before."""
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
