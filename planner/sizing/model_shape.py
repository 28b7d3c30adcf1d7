"""The KV and the arithmetic of a model per token, from the numbers of its `config.json`.

Supports grouped and multi-query attention, MLA (one latent vector per token and layer), sliding
windows, layers that keep a fixed state instead of KV, and mixtures of experts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpool.errors import ConfigError

Numbers = Mapping[str, Any]
DSA_SCALE_BYTES = 4  # an fp32 scale beside each fp8 index key, as vLLM keeps it


@dataclass(slots=True, frozen=True)
class KeptLayers:
    """Equal layers. Each keeps per token `values` in the cache's dtype, and `fixed_bytes` in another."""

    layers: int
    values: int
    window: int = 0  # tokens kept; 0: all
    fixed_bytes: int = 0


@dataclass(slots=True, frozen=True)
class ModelShape:
    """The memory, traffic and arithmetic of a model.

    Args:
        pair_flops: floating-point operations for each pair of a new token and a token that it
            attends to, over all layers with full attention.
        windowed_flops: the same for layers with a window, per new token once the window is full.
        state_bytes: kept per sequence, independent of its length, by layers without KV.
    """

    name: str
    source: str
    layers: int
    kept: tuple[KeptLayers, ...]
    total_params: int
    active_params: int  # used by one token, without embedding look-ups
    hidden: int
    pair_flops: float
    windowed_flops: float = 0.0
    state_bytes: int = 0

    def bytes_per_token(self, value_bytes: float) -> int:
        """KV bytes that a token adds while no window is full."""
        return round(sum(k.layers * (k.values * value_bytes + k.fixed_bytes) for k in self.kept))

    def kv_bytes(self, tokens: int, value_bytes: float) -> int:
        """KV bytes of one sequence of `tokens` within its layers' windows, including fixed state."""
        total = 0.0
        for k in self.kept:
            held = min(tokens, k.window) if k.window else tokens
            total += held * k.layers * (k.values * value_bytes + k.fixed_bytes)
        return round(total) + self.state_bytes

    @property
    def smallest_window(self) -> int:
        """The smallest number of tokens that a layer keeps; 0: all layers keep all tokens."""
        return min((k.window for k in self.kept if k.window), default=0)


def shape_of(config: Numbers, name: str, source: str) -> ModelShape:
    """The shape that a `config.json` describes.

    Raises:
        ConfigError: a number is missing or invalid.
    """
    reader = _Reader(config, source)
    layers = reader.number("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    hidden = reader.number("hidden_size", "n_embd", "d_model", "dim")
    heads = reader.number("num_attention_heads", "n_head", "n_heads", "num_heads")
    kinds = _layer_kinds(reader, layers)
    vocabulary = reader.number("vocab_size", default=0)
    attention, values, head_flops = _attention(reader, hidden, heads)
    index_dim = reader.number("index_head_dim", default=0)
    fixed = index_dim + DSA_SCALE_BYTES if index_dim else 0
    counts = Counter(kinds)
    kept = tuple(
        KeptLayers(count, values, window, fixed) for window, count in counts.items() if window >= 0
    )
    if not kept:
        raise ConfigError(f"{source}: no layer of {name} keeps KV, so there is nothing to size")
    linear_params, state_values = _linear_layer(reader, hidden)
    in_mlp, in_active_mlp = _mlp(reader, layers, hidden)
    in_layers = attention * (layers - counts[-1]) + linear_params * counts[-1]
    is_tied = bool(reader.get("tie_word_embeddings"))
    embeddings = vocabulary * hidden
    return ModelShape(
        name=name,
        source=source,
        layers=layers,
        kept=kept,
        total_params=in_layers + in_mlp + embeddings * (1 if is_tied else 2),
        active_params=in_layers + in_active_mlp + embeddings,
        hidden=hidden,
        pair_flops=float(head_flops * counts[0]),
        windowed_flops=float(sum(head_flops * n * w for w, n in counts.items() if w > 0)),
        state_bytes=4 * state_values * counts[-1],  # kept in fp32
    )


class _Reader:
    """Numbers of a config by any of their names; of a multimodal model, those of its language part."""

    def __init__(self, config: Numbers, source: str) -> None:
        inner = next(
            (
                config[key]
                for key in ("text_config", "llm_config", "language_config")
                if key in config
            ),
            None,
        )
        self.config = {**config, **inner} if isinstance(inner, Mapping) else config
        self.source = source

    def get(self, *names: str) -> Any:
        return next((self.config[n] for n in names if self.config.get(n) is not None), None)

    def number(self, *names: str, default: int | None = None) -> int:
        found = self.get(*names)
        if found is None and default is not None:
            return default
        if not isinstance(found, int) or isinstance(found, bool) or not 0 < found < 1 << 40:
            if found == 0 and default is not None:
                return 0
            what = "is missing" if found is None else f"is {found!r}"
            raise ConfigError(
                f"{self.source}: {names[0]} {what}",
                hint="give a decoder model's config.json as Hugging Face writes it",
            )
        return found


def _layer_kinds(reader: _Reader, layers: int) -> list[int]:
    """The tokens that each layer keeps: 0: all; -1: none, but a fixed state; otherwise its window."""
    window = reader.number("sliding_window", "attention_window_size", default=0)
    if reader.get("use_sliding_window") is False:
        window = 0
    chunk = reader.number("attention_chunk_size", default=0)
    named = reader.get("layer_types")
    if isinstance(named, (list, tuple)) and len(named) == layers:
        of_kind = {
            "full_attention": 0,
            "sliding_attention": window,
            "chunked_attention": chunk,
            "linear_attention": -1,
        }
        unknown = sorted({str(kind) for kind in named} - set(of_kind))
        if unknown:
            raise ConfigError(
                f"{reader.source}: layers of kind {unknown[0]!r} are not known here",
                hint=f"known: {', '.join(of_kind)}",
            )
        return [of_kind[str(kind)] for kind in named]
    interval = reader.number("full_attention_interval", default=0)
    if interval:
        return [-1 if (i + 1) % interval else 0 for i in range(layers)]
    period = reader.number("attn_layer_period", default=0)
    if period:
        offset = reader.number("attn_layer_offset", default=0)
        return [0 if i % period == offset else -1 for i in range(layers)]
    pattern = reader.number("sliding_window_pattern", default=0)
    model_type = str(reader.get("model_type") or "")
    if not pattern and model_type.startswith(("gemma2", "gpt_oss")):
        pattern = 2  # without a pattern in the config, every second layer is full
    if window and pattern:
        return [window if (i + 1) % pattern else 0 for i in range(layers)]
    if window and model_type.startswith("qwen"):
        first = reader.number("max_window_layers", default=layers)
        return [window if i >= first else 0 for i in range(layers)]
    return [window] * layers


def _attention(reader: _Reader, hidden: int, heads: int) -> tuple[int, int, int]:
    """Parameters, values kept per token, and operations per pair of tokens of one layer with KV."""
    rank = reader.number("kv_lora_rank", default=0)
    if rank:
        rope = reader.number("qk_rope_head_dim")
        nope = reader.number("qk_nope_head_dim", default=128)
        value_dim = reader.number("v_head_dim", default=128)
        q_rank = reader.number("q_lora_rank", default=0)
        queries = heads * (nope + rope)
        params = hidden * q_rank + q_rank * queries if q_rank else hidden * queries
        params += hidden * (rank + rope) + rank * heads * (nope + value_dim)
        params += heads * value_dim * hidden
        return params, rank + rope, 2 * heads * (nope + rope + value_dim)
    kv_heads = reader.number("num_key_value_heads", "num_kv_heads", "n_head_kv", default=0)
    if not kv_heads:
        kv_heads = 1 if reader.get("multi_query") else heads
    if heads % kv_heads:
        raise ConfigError(f"{reader.source}: {heads} heads cannot share {kv_heads} KV heads")
    head_dim = reader.number("head_dim", "attention_head_dim", default=0) or hidden // heads
    gates = 2 if reader.get("attn_output_gate") or _has_gated_queries(reader) else 1
    params = hidden * head_dim * (heads * (1 + gates) + 2 * kv_heads)
    return params, 2 * kv_heads * head_dim, 4 * heads * head_dim


def _has_gated_queries(reader: _Reader) -> bool:
    return str(reader.get("model_type") or "").startswith(("qwen3_next", "qwen3_5"))


def _linear_layer(reader: _Reader, hidden: int) -> tuple[int, int]:
    """Parameters and state values of one layer of linear attention (gated delta net)."""
    value_heads = reader.number("linear_num_value_heads", default=0)
    if not value_heads:
        return 0, 0
    key_heads = reader.number("linear_num_key_heads")
    key_dim = reader.number("linear_key_head_dim")
    value_dim = reader.number("linear_value_head_dim")
    keys, values = key_heads * key_dim, value_heads * value_dim
    params = hidden * (2 * keys + 2 * values + 2 * value_heads) + values * hidden
    return params, value_heads * key_dim * value_dim


def _mlp(reader: _Reader, layers: int, hidden: int) -> tuple[int, int]:
    """Parameters of all feed-forward layers: in total, and used by one token."""
    inner = reader.number("intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim", default=0)
    matrices = 2 if _is_plain_mlp(reader) else 3
    experts = reader.number("num_experts", "n_routed_experts", "num_local_experts", default=0)
    if not experts:
        dense = matrices * hidden * (inner or 4 * hidden)
        return layers * dense, layers * dense
    chosen = reader.number("num_experts_per_tok", "experts_per_token", "moe_topk")
    width = reader.number("moe_intermediate_size", default=0) or inner
    shared = reader.number("shared_expert_intermediate_size", default=0)
    if not shared:
        shared = reader.number("n_shared_experts", default=0) * width
    first_dense = reader.number("first_k_dense_replace", default=0)
    always = hidden * experts + 3 * hidden * shared
    dense_layers = first_dense * 3 * hidden * inner
    sparse = layers - first_dense
    total = dense_layers + sparse * (always + experts * 3 * hidden * width)
    active = dense_layers + sparse * (always + chosen * 3 * hidden * width)
    return total, active


def _is_plain_mlp(reader: _Reader) -> bool:
    """Whether a feed-forward layer has two matrices instead of the three of a gated one."""
    model_type = str(reader.get("model_type") or "")
    return model_type in ("gpt2", "falcon", "opt", "bloom", "gpt_neox", "gpt_bigcode", "starcoder2")
