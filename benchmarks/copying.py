"""Compares ways to copy and checksum 64 MiB from shared memory, as ratios to memcpy in the same run.

    python -m benchmarks.copying

Shows why `kvpool.transports.copy` checksums each chunk right after copying it, and on several
threads.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable

import numpy as np
import xxhash

from kvpool.transports.copy import copy, copy_and_sum, sum_runs

BLOCK_BYTES = 4 << 20
BLOCKS = 16
ROUNDS = 15


def median_s(work: Callable[[], object]) -> float:
    """Median seconds of `work`. The first call does not count."""
    times = []
    for _ in range(ROUNDS + 1):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return sorted(times[1:])[ROUNDS // 2]


def main() -> None:
    """Print one line for each way."""
    size = BLOCK_BYTES * BLOCKS
    fd = os.memfd_create("bench")
    os.ftruncate(fd, size)
    arena = np.frombuffer(mmap.mmap(fd, size), dtype=np.uint8)
    arena[:] = 3
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    steps = np.arange(BLOCKS, dtype=np.int64) * BLOCK_BYTES
    lengths = np.full(BLOCKS, BLOCK_BYTES, dtype=np.int64)
    there, here = arena.ctypes.data + steps, target.ctypes.data + steps
    memmove = ctypes.CDLL(None).memmove
    memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

    def one_memmove() -> None:
        memmove(target.ctypes.data, arena.ctypes.data, size)

    def copy_then_sum() -> None:
        one_memmove()
        for block in target.reshape(BLOCKS, -1):
            xxhash.xxh3_64_intdigest(block.data)

    ways: dict[str, Callable[[], object]] = {
        "memcpy between private buffers": lambda: np.copyto(target, source),
        "one memmove out of shared memory": one_memmove,
        "that, then a checksum of each block": copy_then_sum,
        "kvpool: copy": lambda: copy(here, there, lengths),
        "kvpool: checksums alone": lambda: sum_runs(there, lengths),
        "kvpool: copy_and_sum": lambda: copy_and_sum(here, there, lengths, sum_targets=True),
    }
    reference = median_s(ways["memcpy between private buffers"])
    for name, work in ways.items():
        seconds = median_s(work)
        print(f"{name:38} {size / seconds / 1e9:6.2f} GB/s  {reference / seconds:5.2f} of memcpy")


if __name__ == "__main__":
    main()
