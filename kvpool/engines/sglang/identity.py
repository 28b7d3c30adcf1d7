"""The model and revision that a SGLang process serves."""

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
    """What identifies a model's KV besides its layout.

    Args:
        name: for people.
        revision: identifies the weights.
        draft_revision: identifies a draft model's weights; "" without one.
        kv_cache_dtype: as in SGLang; "auto" for the model's own.
    """

    name: str
    revision: str
    draft_revision: str
    kv_cache_dtype: str


def identify(settings: SGLangSettings, config: HiCacheStorageConfig) -> ModelIdentity:
    """The identity from the settings, and otherwise from SGLang's published configuration.

    Raises:
        ConfigError: this version of SGLang is not supported; or the model's name or revision is
            unknown.
    """
    if not sglang_version.startswith(f"{SUPPORTED}."):
        raise ConfigError(
            f"kvpool does not support SGLang {sglang_version}",
            hint=f"{SUPPORTED}.x is supported",
        )
    path = published("get_model", "model_path") or config.model_name or ""
    is_directory = bool(path) and Path(path).expanduser().is_dir()
    revision = settings.revision
    if not revision:
        revision = _content_hash(path, published("get_model", "revision"), "revision")
    elif is_directory and not settings.model:
        raise ConfigError(
            f"{SOURCE}: revision is set, but the model has no name except its directory {path}",
            hint="set model, too, to the same name on all hosts",
        )
    # A content hash identifies the weights, so the directory's last part is name enough.
    name = settings.model or (path if settings.revision else Path(path).expanduser().name)
    if not name:
        raise ConfigError(f"{SOURCE}: SGLang gives no name of its model", hint="set model")
    draft = settings.draft_revision
    draft_path = published("get_spec", "speculative_draft_model_path")
    if not draft and draft_path:
        draft_commit = published("get_spec", "speculative_draft_model_revision")
        draft = _content_hash(draft_path, draft_commit, "draft_revision")
    dtype = settings.kv_cache_dtype or published("get_model", "kv_cache_dtype") or ""
    return ModelIdentity(name, revision, draft, dtype)


def published(bag: str, name: str) -> Any:
    """A value of SGLang's published configuration; None if this process has none."""
    from sglang.srt import runtime_context

    try:
        return getattr(getattr(runtime_context, bag)(), name)
    except (ValueError, RuntimeError, AttributeError, KeyError):
        return None  # not published (tools, tests), or named otherwise in this patch release


def _content_hash(path: str, commit: str | None, setting: str) -> str:
    try:
        return revision_of(model_directory(path, commit))
    except ModelNotFound as error:
        raise ConfigError(
            f"{SOURCE}: the weights cannot be identified: {error}",
            hint=f"set {setting} to what names them, e.g. a commit",
        ) from error
