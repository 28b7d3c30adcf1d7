"""Moves blocks between DRAM and NVMe beside the traffic: the store plans, threads do the I/O.

Every move verifies the checksum of what it read before the copy may be read (invariant 5). A move is the
mover's own from the moment it begins: whoever asked for it may leave, the slots stay held until the I/O is over,
and its true result reaches the store. A failing disk turns the NVMe tier off and says so; nobody's request
fails for it, and no block is dropped for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import structlog

from kvpool.errors import ChecksumMismatch, KvpoolError
from kvpool.hashing import checksum
from kvpool.layout import Namespace
from tiers.arena import Arena
from tiers.bandwidth import ByteQueue, Throughput
from tiers.blocks import Move
from tiers.manifest import NvmeFailed
from tiers.nvme import NvmeFiles
from tiers.store import Store

log = structlog.get_logger(__name__)

BATCH_BLOCKS = 16  # demoted together; their slots are held meanwhile
TICK_S = 0.25
POLL_S = 0.01  # for blocks that somebody else brings into DRAM

Job = Callable[[Move], None]


class Mover:
    """Carries out the store's moves.

    Reads and writes have threads of their own, so that no promotion, which a request waits for, ever queues
    behind demotions, for which nobody does.

    Args:
        files: the NVMe tier; None where the node has none.
        threads: how many disk operations may be under way at once, half of them writes; at least one each.
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
        self.is_disk_failed = False  # nothing is written any more
        self.can_promote = (
            True  # until a read fails: after a failed write, what stands there is still good
        )
        self._store = store
        self._arenas = {arena.arena_id: arena for arena in arenas}
        self._files = files
        self._clock = clock
        writers = max(1, threads // 2)
        self._writers = ThreadPoolExecutor(writers, thread_name_prefix="kvpool-disk-write")
        self._readers = ThreadPoolExecutor(
            max(1, threads - writers), thread_name_prefix="kvpool-disk-read"
        )
        self.read_speed, self.write_speed = Throughput(), Throughput()
        self._speed_lock = threading.Lock()  # the threads feed them
        self._queue = ByteQueue()  # promotions, by move id
        self._recorded: set[bytes] = set()  # namespace ids that the manifest has
        self._promotions: dict[tuple[bytes, bytes], dict[int, asyncio.Future[None]]] = {}
        self._wake = asyncio.Event()
        self._defect: BaseException | None = None

    # ------------------------------------------------------------ namespaces

    def keep_namespace(self, namespace: Namespace) -> None:
        """Have a namespace's definition written to the disk, so that its blocks can be found again.

        Returns at once. What fails is logged and counted; blocks of the namespace are not demoted before
        its record is written.
        """
        namespace_id = namespace.namespace_id
        if self._files is None or self.is_disk_failed or namespace_id in self._recorded:
            return
        work = asyncio.wrap_future(self._writers.submit(self._record, namespace))
        work.add_done_callback(lambda ended: self._namespace_kept(namespace, ended))

    def _record(self, namespace: Namespace) -> None:
        # In a thread, and perhaps in two at once: recording it again changes nothing.
        assert self._files is not None
        namespace_id = namespace.namespace_id
        if namespace_id not in self._recorded:
            self._files.record_namespace(namespace)
            self._recorded.add(namespace_id)

    def _namespace_kept(self, namespace: Namespace, work: asyncio.Future[None]) -> None:
        error = None if work.cancelled() else work.exception()
        if error is None:
            return
        self.counters["namespaces_not_kept"] += 1
        log.error("a namespace was not recorded", namespace=namespace.name, error=str(error))
        self._judge(error)

    # ------------------------------------------------------------ demotion

    def wake(self) -> None:
        """There may be something to demote."""
        self._wake.set()

    async def run(self) -> None:
        """Expire and demote until cancelled.

        Raises:
            StoreCorrupt, or whatever else a move met that no disk and no caller can be blamed for.
        """
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._wake.wait()
            self._wake.clear()
            if self._defect is not None:
                raise self._defect
            self._store.expire(self._clock())
            if self._files is None or self.is_disk_failed:
                continue
            moves = self._store.plan_demotions(BATCH_BLOCKS, self._clock())
            if moves:
                await asyncio.wait([self._begin(move) for move in moves])
                self._wake.set()

    # ------------------------------------------------------------ promotion

    def begin(self, moves: Sequence[Move]) -> list[asyncio.Future[None]]:
        """Start promotions; they go on to their end whatever becomes of the caller.

        Returns what is done when each has ended; wait for these, never cancel them. After a read from the
        disk failed the moves are cancelled instead: see `can_promote`.
        """
        if not self.can_promote:
            self._store.cancel_moves(moves, self._clock())
            return []
        return [self._begin(move) for move in moves]

    async def promote(self, moves: Sequence[Move]) -> None:
        """Bring blocks into DRAM; when this returns every move has ended, one way or the other."""
        works = self.begin(moves)
        if works:
            await asyncio.wait(works)

    async def wait_for_run(
        self, namespace_id: bytes, hashes: Sequence[bytes], timeout_s: float
    ) -> None:
        """Until every promotion of these blocks that is under way has ended, or the time is over."""
        works = [
            work
            for name in hashes
            for work in self._promotions.get((namespace_id, name), {}).values()
        ]
        if works:
            await asyncio.wait(works, timeout=timeout_s)
        else:
            await asyncio.sleep(min(timeout_s, POLL_S))

    # ------------------------------------------------------------ costs

    @property
    def queued_read_bytes(self) -> int:
        """Promotions under way or waiting."""
        return self._queue.size_bytes

    def waits(
        self, namespace_id: bytes, hashes: Sequence[bytes], tiers: Sequence[str]
    ) -> list[float] | None:
        """Seconds until each block of a leading run stands in DRAM, as if its promotion began now.

        Args:
            tiers: where each stands, from `Store.lookup`.

        Returns:
            None while the disk's speed is not known and something would have to be read.
        """
        namespace = self._store.namespace(namespace_id)
        waits: list[float] = []
        own_bytes = 0
        wait_s = 0.0
        for name, tier in zip(hashes, tiers, strict=False):
            if tier == "nvme":
                under_way = self._promotions.get((namespace_id, name), ())
                if under_way:
                    needed = max(map(self._queue.bytes_until, under_way))
                else:
                    own_bytes += namespace.layout.block_bytes
                    needed = self._queue.size_bytes + own_bytes
                operations = len(self._queue) + own_bytes // namespace.layout.part_bytes
                with self._speed_lock:
                    seconds = self.read_speed.seconds(needed, operations)
                if seconds is None:
                    return None
                wait_s = max(wait_s, seconds)
            waits.append(wait_s)
        return waits

    # ------------------------------------------------------------ on the event loop

    def _begin(self, move: Move) -> asyncio.Future[None]:
        is_promotion = move.target_tier == "dram"
        if is_promotion:
            submitted = self._readers.submit(self._read, move)
        else:
            namespace = self._store.namespace(move.namespace_id)
            submitted = self._writers.submit(self._write, move, namespace)
        work = asyncio.wrap_future(submitted)
        if is_promotion:
            self._promotions.setdefault(_block(move), {})[move.move_id] = work
            self._queue.enter(move.move_id, move.length)
        # Before anybody can wait for it: whoever does finds the store settled.
        work.add_done_callback(lambda ended: self._settle(move, ended))
        return work

    def _settle(self, move: Move, work: asyncio.Future[None]) -> None:
        self._queue.leave(move.move_id)
        works = self._promotions.get(_block(move), {})
        if works.pop(move.move_id, None) is not None and not works:
            del self._promotions[_block(move)]
        try:
            self._finish(move, work)
        except KvpoolError as defect:
            self._fail(defect)

    def _finish(self, move: Move, work: asyncio.Future[None]) -> None:
        now = self._clock()
        if work.cancelled():  # it never began: the mover was closed
            self._store.cancel_moves([move], now)
            return
        error = work.exception()
        self._store.finish_move(move.move_id, error is None, now)
        if error is None:
            kind = "bytes_promoted" if move.target_tier == "dram" else "bytes_demoted"
            self.counters[kind] += move.length
        elif isinstance(error, ChecksumMismatch):
            self.counters["corrupt_blocks"] += 1
            log.error("dropping a corrupt block", block=move.block_hash.hex(), error=str(error))
            self._store.drop(move.namespace_id, move.block_hash, "checksum", now)
        else:
            if move.target_tier == "dram":
                self.can_promote = False
            self._judge(error)

    def _judge(self, error: BaseException) -> None:
        if isinstance(error, NvmeFailed):
            self.counters["disk_errors"] += 1
            if not self.is_disk_failed:
                self.is_disk_failed = True
                log.error("NVMe tier is off after an error", error=str(error))
        elif isinstance(error, KvpoolError):  # one record or place that the files refuse
            self.counters["disk_refusals"] += 1
            log.error("the NVMe files refused a move", error=str(error))
        else:
            self._fail(error)

    def _fail(self, defect: BaseException) -> None:
        """Have the owner of `run` see it."""
        self._defect = self._defect or defect
        self._wake.set()

    # ------------------------------------------------------------ in threads

    def _write(self, move: Move, namespace: Namespace) -> None:
        assert self._files is not None
        data = self._arenas[move.source.arena_id].view(move.source.offset, move.length)
        if checksum(data) != move.checksum:
            raise ChecksumMismatch(f"part {move.part} in DRAM is not what was committed")
        self._record(namespace)  # a block that no namespace explains could never be recovered
        with self._timed(self.write_speed, move.length):
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

    def _read(self, move: Move) -> None:
        assert self._files is not None
        target = self._arenas[move.target.arena_id].view(move.target.offset, move.length)
        with self._timed(self.read_speed, move.length):
            self._files.read(move.source, target)
        if checksum(target) != move.checksum:
            with contextlib.suppress(NvmeFailed):  # a record too many is found out again
                self._files.record_removed(move.namespace_id, move.block_hash)
            raise ChecksumMismatch(f"part {move.part} on NVMe is not what was written")

    @contextlib.contextmanager
    def _timed(self, speed: Throughput, size_bytes: int) -> Iterator[None]:
        with self._speed_lock:
            operation = speed.begin(self._clock())
        moved = 0
        try:
            yield
            moved = size_bytes
        finally:
            with self._speed_lock:
                speed.end(operation, moved, self._clock())

    def close(self) -> None:
        """Wait for the I/O under way; what has not begun never will."""
        for pool in (self._readers, self._writers):
            pool.shutdown(wait=True, cancel_futures=True)


def _block(move: Move) -> tuple[bytes, bytes]:
    return move.namespace_id, move.block_hash
