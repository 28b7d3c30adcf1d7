"""Writes vLLM's pages to the pool, in a thread of its own, so that saves never delay tokens.

One indexed copy brings pages into a staging buffer, from which they are sent; vLLM can then reuse
the pages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np
import structlog
import torch

from kvpool.client.async_pool import AsyncPool
from kvpool.client.data.layered import LayeredWriter
from kvpool.engines.vllm.layers import Progress
from kvpool.engines.vllm.metadata import SaveJob
from kvpool.engines.vllm.threads import DeviceEvent
from kvpool.engines.vllm.transfer_thread import Rank, TransferThread
from kvpool.errors import DeadlineExceeded, KvpoolError
from kvpool.transports.copy import Int64Array, sum_runs

log = structlog.get_logger(__name__)

T = TypeVar("T")


class Saver(TransferThread[tuple[SaveJob, DeviceEvent | Progress, float], tuple[int, bool]]):
    """The transfer thread for saves.

    A job ends with its number, and whether all of it was stored.
    """

    def __init__(self, rank: Rank) -> None:
        self._buffer: torch.Tensor | None = None
        super().__init__("kvpool-save", rank.settings.save_timeout_s, rank)

    def submit(self, job: SaveJob, progress: Progress | None = None) -> None:
        """Submit a save. Its time-out starts now, and bounds how long vLLM lacks the pages.

        Args:
            progress: save each layer as soon as it is final; default: save all layers when the
                device has done the work launched so far.
        """
        deadline = time.monotonic() + self._timeout_s
        self._hand_over((job, progress or DeviceEvent(self._device), deadline))

    def takes_layers(self, job: SaveJob) -> bool:
        """Whether this job can be saved layer by layer: one buffer must hold all its blocks."""
        return len(job.hashes) <= self._blocks

    def _do(self, item: tuple[SaveJob, DeviceEvent | Progress, float]) -> None:
        job, when, deadline = item
        started = time.monotonic()
        is_whole = False
        try:
            if time.monotonic() > deadline:
                raise DeadlineExceeded("earlier saves took all of the time")
            if isinstance(when, Progress):
                is_whole = self._save_layers(job, when, deadline)
            else:
                when.wait()
                is_whole = self._save(job, deadline)
        except (KvpoolError, RuntimeError, OSError) as error:
            self._buffer = None  # a late transfer may still read from it
            log.warning("a save failed", request=job.request_id, error=str(error))
        except Exception:  # it would end the thread, which would keep vLLM's pages for ever
            self._buffer = None  # a late transfer may still read from it
            log.exception("a save failed because of a defect", request=job.request_id)
        finally:
            self._metrics.time("save_s", time.monotonic() - started)
            if not is_whole:
                self._metrics.count("saves_failed")
            self._end_with((job.job_id, is_whole))

    def _save(self, job: SaveJob, deadline: float) -> bool:
        for start in range(0, len(job.hashes), self._blocks):
            hashes = job.hashes[start : start + self._blocks]
            first = start * self._pages_per_block
            pages = job.pages[first : first + len(hashes) * self._pages_per_block]
            buffer = self._staging()[: len(hashes)]
            self._paged.gather(pages, buffer.view(-1, self._paged.page_bytes))
            result = self._pool.put(
                self._namespace,
                hashes,
                buffer,
                parent=job.hashes[start - 1] if start else job.parent,
                part=self._part,
                timeout_s=max(0.001, deadline - time.monotonic()),
            )
            self._metrics.add("blocks_stored", result.stored)
            self._metrics.add("blocks_known", result.existing + result.in_progress)
            self._metrics.add("save_bytes", sum(result.bytes_moved.values()))
            if result.rejected:
                return False
        return True

    def _save_layers(self, job: SaveJob, progress: Progress, deadline: float) -> bool:
        writer = self._wait(
            lambda pool: LayeredWriter.open(
                pool.directory,
                self._namespace,
                job.hashes,
                parent=job.parent,
                part=self._part,
                deadline=deadline,
            ),
            deadline,
        )
        granted = np.array(writer.granted, dtype=np.int64)
        self._metrics.add("blocks_known", len(job.hashes) - len(granted) - writer.rejected)
        if not len(granted):
            return not writer.rejected
        pages = job.pages.reshape(-1, self._pages_per_block)[granted].reshape(-1)
        rows = self._staging()[: len(granted)]
        addresses = rows.data_ptr() + np.arange(len(granted), dtype=np.int64) * self._part_bytes
        sent: Future[None] | None = None
        try:
            for group in self._slices.groups(len(granted)):
                if not progress.wait(group.stop, deadline):
                    raise DeadlineExceeded("the model did not compute all layers in time")
                self._paged.gather(pages, rows.view(-1, self._paged.page_bytes), group)
                if sent is not None:
                    sent.result(max(0.001, deadline - time.monotonic()) + 0.5)
                sent = self._send(writer, addresses, rows, group)
            lengths = np.full(len(granted), self._part_bytes, dtype=np.int64)
            sums = sum_runs(addresses, lengths)
            if sent is not None:
                sent.result(max(0.001, deadline - time.monotonic()) + 0.5)
            self._wait(lambda _: writer.commit(sums), deadline)
        except (KvpoolError, TimeoutError) as error:
            late = error if isinstance(error, KvpoolError) else DeadlineExceeded(str(error))
            self._wait(lambda _: writer.abort(late), time.monotonic() + 2.0)
            raise late from error
        self._metrics.add("blocks_stored", len(granted))
        self._metrics.add("save_bytes", writer.bytes_written)
        return not writer.rejected

    def _send(
        self, writer: LayeredWriter, addresses: Int64Array, rows: torch.Tensor, group: slice
    ) -> Future[None]:
        offsets, length = self._slices.ranges(group)
        return self._pool.submit(lambda _: writer.write(addresses, rows, offsets, length))

    def _wait(self, start: Callable[[AsyncPool], Coroutine[Any, Any, T]], deadline: float) -> T:
        try:
            return self._pool.submit(start).result(max(0.001, deadline - time.monotonic()) + 0.5)
        except TimeoutError:
            raise DeadlineExceeded("the save did not end in time") from None

    def _staging(self) -> torch.Tensor:
        if self._buffer is None:
            self._buffer = torch.empty((self._blocks, self._part_bytes), dtype=torch.uint8)
        return self._buffer
