"""Registered buffers between scattered memory and transfers of few large runs.

Their number is bounded. A buffer is free when neither the caller, who packs into it or unpacks from
it, nor a transfer holds it. If a transfer outlives its deadline, its buffer stays held, in
quarantine, until the transfer ends (invariant 2).
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from kvpool.transports.base import Pieces
from kvpool.transports.copy import CHUNK_BYTES, Int64Array, Sums, copy, copy_and_sum, sum_runs

BUFFER_BYTES = 16 << 20
MAX_BUFFERS = 4


class StagingBuffer:
    """One buffer. Each `hold` needs a `release`."""

    def __init__(self, pool: Staging) -> None:
        self._pool = pool
        self._map = mmap.mmap(-1, BUFFER_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._map.madvise(mmap.MADV_HUGEPAGE)  # halves the time of a copy between processes
        self.bytes = np.frombuffer(self._map, dtype=np.uint8)
        self.address = int(self.bytes.ctypes.data)
        self.holders = 0

    def hold(self) -> None:
        """Keep the buffer from being reused until `release`."""
        self._pool._count(self, 1)

    def release(self) -> None:
        """End one `hold`. The last one frees the buffer."""
        self._pool._count(self, -1)


class SpareBuffer:
    """Memory for one transfer, used if no staging buffer fits. References keep it alive."""

    def __init__(self, size_bytes: int) -> None:
        self.bytes = np.empty(size_bytes, dtype=np.uint8)
        self.address = int(self.bytes.ctypes.data)

    def hold(self) -> None:
        """Does nothing: the memory is used once."""

    def release(self) -> None:
        """Does nothing."""


Buffer = StagingBuffer | SpareBuffer


class Staging:
    """The buffers of one transport.

    Args:
        register: registers a new buffer with the transport; called once for each, in the caller's
            thread.
    """

    def __init__(self, register: Callable[[StagingBuffer], None]) -> None:
        self._register = register
        self._lock = threading.Lock()
        self._free: list[StagingBuffer] = []
        self._made = 0

    def take(self) -> StagingBuffer | None:
        """A free buffer, held once; None if all are in use.

        Raises:
            KvpoolError: a new buffer could not be registered.
        """
        with self._lock:
            buffer = self._free.pop() if self._free else None
            if buffer is None:
                if self._made == MAX_BUFFERS:
                    return None
                self._made += 1
        if buffer is None:
            buffer = StagingBuffer(self)
            try:
                self._register(buffer)
            except BaseException:
                with self._lock:
                    self._made -= 1
                raise
        buffer.hold()
        return buffer

    @property
    def free(self) -> int:
        """How many buffers `take` could return now."""
        with self._lock:
            return len(self._free) + MAX_BUFFERS - self._made

    def _count(self, buffer: StagingBuffer, change: int) -> None:
        with self._lock:
            buffer.holders += change
            if not buffer.holders:
                self._free.append(buffer)


def packed(pieces: Pieces, buffer: Buffer) -> Pieces:
    """The same runs with `buffer` as their local side, one after the other.

    Contiguous neighbours are joined.
    """
    local = addresses_in(buffer, pieces)
    return Pieces(local, pieces.places, pieces.lengths, buffer).coalesced()


def addresses_in(buffer: Buffer, pieces: Pieces) -> Int64Array:
    """The address of each run in the buffer."""
    starts: Int64Array = buffer.address + np.cumsum(pieces.lengths) - pieces.lengths
    return starts


def pack(pieces: Pieces, buffer: Buffer) -> None:
    """Copy local memory into the buffer."""
    rows = _rows(pieces)
    if rows is not None:
        np.take(*rows, axis=0, out=_view(pieces, buffer), mode="clip")
        return
    copy(addresses_in(buffer, pieces), pieces.local, pieces.lengths)


def unpack(pieces: Pieces, buffer: Buffer) -> None:
    """Copy the buffer to local memory."""
    rows = _rows(pieces)
    if rows is not None:
        memory, numbers = rows
        memory[numbers] = _view(pieces, buffer)
        return
    copy(pieces.local, addresses_in(buffer, pieces), pieces.lengths)


def unpack_and_sum(pieces: Pieces, buffer: Buffer) -> Sums:
    """`unpack`, and the xxh3-64 of each `per_sum` runs in local memory afterwards."""
    if pieces.total_bytes < CHUNK_BYTES * len(pieces.lengths):
        unpack(pieces, buffer)
        return sum_runs(pieces.local, pieces.lengths, pieces.per_sum)
    return copy_and_sum(
        pieces.local,
        addresses_in(buffer, pieces),
        pieces.lengths,
        sum_targets=True,
        per_sum=pieces.per_sum,
    )


def _view(pieces: Pieces, buffer: Buffer) -> np.ndarray:
    return buffer.bytes[: pieces.total_bytes].reshape(len(pieces.lengths), -1)


def _rows(pieces: Pieces) -> tuple[np.ndarray, Int64Array] | None:
    """The local runs as rows of one array, and their row numbers; None if they fit no grid.

    numpy copies such rows in one call.
    """
    length, first = int(pieces.lengths[0]), int(pieces.local.min())
    offsets = pieces.local - first
    if length >= CHUNK_BYTES:
        return None  # one call for each long run costs little, and lets other threads run
    if (pieces.lengths != length).any() or (offsets % length).any():
        return None
    span = int(offsets.max()) + length
    # Only the named rows are touched; memory between them may be unmapped.
    span_at: Any = (ctypes.c_uint8 * span).from_address(first)
    memory = np.frombuffer(span_at, dtype=np.uint8)
    return memory.reshape(-1, length), offsets // length
