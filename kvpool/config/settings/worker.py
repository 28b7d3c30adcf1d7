"""The settings of a worker, and of the engine that only sleeps."""

from __future__ import annotations

import socket
from typing import Literal, Self

from pydantic import Field, SecretStr, model_validator

from kvpool.config.settings.types import (
    DEFAULT_CONDUCTOR,
    MIB,
    Addresses,
    OptionalText,
    Port,
    Section,
    ServerConfig,
)


class WorkerConfig(ServerConfig):
    """A prefill or decode worker around one engine, and whose blocks it makes."""

    worker_id: OptionalText = Field(None, max_length=128, description="None: a fresh UUID")
    role: Literal["prefill", "decode", "both"] = "both"
    engine: Literal["transformers", "fake"] = Field(
        "transformers", description="fake: sleeps instead of computing, to try out scheduling"
    )
    model: OptionalText = Field(None, description="directory or GGUF file; needed to start")
    model_name: OptionalText = Field(
        None, description="name that users ask for; None: from the model"
    )
    device: str = Field("cpu", min_length=1)
    threads: int = Field(
        0, ge=0, le=4096, description="CPU threads of the engine; 0: its own choice"
    )
    host_label: str = Field(default_factory=socket.gethostname, min_length=1, max_length=128)
    wire_port: Port = 7820
    http_port: Port = 7821
    conductor: Addresses = Field(
        DEFAULT_CONDUCTOR, description="wire address of one or of several, as in node.conductor"
    )
    may_change_role: bool = Field(
        True, description="the conductor may have it prefill instead of decode, and back"
    )
    kv_events: str = Field(
        "", max_length=512, description="where its engine publishes KV events, as tcp://host:5557"
    )
    kv_replay: str = Field(
        "", max_length=512, description="where it replays them, as tcp://host:5558"
    )
    max_concurrent: int = Field(4, ge=1, le=4096)
    max_model_tokens: int = Field(8192, ge=16, le=16_777_216)
    block_tokens: int = Field(64, ge=1, le=65_536)
    local_cache_tokens: int = Field(
        0, ge=0, description="capacity of the engine's own prefix cache; 0: none"
    )
    tenant: str = Field("", max_length=512)
    salt: SecretStr = Field(SecretStr(""), description="separates users; mixed into every hash")
    hash_algorithm: Literal["xxh3-128", "sha256"] = "xxh3-128"


class FakeEngineConfig(Section):
    """What a worker with `worker.engine=fake` pretends: how long things take, and how large its KV is."""

    prefill_base_s: float = Field(5e-3, ge=0, le=60)
    prefill_token_s: float = Field(2e-5, ge=0, le=1, description="per new token")
    prefill_attention_s: float = Field(
        2e-10, ge=0, le=1, description="per pair of a new token and one that it attends to"
    )
    tpot_base_s: float = Field(0.02, ge=0, le=60)
    tpot_context_s: float = Field(1e-8, ge=0, le=1, description="per token of KV in the batch")
    tpot_sequence_s: float = Field(5e-4, ge=0, le=60, description="per sequence of the batch")
    layers: int = Field(2, ge=1, le=1024)
    bytes_per_token: int = Field(512, ge=16, le=MIB, description="of KV, over all layers")

    @model_validator(mode="after")
    def _divisible(self) -> Self:
        if self.bytes_per_token % (8 * self.layers):
            raise ValueError("bytes_per_token must be a multiple of 8 x layers")
        return self
