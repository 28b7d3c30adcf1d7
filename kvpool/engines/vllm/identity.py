"""What identifies KV: the model, in the namespace, and the request, in its chain of hashes.

This covers everything that changes a byte of KV besides the tokens. A request with KV that cannot
be identified for sure shares nothing. The identity depends on content, never on a path, the process
or PYTHONHASHSEED.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

from kvpool.blocks.hashing import cache_salt_key
from kvpool.blocks.layout import Namespace
from kvpool.blocks.model_revision import CONFIG_NOISE, model_directory, revision_of
from kvpool.engines.vllm.lora import LoraVersions
from kvpool.engines.vllm.page_layout import LayoutFacts
from kvpool.engines.vllm.settings import VllmSettings

__all__ = [
    "LayoutFacts",
    "ModelIdentity",
    "attention_backends",
    "extra_keys",
    "lora_traits",
    "model_identity",
    "namespace_of",
]

_FORMAT = 1  # raise it when the traits of the fingerprint change
# Drafters without KV of their own do not change what is stored.
_DRAFTERS_WITHOUT_KV = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
# vLLM's digest of a picture or sound. A name chosen by a client does not identify the content.
_CONTENT_HASH = re.compile(r"(.*:)?[0-9a-f]{64,128}", re.DOTALL)


class ModelIdentity(msgspec.Struct, frozen=True):
    """A model as one vLLM instance runs it.

    Args:
        model: its name, for people; the rest identifies it.
        revision: content hash of its weights and configuration.
        traits: everything else that changes KV: types, quantization, parallelism, drafters.
        tp_size: tensor-parallel ranks.
    """

    model: str
    revision: str
    traits: dict[str, str]
    tp_size: int = 1

    @property
    def fingerprint(self) -> str:
        """A hash of the traits, 16 hex digits."""
        text = msgspec.json.encode([_FORMAT, self.traits], order="sorted")
        return hashlib.sha256(text).hexdigest()[:16]


def model_identity(vllm_config: Any, revision: str = "") -> ModelIdentity:
    """The identity of the model that vLLM serves.

    Args:
        revision: the revision in the settings; "": a hash of the model's files.

    Raises:
        ModelNotFound: `revision` is empty, and the model's files are not on this host.
    """
    config = vllm_config.model_config
    traits = {
        "dtype": str(config.dtype),
        "kv_dtype": str(vllm_config.cache_config.cache_dtype),
        "config": _config_hash(config.hf_config),
        **_model_traits(vllm_config),
        **_parallel_traits(vllm_config.parallel_config),
        **_draft_traits(vllm_config.speculative_config),
    }
    return ModelIdentity(
        model=Path(str(config.model).rstrip("/")).name or str(config.model),
        revision=revision or revision_of(model_directory(config.model, config.revision)),
        traits=traits,
        tp_size=vllm_config.parallel_config.tensor_parallel_size,
    )


def namespace_of(identity: ModelIdentity, facts: LayoutFacts, settings: VllmSettings) -> Namespace:
    """The namespace of the blocks that this instance stores. Raises as `Namespace` and `Layout`.

    Its revision consists of the weights' revision and the fingerprint.
    """
    return Namespace(
        settings.model or identity.model,
        f"{settings.revision or identity.revision}+vllm.{identity.fingerprint}",
        facts.layout(settings.block_tokens_for(facts.page_tokens), identity.tp_size),
        settings.tenant,
        settings.salt.get_secret_value(),
        settings.hash_algorithm,
    )


def attention_backends(vllm_config: Any) -> str:
    """The attention backends that vLLM chose for its layers.

    Each may lay out a page differently.
    """
    layers = vllm_config.compilation_config.static_forward_context.values()
    names = {
        str(layer.get_attn_backend().get_name())
        for layer in layers
        if hasattr(layer, "get_attn_backend")
    }
    return ",".join(sorted(names))


def lora_traits(vllm_config: Any) -> str:
    """What changes an adapter's effect besides its files."""
    lora = vllm_config.lora_config
    return "" if lora is None else f"{lora.lora_dtype}/{_text(lora.target_modules)}"


def extra_keys(request: Any, loras: LoraVersions, wait_s: float = 0.0) -> tuple[str, ...] | None:
    """What a request's KV depends on besides its tokens; None if the request shares nothing.

    Pictures and sounds count with their positions. They go into the chain's root, so prompts with
    different pictures share no blocks, even before the first picture.

    Args:
        request: vLLM's `Request`.
        wait_s: how long to wait for the content of a new adapter.
    """
    if request.prompt_embeds is not None or request.prompt_token_ids is None:
        return None
    keys = []
    if request.lora_request is not None:
        version = loras.version_of(request.lora_request, wait_s)
        if version is None:
            return None
        keys.append(f"lora:{version}")
    if request.cache_salt:
        keys.append(cache_salt_key(request.cache_salt))
    for feature in request.mm_features:
        if not feature.identifier or not _CONTENT_HASH.fullmatch(feature.identifier):
            return None
        place = feature.mm_position
        keys.append(f"mm:{place.offset}+{place.length}:{feature.modality}:{feature.identifier}")
    return tuple(keys)


def _model_traits(vllm_config: Any) -> dict[str, str]:
    """The options in `ModelConfig` that change KV, without those at their defaults."""
    config = vllm_config.model_config
    traits = {
        name: _text(value)
        for name in (
            "quantization",
            "quantization_config",
            "override_attention_dtype",
            "disable_sliding_window",
            "model_class_overrides",
        )
        if (value := getattr(config, name, None))
    }
    rope = getattr(config.hf_text_config, "rope_parameters", None) or getattr(
        config.hf_text_config, "rope_scaling", None
    )
    if isinstance(rope, Mapping) and _is_scaled(rope):
        # Some scalings depend on the longest sequence that is served.
        traits["max_model_len"] = str(config.max_model_len)
    load_format = str(getattr(vllm_config.load_config, "load_format", "auto"))
    if "dummy" in load_format:
        traits["dummy_weights"] = str(config.seed)
    media = config.multimodal_config
    if media is not None:
        names = ("mm_processor_kwargs", "video_pruning_rate", "mm_encoder_attn_dtype")
        traits["media"] = _text({name: getattr(media, name, None) for name in names})
    return traits


def _parallel_traits(parallel: Any) -> dict[str, str]:
    shape = (
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
        getattr(parallel, "prefill_context_parallel_size", 1),
        getattr(parallel, "decode_context_parallel_size", 1),
    )
    return {"tp_pp_pcp_dcp": ".".join(map(str, shape))}


def _draft_traits(speculative: Any) -> dict[str, str]:
    """A drafter's KV is in the same pages, so its weights count, too."""
    if speculative is None or speculative.method in _DRAFTERS_WITHOUT_KV:
        return {}
    draft = speculative.draft_model_config
    traits = {"drafter": str(speculative.method)}
    if draft is not None:
        traits["draft_config"] = _config_hash(draft.hf_config)
        traits["draft_dtype"] = f"{draft.dtype} {draft.quantization} {speculative.kv_cache_dtype}"
        if draft.model != speculative.target_model_config.model:
            traits["draft_revision"] = revision_of(model_directory(draft.model, draft.revision))
    return traits


def _is_scaled(rope: Mapping[str, Any]) -> bool:
    """Whether rotary embeddings are scaled in any layer type. The mapping may be nested by type."""
    kind = rope.get("rope_type") or rope.get("type")
    nested = [value for value in rope.values() if isinstance(value, Mapping)]
    return kind not in (None, "default") or any(_is_scaled(value) for value in nested)


def _config_hash(hf_config: Any) -> str:
    """A hash of the configuration as vLLM uses it, with the changes of the command line."""
    fields = dict(hf_config.to_dict())
    for name in CONFIG_NOISE:
        fields.pop(name, None)
    return hashlib.sha256(_text(fields).encode()).hexdigest()


def _text(value: Any) -> str:
    return msgspec.json.encode(_plain(value), order="sorted").decode()


def _plain(value: Any) -> Any:
    """The value as JSON types, without memory addresses or hash order."""
    if isinstance(value, Enum):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, (set, frozenset)):
        return sorted(_text(one) for one in value)
    if hasattr(value, "to_dict"):
        return _plain(value.to_dict())
    if hasattr(value, "__dict__"):
        public = {name: one for name, one in vars(value).items() if not name.startswith("_")}
        return {"": type(value).__name__, **_plain(public)}
    return str(value)
