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
        description='of the weights; "": a hash of the model\'s files',
    )
    draft_revision: str = Field(
        "", max_length=256, description="the same of a draft model for speculative decoding"
    )
    kv_cache_dtype: str = Field(
        "", max_length=32, description='format of 8-bit KV; "": as SGLang\'s --kv-cache-dtype'
    )
    on_mismatch: Literal["refuse", "separate"] = Field(
        "refuse",
        description="if the pool has the model in another layout (page size, dtype, TP size):"
        " do not start, or keep the blocks apart",
    )

    lookup_timeout_s: Seconds = Field(
        1.0,
        description="of one look-up, including promotion of pages from disks; then a miss",
    )
    load_timeout_s: Seconds = Field(5.0, description="of one load of up to 128 pages; then a miss")
    store_timeout_s: Seconds = Field(10.0, description="of one store of up to 128 pages")
    lease_s: Seconds = Field(
        10.0, description="how long found pages are held for the load that follows"
    )
    max_leased_pages: int = Field(
        65_536, ge=1, description="most pages held at once; beyond that, the oldest are released"
    )

    # SGLang's own keys: kvpool accepts and ignores them.
    backend_name: str = "kvpool"
    module_path: str = ""
    class_name: str = ""
    interface_v1: Any = Field(None, description="must be 1: moves pages without copies")
    prefetch_threshold: Any = None
    prefetch_timeout_base: Any = None
    prefetch_timeout_per_ki_token: Any = None
    hicache_storage_pass_prefix_keys: Any = Field(
        None, description="true lets the pool evict suffixes before their prefixes"
    )
    tp_lcm_size: Any = Field(None, description="not supported")
    file_storage_path: Any = None
