"""The thread that moves a rank's pages, one job after the other. Loads and saves each have one."""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from kvpool.blocks.layout import Namespace
from kvpool.client.pool import Pool
from kvpool.engines.vllm.layers import Slices
from kvpool.engines.vllm.metrics import MetricsRecorder
from kvpool.engines.vllm.paged_kv import PagedKV
from kvpool.engines.vllm.settings import VllmSettings
from kvpool.engines.vllm.threads import start_thread

Item = TypeVar("Item")
EndedJob = TypeVar("EndedJob")


@dataclass(slots=True, frozen=True)
class Rank:
    """One rank's memory, and its pool.

    Args:
        part: the part of each block that this rank holds.
        on_end: called in the transfer thread when a load or save has ended.
    """

    pool: Pool
    namespace: Namespace
    paged: PagedKV
    settings: VllmSettings
    part: int
    metrics: MetricsRecorder
    on_end: Callable[[], None]
    device: torch.device


class TransferThread(ABC, Generic[Item, EndedJob]):
    """Moves one job after another between vLLM's pages and the pool.

    Args:
        name: the thread's name.
        timeout_s: time limit of a job, from its submission.
    """

    def __init__(self, name: str, timeout_s: float, rank: Rank) -> None:
        self._timeout_s = timeout_s
        self._pool = rank.pool
        self._namespace = namespace = rank.namespace
        self._paged = paged = rank.paged
        self._settings = rank.settings
        self._part = rank.part
        self._metrics = rank.metrics
        self._on_end = rank.on_end
        self._device = rank.device
        self._part_bytes = namespace.layout.part_bytes
        self._pages_per_block = namespace.layout.block_tokens // paged.page_tokens
        self._blocks = max(1, rank.settings.staging_bytes // self._part_bytes)
        self._slices = Slices(paged, self._pages_per_block)
        self._jobs: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._ended: list[EndedJob] = []
        self._in_work = 0
        self._thread = start_thread(name, self._work, rank.device)

    @property
    def is_busy(self) -> bool:
        """Whether some job has not ended, or its end was not taken."""
        return self._in_work > 0

    @property
    def has_ended(self) -> bool:
        """Whether some job has ended whose end was not taken."""
        return bool(self._ended)

    def take_ended(self) -> list[EndedJob]:
        """The jobs that ended since the last call."""
        with self._lock:
            ended, self._ended = self._ended, []
            self._in_work -= len(ended)
        return ended

    def close(self) -> None:
        """Take no more jobs, and wait for those submitted."""
        self._jobs.put(None)
        self._thread.join(self._timeout_s + 1.0)

    def _hand_over(self, item: Item) -> None:
        with self._lock:
            self._in_work += 1
        self._jobs.put(item)

    def _end_with(self, ended: EndedJob) -> None:
        with self._lock:
            self._ended.append(ended)
        self._on_end()

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            self._do(item)

    @abstractmethod
    def _do(self, item: Item) -> None:
        """Do one job and call `_end_with`.

        Must not raise: that would end the thread and lose later jobs.
        """
