"""`KVPoolConnector`: passes vLLM's calls on to the connector's side in this process.

`scheduler_side` decides, and `worker_side` moves bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import structlog
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from kvpool.client.pool import Pool
from kvpool.engines.vllm import settings as settings_of
from kvpool.engines.vllm.checks import refuse_unsupported
from kvpool.engines.vllm.identity import (
    LayoutFacts,
    attention_backends,
    lora_traits,
    model_identity,
    namespace_of,
)
from kvpool.engines.vllm.lora import LoraVersions
from kvpool.engines.vllm.metadata import Handshake, StepMetadata, WorkerReport
from kvpool.engines.vllm.metrics import MetricsRecorder, PromMetrics, Stats
from kvpool.engines.vllm.paged_kv import PagedKV
from kvpool.engines.vllm.pool_health import PoolHealth
from kvpool.engines.vllm.scheduler_side import SchedulerSide
from kvpool.engines.vllm.worker_side import WorkerSide
from kvpool.errors import LayoutMismatch

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = structlog.get_logger(__name__)

START_TIMEOUT_S = 5.0  # for the pool to answer at start; a pool that answers later is used, too


class KVPoolConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's KV cache, kept in a kvpool.

    Raises:
        ConfigError: a setting is wrong, or this way of running vLLM is not supported.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        refuse_unsupported(vllm_config)
        transfer = self._kv_transfer_config
        self._settings = settings_of.read(transfer.kv_connector_extra_config)
        self._identity = model_identity(vllm_config, self._settings.revision)
        self.metrics = MetricsRecorder()
        self._pool: Pool | None = None
        self._health: PoolHealth | None = None
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._facts: LayoutFacts | None = None
        if role is KVConnectorRole.SCHEDULER:
            if transfer.kv_load_failure_policy != "recompute":
                log.warning(
                    "kv_load_failure_policy is not recompute: a request fails if a block is lost;"
                    ' add "kv_load_failure_policy": "recompute" next to kv_connector',
                    policy=transfer.kv_load_failure_policy,
                )
            parallel = vllm_config.parallel_config
            self._scheduler = SchedulerSide(
                self._settings,
                loads=transfer.is_kv_consumer,
                saves=transfer.is_kv_producer,
                may_load_in_step=_may_load_in_step(vllm_config),
                ranks=parallel.world_size,
                metrics=self.metrics,
                loras=LoraVersions(lora_traits(vllm_config)),
            )

    # ------------------------------------------------------------ worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        config, settings = self._vllm_config, self._settings
        paged = PagedKV.read(kv_caches, self._kv_cache_config, attention_backends(config))
        self._facts = paged.facts
        namespace = namespace_of(self._identity, paged.facts, settings)
        parallel = config.parallel_config
        self._worker = WorkerSide(
            self._connect(),
            namespace,
            paged,
            settings,
            part=paged.facts.part_of(parallel.rank % parallel.tensor_parallel_size),
            is_single_group=len(self._kv_cache_config.kv_cache_groups) == 1,
            metrics=self.metrics,
            device=next(iter(kv_caches.values())).device,
        )

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return Handshake(self._facts) if self._facts is not None else None

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.begin_step(self._step())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.begin_loads(self._step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._worker is not None:
            self._worker.wait_for_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        if self._worker is not None:
            self._worker.layer_is_final(layer_name)

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.begin_saves(self._step())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._worker is None:
            return KVConnectorTransferResults()
        step = self._step() if self.has_connector_metadata() else None
        received, failed = self._worker.collect(step)
        return KVConnectorTransferResults(finished_recving=received, failed_recving=failed)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending or None, results.finished_recving or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_failed_pages() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> WorkerReport | None:
        return self._worker.take_report() if self._worker is not None else None

    # ------------------------------------------------------------ scheduler

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        facts = {rank: sent.facts for rank, sent in metadata.items() if isinstance(sent, Handshake)}
        first = facts[min(facts)]
        for rank, other in facts.items():
            if other != first:
                raise LayoutMismatch(
                    f"tensor-parallel rank {rank} has the KV layout {other}, but rank {min(facts)}"
                    f" has {first}"
                )
        namespace = namespace_of(self._identity, first, self._settings)
        pool = self._connect()
        settings = self._settings
        self._health = health = PoolHealth(pool, settings, namespace)
        health.start(START_TIMEOUT_S)
        log.info(
            "vLLM shares its KV cache",
            namespace=namespace.name,
            namespace_id=namespace.namespace_id.hex()[:12],  # as much as `kvpool ls` shows
            pool=settings.node or settings.conductor,
            pool_is_reachable=health.is_well,
        )
        if self._scheduler is not None:
            self._scheduler.start(pool, health, namespace, first.page_tokens)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        if self._scheduler is not None:
            self._scheduler.bind(gpu_block_pool)

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a lost save only costs a miss

    def reset_cache(self) -> bool:
        if self._scheduler is not None:
            self._scheduler.reset()
        return True

    def on_new_request(self, request: Request) -> None:
        if self._scheduler is not None:
            self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        assert self._scheduler is not None
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        assert self._scheduler is not None
        self._scheduler.on_allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        assert self._scheduler is not None
        return self._scheduler.metadata(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        assert self._scheduler is not None
        report = connector_output.kv_connector_worker_meta
        self._scheduler.on_output(
            report if isinstance(report, WorkerReport) else None,
            set(connector_output.finished_recving or ()),
        )

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        self._scheduler.on_finished(request)
        return False, None

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.has_pending_saves

    def take_events(self) -> Iterable[KVCacheEvent]:
        # None: vLLM tells the conductor what is in vLLM's memory, and the nodes tell it what is in
        # the pool.
        return ()

    # ------------------------------------------------------------ both

    def get_kv_connector_stats(self) -> Stats | None:
        return self.metrics.take()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        # vLLM calls this while it reads its command line: the first moment to refuse a wrong key,
        # before it starts processes and reads weights.
        settings = settings_of.read(extra_config)
        return settings.layerwise_load or settings.layerwise_save

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats | None:
        return Stats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()
        if self._health is not None:
            self._health.close()
        if self._pool is not None:
            self._pool.close()

    def _step(self) -> StepMetadata:
        step = self._get_connector_metadata()
        assert isinstance(step, StepMetadata)
        return step

    def _connect(self) -> Pool:
        settings = self._settings
        if self._pool is None:
            self._pool = settings.open_pool(settings.load_timeout_s)
        return self._pool


def _may_load_in_step(config: VllmConfig) -> bool:
    """Whether vLLM recovers safely from a load that fails in the step that uses it.

    With prefix caching, other requests may use the failed pages before they are recomputed. With
    asynchronous scheduling, the next step is already under way.
    """
    return not (
        config.cache_config.enable_prefix_caching or config.scheduler_config.async_scheduling
    )
