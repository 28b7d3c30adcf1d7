"""Maps a SGLang host pool to kvpool: its namespace, this rank's part, and its pages' hashes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName

from kvpool.blocks.hashing import chain_root, object_hash
from kvpool.blocks.layout import Layout, Namespace
from kvpool.engines.sglang.host_pages import HostPages, Sharing
from kvpool.engines.sglang.identity import ModelIdentity
from kvpool.engines.sglang.settings import SOURCE, SGLangSettings
from kvpool.errors import ConfigError

DRAFTS = (PoolName.DRAFT.value, PoolName.DRAFT_SWA.value, PoolName.DRAFT_INDEXER.value)


@dataclass(slots=True, frozen=True)
class PageSpace:
    """A host pool and its namespace."""

    name: str
    pages: HostPages
    namespace: Namespace

    @property
    def part(self) -> int:
        """The part of each block that this rank reads and writes."""
        return self.pages.sharing.part

    @property
    def is_writer(self) -> bool:
        """Whether this rank stores pages. Of ranks with the same bytes, one does."""
        return self.pages.sharing.is_writer

    def hashes(self, keys: Sequence[str]) -> list[bytes]:
        """The block hashes of SGLang's page keys.

        A key is SGLang's hash of the tokens up to the page's end. The root adds model, layout and
        tenant.
        """
        root = chain_root(self.namespace, ("sglang-page",))
        return [object_hash(self.namespace, root, key.encode()) for key in keys]


def check_supported(config: HiCacheStorageConfig, settings: SGLangSettings) -> None:
    """Check that kvpool supports this instance.

    Raises:
        ConfigError: it does not; the error names the option.
    """
    if not settings.interface_v1:
        raise ConfigError(f"{SOURCE}: interface_v1 is not set", hint='add "interface_v1": 1')
    if config.tp_lcm_size or settings.tp_lcm_size:
        raise ConfigError(
            f"{SOURCE}: tp_lcm_size is not supported",
            hint="use one tensor-parallel size, or leave it out",
        )
    if config.dcp_size > 1:
        raise ConfigError("decode context parallelism (dcp_size > 1) is not supported")


def page_space(
    host_pool: Any,
    name: str,
    config: HiCacheStorageConfig,
    settings: SGLangSettings,
    identity: ModelIdentity,
) -> PageSpace:
    """The page space of a host pool.

    Raises:
        ConfigError: its pages cannot be stored.
    """
    sharing = _sharing(host_pool, name, config)
    pages = HostPages(host_pool, name, sharing, identity.kv_cache_dtype)
    namespace = Namespace(
        model=identity.name + _suffix(host_pool, name, config),
        revision=_revision(host_pool, name, pages.layout, settings, identity),
        layout=pages.layout,
        tenant=settings.tenant,
        salt=settings.salt.get_secret_value(),
        hash_algorithm=settings.hash_algorithm,
    )
    return PageSpace(name, pages, namespace)


def _sharing(host_pool: Any, name: str, config: HiCacheStorageConfig) -> Sharing:
    """How ranks share a pool: each has its own part, but with MLA all ranks hold the same KV.

    Even with MLA, each rank has its own state of linear layers, and SGLang has every rank store it.
    """
    if not config.is_mla_model or name == PoolName.MAMBA.value:
        return Sharing(config.tp_size, config.tp_rank, is_writer=True)
    is_mha = any(cls.__name__ == "MHATokenToKVPoolHost" for cls in type(host_pool).__mro__)
    if is_mha and config.tp_size > 1:
        raise ConfigError(
            f"pool {name!r} has its own K and V on each of {config.tp_size} ranks, but SGLang lets"
            " a dynamic backend store only the first rank's",
            hint="use a draft model with MLA, or none",
        )
    return Sharing(1, 0, is_writer=config.tp_rank == 0)


def _suffix(host_pool: Any, name: str, config: HiCacheStorageConfig) -> str:
    """The part of a namespace's name that tells the pools of one model apart."""
    suffix = f":sglang/{name}"
    if config.pp_size > 1:
        suffix += f"/layers{host_pool.start_layer}-{host_pool.end_layer}"
    if config.attn_cp_size > 1:
        suffix += f"/cp{config.attn_cp_rank}of{config.attn_cp_size}"
    tag = getattr(host_pool, "storage_format_tag", None)
    return f"{suffix}/{tag}" if tag else suffix


def _revision(
    host_pool: Any, name: str, layout: Layout, settings: SGLangSettings, identity: ModelIdentity
) -> str:
    revision = identity.revision
    drafts = getattr(host_pool, "layer_num", 0) - getattr(host_pool, "target_layer_num", 0)
    has_draft = hasattr(host_pool, "target_layer_num") and drafts > 0
    if identity.draft_revision and (name in DRAFTS or has_draft):
        revision += f"+draft:{identity.draft_revision}"
    if settings.on_mismatch == "separate":
        revision += f"+layout:{layout.fingerprint}"
    return revision
