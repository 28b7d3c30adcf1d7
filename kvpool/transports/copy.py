"""Copying and checksumming host memory as fast as the machine allows, outside the GIL.

A checksum costs a second pass over the bytes. If both passes go chunk by chunk, the second finds
its bytes in the cache. Measured on 2 cores (benchmarks/copying.py), as ratios to memcpy of the same
64 MiB: copy 1.0; copy, then checksum 0.55; chunk by chunk, checksum of the target after the copy
0.81, of the source before it 0.92. One core nearly fills the memory bandwidth there: two threads
reached 0.6 to 0.7, so half of the cores take part. Copying to memory that is not aligned to 64
bytes (numpy's is not) costs another tenth.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import xxhash

from kvpool.errors import DeadlineExceeded

Int64Array = npt.NDArray[np.int64]
Sums = npt.NDArray[np.uint64]

CHUNK_BYTES = 256 << 10  # fits into a core's second-level cache together with its source
PARALLEL_FROM_BYTES = 4 << 20  # below it, waking a thread costs more time than it saves
MAX_THREADS = 4

_memmove = ctypes.CDLL(None).memmove  # releases the GIL while it copies
_memmove.restype = None
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None


def copy(
    targets: Int64Array,
    sources: Int64Array,
    lengths: Int64Array,
    deadline: float = float("inf"),
) -> None:
    """Copy `lengths[i]` bytes from address `sources[i]` to `targets[i]`, for all i.

    Nothing checks the addresses.

    Raises:
        DeadlineExceeded: `deadline` (monotonic seconds) passed; no further run was begun.
    """
    rows = list(zip(targets.tolist(), sources.tolist(), lengths.tolist(), strict=True))

    def work(first: int, last: int) -> None:
        for target, source, length in rows[first:last]:
            _check(deadline)
            _memmove(target, source, length)

    _spread(work, lengths)


def copy_and_sum(
    targets: Int64Array,
    sources: Int64Array,
    lengths: Int64Array,
    deadline: float = float("inf"),
    *,
    sum_targets: bool,
    per_sum: int = 1,
) -> Sums:
    """`copy`, and the xxh3-64 of each `per_sum` successive runs taken together, in one pass.

    Args:
        sum_targets: sum the targets after the copy (for a reader); otherwise the sources before it
            (for a writer), so that the first reader finds damage that the copy did.
    """
    rows = list(zip(targets.tolist(), sources.tolist(), lengths.tolist(), strict=True))
    sums = np.empty(len(rows) // per_sum, dtype=np.uint64)

    def work(first: int, last: int) -> None:
        for i in range(first, last):
            hasher = xxhash.xxh3_64()
            for target, source, length in rows[i * per_sum : (i + 1) * per_sum]:
                _check(deadline)
                view = _bytes_at(target if sum_targets else source, length)
                for at in range(0, length, CHUNK_BYTES):
                    step = min(CHUNK_BYTES, length - at)
                    if not sum_targets:
                        hasher.update(view[at : at + step])
                    _memmove(target + at, source + at, step)
                    if sum_targets:
                        hasher.update(view[at : at + step])
            sums[i] = hasher.intdigest()

    _spread(work, lengths.reshape(-1, per_sum).sum(axis=1))
    return sums


def sum_runs(addresses: Int64Array, lengths: Int64Array, per_sum: int = 1) -> Sums:
    """The xxh3-64 of each `per_sum` successive runs of `lengths[i]` bytes at `addresses[i]`."""
    rows = list(zip(addresses.tolist(), lengths.tolist(), strict=True))
    sums = np.empty(len(rows) // per_sum, dtype=np.uint64)

    def work(first: int, last: int) -> None:
        for i in range(first, last):
            if per_sum == 1:
                sums[i] = xxhash.xxh3_64_intdigest(_bytes_at(*rows[i]))
                continue
            hasher = xxhash.xxh3_64()
            for address, length in rows[i * per_sum : (i + 1) * per_sum]:
                hasher.update(_bytes_at(address, length))
            sums[i] = hasher.intdigest()

    _spread(work, lengths.reshape(-1, per_sum).sum(axis=1))
    return sums


def _check(deadline: float) -> None:
    if time.monotonic() >= deadline:
        raise DeadlineExceeded("the deadline passed before all bytes were copied")


def _bytes_at(address: int, length: int) -> memoryview:
    return memoryview((ctypes.c_char * length).from_address(address)).cast("B")


def _spread(work: Callable[[int, int], None], lengths: Int64Array) -> None:
    """Run `work(first, last)` over all rows, in the caller's thread and in helper threads."""
    count = len(lengths)
    total = int(lengths.sum())
    shares = min(_threads(), count)
    if total < PARALLEL_FROM_BYTES or shares < 2:
        work(0, count)
        return
    edges = np.searchsorted(np.cumsum(lengths), np.linspace(0, total, shares + 1)[1:-1]).tolist()
    cuts = [0, *edges, count]
    helpers: list[Future[None]] = [
        _helpers().submit(work, first, last) for first, last in itertools.pairwise(cuts[1:])
    ]
    try:
        work(cuts[0], cuts[1])
    finally:
        for helper in helpers:
            helper.result()


def _threads() -> int:
    return max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) // 2))


def _helpers() -> ThreadPoolExecutor:
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="kvpool-copy")
        return _pool
