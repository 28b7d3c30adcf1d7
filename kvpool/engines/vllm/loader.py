"""Reads blocks from the pool into vLLM's pages, in a thread of its own.

Pages in host memory are read directly: over shared memory one pass copies and verifies, and the
client makes sure that no transfer arrives late. Pages on a device go through staging buffers: bytes
arrive in one, are verified there, and go to their pages in one indexed copy while the next one
fills. Either way, a transfer that was given up never writes to pages that vLLM has reused.
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

LATE_S = 5.0  # log a read that was given up and has not ended after this time


@dataclass(slots=True, frozen=True)
class EndedLoad:
    """The result of a load, and the pages that were not read."""

    request_id: str
    is_layerwise: bool
    bad_pages: tuple[int, ...]
    size: int
    seconds: float

    @property
    def is_good(self) -> bool:
        """Whether all pages were read."""
        return not self.bad_pages


class Loader(TransferThread[tuple[LoadJob, DeviceEvent, Progress | None, float], EndedLoad]):
    """The transfer thread for loads."""

    def __init__(self, rank: Rank) -> None:
        self._is_direct = rank.device.type == "cpu"
        self._spare: torch.Tensor | None = None  # target for the pages to be skipped
        self._buffers: list[torch.Tensor | None] = [None, None]
        self._filled: dict[int, torch.Tensor] = {}  # the buffers of the load under way
        self._under_way: list[
            tuple[threading.Event, threading.Event]
        ] = []  # of each read: it has begun; it writes to no page any more
        super().__init__("kvpool-load", rank.settings.load_timeout_s, rank)

    def submit(self, job: LoadJob) -> Progress | None:
        """Submit a load.

        It begins when the device has done the work launched so far; its time-out starts now.

        Returns:
            The progress of a layerwise job; None for others.
        """
        deadline = time.monotonic() + self._timeout_s
        progress = Progress(self._paged.layer_names) if job.is_layerwise else None
        self._hand_over((job, DeviceEvent(self._device), progress, deadline))
        return progress

    def _do(self, item: tuple[LoadJob, DeviceEvent, Progress | None, float]) -> None:
        job, event, progress, deadline = item
        started = time.monotonic()
        good = 0
        try:
            event.wait()
            if progress is None or not self._paged.has_layers_in_runs:
                good = self._load(job, deadline)
            else:
                good = self._load_layers(job, progress, deadline)
        except (KvpoolError, RuntimeError, OSError) as error:
            log.warning("a load failed", request=job.request_id, error=str(error))
        except Exception:  # it would end the thread, and later requests would wait for ever
            log.exception("a load failed because of a defect", request=job.request_id)
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
        """Load the leading blocks. Returns how many were read."""
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
                    self._buffers[number % 2] = None  # a late transfer may still write to it
            self._await_reads()
        return good

    def _load_layers(self, job: LoadJob, progress: Progress, deadline: float) -> int:
        """Load all blocks, one group of layers after the other. Returns how many are verified."""
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
            self._wait_for_device()
            progress.reach(group.stop)
        return future.result(max(0.001, deadline - time.monotonic()) + 0.5)

    def _await_reads(self) -> None:
        """Wait until no read, cancelled ones included, writes to pages any more."""
        if not self._under_way:
            return

        async def reach_loop(_: AsyncPool) -> None:
            """Once the client's loop runs this, reads cancelled before they began never begin."""

        reached = self._pool.submit(reach_loop)
        while wait_for_all([reached], LATE_S).not_done:
            log.warning("the pool client's event loop hangs: keeping pages until it runs again")
        for has_begun, has_ended in self._under_way:
            while has_begun.is_set() and not has_ended.wait(LATE_S):
                log.warning(
                    "a read that was given up has not ended: keeping its pages until it does"
                )
        self._under_way.clear()

    def _wait_for_device(self) -> None:
        """Wait until the device has done what this thread launched."""
        DeviceEvent(self._device).wait()

    def _begin(
        self, job: LoadJob, number: int, start: int, end: int, deadline: float
    ) -> Future[int]:
        """Begin to read blocks [start, end). The future gives how many leading blocks were read."""
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
        """The memory of the pages of blocks [start, end); spare memory for pages to be skipped."""
        per_block = self._pages_per_block
        pages = job.pages[start * per_block : end * per_block]
        addresses, lengths = self._paged.runs(pages)
        addresses = addresses.reshape(len(pages), -1)
        lengths = lengths[: addresses.shape[1]]
        skip = min(len(pages), max(0, job.skip_pages - start * per_block))
        if skip:
            if self._spare is None:
                # One place for each page, because a block is verified as a whole where it was read.
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
                self._buffers[number % 2] = None  # never used again, as `is_disposable` requires
        return found

    def _place(self, job: LoadJob, number: int, start: int, found: int) -> None:
        """Copy a buffer to its pages, unless blocks were read to them directly."""
        if self._is_direct:
            return
        rows = self._filled[number % 2][:found].view(-1, self._paged.page_bytes)
        first = start * self._pages_per_block
        pages = job.pages[first : first + found * self._pages_per_block]
        skip = min(len(pages), max(0, job.skip_pages - first))
        self._paged.scatter(pages[skip:], rows[skip:])
        self._wait_for_device()

    def _buffer(self, number: int) -> torch.Tensor:
        buffer = self._buffers[number % 2]
        if buffer is None:
            buffer = torch.empty((self._blocks, self._part_bytes), dtype=torch.uint8)
            self._buffers[number % 2] = buffer
        self._filled[number % 2] = buffer
        return buffer
