"""vLLM's real scheduler and both roles of the connector around a model that depends on its KV.

The "model" writes a pattern of all tokens so far into each layer's page, and samples the next token
from the pages' bytes. So a wrong byte anywhere changes the text.
"""

from __future__ import annotations

import copy
import json
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvpool.engines.vllm import KVPoolConnector

LAYERS, HEADS, HEAD_DIM, VOCABULARY = 3, 2, 16, 997
HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_model(directory: Path) -> Path:
    """A model directory without usable weights; no test loads them."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(HF_CONFIG))
    (directory / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    return directory


class Engine:
    """One vLLM instance without a model.

    Args:
        extra: the connector's settings.
        pages: of KV memory.
    """

    def __init__(
        self,
        model: Path,
        extra: dict[str, Any],
        *,
        role: str = "kv_both",
        page_tokens: int = 16,
        pages: int = 512,
        step_tokens: int = 8192,
        ranks: int = 1,
        prefix_caching: bool = True,
        policy: str = "recompute",
        revision: str | None = None,
    ) -> None:
        self.config = VllmConfig(
            model_config=ModelConfig(
                model=str(model),
                dtype="bfloat16",
                max_model_len=8192,
                skip_tokenizer_init=True,
                revision=revision,
            ),
            cache_config=CacheConfig(block_size=page_tokens, enable_prefix_caching=prefix_caching),
            scheduler_config=SchedulerConfig(
                max_num_seqs=16,
                max_num_batched_tokens=step_tokens,
                max_model_len=8192,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
                async_scheduling=False,
            ),
            parallel_config=ParallelConfig(
                tensor_parallel_size=ranks, distributed_executor_backend="mp"
            ),
            device_config=DeviceConfig("cpu"),
            kv_transfer_config=KVTransferConfig(
                kv_connector="KVPoolConnector",
                kv_connector_module_path="kvpool.engines.vllm",
                kv_role=role,
                kv_load_failure_policy=policy,
                kv_connector_extra_config=extra,
            ),
        )
        self.page_tokens = page_tokens
        self.ranks = ranks
        heads = max(1, HEADS // ranks)
        spec = FullAttentionSpec(
            block_size=page_tokens, num_kv_heads=heads, head_size=HEAD_DIM, dtype=torch.bfloat16
        )
        names = [f"model.layers.{i}.self_attn.attn" for i in range(LAYERS)]
        size = pages * spec.page_size_bytes
        self.config.cache_config.num_gpu_blocks = pages
        kv_config = KVCacheConfig(
            num_blocks=pages,
            kv_cache_tensors=[
                KVCacheTensor(
                    size=size * LAYERS,
                    layers=names,
                    layer_stride=size,
                    block_stride=spec.page_size_bytes,
                )
            ],
            kv_cache_groups=[KVCacheGroupSpec(names, spec)],
            kv_cache_layout="LBHNC",
            hash_block_size=page_tokens,
        )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(page_tokens, sha256)
        self.scheduler = Scheduler(
            self.config,
            kv_config,
            StructuredOutputManager(self.config),
            block_size=page_tokens,
            log_stats=True,
        )
        self.connector: KVPoolConnector = self.scheduler.connector
        # One storage for all layers, layer outermost, K and V side by side: as vLLM has it on CPU.
        self.caches: list[torch.Tensor] = []
        self.workers: list[KVPoolConnector] = []
        for rank in range(ranks):
            cache = torch.zeros(
                (LAYERS, pages, heads, page_tokens, 2 * HEAD_DIM), dtype=torch.bfloat16
            )
            config = copy.copy(self.config)
            config.parallel_config = copy.copy(self.config.parallel_config)
            config.parallel_config.rank = rank
            worker = KVPoolConnector(config, KVConnectorRole.WORKER, kv_config)
            worker.register_kv_caches(dict(zip(names, cache, strict=True)))
            self.caches.append(cache)
            self.workers.append(worker)
        handshakes = {(0, rank): w.get_handshake_metadata() for rank, w in enumerate(self.workers)}
        self.connector.set_xfer_handshake_metadata_pp_aware(handshakes)
        self._aggregator = KVOutputAggregator.from_connector(self.connector, ranks)
        self._names = names
        self.outputs: dict[str, list[int]] = {}
        self.errors: set[str] = set()
        self.steps = 0
        self.computed_tokens = 0  # positions whose KV the "model" wrote
        self.slow_layer: Callable[[int], None] = lambda _layer: None

    def close(self) -> None:
        self.scheduler.shutdown()
        for worker in self.workers:
            worker.shutdown()

    # ------------------------------------------------------------ requests

    def add(
        self,
        name: str,
        tokens: Sequence[int],
        max_tokens: int = 4,
        *,
        transfer: dict[str, Any] | None = None,
        **options: Any,
    ) -> Request:
        request = Request(
            request_id=name,
            prompt_token_ids=list(tokens),
            sampling_params=SamplingParams(
                max_tokens=max_tokens,
                temperature=0,
                ignore_eos=True,
                extra_args={"kv_transfer_params": transfer},
            ),
            pooling_params=None,
            block_hasher=self._hasher,
            **options,
        )
        request.sampling_params.update_from_generation_config({}, 2)
        self.outputs[name] = []
        self.scheduler.add_request(request)
        return request

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def run(
        self, name: str, tokens: Sequence[int], max_tokens: int = 4, **options: Any
    ) -> list[int]:
        """Serve one request to its end; returns what it generated."""
        self.add(name, tokens, max_tokens, **options)
        self.drain()
        return self.outputs[name]

    def drain(self, limit: int = 20_000) -> None:
        """Step until all requests and saves have ended."""
        for _ in range(limit):
            if not self.scheduler.has_requests():
                return
            self.step()
        raise AssertionError(f"not done after {limit} steps")

    # ------------------------------------------------------------ one step

    def step(self) -> SchedulerOutput:
        self.steps += 1
        output = self.scheduler.schedule()
        results = [self._execute(rank, output) for rank in range(self.ranks)]
        results[0].sampled_token_ids = [self._sample(name) for name in results[0].req_ids]
        merged = self._aggregator.aggregate(results) if self.ranks > 1 else results[0]
        for outputs in self.scheduler.update_from_output(output, merged).values():
            for item in outputs.outputs:
                self.outputs[item.request_id] += item.new_token_ids
                if str(item.finish_reason) == "error":
                    self.errors.add(item.request_id)
        return output

    def _execute(self, rank: int, output: SchedulerOutput) -> ModelRunnerOutput:
        worker = self.workers[rank]
        worker.handle_preemptions(output.kv_connector_metadata)
        worker.bind_connector_metadata(output.kv_connector_metadata)
        if output.has_sync_kv_loads:
            worker.start_load_kv(None)
        for layer, layer_name in enumerate(self._names):
            if not output.num_scheduled_tokens:
                break
            worker.wait_for_layer_load(layer_name)
            self.slow_layer(layer)
            for request_id, count in output.num_scheduled_tokens.items():
                self._compute(rank, layer, request_id, count)
            worker.save_kv_layer(layer_name, self.caches[rank][layer], None)
        if not output.has_sync_kv_loads:
            worker.start_load_kv(None)
        worker.wait_for_save()
        results = worker.get_transfer_results(output.finished_req_ids)
        told = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_stats=worker.get_kv_connector_stats(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        ids = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={name: i for i, name in enumerate(ids)},
            kv_connector_output=told,
        )

    def _compute(self, rank: int, layer: int, request_id: str, count: int) -> None:
        request = self.scheduler.requests[request_id]
        start = request.num_computed_tokens - count  # the scheduler has counted them already
        values = kv_values(list(request.all_token_ids)[: start + count], layer, rank)[start:]
        for position, value in enumerate(values, start):
            self._cell(rank, layer, request_id, position)[...] = value
        if not layer and not rank:
            self.computed_tokens += count

    def _cell(self, rank: int, layer: int, request_id: str, position: int) -> torch.Tensor:
        table = self.scheduler.kv_cache_manager.get_block_ids(request_id)[0]
        page = table[position // self.page_tokens]
        return self.caches[rank][layer, page, :, position % self.page_tokens, :].view(torch.int16)

    def _sample(self, request_id: str) -> list[int]:
        request = self.scheduler.requests[request_id]
        if request.num_computed_tokens < request.num_tokens:
            return []  # a chunk of the prompt
        return [next_token(self.stored_kv(request_id, request.num_computed_tokens))]

    def stored_kv(self, request_id: str, tokens: int) -> np.ndarray:
        """The pages' content, shape [ranks, layers, tokens, heads, 2 x head dim]."""
        table = self.scheduler.kv_cache_manager.get_block_ids(request_id)[0]
        pages = table[: -(-tokens // self.page_tokens)]
        kv = torch.stack([cache[:, pages] for cache in self.caches]).view(torch.int16)
        kv = kv.permute(0, 1, 2, 4, 3, 5).flatten(2, 3)[:, :, :tokens]
        return kv.contiguous().numpy()

    @property
    def totals(self) -> dict[str, float]:
        """MetricsRecorder of all sides together."""
        merged: dict[str, float] = {}
        for connector in (self.connector, *self.workers):
            for name, value in connector.metrics.totals.items():
                merged[name] = merged.get(name, 0) + value
        return merged


def kv_values(tokens: Sequence[int], layer: int, rank: int) -> list[int]:
    """The KV of each position, which depends on all tokens up to it."""
    values, state = [], zlib.crc32(bytes([layer, rank]))
    for token in tokens:
        state = zlib.crc32(int(token).to_bytes(4, "little"), state)
        values.append(state & 0x7FFF)
    return values


def next_token(kv: np.ndarray) -> int:
    """Sampled from every byte of the KV."""
    return 3 + zlib.crc32(kv.tobytes()) % (VOCABULARY - 3)


def expected_output(tokens: Sequence[int], count: int, ranks: int = 1) -> list[int]:
    """The model's output after `tokens`, computed without vLLM."""
    tokens = list(tokens)
    generated: list[int] = []
    heads = max(1, HEADS // ranks)
    for _ in range(count):
        kv = np.array(
            [[kv_values(tokens, layer, rank) for layer in range(LAYERS)] for rank in range(ranks)],
            dtype=np.int16,
        )
        cells = np.broadcast_to(kv[..., None, None], (*kv.shape, heads, 2 * HEAD_DIM))
        generated.append(next_token(np.ascontiguousarray(cells)))
        tokens.append(generated[-1])
    return generated
