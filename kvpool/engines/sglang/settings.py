"""The keys of `--hicache-storage-backend-extra-config`: names, units, defaults and bounds."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from kvpool.config.settings import Seconds
from kvpool.engines.shared.settings import EngineSettings

SOURCE = "hicache-storage-backend-extra-config"


class SGLangSettings(EngineSettings):
    """How one SGLang instance uses the pool."""

    model: str = Field(
        "", max_length=256, description='in the namespace; "": what SGLang calls the model'
    )
    revision: str = Field(
        "",
        max_length=256,
        description='of the weights; "": a hash of what is in the model\'s files',
    )
    draft_revision: str = Field(
        "", max_length=256, description="the same of a draft model for speculative decoding"
    )
    kv_cache_dtype: str = Field(
        "", max_length=32, description='format of 8-bit KV; "": as SGLang\'s --kv-cache-dtype'
    )
    on_mismatch: Literal["refuse", "separate"] = Field(
        "refuse",
        description="where the pool knows the model in another layout (page size, dtype, TP size, ...): do not"
        " start, or keep blocks apart from the others'",
    )

    lookup_timeout_s: Seconds = Field(
        1.0,
        description="of one look-up; then all is a miss. Of blocks on disks, too, which it brings up",
    )
    load_timeout_s: Seconds = Field(5.0, description="of one load of up to 128 pages; then a miss")
    store_timeout_s: Seconds = Field(10.0, description="of one store of up to 128 pages")
    lease_s: Seconds = Field(
        10.0, description="that found pages are held for the load that follows; SGLang may not come"
    )
    max_leased_pages: int = Field(
        65_536, ge=1, description="held at once; beyond, the oldest are let go"
    )

    # SGLang's own, which it reads or removes: not ours, but no mistakes either.
    backend_name: str = "kvpool"
    module_path: str = ""
    class_name: str = ""
    interface_v1: Any = Field(None, description="must be 1: pages are moved without being copied")
    prefetch_threshold: Any = None
    prefetch_timeout_base: Any = None
    prefetch_timeout_per_ki_token: Any = None
    hicache_storage_pass_prefix_keys: Any = Field(
        None, description="set it to true: the pool then evicts suffixes before their prefixes"
    )
    tp_lcm_size: Any = Field(None, description="not supported")
    file_storage_path: Any = None
