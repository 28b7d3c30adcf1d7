"""Common models by name: the numbers of their `config.json`, and where it was published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvpool.errors import ConfigError, did_you_mean
from planner.sizing.model_shape import ModelShape, shape_of

HUB = "https://huggingface.co/"


def _dense(
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    inner: int,
    vocabulary: int,
    **more: Any,
) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
        **more,
    }


def _experts(count: int, chosen: int, width: int, **more: Any) -> dict[str, Any]:
    return {
        "num_experts": count,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": width,
        **more,
    }


def _latent(rank: int, q_rank: int | None, nope: int, **more: Any) -> dict[str, Any]:
    return {
        "kv_lora_rank": rank,
        "q_lora_rank": q_rank,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": nope,
        "v_head_dim": 128,
        **more,
    }


_DELTA_NET = {
    "full_attention_interval": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_V3_EXPERTS = _experts(256, 8, 2048, n_shared_experts=1, first_k_dense_replace=3)
_OSS = {"model_type": "gpt_oss", "head_dim": 64, "sliding_window": 128}
_TIED = {"tie_word_embeddings": True}

# name -> (repository on the Hugging Face hub, numbers of its config.json)
PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm2-135m": (
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        _dense(30, 576, 9, 3, 1536, 49152, **_TIED),
    ),
    "llama-3-8b": ("meta-llama/Meta-Llama-3-8B", _dense(32, 4096, 32, 8, 14336, 128256)),
    "llama-3-70b": ("meta-llama/Meta-Llama-3-70B", _dense(80, 8192, 64, 8, 28672, 128256)),
    "llama-3.1-405b": ("meta-llama/Llama-3.1-405B", _dense(126, 16384, 128, 8, 53248, 128256)),
    "llama-2-70b": ("meta-llama/Llama-2-70b-hf", _dense(80, 8192, 64, 8, 28672, 32000)),
    "qwen2.5-7b": ("Qwen/Qwen2.5-7B-Instruct", _dense(28, 3584, 28, 4, 18944, 152064)),
    "qwen2.5-72b": ("Qwen/Qwen2.5-72B-Instruct", _dense(80, 8192, 64, 8, 29568, 152064)),
    "qwen3-8b": ("Qwen/Qwen3-8B", _dense(36, 4096, 32, 8, 12288, 151936, head_dim=128)),
    "qwen3-32b": ("Qwen/Qwen3-32B", _dense(64, 5120, 64, 8, 25600, 151936, head_dim=128)),
    "qwen3-30b-a3b": (
        "Qwen/Qwen3-30B-A3B",
        _dense(48, 2048, 32, 4, 6144, 151936, head_dim=128) | _experts(128, 8, 768),
    ),
    "qwen3-235b-a22b": (
        "Qwen/Qwen3-235B-A22B",
        _dense(94, 4096, 64, 4, 12288, 151936, head_dim=128) | _experts(128, 8, 1536),
    ),
    "qwen3-next-80b-a3b": (
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        _dense(48, 2048, 16, 2, 5120, 151936, head_dim=256, model_type="qwen3_next")
        | _experts(512, 10, 512, shared_expert_intermediate_size=512)
        | _DELTA_NET,
    ),
    "qwen3.5-35b-a3b": (
        "Qwen/Qwen3.5-35B-A3B",
        _dense(40, 2048, 16, 2, 512, 248320, head_dim=256, model_type="qwen3_5_moe")
        | _experts(256, 8, 512, shared_expert_intermediate_size=512)
        | _DELTA_NET,
    ),
    "deepseek-v2-lite": (
        "deepseek-ai/DeepSeek-V2-Lite",
        _dense(27, 2048, 16, 16, 10944, 102400)
        | _experts(64, 6, 1408, n_shared_experts=2, first_k_dense_replace=1)
        | _latent(512, None, 128),
    ),
    "deepseek-v3": (
        "deepseek-ai/DeepSeek-V3",
        _dense(61, 7168, 128, 128, 18432, 129280) | _V3_EXPERTS | _latent(512, 1536, 128),
    ),
    "deepseek-r1": (
        "deepseek-ai/DeepSeek-R1",
        _dense(61, 7168, 128, 128, 18432, 129280) | _V3_EXPERTS | _latent(512, 1536, 128),
    ),
    "deepseek-v3.2": (
        "deepseek-ai/DeepSeek-V3.2-Exp",
        _dense(61, 7168, 128, 128, 18432, 129280)
        | _V3_EXPERTS
        | _latent(512, 1536, 128, index_head_dim=128),
    ),
    "kimi-k2": (
        "moonshotai/Kimi-K2-Instruct",
        _dense(61, 7168, 64, 64, 18432, 163840)
        | _experts(384, 8, 2048, n_shared_experts=1, first_k_dense_replace=1)
        | _latent(512, 1536, 128),
    ),
    "mistral-7b-v0.1": (
        "mistralai/Mistral-7B-v0.1",
        _dense(32, 4096, 32, 8, 14336, 32000, sliding_window=4096),
    ),
    "mistral-7b-v0.3": ("mistralai/Mistral-7B-v0.3", _dense(32, 4096, 32, 8, 14336, 32768)),
    "mistral-small-24b": (
        "mistralai/Mistral-Small-24B-Instruct-2501",
        _dense(40, 5120, 32, 8, 32768, 131072, head_dim=128),
    ),
    "mistral-large-123b": (
        "mistralai/Mistral-Large-Instruct-2407",
        _dense(88, 12288, 96, 8, 28672, 32768),
    ),
    "mistral-small-4-119b": (
        "mistralai/Mistral-Small-4-119B-2603",
        _dense(36, 4096, 32, 32, 12288, 131072)
        | _experts(128, 4, 2048, n_shared_experts=1)
        | _latent(256, 1024, 64),
    ),
    "ministral-3-8b": (
        "mistralai/Ministral-3-8B-Base-2512",
        _dense(34, 4096, 32, 8, 14336, 131072, head_dim=128),
    ),
    "mixtral-8x7b": (
        "mistralai/Mixtral-8x7B-v0.1",
        _dense(32, 4096, 32, 8, 14336, 32000) | _experts(8, 2, 14336),
    ),
    "gpt-oss-20b": (
        "openai/gpt-oss-20b",
        _dense(24, 2880, 64, 8, 2880, 201088, **_OSS) | _experts(32, 4, 2880),
    ),
    "gpt-oss-120b": (
        "openai/gpt-oss-120b",
        _dense(36, 2880, 64, 8, 2880, 201088, **_OSS) | _experts(128, 4, 2880),
    ),
    "gemma-3-27b": (
        "google/gemma-3-27b-it",
        _dense(62, 5376, 32, 16, 21504, 262208, head_dim=128)
        | {"sliding_window": 1024, "sliding_window_pattern": 6}
        | _TIED,
    ),
    "falcon-7b": (
        "tiiuae/falcon-7b",
        {
            "model_type": "falcon",
            "num_hidden_layers": 32,
            "hidden_size": 4544,
            "num_attention_heads": 71,
            "multi_query": True,
            "vocab_size": 65024,
            "tie_word_embeddings": True,
        },
    ),
}


def model_named(name: str) -> ModelShape:
    """A preset, or the model of a `config.json` (a path to the file or to its directory).

    Raises:
        ConfigError: the preset or file does not exist, or the file lacks a number.
    """
    preset = PRESETS.get(name.lower())
    if preset is not None:
        repository, config = preset
        return shape_of(config, name.lower(), HUB + repository)
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return shape_of(_read(path), path.resolve().parent.name or str(path), str(path))
    if name.endswith(".json"):
        raise ConfigError(f"cannot read {name}: the file does not exist")
    hint = did_you_mean(name.lower(), PRESETS)
    raise ConfigError(f"unknown model {name!r}", hint=f"{hint}, or the path of a config.json")


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds {type(found).__name__}, not a JSON object")
    return found
