"""What the LMCache backends can be told, beyond what every engine's backend can."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from kvpool.blocks.model_revision import revision_of
from kvpool.config.settings import OptionalPath, Seconds
from kvpool.engines.shared.settings import EngineSettings


class LMCacheSettings(EngineSettings):
    """What both backends have."""

    revision: str = Field(
        "", max_length=400, description="identifies the weights, e.g. a commit or content hash"
    )
    model_path: OptionalPath = Field(
        None, description="instead of revision: the model's files, whose content hash it then is"
    )
    lookup_timeout_s: Seconds = Field(
        2.0, description="what is not found and held by then is a miss"
    )
    load_timeout_s: Seconds = Field(10.0, description="what has not come by then is a miss")
    store_timeout_s: Seconds = Field(
        30.0, description="from submission on, waiting for others included; then it is given up"
    )
    max_stores: int = Field(4, ge=1, le=64, description="store tasks at work at once; others wait")
    max_listed: int = Field(
        100_000, ge=1, le=10_000_000, description="keys remembered for listing and for usage"
    )

    @model_validator(mode="after")
    def _weights_are_named_once(self) -> Self:
        if self.revision and self.model_path is not None:
            raise ValueError("revision and model_path: give one of the two")
        return self

    def weights(self) -> str:
        """What identifies the weights. Reads the model's files where no revision is given.

        Raises:
            ModelNotFound: there are no such files.
        """
        return self.revision if self.model_path is None else revision_of(self.model_path)


class AdapterSettings(LMCacheSettings):
    """`adapter_params` of the L2 adapter."""

    lock_ttl_s: Seconds = Field(
        10.0, description="lease of what a lookup found; renewed until it is unlocked"
    )
    max_lock_s: Seconds = Field(
        300.0, description="longest that a lookup holds blocks in place if nobody unlocks them"
    )

    @model_validator(mode="after")
    def _weights_are_known(self) -> Self:
        if not self.revision and self.model_path is None:
            raise ValueError(
                "revision or model_path is needed: LMCache's keys hold no more of a model than its name, and"
                " other weights must never be taken for these"
            )
        return self


class ConnectorSettings(LMCacheSettings):
    """`extra_config.remote_storage_plugin.kvpool.*` of the in-process mode, where nothing is locked.

    With neither revision nor model_path, the files of the model that LMCache names are looked for.
    """

    # The engine's scheduler waits for it.
    lookup_timeout_s: Seconds = Field(0.25, description="what is not found by then is a miss")
