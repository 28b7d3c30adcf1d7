"""Writing vLLM's pages to the pool, in a thread of its own: never in the way of a token.

Pages are copied into a staging buffer in one indexed copy, after which vLLM may have them back, and sent from there.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import structlog
import torch

from kvpool.client.pool import Pool
from kvpool.engines.vllm.metadata import SaveJob
from kvpool.engines.vllm.metrics import Figures
from kvpool.engines.vllm.paged_kv import PagedKV
from kvpool.engines.vllm.settings import VllmSettings
from kvpool.engines.vllm.threads import Moment, start_thread
from kvpool.errors import KvpoolError
from kvpool.layout import Namespace

log = structlog.get_logger(__name__)


class Saver:
    """Saves one job after another."""

    def __init__(
        self,
        pool: Pool,
        namespace: Namespace,
        paged: PagedKV,
        settings: VllmSettings,
        part: int,
        figures: Figures,
        on_end: Callable[[], None],
        device: torch.device,
    ) -> None:
        self._pool = pool
        self._namespace = namespace
        self._paged = paged
        self._settings = settings
        self._part = part
        self._figures = figures
        self._on_end = on_end
        self._device = device
        self._part_bytes = namespace.layout.part_bytes
        self._pages_per_block = namespace.layout.block_tokens // paged.page_tokens
        self._blocks = max(1, settings.staging_bytes // self._part_bytes)
        self._buffer: torch.Tensor | None = None
        self._jobs: queue.SimpleQueue[tuple[SaveJob, Moment] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._ended: list[tuple[int, bool]] = []
        self._in_work = 0
        self._thread = start_thread("kvpool-save", self._work)

    @property
    def is_busy(self) -> bool:
        """Whether some save is not over."""
        return self._in_work > 0

    @property
    def has_ended(self) -> bool:
        """Whether the end of some save has not been taken."""
        return bool(self._ended)

    def submit(self, job: SaveJob) -> None:
        """Begin a save, once the device has done what was launched so far."""
        with self._lock:
            self._in_work += 1
        self._jobs.put((job, Moment(self._device)))

    def take_ended(self) -> list[tuple[int, bool]]:
        """Jobs that ended since the last call, each with whether all of it is in the pool."""
        with self._lock:
            ended, self._ended = self._ended, []
            self._in_work -= len(ended)
        return ended

    def close(self) -> None:
        """Take no more; wait for what is under way."""
        self._jobs.put(None)
        self._thread.join(self._settings.save_timeout_s + 1.0)

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, moment = item
            started = time.monotonic()
            is_whole = False
            try:
                moment.wait()
                is_whole = self._save(job, started + self._settings.save_timeout_s)
            except (KvpoolError, RuntimeError, OSError) as error:
                log.warning("a save failed", request=job.request_id, error=str(error))
            finally:
                self._figures.time("save_s", time.monotonic() - started)
                if not is_whole:
                    self._figures.count("saves_failed")
                with self._lock:
                    self._ended.append((job.job_id, is_whole))
                self._on_end()

    def _save(self, job: SaveJob, deadline: float) -> bool:
        for start in range(0, len(job.hashes), self._blocks):
            hashes = job.hashes[start : start + self._blocks]
            first = start * self._pages_per_block
            pages = job.pages[first : first + len(hashes) * self._pages_per_block]
            buffer = self._staging()[: len(hashes)]
            self._paged.gather(pages, buffer.view(-1, self._paged.page_bytes))
            try:
                result = self._pool.put(
                    self._namespace,
                    hashes,
                    buffer,
                    parent=job.hashes[start - 1] if start else job.parent,
                    part=self._part,
                    timeout_s=max(0.001, deadline - time.monotonic()),
                )
            except KvpoolError:
                self._buffer = None  # it may still be read
                raise
            self._figures.add("blocks_stored", result.stored)
            self._figures.add("blocks_known", result.existing + result.in_progress)
            self._figures.add("save_bytes", sum(result.bytes_moved.values()))
            if result.rejected:
                return False
        return True

    def _staging(self) -> torch.Tensor:
        if self._buffer is None:
            self._buffer = torch.empty((self._blocks, self._part_bytes), dtype=torch.uint8)
        return self._buffer
