"""The half of the connector beside the model: moves bytes between vLLM's pages and the pool.

The model's thread only hands over and collects; loads and saves run in threads of their own.
"""

from __future__ import annotations

import threading
import time

import structlog
import torch

from kvpool.blocks.layout import Namespace
from kvpool.client.pool import Pool
from kvpool.engines.vllm.layers import Progress
from kvpool.engines.vllm.loader import Loader
from kvpool.engines.vllm.metadata import StepMetadata, WorkerReport
from kvpool.engines.vllm.metrics import MetricsRecorder
from kvpool.engines.vllm.paged_kv import PagedKV
from kvpool.engines.vllm.prefault import Prefault
from kvpool.engines.vllm.saver import Saver
from kvpool.engines.vllm.settings import VllmSettings
from kvpool.engines.vllm.transfer_thread import Rank
from kvpool.errors import LayoutMismatch

log = structlog.get_logger(__name__)

LATE_S = 5.0  # a load ends by its own deadline; after so long it is worth a line
IDLE_WAIT_S = 0.002  # that a step in which nothing is computed waits for a load or save to end


class WorkerSide:
    """One rank.

    Args:
        is_single_group: vLLM has one table of pages a request, so that a page names what failed.
    """

    def __init__(
        self,
        pool: Pool,
        namespace: Namespace,
        paged: PagedKV,
        settings: VllmSettings,
        *,
        part: int,
        is_single_group: bool,
        metrics: MetricsRecorder,
        device: torch.device,
    ) -> None:
        self._namespace = namespace
        self._is_single_group = is_single_group
        self.metrics = metrics
        self._changed = threading.Condition()
        self._device = device
        self._names = paged.layer_names
        self._saves_layers = settings.layerwise_save and paged.has_layers_in_runs
        if settings.layerwise_save and not self._saves_layers:
            log.warning("layers are not saved one by one: a page mixes them", order=paged.order)
        self._computing: Progress | None = None  # of the step's layers that are to be saved
        self._awaited: list[Progress] = []  # of the loads that the step computes with
        rank = Rank(pool, namespace, paged, settings, part, metrics, self._notify, device)
        self._loader = Loader(rank)
        self._saver = Saver(rank)
        is_prefaulted = settings.prefault and device.type == "cpu"
        self._prefault = Prefault(paged.regions()) if is_prefaulted else None
        self._report = WorkerReport()
        self._failed_pages: set[int] = set()
        self._failed_requests: set[str] = set()

    def close(self) -> None:
        """End the threads; what is under way is waited for, within its deadline."""
        if self._prefault is not None:
            self._prefault.close()
        self._loader.close()
        self._saver.close()

    def begin_step(self, step: StepMetadata) -> None:
        """See `bind_connector_metadata`: the model has not begun.

        Raises:
            LayoutMismatch: the scheduler means another namespace.
        """
        if step.namespace_id and step.namespace_id != self._namespace.namespace_id:
            raise LayoutMismatch("scheduler and rank do not agree on the namespace")
        if self._saves_layers and not step.is_idle:
            jobs = [job for job in step.saves if self._saver.takes_layers(job)]
            if jobs:
                self._computing = Progress(self._names)
            for job in jobs:
                self._saver.submit(job, self._computing)

    def begin_loads(self, step: StepMetadata) -> None:
        """See `start_load_kv`."""
        for job in step.loads:
            progress = self._loader.submit(job)
            if progress is not None:
                self._awaited.append(progress)

    def wait_for_layer(self, name: str) -> None:
        """See `wait_for_layer_load`. A load that fails is told after the step; nobody uses its tokens.

        There is no deadline but the load's own: to go on without a layer that comes later would be to compute
        with wrong bytes, and to hear that they are good.
        """
        for progress in self._awaited:
            while not progress.wait_for(name, time.monotonic() + LATE_S):
                if progress.has_ended:
                    break
                log.warning("a step waits for its load", layer=name)

    def layer_is_final(self, name: str) -> None:
        """See `save_kv_layer`."""
        if self._computing is not None:
            self._computing.layer(name, self._device)

    def begin_saves(self, step: StepMetadata) -> None:
        """See `wait_for_save`: what the step computed is final once the device is done with it."""
        by_layers = self._computing is not None
        for job in step.saves:
            if not by_layers or not self._saver.takes_layers(job):
                self._saver.submit(job)
        if self._computing is not None:
            self._computing.end(self._device)
            self._computing = None

    def collect(self, step: StepMetadata | None) -> tuple[set[str], set[str]]:
        """Requests whose asynchronous load is over, and those of them that failed."""
        for (
            progress
        ) in self._awaited:  # what the step computed with is good, or told to be bad, now
            while not progress.wait_end(time.monotonic() + LATE_S):
                log.warning("a step waits for the end of its load")
        self._awaited.clear()
        if step is not None and step.is_idle:
            self._rest(step)
        received: set[str] = set()
        failed: set[str] = set()
        for ended in self._loader.take_ended():
            self._report.ended_loads.add(ended.request_id)
            if ended.is_good:
                self._report.loaded_bytes += ended.size
                self._report.load_s += ended.seconds
            else:
                self._report.failed_loads.add(ended.request_id)
                failed.add(ended.request_id)
                self._failed_pages.update(ended.bad_pages)
            if not ended.is_layerwise:
                received.add(ended.request_id)
        for job_id, is_whole in self._saver.take_ended():
            self._report.ended_saves[job_id] = 1
            if not is_whole:
                self._report.dropped_saves.add(job_id)
        return received, (set() if self._is_single_group else failed)

    def take_failed_pages(self) -> set[int]:
        """See `get_block_ids_with_load_errors`."""
        pages, self._failed_pages = self._failed_pages, set()
        return pages if self._is_single_group else set()

    def take_report(self) -> WorkerReport | None:
        """See `build_connector_worker_meta`."""
        report, self._report = self._report, WorkerReport()
        return None if report.is_empty else report

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _rest(self, step: StepMetadata) -> None:
        """Let the threads have the interpreter: vLLM spins while a request waits for its load.

        Seen in one process with both roles: a load of 64 blocks took 0.9 s beside that, of 16 in a process of
        its own 6 ms.
        """
        with self._changed:
            if self._loader.has_ended or self._saver.has_ended:
                return
            if self._loader.is_busy or self._saver.is_busy or step.waits_for_lookup:
                self._changed.wait(IDLE_WAIT_S)
