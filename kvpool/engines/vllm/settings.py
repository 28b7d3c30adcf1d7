"""The connector's settings in `kv_connector_extra_config`."""

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
        "",
        max_length=512,
        description='name in the namespace; "": the last part of vLLM\'s --model',
    )
    revision: str = Field(
        "", max_length=512, description='of the weights; "": a hash of the model\'s files'
    )
    block_tokens: int = Field(
        0,
        ge=0,
        le=65_536,
        description="tokens of a block, a multiple of vLLM's page; 0: the page, at least 64",
    )

    lookup_deadline_s: float = Field(
        0.005, ge=0, le=1, description="longest time that a look-up may delay the scheduling loop"
    )
    max_disk_wait_s: float = Field(
        5.0,
        ge=0,
        le=600,
        description="longest wait for blocks on a disk, if that is faster than computing",
    )
    lease_s: float = Field(
        20.0, gt=0, le=3600, description="how long found blocks are held for a waiting request"
    )
    load_timeout_s: float = Field(
        10.0, gt=0, le=600, description="of one load; then vLLM recomputes"
    )
    save_timeout_s: float = Field(30.0, gt=0, le=600, description="of one save; then it is dropped")
    prefill_tokens_per_s: float = Field(
        0.0, ge=0, description="speed of computing, to compare a load with; 0: as measured"
    )
    save_decoded: bool = Field(True, description="save generated tokens too, for the next turn")
    fixed_weights: bool = Field(
        False,
        description="weights never change in place: continue sharing after vLLM resets its caches",
    )
    layerwise_load: bool = Field(
        False, description="compute the first layers while the last ones are loaded"
    )
    layerwise_save: bool = Field(
        False, description="send each layer when it is final, for prefill instances"
    )
    prefault: bool = Field(
        True,
        description="on a CPU, page in vLLM's KV memory at start, not by the first loads",
    )
    staging_bytes: Bytes = Field(
        64 << 20, ge=1 << 20, description="of each buffer for loads and saves"
    )
    max_pending_save_bytes: Bytes = Field(
        512 << 20, ge=0, description="blocks that wait to be saved; more are postponed"
    )

    def block_tokens_for(self, page_tokens: int) -> int:
        """Tokens of a block if vLLM's page has `page_tokens`.

        Raises:
            ConfigError: `block_tokens` is no multiple of the page.
        """
        if not self.block_tokens:
            return page_tokens * max(1, -(-64 // page_tokens))
        if self.block_tokens % page_tokens:
            nearest = max(1, round(self.block_tokens / page_tokens)) * page_tokens
            raise ConfigError(
                f"block_tokens={self.block_tokens} is no multiple of vLLM's page of {page_tokens}"
                " tokens",
                hint=f"leave it out, or use {nearest}",
            )
        return self.block_tokens


def read(extra_config: Mapping[str, Any]) -> VllmSettings:
    """The settings in vLLM's `kv_connector_extra_config`.

    Raises:
        ConfigError: a key is unknown (the error names the nearest known key), or a value is
            invalid.
    """
    return read_settings(VllmSettings, extra_config, SOURCE)
