"""Reading blocks from the pool into vLLM's pages, in a thread of its own.

Pages in host memory are read into directly: over shared memory one pass copies and verifies, and the pool's client
sees to it that no transfer arrives there late. For pages on a device bytes arrive in a staging buffer, are
verified there, and go to their pages in one indexed copy a buffer while the next one fills. Either way a transfer
that was given up never meets pages that vLLM has reused.
"""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_all
from dataclasses import dataclass

import numpy as np
import structlog
import torch

from kvpool.client.async_pool import AsyncPool
from kvpool.client.data.buffers import BlockSpans
from kvpool.client.data.layered import LayeredReader
from kvpool.client.node.deadlines import time_left
from kvpool.engines.vllm.layers import Progress
from kvpool.engines.vllm.metadata import LoadJob
from kvpool.engines.vllm.threads import DeviceEvent
from kvpool.engines.vllm.transfer_thread import Rank, TransferThread
from kvpool.errors import DeadlineExceeded, KvpoolError
from kvpool.wire import messages as m

log = structlog.get_logger(__name__)

LATE_S = 5.0  # a read that was given up ends by its own deadline; after so long it is worth a line


@dataclass(slots=True, frozen=True)
class EndedLoad:
    """What became of a load: all of it, or pages that hold nothing of use."""

    request_id: str
    is_layerwise: bool
    bad_pages: tuple[int, ...]
    size: int
    seconds: float

    @property
    def is_good(self) -> bool:
        """Whether all was read."""
        return not self.bad_pages


class Loader(TransferThread[tuple[LoadJob, DeviceEvent, Progress | None, float], EndedLoad]):
    """Loads one job after another."""

    def __init__(self, rank: Rank) -> None:
        self._is_direct = rank.device.type == "cpu"
        self._spare: torch.Tensor | None = None  # pages read into in place of those to be skipped
        self._buffers: list[torch.Tensor | None] = [None, None]
        self._filled: dict[int, torch.Tensor] = {}  # those of the load under way
        self._under_way: list[
            tuple[threading.Event, threading.Event]
        ] = []  # set when nothing writes to pages any more
        super().__init__("kvpool-load", rank.settings.load_timeout_s, rank)

    def submit(self, job: LoadJob) -> Progress | None:
        """Begin a load, once the device has done what was launched so far. Its time-out runs from now on.

        Returns:
            How far it is, where the job is layerwise.
        """
        deadline = time.monotonic() + self._timeout_s
        progress = Progress(self._paged.layer_names) if job.is_layerwise else None
        self._hand_over((job, DeviceEvent(self._device), progress, deadline))
        return progress

    def _do(self, item: tuple[LoadJob, DeviceEvent, Progress | None, float]) -> None:
        job, moment, progress, deadline = item
        started = time.monotonic()
        good = 0
        try:
            moment.wait()
            if progress is None or not self._paged.has_layers_in_runs:
                good = self._load(job, deadline)
            else:
                good = self._load_layers(job, progress, deadline)
        except (KvpoolError, RuntimeError, OSError) as error:
            log.warning("a load failed", request=job.request_id, error=str(error))
        except Exception:  # of a thread that died of it all later requests would wait for ever
            log.exception("a load failed by a defect", request=job.request_id)
        finally:
            self._end(job, good, time.monotonic() - started)
            if progress is not None:
                progress.end()

    def _end(self, job: LoadJob, good: int, seconds: float) -> None:
        first_bad = max(good * self._pages_per_block, job.skip_pages)
        bad = tuple(job.pages[first_bad:].tolist()) if good < len(job.hashes) else ()
        size = good * self._part_bytes
        self._metrics.time("load_s", seconds)
        self._metrics.add("load_bytes", size)
        if bad:
            self._metrics.count("loads_failed")
        self._end_with(EndedLoad(job.request_id, job.is_layerwise, bad, size, seconds))

    def _load(self, job: LoadJob, deadline: float) -> int:
        """Load as many leading blocks as can be had; returns how many."""
        count = len(job.hashes)
        edges = [*range(0, count, self._blocks), count]
        futures: list[Future[int]] = []
        good = 0
        try:
            futures.append(self._begin(job, 0, edges[0], edges[1], deadline))
            for number, start in enumerate(edges[:-1]):
                end = edges[number + 1]
                if number + 2 < len(edges):
                    following = edges[number + 2]
                    futures.append(self._begin(job, number + 1, end, following, deadline))
                found = self._result(futures[number], number, end - start, deadline)
                self._place(job, number, start, found)
                good += found
                if found < end - start:
                    break
        finally:
            for number, future in enumerate(futures):
                if not future.done():
                    future.cancel()
                    self._buffers[number % 2] = None  # it may still be written
            self._await_reads()
        return good

    def _load_layers(self, job: LoadJob, progress: Progress, deadline: float) -> int:
        """Load all blocks, group by group of their layers; they count once all are verified."""
        count = len(job.hashes)
        buffer = torch.empty((count, self._part_bytes), dtype=torch.uint8)
        rows = buffer.view(-1, self._paged.page_bytes)[job.skip_pages :]
        arrived: queue.SimpleQueue[slice | None] = queue.SimpleQueue()

        async def fetch(pool: AsyncPool) -> int:
            try:
                pinned = await pool.pin(
                    self._namespace,
                    job.hashes,
                    part=self._part,
                    segments=job.segments,
                    timeout_s=time_left(deadline),
                )
                if pinned.found < count:
                    pinned.release()
                    return 0
                reader = LayeredReader(pinned, buffer, deadline)
                try:
                    for group in self._slices.groups(count):
                        await reader.read(*self._slices.ranges(group))
                        arrived.put(group)
                    if not self._settings.verify_checksums:
                        return count
                    return min(await reader.bad_blocks(), default=count)
                finally:
                    await reader.close()
            finally:
                arrived.put(None)

        future = self._pool.submit(fetch)
        while (group := arrived.get()) is not None:
            self._paged.scatter(job.pages[job.skip_pages :], rows, group)
            self._settle()
            progress.reach(group.stop)
        return future.result(max(0.001, deadline - time.monotonic()) + 0.5)

    def _await_reads(self) -> None:
        """Nothing is read into pages any more when this returns, cancelled reads included."""
        if not self._under_way:
            return

        async def turn(_: AsyncPool) -> None:
            """What was cancelled before it began never will, once the client's loop comes to this."""

        turned = self._pool.submit(turn)
        while wait_for_all([turned], LATE_S).not_done:
            log.warning("the pool's client does not answer: pages are kept until it does")
        for has_begun, has_ended in self._under_way:
            while has_begun.is_set() and not has_ended.wait(LATE_S):
                log.warning("a read that was given up has not ended: its pages are kept until then")
        self._under_way.clear()

    def _settle(self) -> None:
        """What this thread has launched on the device is done when this returns."""
        DeviceEvent(self._device).wait()

    def _begin(
        self, job: LoadJob, number: int, start: int, end: int, deadline: float
    ) -> Future[int]:
        """Begin to read blocks [start, end); gives how many leading ones were read."""
        hashes = job.hashes[start:end]
        segments = [
            m.Segment(s.node_id, max(s.start - start, 0), n, s.tier)
            for s in job.segments
            if (n := min(s.start + s.count, end) - max(s.start, start)) > 0
        ]
        out = (
            self._spans(job, start, end) if self._is_direct else self._buffer(number)[: end - start]
        )
        has_begun, has_ended = threading.Event(), threading.Event()

        async def read(pool: AsyncPool) -> int:
            has_begun.set()
            try:
                result = await pool.get(
                    self._namespace,
                    hashes,
                    out,
                    part=self._part,
                    segments=segments or None,
                    is_disposable=not self._is_direct,
                    verify=self._settings.verify_checksums,
                    timeout_s=time_left(deadline),
                )
                return result.found
            finally:
                has_ended.set()

        if self._is_direct:
            self._under_way.append((has_begun, has_ended))
        return self._pool.submit(read)

    def _spans(self, job: LoadJob, start: int, end: int) -> BlockSpans:
        """The pages of blocks [start, end) in memory; in place of those to be skipped, spare memory."""
        per_block = self._pages_per_block
        pages = job.pages[start * per_block : end * per_block]
        addresses, lengths = self._paged.runs(pages)
        addresses = addresses.reshape(len(pages), -1)
        lengths = lengths[: addresses.shape[1]]
        skip = min(len(pages), max(0, job.skip_pages - start * per_block))
        if skip:
            if self._spare is None:
                # Each has a place of its own: a block is verified as a whole where it was read to.
                self._spare = torch.empty((per_block, self._paged.page_bytes), dtype=torch.uint8)
            rows = self._spare.data_ptr() + np.arange(skip)[:, None] * self._paged.page_bytes
            addresses[:skip] = rows + (np.cumsum(lengths) - lengths)
        blocks = addresses.reshape(end - start, -1)
        return BlockSpans(blocks, np.tile(lengths, per_block), (self._paged, self._spare))

    def _result(self, future: Future[int], number: int, wanted: int, deadline: float) -> int:
        found = 0
        try:
            found = future.result(max(0.001, deadline - time.monotonic()) + 0.5)
        except TimeoutError:
            raise DeadlineExceeded("the load did not end in time") from None
        finally:
            if found < wanted:
                self._buffers[number % 2] = None  # what was promised of it: see `is_disposable`
        return found

    def _place(self, job: LoadJob, number: int, start: int, found: int) -> None:
        """Copy what a buffer holds to its pages, unless it was read there."""
        if self._is_direct:
            return
        rows = self._filled[number % 2][:found].view(-1, self._paged.page_bytes)
        first = start * self._pages_per_block
        pages = job.pages[first : first + found * self._pages_per_block]
        skip = min(len(pages), max(0, job.skip_pages - first))
        self._paged.scatter(pages[skip:], rows[skip:])
        self._settle()

    def _buffer(self, number: int) -> torch.Tensor:
        buffer = self._buffers[number % 2]
        if buffer is None:
            buffer = torch.empty((self._blocks, self._part_bytes), dtype=torch.uint8)
            self._buffers[number % 2] = buffer
        self._filled[number % 2] = buffer
        return buffer
