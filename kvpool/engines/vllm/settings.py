"""`kv_connector_extra_config` of the connector: names, units, defaults and bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from kvpool.config.settings import Bytes
from kvpool.engines.shared.settings import EngineSettings, read_settings
from kvpool.errors import ConfigError

SOURCE = "kv_connector_extra_config"


class VllmSettings(EngineSettings):
    """How one vLLM instance uses the pool."""

    model: str = Field(
        "", max_length=512, description='in the namespace; "": last part of vLLM\'s --model'
    )
    revision: str = Field(
        "", max_length=512, description='of the weights; "": a hash of the model\'s files'
    )
    block_tokens: int = Field(
        0, ge=0, le=65_536, description="a multiple of vLLM's page; 0: that page, 64 at least"
    )

    lookup_deadline_s: float = Field(
        0.005, ge=0, le=1, description="that a look-up may hold up the scheduling loop"
    )
    max_disk_wait_s: float = Field(
        5.0,
        ge=0,
        le=600,
        description="that a request may wait for blocks on a disk, if that is faster than computing",
    )
    lease_s: float = Field(
        20.0, gt=0, le=3600, description="that found blocks are held for a request that waits"
    )
    load_timeout_s: float = Field(10.0, gt=0, le=600, description="of one load; then recomputed")
    save_timeout_s: float = Field(30.0, gt=0, le=600, description="of one save; then dropped")
    prefill_tokens_per_s: float = Field(
        0.0, ge=0, description="what computing costs, to compare a load with; 0: as measured"
    )
    save_decoded: bool = Field(True, description="save generated tokens too, for the next turn")
    fixed_weights: bool = Field(
        False,
        description="weights are never updated in place: go on sharing after vLLM's caches were reset",
    )
    layerwise_load: bool = Field(
        False, description="compute the first layers while the last ones are loaded"
    )
    layerwise_save: bool = Field(
        False, description="send each layer when it is final, for prefill instances"
    )
    prefault: bool = Field(
        True,
        description="on a CPU, have all of vLLM's KV memory paged in at start, not by the first loads",
    )
    staging_bytes: Bytes = Field(
        64 << 20, ge=1 << 20, description="of each of the buffers that loads and saves go through"
    )
    max_pending_save_bytes: Bytes = Field(
        512 << 20, ge=0, description="that wait to be saved; what comes beyond is put off"
    )

    def block_tokens_for(self, page_tokens: int) -> int:
        """Tokens of a block, where vLLM's page has `page_tokens`.

        Raises:
            ConfigError: what is set is no multiple of the page.
        """
        if not self.block_tokens:
            return page_tokens * max(1, -(-64 // page_tokens))
        if self.block_tokens % page_tokens:
            raise ConfigError(
                f"block_tokens={self.block_tokens} is no multiple of vLLM's page of {page_tokens} tokens",
                hint=f"use {max(1, round(self.block_tokens / page_tokens)) * page_tokens}, or leave it out",
            )
        return self.block_tokens


def read(extra_config: Mapping[str, Any]) -> VllmSettings:
    """The settings in vLLM's `kv_connector_extra_config`.

    Raises:
        ConfigError: a key is unknown (the nearest known one is named), or a value cannot be accepted.
    """
    return read_settings(VllmSettings, extra_config, SOURCE)
