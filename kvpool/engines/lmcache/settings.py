"""What the LMCache backends can be told, beyond what every engine's backend can."""

from __future__ import annotations

from pydantic import Field

from kvpool.engines.settings import EngineSettings
from kvpool.settings import Seconds


class LMCacheSettings(EngineSettings):
    """`adapter_params` of the L2 adapter; `extra_config.remote_storage_plugin.kvpool.*` of the connector."""

    revision: str = Field(
        min_length=1,
        max_length=400,
        description="identifies the weights, as a content hash does: LMCache's keys hold the model's name alone",
    )
    lookup_timeout_s: Seconds = Field(
        2.0, description="what is not found and held by then is a miss"
    )
    load_timeout_s: Seconds = Field(10.0, description="what has not come by then is a miss")
    store_timeout_s: Seconds = Field(
        30.0, description="from submission on, waiting for others included; then it is given up"
    )
    lock_ttl_s: Seconds = Field(
        10.0, description="lease of what a lookup found; renewed until it is unlocked"
    )
    max_lock_s: Seconds = Field(
        300.0, description="longest that a lookup holds blocks in place if nobody unlocks them"
    )
    max_stores: int = Field(4, ge=1, le=64, description="store tasks at work at once; others wait")
    max_listed: int = Field(
        100_000, ge=1, le=10_000_000, description="keys remembered for listing and for usage"
    )
