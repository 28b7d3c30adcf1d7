"""Compares ways to read and write blocks of a file, as ratios to the NVMe tier's own way in the same run.

    python -m benchmarks.disk [--directory /mnt/nvme] [--mib 256] [--json]

Shows why `tiers.disk.slab_file` uses preadv and pwritev in threads. All but the buffered rows go
around the page cache (O_DIRECT); buffered reads find it empty, and buffered writes end with an
fdatasync. Blocks come in a shuffled order, as the pool's do, so that no way gains by merging
neighbours. Rounds of all ways alternate, so that a slow moment of the machine hits all of them; the
median counts.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.transports.nixl_agent import NixlUnavailable, load_nixl, prepare_environment

BLOCK_BYTES = (64 << 10, 1 << 20, 4 << 20)
THREADS = (1, 2, 4, 8)
REFERENCE = "preadv/pwritev, 4 threads"
ROUNDS = 5
RUN = 16  # blocks that a node moves together

Way = Callable[[bool, int], None]  # (is write, block bytes): move the whole file once


class Disk:
    """One preallocated file, and prefaulted memory of the same size."""

    def __init__(self, directory: Path, size: int) -> None:
        self.path = directory / "kvpool-disk-benchmark"
        self.size = size
        self.direct = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self.direct, 0, size)
        self.memory = memoryview(mmap.mmap(-1, size))
        self.address = int(np.frombuffer(self.memory, dtype=np.uint8).ctypes.data)
        for start in range(0, size, 1 << 20):
            self.memory[start : start + (1 << 20)] = os.urandom(1 << 20)
            os.pwritev(self.direct, [self.memory[start : start + (1 << 20)]], start)
        os.fsync(self.direct)

    def starts(self, block_bytes: int) -> list[int]:
        """The offsets of the blocks, in the order in which they are moved."""
        order = np.random.default_rng(1).permutation(self.size // block_bytes)
        return [int(i) * block_bytes for i in order]

    def empty_page_cache(self) -> None:
        """Make the next buffered read go to the disk."""
        os.fsync(self.direct)
        os.posix_fadvise(self.direct, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Remove the file."""
        os.close(self.direct)
        self.path.unlink()


def in_threads(disk: Disk, threads: int, run: int = 1) -> Way:
    """preadv and pwritev as in `tiers.disk.slab_file`, with `run` blocks per task of the thread pool."""
    pool = ThreadPoolExecutor(threads)

    def blocks(is_write: bool, block_bytes: int, starts: list[int]) -> None:
        call = os.pwritev if is_write else os.preadv
        for start in starts:
            done = call(disk.direct, [disk.memory[start : start + block_bytes]], start)
            assert done == block_bytes

    def way(is_write: bool, block_bytes: int) -> None:
        starts = disk.starts(block_bytes)
        runs = [starts[i : i + run] for i in range(0, len(starts), run)]
        list(pool.map(functools.partial(blocks, is_write, block_bytes), runs))

    return way


@contextmanager
def in_nixl(disk: Disk, engine: str, run: int = 0) -> Iterator[Way]:
    """NIXL's POSIX backend: all blocks in one transfer, or `run` blocks per transfer.

    Raises:
        NixlUnavailable: NIXL, or this engine of it, cannot be used here.
    """
    prepare_environment(loopback_only=True)
    api = load_nixl()
    name = f"disk-benchmark-{engine}-{run}"
    agent: Any = api.nixl_agent(
        name,
        api.nixl_agent_config(enable_prog_thread=False, enable_listen_thread=False, backends=[]),
    )
    try:
        agent.create_backend("POSIX", {engine: "true"})
    except Exception as error:  # native errors come as several unrelated types
        raise NixlUnavailable(f"no {engine} here: {error}") from error
    memory = agent.register_memory([(disk.address, disk.size, 0, "")], "DRAM", ["POSIX"])
    file = agent.register_memory([(0, disk.size, disk.direct, "")], "FILE", ["POSIX"])

    def transfer_of(is_write: bool, block_bytes: int, starts: npt.NDArray[np.uint64]) -> None:
        rows = np.zeros((len(starts), 3), dtype=np.uint64)
        rows[:, 0], rows[:, 1] = starts + np.uint64(disk.address), block_bytes
        local = agent.get_xfer_descs(rows, "DRAM")
        rows[:, 0], rows[:, 2] = starts, disk.direct
        there = agent.get_xfer_descs(rows, "FILE")
        transfer = agent.initialize_xfer(
            "WRITE" if is_write else "READ", local, there, name, backends=["POSIX"]
        )
        state = agent.transfer(transfer)
        while state == "PROC":
            state = agent.check_xfer_state(transfer)
        assert state == "DONE", state
        transfer.release()

    def way(is_write: bool, block_bytes: int) -> None:
        starts = np.array(disk.starts(block_bytes), dtype=np.uint64)
        for first in range(0, len(starts), run or len(starts)):
            transfer_of(is_write, block_bytes, starts[first : first + (run or len(starts))])

    try:
        yield way
    finally:
        agent.deregister_memory(file)
        agent.deregister_memory(memory)


def in_aiofiles(disk: Disk, files: int, *, is_direct: bool) -> Way:
    """aiofiles: `files` tasks, each with its own handle, block after block.

    Raises:
        ImportError: it is not installed.
    """
    import aiofiles  # type: ignore[import-untyped, unused-ignore]

    def opener(path: str, flags: int) -> int:
        return os.open(path, flags | (os.O_DIRECT if is_direct else 0))

    async def run(is_write: bool, block_bytes: int) -> None:
        starts = iter(disk.starts(block_bytes))

        async def work() -> None:
            async with aiofiles.open(disk.path, "r+b", buffering=0, opener=opener) as file:
                for start in starts:
                    view = disk.memory[start : start + block_bytes]
                    await file.seek(start)
                    moved: Awaitable[int] = file.write(view) if is_write else file.readinto(view)
                    assert await moved == block_bytes

        await asyncio.gather(*(work() for _ in range(files)))

    def way(is_write: bool, block_bytes: int) -> None:
        asyncio.run(run(is_write, block_bytes))
        if is_write and not is_direct:
            os.fdatasync(disk.direct)

    return way


def ways_here(disk: Disk, stack: ExitStack) -> dict[str, Way]:
    """All ways that work on this machine. Prints those that do not."""
    ways: dict[str, Way] = {}
    for threads in THREADS:
        label = f"preadv/pwritev, {threads} thread{'s' if threads > 1 else ''}"
        ways[label] = in_threads(disk, threads)
    ways[f"4 threads, {RUN} blocks a task"] = in_threads(disk, 4, RUN)
    for label, engine, run in (
        ("NIXL POSIX, AIO", "use_aio", 0),
        (f"NIXL POSIX, AIO, {RUN} a transfer", "use_aio", RUN),
        ("NIXL POSIX, io_uring", "use_uring", 0),
    ):
        try:
            ways[label] = stack.enter_context(in_nixl(disk, engine, run))
        except NixlUnavailable as error:
            print(f"left out: {label}: {error}")
    try:
        ways["aiofiles, O_DIRECT, 4 files"] = in_aiofiles(disk, 4, is_direct=True)
        ways["aiofiles, buffered, 4 files"] = in_aiofiles(disk, 4, is_direct=False)
    except ImportError as error:
        print(f"left out: aiofiles: {error}")
    return ways


def measure(disk: Disk, ways: dict[str, Way]) -> list[dict[str, Any]]:
    """GB/s of every way, direction and block size, and its ratio to the reference."""
    rows: list[dict[str, Any]] = []
    for block_bytes in BLOCK_BYTES:
        for is_write in (False, True):
            took: dict[str, list[float]] = {label: [] for label in ways}
            for _ in range(ROUNDS):
                for label, way in ways.items():
                    disk.empty_page_cache()
                    started = time.perf_counter()
                    way(is_write, block_bytes)
                    took[label].append(time.perf_counter() - started)
            reference = statistics.median(took[REFERENCE])
            for label, times in took.items():
                seconds = statistics.median(times)
                rows.append(
                    {
                        "block_bytes": block_bytes,
                        "direction": "write" if is_write else "read",
                        "way": label,
                        "gb_per_s": round(disk.size / seconds / 1e9, 3),
                        "ratio": round(reference / seconds, 3),
                    }
                )
    return rows


def main() -> None:
    """Measure and print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--mib", type=int, default=256, help="size of the file")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with closing(Disk(options.directory, options.mib << 20)) as disk, ExitStack() as stack:
        rows = measure(disk, ways_here(disk, stack))
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    print(f"{options.mib} MiB file, median of {ROUNDS}; ratio to {REFERENCE}")
    for row in rows:
        print(
            f"{row['block_bytes'] >> 10:5} KiB {row['direction']:5}  {row['way']:30}"
            f"{row['gb_per_s']:6.2f} GB/s  {row['ratio']:5.2f}"
        )


if __name__ == "__main__":
    main()
