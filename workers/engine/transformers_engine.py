"""An engine that runs a causal language model of Hugging Face transformers on any torch device.

For models with plain full attention in every layer (Llama, Qwen, Mistral without a window, SmolLM
...) and one tensor-parallel rank. One sequence per step: no batching, no paging, no CUDA graphs. It
serves tests, demos and CPUs; production GPUs join through vLLM's and SGLang's connectors.

Numerics: two prefills of one prompt agree bit for bit if they are split at the same tokens. In
bfloat16 another split rounds differently, so compare a pool hit with a local hit of the same split.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import structlog
import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache, DynamicLayer

from kvpool.blocks.layout import Layout
from kvpool.blocks.model_revision import revision_of
from kvpool.errors import (
    ConfigError,
    EngineFailed,
    InvalidArgument,
    ModelNotFound,
    WrongByteCount,
)
from kvpool.wire.messages import Sampling
from workers.engine.contract import Bytes, Engine, LayerChunk, OnLayer, SequenceState
from workers.engine.kv_cache import TORCH_DTYPES, BlockedCache
from workers.engine.sampling import draw

if TYPE_CHECKING:
    from collections.abc import Iterator

log = structlog.get_logger(__name__)

# What torch and transformers raise when a forward pass fails (out of memory is a RuntimeError).
_MODEL_ERRORS = (RuntimeError, ValueError, IndexError, TypeError, MemoryError)
_NO_LOGITS = torch.empty(0)


@dataclass(slots=True, eq=False)
class _Sequence(SequenceState):
    owner: object = None
    cache: BlockedCache | None = None
    logits: torch.Tensor = field(default=_NO_LOGITS)  # of the last token computed, float32, on CPU


class TransformersEngine(Engine):
    """An engine on torch.

    Args:
        model_dir: directory with `config.json` and safetensors weights.
        model_name: part of the namespace, so equal on all hosts; default: the directory's name.
        block_tokens: tokens per pool block.
        device: as torch names it: "cpu", "cuda:0" ...
        dtype: "float32", "bfloat16", "float16", or "auto" for the dtype of the weights. On a CPU that
            has no instructions for a 16-bit dtype, "auto" means float32.
        attention: transformers' name of the attention implementation.

    Raises:
        ModelNotFound: the directory holds no model that transformers can load.
        ConfigError: the dtype is unknown, the device does not exist, or the model has layers
            without full attention, whose KV does not fit into the pool's blocks.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        model_name: str = "",
        block_tokens: int = 64,
        device: str = "cpu",
        dtype: str = "auto",
        attention: str = "sdpa",
    ) -> None:
        if dtype != "auto" and dtype not in TORCH_DTYPES:
            raise ConfigError(
                f"dtype {dtype!r} is unknown to this engine",
                hint=f"use auto or one of {', '.join(TORCH_DTYPES)}",
            )
        self._device = _device(device)
        self._revision = revision_of(model_dir)
        self._model_name = model_name or model_dir.resolve().name
        self._model: Any = _load(model_dir, dtype, attention, self._device)
        config = self._model.config.get_text_config(decoder=True)
        _require_full_attention(config, model_dir)
        self._layout = Layout(
            dtype=_dtype_name(self._model.dtype),
            layers=config.num_hidden_layers,
            kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None)
            or config.hidden_size // config.num_attention_heads,
            block_tokens=block_tokens,
        )
        self._vocabulary = int(config.vocab_size)
        self._max_model_tokens = int(config.max_position_embeddings)
        self._eos_token_ids = _eos_token_ids(self._model)
        # `past_key_values` became `cache`; transformers keeps both names from 5.24 to 5.40
        parameters = inspect.signature(self._model.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"

    @property
    def layout(self) -> Layout:
        return self._layout

    @property
    def model_name(self) -> str:
        return self._model_name

    @property
    def revision(self) -> str:
        return self._revision

    @property
    def max_model_tokens(self) -> int:
        return self._max_model_tokens

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._eos_token_ids

    def start(self, token_ids: npt.NDArray[np.integer[Any]], max_new_tokens: int) -> SequenceState:
        prompt = self._checked_prompt(token_ids)
        if max_new_tokens < 0:
            raise InvalidArgument(f"max_new_tokens is {max_new_tokens}", hint="0 or more")
        wanted = len(prompt) + max_new_tokens
        if wanted > self._max_model_tokens:
            raise InvalidArgument(
                f"{len(prompt)} prompt tokens and {max_new_tokens} new ones do not fit",
                hint=f"{self._model_name} takes at most {self._max_model_tokens} tokens in all",
            )
        try:
            cache = BlockedCache(self._layout, wanted, self._device)
        except (RuntimeError, MemoryError) as error:
            raise EngineFailed(
                f"no memory for the KV of {wanted} tokens: {error}", hint="close other sequences"
            ) from error
        return _Sequence(prompt=prompt, max_new_tokens=max_new_tokens, owner=self, cache=cache)

    def load_prefix(self, sequence: SequenceState, blocks: Bytes) -> None:
        own, cache = self._own(sequence)
        if own.kv_tokens:
            raise InvalidArgument(
                "a prefix must be loaded before anything is computed,"
                f" but {own.kv_tokens} tokens already have KV"
            )
        if blocks.dtype != np.uint8 or blocks.ndim != 2:
            raise InvalidArgument(
                f"blocks must be uint8 [n, part_bytes], got {blocks.dtype} of {blocks.shape}"
            )
        count, row_bytes = blocks.shape
        if row_bytes != self._layout.part_bytes:
            raise WrongByteCount(
                f"a block part has {row_bytes} bytes",
                hint=f"this layout has {self._layout.part_bytes}",
            )
        tokens = count * self._layout.block_tokens
        if tokens > len(own.prompt):
            raise InvalidArgument(
                f"{count} blocks are {tokens} tokens, the prompt has {len(own.prompt)}"
            )
        with _timed(own, "load"), _model_errors("loading a prefix"):
            cache.load_blocks(blocks)
        own.loaded_blocks = count
        own.loaded_tokens = own.kv_tokens = min(tokens, len(own.prompt) - 1)
        cache.set_length(own.kv_tokens)

    def prefill(
        self, sequence: SequenceState, on_layer: OnLayer | None = None, chunk_tokens: int = 0
    ) -> None:
        own, cache = self._own(sequence)
        if chunk_tokens < 0:
            raise InvalidArgument(f"chunk_tokens is {chunk_tokens}", hint="0 or more")
        if own.is_prefilled:
            raise InvalidArgument("the prompt is already computed")
        end = len(own.prompt)
        cache.on_blocks_final = _notifier(own, cache, on_layer)
        try:
            with _timed(own, "prefill"):
                while own.kv_tokens < end:
                    step = min(chunk_tokens or end, end - own.kv_tokens)
                    self._forward(own, cache, own.prompt[own.kv_tokens : own.kv_tokens + step])
                    own.computed_tokens += step
        finally:
            cache.on_blocks_final = None

    def next_token(self, sequence: SequenceState, sampling: Sampling) -> int:
        own, _ = self._own(sequence)
        self._require_prefilled(own)
        return draw(own.logits, sampling, position=own.kv_tokens)

    def decode(self, sequence: SequenceState, token: int) -> None:
        own, cache = self._own(sequence)
        self._require_prefilled(own)
        if not 0 <= token < self._vocabulary:
            raise InvalidArgument(f"token {token} is not in [0, {self._vocabulary})")
        if len(own.generated) >= own.max_new_tokens:
            raise InvalidArgument(
                f"the sequence was started with room for {own.max_new_tokens} new tokens"
            )
        with _timed(own, "decode"):
            self._forward(own, cache, np.array([token], np.int64))
        own.generated.append(token)

    def export_blocks(self, sequence: SequenceState, first_block: int, count: int) -> Bytes:
        own, cache = self._own(sequence)
        whole = own.kv_tokens // self._layout.block_tokens
        if first_block < 0 or count < 0 or first_block + count > whole:
            raise InvalidArgument(
                f"blocks [{first_block}, {first_block + count}) were asked for, {whole} are whole"
            )
        with _model_errors("exporting blocks"):
            return cache.pack_blocks(first_block, first_block + count)

    def close(self, sequence: SequenceState) -> None:
        if not isinstance(sequence, _Sequence) or sequence.owner is not self:
            raise InvalidArgument("the sequence belongs to another engine")
        sequence.cache = None
        sequence.logits = _NO_LOGITS
        sequence.is_closed = True

    def _forward(self, own: _Sequence, cache: BlockedCache, tokens: npt.NDArray[np.int64]) -> None:
        """One forward pass. An error leaves the KV as it was."""
        before = own.kv_tokens
        cache.is_notifying = False
        try:
            with torch.inference_mode():
                output = self._model(
                    input_ids=torch.from_numpy(tokens).unsqueeze(0).to(self._device),
                    use_cache=True,
                    logits_to_keep=1,
                    **{self._cache_argument: cache},
                )
                logits = output.logits[0, -1].float().cpu()
        except BaseException as error:
            cache.set_length(before)
            if isinstance(error, _MODEL_ERRORS) and not cache.is_notifying:
                raise EngineFailed(
                    f"{self._model_name} failed on tokens [{before}, {before + len(tokens)}):"
                    f" {type(error).__name__}: {error}"
                ) from error
            raise
        own.kv_tokens = before + len(tokens)
        own.logits = logits

    def _checked_prompt(self, token_ids: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int64]:
        if token_ids.ndim != 1 or not np.issubdtype(token_ids.dtype, np.integer):
            raise InvalidArgument(
                "token ids must be a one-dimensional integer array,"
                f" got {token_ids.dtype} of shape {token_ids.shape}"
            )
        if not len(token_ids):
            raise InvalidArgument("the prompt is empty")
        low, high = int(token_ids.min()), int(token_ids.max())
        if low < 0 or high >= self._vocabulary:
            raise InvalidArgument(
                f"token {low if low < 0 else high} is not in [0, {self._vocabulary})",
                hint="was the prompt tokenized for another model?",
            )
        return np.array(token_ids, np.int64)  # a copy: the caller may reuse its buffer

    def _own(self, sequence: SequenceState) -> tuple[_Sequence, BlockedCache]:
        if not isinstance(sequence, _Sequence) or sequence.owner is not self:
            raise InvalidArgument("the sequence belongs to another engine")
        if sequence.cache is None:
            raise InvalidArgument("the sequence is closed")
        return sequence, sequence.cache

    @staticmethod
    def _require_prefilled(own: _Sequence) -> None:
        if not own.is_prefilled:
            raise InvalidArgument(
                f"{own.kv_tokens} of {len(own.prompt)} prompt tokens have KV", hint="prefill first"
            )


def _notifier(
    own: _Sequence, cache: BlockedCache, on_layer: OnLayer | None
) -> Callable[[int, int, int], None] | None:
    """Pack the blocks that become final and pass them on, except those that were loaded."""
    if on_layer is None:
        return None

    def notify(layer: int, first: int, end: int) -> None:
        first = max(first, own.loaded_blocks)
        if first < end:
            with _model_errors("packing a layer"), _timed(own, "pack"):
                packed = cache.pack_layer(layer, first, end)
            on_layer(LayerChunk(layer, first, packed))

    return notify


@contextmanager
def _timed(own: _Sequence, phase: str) -> Iterator[None]:
    started = time.perf_counter()
    try:
        yield
    finally:
        own.seconds[phase] = own.seconds.get(phase, 0.0) + time.perf_counter() - started


@contextmanager
def _model_errors(doing: str) -> Iterator[None]:
    try:
        yield
    except _MODEL_ERRORS as error:
        raise EngineFailed(f"{doing} failed: {type(error).__name__}: {error}") from error


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built with CUDA
        raise ConfigError(
            f"device {name!r} cannot be used: {error}", hint="cpu always works"
        ) from error
    return device


def _load(model_dir: Path, dtype: str, attention: str, device: torch.device) -> Any:
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(model_dir),
            dtype="auto" if dtype == "auto" else TORCH_DTYPES[dtype],
            attn_implementation=attention,
            local_files_only=True,
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelNotFound(
            f"{model_dir} holds no model that transformers can load: {error}"
        ) from error
    if dtype == "auto" and device.type == "cpu" and not _is_fast_on_cpu(model.dtype):
        log.info("this CPU is slow at the weights' dtype", dtype=str(model.dtype), uses="float32")
        model = model.float()
    return model.to(device)  # from_pretrained leaves it in evaluation mode


def _is_fast_on_cpu(dtype: torch.dtype) -> bool:
    """Whether torch multiplies matrices of this dtype with the CPU's own instructions for it.

    Without them it is far slower than in float32: 1.2 against 96 GFLOP/s on two cores with AVX2.
    """
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return True


def _require_full_attention(config: Any, model_dir: Path) -> None:
    # transformers itself says what each layer must keep
    odd = {
        type(x).__name__ for x in DynamicCache(config=config).layers if type(x) is not DynamicLayer
    }
    if odd:
        raise ConfigError(
            f"{model_dir} has layers whose state is not the KV of full attention:"
            f" {', '.join(sorted(odd))}",
            hint="serve it without the pool, or with vLLM's connector",
        )


def _dtype_name(dtype: torch.dtype) -> str:
    for name, known in TORCH_DTYPES.items():
        if known == dtype:
            return name
    raise ConfigError(
        f"the weights are in {dtype}", hint=f"pass dtype, one of {', '.join(TORCH_DTYPES)}"
    )


def _eos_token_ids(model: Any) -> frozenset[int]:
    found: set[int] = set()
    for source in (model.config, getattr(model, "generation_config", None)):
        eos = getattr(source, "eos_token_id", None)
        if eos is not None:
            found.update([eos] if isinstance(eos, int) else eos)
    return frozenset(found)
