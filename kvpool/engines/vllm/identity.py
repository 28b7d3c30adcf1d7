"""Whose KV it is: what goes into the namespace, and what else a request's KV depends on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvpool.engines.vllm.settings import VllmSettings
from kvpool.layout import Layout, Namespace
from kvpool.model_revision import model_directory, revision_of


class LayoutFacts(msgspec.Struct, frozen=True):
    """What only a rank knows of how KV is laid out, told to the scheduler; equal on all ranks."""

    order: str
    dtype: str
    kv_heads: int
    head_dim: int
    layers: int
    page_tokens: int
    ranks: int = 1
    kv_per_token: int = 2


@dataclass(slots=True, frozen=True)
class ModelIdentity:
    """A model by its content."""

    model: str
    revision: str


def model_identity(vllm_config: Any) -> ModelIdentity:
    """Of the model that vLLM serves. Raises `ModelNotFound`."""
    config = vllm_config.model_config
    directory = model_directory(config.model, config.revision)
    return ModelIdentity(Path(config.model).name, revision_of(directory))


def namespace_of(identity: ModelIdentity, facts: LayoutFacts, settings: VllmSettings) -> Namespace:
    """The namespace of all that this instance stores. Raises as `Namespace` and `Layout`."""
    layout = Layout(
        facts.dtype,
        facts.layers,
        facts.kv_heads,
        facts.head_dim,
        settings.block_tokens_for(facts.page_tokens),
        facts.ranks,
        facts.kv_per_token,
        facts.order,
    )
    return Namespace(
        settings.model or identity.model,
        settings.revision or identity.revision,
        layout,
        settings.tenant,
        settings.salt.get_secret_value(),
        settings.hash_algorithm,
    )


def extra_keys(request: Any) -> tuple[str, ...] | None:
    """What else than tokens the KV of a request depends on; None: it is shared with nobody."""
    if request.mm_features or request.prompt_embeds is not None or request.lora_request is not None:
        return None
    return (f"cache_salt:{request.cache_salt}",) if request.cache_salt else ()
