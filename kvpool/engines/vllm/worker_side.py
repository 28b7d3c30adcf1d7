"""The connector's side in vLLM's workers: moves bytes between vLLM's pages and the pool.

The model's thread only submits jobs and collects results; loads and saves run in their own threads.
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

LATE_S = 5.0  # log a load that has not ended after this time
IDLE_WAIT_S = 0.002  # how long an idle step waits for a load or save to end


class WorkerSide:
    """The connector's side of one rank.

    Args:
        part: the part of each block that this rank holds.
        is_single_group: vLLM has one page table per request, so failed loads are reported by page.
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
            log.warning(
                "layerwise_save is off: the layers of a page are interleaved", order=paged.order
            )
        self._computing: Progress | None = None  # of the layers that the step computes and saves
        self._awaited: list[Progress] = []  # of the loads that the step uses
        rank = Rank(pool, namespace, paged, settings, part, metrics, self._notify, device)
        self._loader = Loader(rank)
        self._saver = Saver(rank)
        is_prefaulted = settings.prefault and device.type == "cpu"
        self._prefault = Prefault(paged.regions()) if is_prefaulted else None
        self._report = WorkerReport()
        self._failed_pages: set[int] = set()

    def close(self) -> None:
        """End the threads. Waits for jobs under way, within their deadlines."""
        if self._prefault is not None:
            self._prefault.close()
        self._loader.close()
        self._saver.close()

    def begin_step(self, step: StepMetadata) -> None:
        """Submit layerwise saves, before the model runs (`bind_connector_metadata`).

        Raises:
            LayoutMismatch: the scheduler has another namespace.
        """
        if step.namespace_id and step.namespace_id != self._namespace.namespace_id:
            raise LayoutMismatch("scheduler and rank have different namespaces")
        if self._saves_layers and not step.is_idle:
            jobs = [job for job in step.saves if self._saver.takes_layers(job)]
            if jobs:
                self._computing = Progress(self._names)
            for job in jobs:
                self._saver.submit(job, self._computing)

    def begin_loads(self, step: StepMetadata) -> None:
        """Submit the step's loads (`start_load_kv`)."""
        for job in step.loads:
            progress = self._loader.submit(job)
            if progress is not None:
                self._awaited.append(progress)

    def wait_for_layer(self, name: str) -> None:
        """Wait until this step's loads have read a layer or failed (`wait_for_layer_load`).

        vLLM learns of a failure after the step, and discards the step's tokens. This has no deadline
        besides the load's own: if the model went on without a layer that arrives later, it would
        compute with wrong bytes, and the load would count as good.
        """
        for progress in self._awaited:
            while not progress.wait_for(name, time.monotonic() + LATE_S):
                if progress.has_ended:
                    break
                log.warning("a step waits for its load", layer=name)

    def layer_is_final(self, name: str) -> None:
        """Let the saver send a layer that is final (`save_kv_layer`)."""
        if self._computing is not None:
            self._computing.layer(name, self._device)

    def begin_saves(self, step: StepMetadata) -> None:
        """Submit the step's other saves (`wait_for_save`)."""
        by_layers = self._computing is not None
        for job in step.saves:
            if not by_layers or not self._saver.takes_layers(job):
                self._saver.submit(job)
        if self._computing is not None:
            self._computing.end(self._device)
            self._computing = None

    def collect(self, step: StepMetadata | None) -> tuple[set[str], set[str]]:
        """Requests whose asynchronous load has ended, and those whose load failed."""
        for progress in self._awaited:  # before the results of this step are used
            while not progress.wait_end(time.monotonic() + LATE_S):
                log.warning("a step waits for the end of its load")
        self._awaited.clear()
        if step is not None and step.is_idle:
            self._yield_gil(step)
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
        """Pages that could not be read since the last call (`get_block_ids_with_load_errors`)."""
        pages, self._failed_pages = self._failed_pages, set()
        return pages if self._is_single_group else set()

    def take_report(self) -> WorkerReport | None:
        """The report of what ended since the last call (`build_connector_worker_meta`)."""
        report, self._report = self._report, WorkerReport()
        return None if report.is_empty else report

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _yield_gil(self, step: StepMetadata) -> None:
        """Release the GIL for a moment, because vLLM spins while a request waits for its load.

        Measured in one process with both roles: without this, a load of 64 blocks took 0.9 s; in a
        process of its own, a load of 16 took 6 ms.
        """
        with self._changed:
            if self._loader.has_ended or self._saver.has_ended:
                return
            if self._loader.is_busy or self._saver.is_busy or step.waits_for_lookup:
                self._changed.wait(IDLE_WAIT_S)
