"""Settings of the LMCache backends, besides those of all engine backends."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from kvpool.blocks.model_revision import revision_of
from kvpool.config.settings import OptionalPath, Seconds
from kvpool.engines.shared.settings import EngineSettings


class LMCacheSettings(EngineSettings):
    """Settings of both backends."""

    revision: str = Field(
        "", max_length=400, description="identifies the weights, e.g. a commit or content hash"
    )
    model_path: OptionalPath = Field(
        None,
        description="instead of revision: the model's files; their content hash is the revision",
    )
    lookup_timeout_s: Seconds = Field(
        2.0, description="blocks not found and leased by then are misses"
    )
    load_timeout_s: Seconds = Field(10.0, description="blocks not read by then are misses")
    store_timeout_s: Seconds = Field(
        30.0, description="of a store from its submission, including the wait for others"
    )
    max_stores: int = Field(4, ge=1, le=64, description="store tasks that run at once; others wait")
    max_listed: int = Field(
        100_000, ge=1, le=10_000_000, description="keys remembered for listing and usage"
    )

    @model_validator(mode="after")
    def _weights_are_named_once(self) -> Self:
        if self.revision and self.model_path is not None:
            raise ValueError("give revision or model_path, not both")
        return self

    def weights(self) -> str:
        """What identifies the weights. Reads the model's files if no revision is given.

        Raises:
            ModelNotFound: `model_path` has no such files.
        """
        return self.revision if self.model_path is None else revision_of(self.model_path)


class AdapterSettings(LMCacheSettings):
    """`adapter_params` of the L2 adapter."""

    lock_ttl_s: Seconds = Field(
        10.0, description="lease on what a lookup found; renewed until it is unlocked"
    )
    max_lock_s: Seconds = Field(
        300.0, description="longest time that a lookup holds blocks if nobody unlocks them"
    )

    @model_validator(mode="after")
    def _weights_are_known(self) -> Self:
        if not self.revision and self.model_path is None:
            raise ValueError(
                "revision or model_path is needed: LMCache's keys contain only the model's name,"
                " which does not tell other weights apart"
            )
        return self


class ConnectorSettings(LMCacheSettings):
    """`extra_config.remote_storage_plugin.kvpool.*` of the in-process mode, which locks nothing.

    With neither revision nor model_path, kvpool looks for the files of the model that LMCache
    names.
    """

    # The engine's scheduler waits for it.
    lookup_timeout_s: Seconds = Field(0.25, description="chunks not found by then are misses")
