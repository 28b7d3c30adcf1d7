"""Whose pages these are: model and revision, as SGLang's process knows them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.version import __version__ as sglang_version

from kvpool.blocks.model_revision import model_directory, revision_of
from kvpool.engines.sglang.settings import SOURCE, SGLangSettings
from kvpool.errors import ConfigError, ModelNotFound

SUPPORTED = "0.5"


@dataclass(slots=True, frozen=True)
class ModelIdentity:
    """What identifies the KV of a model besides its layout.

    `name` is for people; `revision` stands for the weights, `draft_revision` for those of a draft model, "" where
    there is none. `kv_cache_dtype` is what SGLang calls it, "auto" for the model's own.
    """

    name: str
    revision: str
    draft_revision: str
    kv_cache_dtype: str


def identify(settings: SGLangSettings, config: HiCacheStorageConfig) -> ModelIdentity:
    """The identity from the settings, and from what SGLang has published for the rest.

    Raises:
        ConfigError: this SGLang is not supported; or model or revision can be found nowhere.
    """
    if not sglang_version.startswith(f"{SUPPORTED}."):
        raise ConfigError(
            f"kvpool does not know the storage interface of SGLang {sglang_version}",
            hint=f"{SUPPORTED}.x is supported",
        )
    path = published("get_model", "model_path") or config.model_name or ""
    is_directory = bool(path) and Path(path).expanduser().is_dir()
    revision = settings.revision
    if not revision:
        revision = _content_hash(path, published("get_model", "revision"), "revision")
    elif is_directory and not settings.model:
        raise ConfigError(
            f"{SOURCE}: revision is set, and the model is known by its directory {path} alone",
            hint="set model, too: one name for it on all hosts",
        )
    # A hash of the content is identity enough: the same files may lie in any directory, or be some owner's.
    name = settings.model or (path if settings.revision else Path(path).expanduser().name)
    if not name:
        raise ConfigError(f"{SOURCE}: SGLang tells no name of its model", hint="set model")
    draft = settings.draft_revision
    draft_path = published("get_spec", "speculative_draft_model_path")
    if not draft and draft_path:
        draft_commit = published("get_spec", "speculative_draft_model_revision")
        draft = _content_hash(draft_path, draft_commit, "draft_revision")
    dtype = settings.kv_cache_dtype or published("get_model", "kv_cache_dtype") or ""
    return ModelIdentity(name, revision, draft, dtype)


def published(bag: str, name: str) -> Any:
    """A value of SGLang's published configuration; None where this process has none."""
    from sglang.srt import runtime_context

    try:
        return getattr(getattr(runtime_context, bag)(), name)
    except (ValueError, RuntimeError, AttributeError, KeyError):
        return None  # not published here (as in tools and tests), or another patch release's name


def _content_hash(path: str, commit: str | None, setting: str) -> str:
    try:
        return revision_of(model_directory(path, commit))
    except ModelNotFound as error:
        raise ConfigError(
            f"{SOURCE}: the weights cannot be identified: {error}",
            hint=f"set {setting} to what names them, e.g. a commit",
        ) from error
