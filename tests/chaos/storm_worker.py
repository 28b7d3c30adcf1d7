"""A writer or reader of the storm, as a process of its own: acts at random until SIGTERM or kill -9.

    python -m tests.chaos.storm_worker writer|reader shm|nixl NODE_ADDRESS SEED REPORT

What it saw stands in the last whole line of REPORT (a `Report` as JSON), written after every call, so that it
outlives a kill. It exits with 0 when SIGTERM came and its last call ended.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from kvpool import AsyncPool
from kvpool.errors import (
    DeadlineExceeded,
    KvpoolError,
    LeaseExpired,
    NoRoom,
    ReservationGone,
)
from kvpool.transports import Pieces, TransportName
from tests.chaos.keyed import NAMESPACE, SIZE, contents, prompt, wrong_blocks

PROMPTS = 40
PROMPT_BLOCKS = 16
# What a full pool or a busy machine may answer. A checksum that does not match is none of these.
EXPECTED = (NoRoom, LeaseExpired, ReservationGone, DeadlineExceeded)


class Report(msgspec.Struct):
    """Totals of one process since it started."""

    calls: int = 0
    outcomes: dict[str, int] = {}
    blocks_written: int = 0
    blocks_checked: int = 0
    wrong: list[str] = []
    unexpected: list[str] = []
    worst_overrun_s: float = 0.0  # seconds past the time-out that the slowest call had
    worst_call: str = ""


class Worker:
    """One process of the storm.

    Args:
        pool: through which it acts; it speaks to the one node.
        report_fd: where the report is appended.
    """

    def __init__(self, pool: AsyncPool, rng: random.Random, report_fd: int) -> None:
        self.report = Report()
        self.is_over = False
        self._pool = pool
        self._rng = rng
        self._fd = report_fd
        self._prompts = [prompt(number, PROMPT_BLOCKS) for number in range(PROMPTS)]

    async def run(self, acts: Sequence[Callable[[list[bytes], float], Awaitable[None]]]) -> None:
        """Act at random until `is_over`."""
        parent = os.getppid()
        while not self.is_over and os.getppid() == parent:
            act = self._rng.choice(acts)
            hashes = self._rng.choice(self._prompts)[: self._rng.randint(1, PROMPT_BLOCKS)]
            await act(hashes, self._rng.uniform(0.5, 4.0))
            line = msgspec.json.encode(self.report) + b"\n"
            os.write(self._fd, line)

    async def _timed(self, call: Awaitable[Any], what: str, timeout_s: float) -> Any:
        """The answer of a call, or None where it failed; how long it took goes into the report."""
        started = time.monotonic()
        outcome, answer = "ok", None
        try:
            answer = await call
        except EXPECTED as error:
            outcome = error.code
        except KvpoolError as error:
            outcome = error.code
            self.report.unexpected.append(f"{what}: {error}")
        overrun = time.monotonic() - started - timeout_s
        if overrun > self.report.worst_overrun_s:
            self.report.worst_overrun_s, self.report.worst_call = overrun, what
        self.report.calls += 1
        key = f"{what}:{outcome}"
        self.report.outcomes[key] = self.report.outcomes.get(key, 0) + 1
        return answer

    # ------------------------------------------------------------ writers

    async def put(self, hashes: list[bytes], timeout_s: float) -> None:
        """Write a prompt's blocks in one call."""
        data = contents(hashes)
        call = self._pool.put(NAMESPACE, hashes, data, timeout_s=timeout_s)
        answer = await self._timed(call, "put", timeout_s)
        self.report.blocks_written += answer.stored if answer else 0

    async def put_slowly(self, hashes: list[bytes], timeout_s: float) -> None:
        """Reserve, write block by block as a prefill does, commit half on the way: time to be killed in."""
        link = await self._pool.directory.only_link(time.monotonic() + timeout_s)
        reserving = link.reserve(
            NAMESPACE, hashes, parent=b"", part=0, ttl_s=2.0, timeout_s=timeout_s
        )
        reservation = await self._timed(reserving, "reserve", timeout_s)
        if reservation is None or not reservation.granted:
            return
        rows = contents([hashes[index] for index in reservation.granted])
        sums: list[int] = []
        for index in range(len(rows)):
            await asyncio.sleep(self._rng.uniform(0.0, 0.04))
            piece = Pieces(
                np.array([rows[index].ctypes.data]),
                reservation.places[index : index + 1],
                np.array([SIZE]),
                rows,
            )
            writing = link.write(piece, timeout_s=timeout_s, deadline=reservation.deadline)
            written = await self._timed(writing, "write", timeout_s)
            if written is None:
                # A write that was given up may still arrive.
                await self._end(link, reservation.reservation_id, False, timeout_s)
                return
            sums += [int(value) for value in written]
        if self._rng.random() < 0.2:
            await self._end(link, reservation.reservation_id, True, timeout_s)
            return
        for half in (range(0, len(rows) // 2), range(len(rows) // 2, len(rows))):
            if half:
                committing = link.commit(
                    reservation.reservation_id,
                    [sums[index] for index in half],
                    timeout_s=timeout_s,
                    indices=list(half),
                )
                done = await self._timed(committing, "commit", timeout_s)
                self.report.blocks_written += done or 0

    async def _end(self, link: Any, number: int, has_stopped: bool, timeout_s: float) -> None:
        aborting = link.abort(number, writer_stopped=has_stopped, timeout_s=timeout_s)
        await self._timed(aborting, "abort", timeout_s)

    # ------------------------------------------------------------ readers

    async def get(self, hashes: list[bytes], timeout_s: float) -> None:
        """Read a prompt's leading run and compare each byte."""
        out = np.empty((len(hashes), SIZE), dtype=np.uint8)
        call = self._pool.get(NAMESPACE, hashes, out, timeout_s=timeout_s)
        answer = await self._timed(call, "get", timeout_s)
        if answer is None:
            return
        if answer.miss_reason == "checksum":
            self.report.wrong.append("checksum")
        elif answer.miss_reason in ("unavailable", "transfer_failed", "stale_epoch"):
            self.report.unexpected.append(f"get: {answer.miss_reason}")
        self._check(hashes[: answer.found], out[: answer.found])

    async def pin_and_read(self, hashes: list[bytes], timeout_s: float) -> None:
        """Hold blocks, linger (beyond the lease at times), read them, let go (or not)."""
        ttl_s = self._rng.uniform(0.1, 1.0)
        call = self._pool.pin(NAMESPACE, hashes, ttl_s=ttl_s, part=0, timeout_s=timeout_s)
        pinned = await self._timed(call, "pin", timeout_s)
        if pinned is None or not pinned.found:
            return
        # A fifth of them beyond lease and grace, when the slots may be anybody's.
        patience_s = ttl_s if self._rng.random() < 0.8 else 3.0
        await asyncio.sleep(self._rng.uniform(0.0, patience_s))
        out = np.empty((pinned.found, SIZE), dtype=np.uint8)
        reading = self._pool.read_pinned(pinned, out, timeout_s=timeout_s)
        read = await self._timed(reading, "read_pinned", timeout_s)
        if read is not None:
            self._check(hashes[:read], out[:read])
        if self._rng.random() < 0.8:
            pinned.release()

    async def look_ahead(self, hashes: list[bytes], timeout_s: float) -> None:
        """Look up and prefetch, without a read."""
        await self._timed(
            self._pool.lookup(NAMESPACE, hashes, timeout_s=timeout_s), "lookup", timeout_s
        )
        await self._timed(
            self._pool.prefetch(NAMESPACE, hashes, timeout_s=timeout_s), "prefetch", timeout_s
        )

    def _check(self, hashes: Sequence[bytes], rows: np.ndarray) -> None:
        self.report.blocks_checked += len(hashes)
        self.report.wrong += wrong_blocks(hashes, rows)


async def main(role: str, transport: str, address: str, seed: int, report: Path) -> None:
    """Run one worker until SIGTERM."""
    fd = os.open(report, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    rng = random.Random(seed)
    pool = AsyncPool(
        node=address,
        host_label="here",
        transport=cast(TransportName, transport),
        # Half of the readers compare nothing themselves: only the bytes' own law can catch a fault there.
        verify_checksums=rng.random() < 0.5,
    )
    async with pool:
        worker = Worker(pool, rng, fd)
        asyncio.get_running_loop().add_signal_handler(
            signal.SIGTERM, lambda: setattr(worker, "is_over", True)
        )
        await pool.connect(timeout_s=30.0)
        if role == "writer":
            await worker.run([worker.put, worker.put, worker.put_slowly])
        else:
            await worker.run(
                [worker.get, worker.get, worker.get, worker.pin_and_read, worker.look_ahead]
            )
    os.close(fd)


if __name__ == "__main__":
    role, transport, address, seed, report = sys.argv[1:]
    asyncio.run(main(role, transport, address, int(seed), Path(report)))
