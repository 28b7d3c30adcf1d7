"""The append-only log of the parts in the slab file, and its replay after a crash.

Each record has a marker, its length and its CRC-32. Replay cuts off a torn tail (kill -9, power
loss). It skips a damaged record and goes on at the next marker with a whole record. The last record
of a part wins, and a put on another part's bytes removes that part. If a removal is lost, the part
comes back, but its bytes have changed, and the checksum shows it on the next read (invariant 5).
Compaction writes a new file and renames it. Not thread-safe: `NvmeFiles` holds a lock.
"""

from __future__ import annotations

import os
import zlib
from contextlib import suppress
from pathlib import Path
from struct import Struct
from typing import NamedTuple

import msgspec
import structlog

from kvpool.blocks.layout import Namespace
from kvpool.errors import InvalidArgument, KvpoolError
from tiers.store.fp8 import Encoding
from tiers.store.slab_allocator import Place

log = structlog.get_logger(__name__)

MAGIC = b"kvpool-manifest-2\n"
MARKER = b"\xffkv\xfe"  # not UTF-8: no text inside a record looks like a marker
MAX_RECORD_BYTES = 65_536
MIN_DEAD_RECORDS = 1024  # compaction is not worth it below
_FRAME = Struct("<4sII")  # marker, bytes of the payload, CRC-32 of it
_REGION_BYTES = 1 << 20  # of the index by place

Key = tuple[bytes, bytes, int]


class NvmeFailed(KvpoolError):
    """The disk, or the filesystem on it, refused a read or a write."""

    code = "nvme_failed"


class NvmeEntry(NamedTuple):
    """One block part in the slab file."""

    namespace_id: bytes
    block_hash: bytes
    parent: bytes
    part: int
    place: Place
    length: int  # bytes on disk
    checksum: int  # of the bytes on disk
    encoding: Encoding = "as_is"  # see `tiers.store.fp8`

    @property
    def key(self) -> Key:
        """Identifies the part; there is at most one entry per key."""
        return self.namespace_id, self.block_hash, self.part


class _Record(msgspec.Struct, array_like=True, tag=True):
    """Base of all records; append fields only, with defaults."""


class _Put(_Record, tag="put"):
    namespace_id: bytes
    block_hash: bytes
    parent: bytes
    part: int
    arena_id: int
    offset: int
    length: int
    checksum: int
    encoding: Encoding = "as_is"  # a record with an unknown one is skipped


class _Removed(_Record, tag="removed"):
    namespace_id: bytes
    block_hash: bytes
    part: int  # -1: all


class _Known(_Record, tag="namespace"):
    namespace: Namespace


_AnyRecord = _Put | _Removed | _Known
_decoder = msgspec.msgpack.Decoder(_AnyRecord)


class Index:
    """The live entries, by key and by place."""

    def __init__(self) -> None:
        self.entries: dict[Key, NvmeEntry] = {}
        self._parts: dict[tuple[bytes, bytes], dict[int, None]] = {}
        self._regions: dict[int, dict[Key, None]] = {}

    def put(self, entry: NvmeEntry) -> None:
        """Add `entry`; it replaces entries with its key or on its bytes."""
        self.remove(entry.key)
        for old in self.overlapping(entry.place, entry.length):
            self.remove(old.key)
        self.entries[entry.key] = entry
        self._parts.setdefault(entry.key[:2], {})[entry.part] = None
        for region in _regions(entry.place, entry.length):
            self._regions.setdefault(region, {})[entry.key] = None

    def remove(self, key: Key) -> None:
        """Forget `key`; an unknown one is ignored."""
        entry = self.entries.pop(key, None)
        if entry is None:
            return
        parts = self._parts[key[:2]]
        del parts[entry.part]
        if not parts:
            del self._parts[key[:2]]
        for region in _regions(entry.place, entry.length):
            keys = self._regions[region]
            del keys[key]
            if not keys:
                del self._regions[region]

    def parts(self, namespace_id: bytes, block_hash: bytes, part: int) -> list[Key]:
        """Keys of a block's known parts: of `part`, or of all for -1."""
        if part >= 0:
            key = (namespace_id, block_hash, part)
            return [key] if key in self.entries else []
        known = self._parts.get((namespace_id, block_hash), ())
        return [(namespace_id, block_hash, part) for part in known]

    def overlapping(self, place: Place, length: int) -> list[NvmeEntry]:
        """Entries that share a byte with `length` bytes at `place`."""
        keys = {
            key: None for region in _regions(place, length) for key in self._regions.get(region, ())
        }
        entries = [self.entries[key] for key in keys]
        end = place.offset + length
        return [
            e for e in entries if e.place.offset < end and place.offset < e.place.offset + e.length
        ]


class Manifest:
    """One manifest file, replayed when it is opened.

    Args:
        path: created with mode 0600 if it does not exist: namespaces hold tenants' salts.

    Raises:
        NvmeFailed: the file cannot be read or written, or is not a manifest.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.index = Index()
        self.namespaces: dict[bytes, Namespace] = {}
        self._records = 0
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise NvmeFailed(f"cannot open {path}: {error}") from error
        try:
            self._size = self._replay(path.read_bytes())
            os.ftruncate(self._fd, self._size)
        except OSError as error:
            os.close(self._fd)
            raise NvmeFailed(f"cannot read {path}: {error}") from error
        except KvpoolError:
            os.close(self._fd)
            raise

    def put(self, entry: NvmeEntry) -> None:
        """Record a part whose bytes are written.


        Raises:
            NvmeFailed: the record could not be written; nothing changed.
            InvalidArgument: it would exceed `MAX_RECORD_BYTES`; nothing changed.
        """
        self._append(_put_record(entry))
        self.index.put(entry)
        self._compact_if_due()

    def remove(self, namespace_id: bytes, block_hash: bytes, part: int) -> None:
        """Record that a part (-1: every part) of a block is removed.


        Raises:
            NvmeFailed: the record could not be written; nothing changed.
        """
        keys = self.index.parts(namespace_id, block_hash, part)
        if keys:
            self._append(_Removed(namespace_id, block_hash, part))
            for key in keys:
                self.index.remove(key)
            self._compact_if_due()

    def add_namespace(self, namespace: Namespace) -> None:
        """Record a namespace, so that a restart can recover its blocks.


        Raises:
            NvmeFailed: the record could not be written; nothing changed.
            InvalidArgument: it would exceed `MAX_RECORD_BYTES`; nothing changed.
        """
        if namespace.namespace_id not in self.namespaces:
            self._append(_Known(namespace))
            self.namespaces[namespace.namespace_id] = namespace

    def sync(self) -> None:
        """Sync the log to the disk, so that it survives a power failure.


        Raises:
            NvmeFailed: the disk failed.
        """
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise NvmeFailed(f"cannot sync {self._path}: {error}") from error

    def close(self) -> None:
        """Close the file; nothing is written."""
        os.close(self._fd)

    # ------------------------------------------------------------ within

    def _replay(self, data: bytes) -> int:
        """Apply all whole records; returns the offset where the last one ends."""
        if len(data) < len(MAGIC) and MAGIC.startswith(data):
            os.pwrite(self._fd, MAGIC, 0)
            return len(MAGIC)
        if not data.startswith(MAGIC):
            raise NvmeFailed(
                f"{self._path} is not a manifest of this version",
                hint="move the directory's files away; its blocks are lost to the pool",
            )
        size = start = len(MAGIC)
        skipped = skipped_bytes = 0
        while start >= 0:
            found = _record_at(data, start)
            if found is None:
                start = data.find(MARKER, start + 1)
                continue
            record, end = found
            if start != size:
                skipped += 1
                skipped_bytes += start - size
            self._apply(record)
            self._records += 1
            size = start = end
        if skipped:
            log.error(
                "skipped damaged stretches of the manifest",
                path=str(self._path),
                stretches=skipped,
                lost_bytes=skipped_bytes,
                orphans=self._forget_orphans(),
            )
        if size != len(data):
            log.warning("cut a torn manifest", path=str(self._path), lost_bytes=len(data) - size)
        return size

    def _forget_orphans(self) -> int:
        """Forget the entries whose namespace was lost; returns how many."""
        orphans = [key for key in self.index.entries if key[0] not in self.namespaces]
        for key in orphans:
            self.index.remove(key)
        return len(orphans)

    def _apply(self, record: _AnyRecord) -> None:
        if isinstance(record, _Put):
            place = Place(record.arena_id, record.offset)
            self.index.put(
                NvmeEntry(
                    record.namespace_id,
                    record.block_hash,
                    record.parent,
                    record.part,
                    place,
                    record.length,
                    record.checksum,
                    record.encoding,
                )
            )
        elif isinstance(record, _Removed):
            for key in self.index.parts(record.namespace_id, record.block_hash, record.part):
                self.index.remove(key)
        else:
            self.namespaces[record.namespace.namespace_id] = record.namespace

    def _append(self, record: _AnyRecord) -> None:
        data = _framed(record)
        if len(data) > _FRAME.size + MAX_RECORD_BYTES:
            raise InvalidArgument(
                f"a manifest record of {len(data)} bytes", hint=f"at most {MAX_RECORD_BYTES}"
            )
        try:
            write_all(self._fd, data, self._size)
        except OSError as error:
            # Cut off the part that was written. If this fails too, the next record overwrites it.
            with suppress(OSError):
                os.ftruncate(self._fd, self._size)
            raise NvmeFailed(f"cannot append to {self._path}: {error}") from error
        self._size += len(data)
        self._records += 1

    def _compact_if_due(self) -> None:
        live = len(self.index.entries) + len(self.namespaces)
        dead = self._records - live
        if dead < MIN_DEAD_RECORDS or dead < live:
            return
        # After a failure the old file stays in use: whole, but longer than needed.
        try:
            self._compact()
        except OSError as error:
            log.warning("could not compact the manifest", path=str(self._path), error=str(error))
            self._records = live  # retry after as many more dead records

    def _compact(self) -> None:
        records: list[_AnyRecord] = [_Known(namespace) for namespace in self.namespaces.values()]
        records += [_put_record(entry) for entry in self.index.entries.values()]
        data = MAGIC + b"".join(map(_framed, records))
        beside = self._path.with_suffix(".new")
        fd = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            write_all(fd, data, 0)
            os.fsync(fd)
            os.rename(beside, self._path)
        except OSError:
            os.close(fd)
            raise
        os.close(self._fd)
        self._fd, self._size, self._records = fd, len(data), len(records)
        sync_directory(self._path.parent)


def sync_directory(path: Path) -> None:
    """Sync a directory, so that its renames and new names survive a power failure."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _regions(place: Place, length: int) -> range:
    return range(place.offset // _REGION_BYTES, (place.offset + length - 1) // _REGION_BYTES + 1)


def _put_record(entry: NvmeEntry) -> _Put:
    return _Put(
        entry.namespace_id,
        entry.block_hash,
        entry.parent,
        entry.part,
        entry.place.arena_id,
        entry.place.offset,
        entry.length,
        entry.checksum,
        entry.encoding,
    )


def _framed(record: _AnyRecord) -> bytes:
    payload = msgspec.msgpack.encode(record)
    return _FRAME.pack(MARKER, len(payload), zlib.crc32(payload)) + payload


def _record_at(data: bytes, start: int) -> tuple[_AnyRecord, int] | None:
    """The record at `start` and its end; None if it is torn or damaged."""
    if start + _FRAME.size > len(data):
        return None
    marker, length, crc = _FRAME.unpack_from(data, start)
    if marker != MARKER or length > MAX_RECORD_BYTES:
        return None
    start += _FRAME.size
    payload = data[start : start + length]
    if len(payload) < length or zlib.crc32(payload) != crc:
        return None
    try:
        record: _AnyRecord = _decoder.decode(payload)
    except (msgspec.MsgspecError, KvpoolError):  # KvpoolError: an invalid namespace
        return None
    return record, start + length


def write_all(fd: int, data: bytes, offset: int) -> None:
    """Write all of `data`, in as many calls as needed."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
