"""The settings of a worker, and of the engine that only sleeps."""

from __future__ import annotations

import socket
from typing import Literal, Self

from pydantic import Field, SecretStr, model_validator

from kvpool.config.settings.types import (
    DEFAULT_CONDUCTOR,
    MIB,
    Addresses,
    HostLabel,
    OptionalText,
    Port,
    Section,
    ServerConfig,
)


class WorkerAdvanced(Section):
    """What few installations change: the engine's threads and caches, KV events, hashing."""

    threads: int = Field(
        0, ge=0, le=4096, description="CPU threads of the engine; 0: its own choice"
    )
    local_cache_tokens: int = Field(
        0, ge=0, description="tokens that the engine's own prefix cache holds; 0: no such cache"
    )
    may_change_role: bool = Field(
        True, description="let the conductor switch this worker between prefill and decode"
    )
    kv_events: str = Field(
        "", max_length=512, description="where its engine publishes KV events, as tcp://host:5557"
    )
    kv_replay: str = Field(
        "", max_length=512, description="where its engine replays KV events, as tcp://host:5558"
    )
    hash_algorithm: Literal["xxh3-128", "sha256"] = Field(
        "xxh3-128", description="hash of token prefixes; sha256 if users might craft collisions"
    )


class WorkerConfig(ServerConfig):
    """A prefill or decode worker around one engine."""

    worker_id: OptionalText = Field(
        None, max_length=128, description="its name in the pool; none: a fresh UUID"
    )
    role: Literal["prefill", "decode", "both"] = Field("both", description="what it does")
    engine: Literal["transformers", "fake"] = Field(
        "transformers", description="fake: sleep instead of computing, to try out scheduling"
    )
    model: OptionalText = Field(
        None, description="directory of the model, or a GGUF file; required to start"
    )
    model_name: OptionalText = Field(
        None, description="name that users ask for; none: taken from worker.model"
    )
    device: str = Field("cpu", min_length=1, description='PyTorch device, e.g. "cuda:0"')
    host_label: HostLabel = Field(default_factory=socket.gethostname)
    wire_port: Port = Field(7820, description="port of the wire protocol; 0: any free port")
    http_port: Port = Field(7821, description="port of HTTP; 0: any free port")
    conductor: Addresses = Field(
        DEFAULT_CONDUCTOR,
        description='wire address of the conductor, or of several, as "a:7800,b:7800"',
    )
    max_concurrent: int = Field(4, ge=1, le=4096, description="requests that it works on at once")
    max_model_tokens: int = Field(
        8192, ge=16, le=16_777_216, description="longest context in tokens, prompt and output"
    )
    block_tokens: int = Field(64, ge=1, le=65_536, description="tokens in a block of the pool")
    tenant: str = Field("", max_length=512, description="tenant whose blocks it makes")
    salt: SecretStr = Field(
        SecretStr(""),
        description="secret in every hash: workers with different salts share no blocks",
    )
    advanced: WorkerAdvanced = Field(default_factory=WorkerAdvanced)


class FakeEngineConfig(Section):
    """The engine of `worker.engine=fake`: how long it sleeps, and how large its KV cache is."""

    prefill_base_s: float = Field(5e-3, ge=0, le=60, description="seconds for each prefill")
    prefill_token_s: float = Field(2e-5, ge=0, le=1, description="seconds for each new token")
    prefill_attention_s: float = Field(
        2e-10,
        ge=0,
        le=1,
        description="seconds for each pair of a new token and a token that it attends to",
    )
    tpot_base_s: float = Field(0.02, ge=0, le=60, description="seconds for each decode step")
    tpot_context_s: float = Field(
        1e-8, ge=0, le=1, description="seconds of a decode step for each token of KV in the batch"
    )
    tpot_sequence_s: float = Field(
        5e-4, ge=0, le=60, description="seconds of a decode step for each sequence in the batch"
    )
    layers: int = Field(2, ge=1, le=1024, description="layers of its KV cache")
    bytes_per_token: int = Field(
        512, ge=16, le=MIB, description="bytes of KV for each token, over all layers"
    )

    @model_validator(mode="after")
    def _divisible(self) -> Self:
        if self.bytes_per_token % (8 * self.layers):
            raise ValueError("bytes_per_token must be a multiple of 8 x layers")
        return self
