"""The NVMe tier's files: a preallocated slab file, read and written with O_DIRECT, and a manifest.

Synchronous and thread-safe: the node calls every method from threads. The store decides which bytes
go where. Crash-safe (invariant 8): a part is recorded after its bytes are written, and the part
that was there is recorded as removed before its bytes are overwritten.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import structlog

from kvpool.blocks.hashing import checksum as checksum_of
from kvpool.blocks.layout import Namespace
from kvpool.errors import ConfigError, InvalidArgument, WrongByteCount
from tiers.disk.manifest import Manifest, NvmeEntry, NvmeFailed, sync_directory
from tiers.store.fp8 import Encoding
from tiers.store.slab_allocator import Place

__all__ = ["FsyncPolicy", "NvmeEntry", "NvmeFailed", "NvmeFiles", "NvmeInUse"]

log = structlog.get_logger(__name__)

Octets = npt.NDArray[np.uint8]
FsyncPolicy = Literal["always", "interval", "never"]
PAGE_BYTES = 4096
FORGET_S = 0.1  # writing a record takes microseconds
BOUNCE_BYTES = 4 << 20  # per thread, for memory without page alignment


# Why preadv and pwritev in threads (benchmarks/disk.py: O_DIRECT, shuffled blocks of 1 and 4 MiB,
# ratios to four threads in three runs): NIXL's POSIX backend reads 1.00 to 1.08 and writes 0.90 to
# 1.14 times as fast by AIO and io_uring with all blocks in one transfer, 0.61 to 1.02 in transfers
# as small as a batch of moves; aiofiles 0.70 to 1.04, and 0.13 to 1.11 through the page cache.
# Queues of thousands win for blocks of 64 KiB alone (1.7 to 3.4), in batches of 16 not either: 0.96
# to 1.42 beside 1.23 to 2.01 of threads.


class NvmeInUse(ConfigError):
    """Another node holds the directory."""

    code = "nvme_in_use"


class NvmeFiles:
    """The slab file and manifest in one directory.

    Args:
        directory: created if it does not exist; locked against a second node while open.
        capacity_bytes: size of the slab file, rounded up to pages; allocated at once, so that a
            full disk shows now. A smaller size than before truncates the file and forgets the parts
            beyond.
        alignment: every place is a multiple of it.
        fsync: "always": a part and its record survive a power failure once `record_put` returns;
            "interval": those older than `fsync_interval_s` do; "never": they may be lost. A killed
            process loses nothing in any mode, and the checksum shows bytes that a power failure
            lost.
        clock: monotonic seconds, for the interval.

    Raises:
        NvmeInUse: another process has the directory open.
        NvmeFailed: the files cannot be created, allocated or read.
        InvalidArgument: a size is not positive or the alignment not a multiple of a page.
    """

    def __init__(
        self,
        directory: Path | str,
        capacity_bytes: int,
        *,
        alignment: int = PAGE_BYTES,
        fsync: FsyncPolicy = "interval",
        fsync_interval_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if capacity_bytes < 1 or alignment < PAGE_BYTES or alignment % PAGE_BYTES:
            raise InvalidArgument(f"capacity_bytes={capacity_bytes}, alignment={alignment}")
        self.directory = Path(directory)
        self.capacity_bytes = -(-capacity_bytes // PAGE_BYTES) * PAGE_BYTES
        self._alignment = alignment
        self._fsync = fsync
        self._fsync_interval_s = fsync_interval_s
        self._clock = clock
        self._synced_at = clock()
        self._lock = threading.Lock()  # of the manifest
        self._local = threading.local()
        self._is_closed = False
        self._path = self.directory / "slabs"
        self._lock_fd = _lock_directory(self.directory)
        try:
            self._fd, self.is_direct = _open_slabs(self._path, self.capacity_bytes)
        except OSError as error:
            os.close(self._lock_fd)
            raise NvmeFailed(
                f"cannot set up {self._path} with {self.capacity_bytes} bytes: {error}",
                hint="free space on the filesystem or lower nvme_bytes",
            ) from error
        try:
            self._manifest = Manifest(self.directory / "manifest")
        except NvmeFailed:
            os.close(self._fd)
            os.close(self._lock_fd)
            raise

    def __enter__(self) -> NvmeFiles:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ------------------------------------------------------------ bytes

    def write(self, place: Place, buffer: Any) -> None:
        """Write `buffer` (contiguous bytes) to `place`; remove the manifest's records there first.

        Call `record_put` afterwards to record the new bytes.


        Raises:
            NvmeFailed: the disk refused. InvalidArgument: the place is outside the file or not
                aligned.
        """
        data = np.frombuffer(buffer, dtype=np.uint8)
        self._check(place, len(data))
        with self._lock:
            for entry in self._manifest.index.overlapping(place, _padded(len(data))):
                self._manifest.remove(entry.namespace_id, entry.block_hash, entry.part)
        offset = place.offset
        try:
            for views, _, _ in self._pieces(data, is_write=True):
                offset += _transfer(os.pwritev, self._fd, views, offset)
        except OSError as error:
            raise NvmeFailed(f"cannot write {len(data)} bytes at {place}: {error}") from error

    def read(self, place: Place, out: Any) -> None:
        """Fill `out` (writable, contiguous) from `place`. The caller verifies it (invariant 5).


        Raises:
            NvmeFailed: the disk refused. InvalidArgument: the place is outside the file or not
                aligned.
            WrongByteCount: `out` cannot be written to.
        """
        data = np.frombuffer(out, dtype=np.uint8)
        if not data.flags.writeable:
            raise WrongByteCount("the buffer to read into is read-only")
        self._check(place, len(data))
        offset = place.offset
        try:
            for views, bounced, target in self._pieces(data, is_write=False):
                offset += _transfer(os.preadv, self._fd, views, offset)
                target[:] = bounced[: len(target)]
        except OSError as error:
            raise NvmeFailed(f"cannot read {len(data)} bytes at {place}: {error}") from error

    # ------------------------------------------------------------ manifest

    def record_namespace(self, namespace: Namespace) -> None:
        """Record a namespace's definition with its blocks; recording it again changes nothing.


        Raises:
            NvmeFailed: the disk refused.
        """
        with self._lock:
            self._manifest.add_namespace(namespace)
            self._sync_if_due()

    def record_put(
        self,
        namespace_id: bytes,
        block_hash: bytes,
        parent: bytes,
        part: int,
        place: Place,
        length: int,
        checksum: int,
        encoding: Encoding = "as_is",
    ) -> None:
        """Record a part that `write` has written to `place`; from now on a restart finds it.

        Args:
            length: bytes on disk.
            checksum: of the bytes on disk.
            encoding: how the part is stored.


        Raises:
            NvmeFailed: the disk refused; the part is not recorded.
        """
        self._check(place, length)
        if self._fsync == "always":
            self._sync_data()  # outside the lock, so that other threads' records do not wait
        entry = NvmeEntry(namespace_id, block_hash, parent, part, place, length, checksum, encoding)
        with self._lock:
            self._manifest.put(entry)
            self._sync_if_due()

    def record_removed(self, namespace_id: bytes, block_hash: bytes, part: int = -1) -> None:
        """Record that a part (-1: all parts) of a block is removed; unknown ones are ignored.

        `write` does so for the parts that it overwrites. Call it for blocks that must not come
        back.


        Raises:
            NvmeFailed: the disk refused.
        """
        with self._lock:
            self._manifest.remove(namespace_id, block_hash, part)
            self._sync_if_due()

    def forget(self, namespace_id: bytes, block_hash: bytes, part: int) -> None:
        """Forget a part that is stored elsewhere now. Does nothing if the manifest is busy."""
        if not self._lock.acquire(timeout=FORGET_S):
            return  # a slow sync must not delay other devices; a stale record costs a miss
        try:
            with suppress(NvmeFailed):
                self._manifest.remove(namespace_id, block_hash, part)
        finally:
            self._lock.release()

    def namespaces(self) -> list[Namespace]:
        """The recorded namespaces."""
        with self._lock:
            return list(self._manifest.namespaces.values())

    def recover(self, *, verify: bool = False) -> list[NvmeEntry]:
        """The recorded parts, in the order in which they were written.

        Args:
            verify: read every part, and remove those whose checksum is wrong. Otherwise a
                wrong checksum shows on the next read.


        Raises:
            NvmeFailed: the disk refused.
        """
        with self._lock:
            entries = list(self._manifest.index.entries.values())
        kept = []
        for entry in entries:
            is_inside = entry.place.offset + entry.length <= self.capacity_bytes
            if is_inside and (not verify or self._is_intact(entry)):
                kept.append(entry)
            else:
                self.record_removed(*entry.key)
        return kept

    def sync(self) -> None:
        """Sync bytes and records to the disk, so that they survive a power failure.


        Raises:
            NvmeFailed: the disk refused.
        """
        self._sync_data()
        with self._lock:
            self._manifest.sync()

    def close(self) -> None:
        """Sync (unless fsync is "never"), close the files and release the lock."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if self._fsync != "never":
                self.sync()
        finally:
            self._manifest.close()
            os.close(self._fd)
            os.close(self._lock_fd)

    # ------------------------------------------------------------ within

    def _check(self, place: Place, length: int) -> None:
        if self._is_closed:
            raise NvmeFailed(f"{self._path} is closed")
        end = place.offset + _padded(length)
        if (
            length < 1
            or place.offset < 0
            or place.offset % self._alignment
            or end > self.capacity_bytes
        ):
            raise InvalidArgument(f"{length} bytes at {place} of {self.capacity_bytes}")

    def _is_intact(self, entry: NvmeEntry) -> bool:
        data = np.empty(entry.length, dtype=np.uint8)
        self.read(entry.place, data)
        return checksum_of(data) == entry.checksum

    def _sync_data(self) -> None:
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise NvmeFailed(f"cannot sync {self._path}: {error}") from error

    def _sync_if_due(self) -> None:
        now = self._clock()
        if self._fsync == "never":
            return
        if self._fsync == "interval":
            if now - self._synced_at < self._fsync_interval_s:
                return
            self._sync_data()
        self._manifest.sync()
        self._synced_at = now

    def _pieces(
        self, data: Octets, *, is_write: bool
    ) -> Iterator[tuple[list[memoryview], Octets, Octets]]:
        """Cut `data` into transfers for O_DIRECT: (views, bounce buffer, the bytes that bounce).

        Page-aligned memory is used directly, except for a tail shorter than a page. Other memory
        bounces.
        """
        whole = len(data) // PAGE_BYTES * PAGE_BYTES if not data.ctypes.data % PAGE_BYTES else 0
        views = [data[:whole].data] if whole else []
        position = whole
        while position < len(data) or views:
            part = data[position : position + BOUNCE_BYTES]
            bounce = self._bounce()[: _padded(len(part))]
            if is_write:
                bounce[: len(part)] = part
                bounce[len(part) :] = 0
            yield [*views, bounce.data] if len(part) else views, bounce, part
            views = []
            position += len(part)

    def _bounce(self) -> Octets:
        buffer = getattr(self._local, "bounce", None)
        if buffer is None:
            buffer = self._local.bounce = np.frombuffer(mmap.mmap(-1, BOUNCE_BYTES), dtype=np.uint8)
        return buffer


def _padded(length: int) -> int:
    return -(-length // PAGE_BYTES) * PAGE_BYTES


def _transfer(
    call: Callable[[int, Any, int], int], fd: int, views: list[memoryview], offset: int
) -> int:
    """Call preadv or pwritev until all views are transferred; returns the bytes."""
    total = 0
    while views:
        done = call(fd, views, offset + total)
        if not done:
            raise OSError(errno.EIO, "the file ended early")
        total += done
        while views and done >= len(views[0]):
            done -= len(views[0])
            views = views[1:]
        if done:
            views = [views[0][done:], *views[1:]]
    return total


def _lock_directory(directory: Path) -> int:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise NvmeFailed(f"cannot use {directory}: {error}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise NvmeInUse(
            f"{directory} is in use by another node", hint="give each node its own directory"
        ) from error
    return fd


def _open_slabs(path: Path, capacity_bytes: int) -> tuple[int, bool]:
    """Open the slab file and allocate all its bytes; returns whether O_DIRECT works."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600)
    try:
        os.ftruncate(fd, min(capacity_bytes, os.fstat(fd).st_size))
        os.posix_fallocate(fd, 0, capacity_bytes)
        os.fsync(fd)
        sync_directory(path.parent)
    except OSError:
        os.close(fd)
        raise
    try:
        direct = os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        reason: OSError = error
    else:
        try:
            os.preadv(direct, [mmap.mmap(-1, PAGE_BYTES)], 0)
        except OSError as error:
            os.close(direct)
            reason = error
        else:
            os.close(fd)
            return direct, True
    log.warning("the filesystem refuses O_DIRECT: buffered I/O", path=str(path), reason=str(reason))
    return fd, False
