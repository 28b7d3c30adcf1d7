"""Moves blocks between DRAM and NVMe beside the traffic: the store plans, threads do the I/O.

Every promotion verifies the checksum before the block may be read (invariant 5); a failing disk turns the
NVMe tier off and says so, and nobody's request fails for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import structlog

from kvpool.errors import KvpoolError
from kvpool.hashing import checksum
from kvpool.layout import Namespace
from tiers.arena import Arena
from tiers.blocks import Move
from tiers.manifest import NvmeFailed
from tiers.nvme import NvmeFiles
from tiers.store import Store

log = structlog.get_logger(__name__)

BATCH_BLOCKS = 16
TICK_S = 0.25


class Mover:
    """Carries out the store's moves.

    Args:
        files: the NVMe tier; None where the node has none.
        threads: how many disk operations may be under way at once.
    """

    def __init__(
        self,
        store: Store,
        arenas: Sequence[Arena],
        files: NvmeFiles | None,
        *,
        threads: int = 4,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self.is_disk_failed = False
        self._store = store
        self._arenas = {arena.arena_id: arena for arena in arenas}
        self._files = files
        self._clock = clock
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kvpool-disk")
        self._wake = asyncio.Event()
        self._moved = asyncio.Event()

    def keep_namespace(self, namespace: Namespace) -> None:
        """Write a namespace's definition to the disk, so that its blocks can be found again."""
        if self._files is None or self.is_disk_failed:
            return
        try:
            self._files.record_namespace(namespace)
        except NvmeFailed as error:
            self._disk_failed(error)

    def wake(self) -> None:
        """There may be something to demote."""
        self._wake.set()

    async def wait_for_a_move(self, timeout_s: float) -> None:
        """Until some move has ended, or the time is over: somebody else promotes what we need."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._moved.wait()

    async def run(self) -> None:
        """Expire and demote until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._wake.wait()
            self._wake.clear()
            self._store.expire(self._clock())
            if self._files is None or self.is_disk_failed:
                continue
            moves = self._store.plan_demotions(BATCH_BLOCKS, self._clock())
            if moves:
                await asyncio.gather(*(self._demote(move) for move in moves))
                self._wake.set()

    async def _demote(self, move: Move) -> None:
        is_done = False
        try:
            is_done = await self._in_thread(self._write, move)
        finally:
            self._finish(move, is_done)

    def _finish(self, move: Move, is_done: bool) -> None:
        self._store.finish_move(move.move_id, is_done, self._clock())
        self._moved.set()
        self._moved = asyncio.Event()

    async def promote(self, moves: Sequence[Move]) -> None:
        """Bring blocks into DRAM; when this returns each move has succeeded or its block is dropped."""
        await asyncio.gather(*(self._promote(move) for move in moves))

    async def _promote(self, move: Move) -> None:
        is_done = False
        try:
            is_done = await self._in_thread(self._read, move)
        finally:
            self._finish(move, is_done)
            if not is_done:
                self._store.drop(move.namespace_id, move.block_hash, "checksum", self._clock())

    async def _in_thread(self, job: Callable[[Move], bool], move: Move) -> bool:
        # Shielded: the slots of a move stay held until the I/O that may touch them is over.
        future = asyncio.get_running_loop().run_in_executor(self._pool, job, move)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            raise

    def _write(self, move: Move) -> bool:
        assert self._files is not None
        data = self._arenas[move.source.arena_id].view(move.source.offset, move.length)
        if checksum(data) != move.checksum:
            self.counters["corrupt_blocks"] += 1
            return False
        try:
            self._files.write(move.target, data)
            self._files.record_put(
                move.namespace_id,
                move.block_hash,
                move.parent,
                move.part,
                move.target,
                move.length,
                move.checksum,
            )
        except NvmeFailed as error:
            self._disk_failed(error)
            return False
        self.counters["bytes_demoted"] += move.length
        return True

    def _read(self, move: Move) -> bool:
        assert self._files is not None
        target = self._arenas[move.target.arena_id].view(move.target.offset, move.length)
        try:
            self._files.read(move.source, target)
        except NvmeFailed as error:
            self._disk_failed(error)
            return False
        if checksum(target) != move.checksum:
            self.counters["corrupt_blocks"] += 1
            log.error("a block on NVMe failed its checksum", block=move.block_hash.hex())
            with contextlib.suppress(NvmeFailed):
                self._files.record_removed(move.namespace_id, move.block_hash)
            return False
        self.counters["bytes_promoted"] += move.length
        return True

    def _disk_failed(self, error: KvpoolError) -> None:
        self.counters["disk_errors"] += 1
        if not self.is_disk_failed:
            self.is_disk_failed = True
            log.error("NVMe tier is off after an error; going on with DRAM alone", error=str(error))

    def close(self) -> None:
        """Wait for the I/O under way."""
        self._pool.shutdown(wait=True)
