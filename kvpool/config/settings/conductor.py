"""The settings of the conductor."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, SecretStr, model_validator

from kvpool.config.settings.types import (
    GIB,
    KIB,
    MIB,
    Bytes,
    Credit,
    Engines,
    Objectives,
    OptionalPath,
    OptionalSeconds,
    OptionalText,
    Port,
    Priorities,
    Priority,
    Seconds,
    Section,
    ServerConfig,
    Strategy,
)


class ConductorAdvanced(Section):
    """What few installations change: times, limits, and the options of the strategies."""

    heartbeat_s: Seconds = Field(1.0, description="seconds between heartbeats of members")
    suspect_after_s: Seconds = Field(
        3.0, description="seconds of silence after which a member gets no new work"
    )
    dead_after_s: Seconds = Field(
        10.0, description="seconds of silence after which a member's blocks are forgotten"
    )
    min_remote_prefill_tokens: int = Field(
        192,
        ge=0,
        description="prompts with fewer tokens to compute are prefilled by the decode worker",
    )
    always_reuse: bool = Field(
        False, description="read what the pool has, even if computing is predicted to be faster"
    )
    balancing_threshold: float = Field(
        1.5,
        ge=0,
        description="kv-centric: copy a prefix toward a worker if the pool has this many times "
        "what is "
        "near the worker; 0: never",
    )
    stall_weight: float = Field(
        0.1,
        ge=0,
        le=1000,
        description="kv-centric: weight of a second that a prefill delays other sequences' "
        "decoding, "
        "against a second of the request itself",
    )
    replications_at_once: int = Field(
        2, ge=0, le=1024, description="background copies of hot prefixes at once; 0: none"
    )
    prefetch: bool = Field(
        True, description="move blocks off disks and toward a worker before it reads them"
    )
    session_ttl_s: Seconds = Field(
        3600.0, description="seconds for which a conversation's blocks are remembered"
    )
    max_sessions: int = Field(
        10_000, ge=1, le=10_000_000, description="conversations that are remembered"
    )
    prefill_timeout_s: Seconds = Field(
        60.0, description="seconds to wait for a remote prefill; then the decode worker does it"
    )
    first_token_timeout_s: Seconds = Field(
        60.0, description="seconds to wait for a decode worker's first token; then another is tried"
    )
    max_queued_requests: int = Field(
        256,
        ge=0,
        le=100_000,
        description="requests that may wait because they can start in time, but not now; 0: none",
    )
    max_queue_wait_s: Seconds = Field(
        30.0,
        description="longest wait for a start, in seconds; a request's TTFT objective less its "
        "predicted TTFT is a bound, too",
    )
    default_priority: Priority = Field(
        "normal", description="priority of requests that name none, if their tenant has none"
    )
    max_body_bytes: Bytes = Field(
        8 * MIB, ge=KIB, le=GIB, description="largest body of an HTTP request"
    )
    max_prompt_tokens: int = Field(
        131_072, ge=1, le=16_777_216, description="longest prompt, in tokens"
    )
    max_output_tokens: int = Field(
        16_384, ge=1, le=1_048_576, description="most tokens that a request may ask for"
    )
    engine_check_s: Seconds = Field(
        1.0, description="seconds between two checks of an engine server"
    )
    roles_window_s: Seconds = Field(
        30.0, description="move_roles: seconds for which a request's outcome counts"
    )
    roles_hold_s: Seconds = Field(
        5.0, description="move_roles: seconds that a breach lasts before a worker moves"
    )
    roles_cooldown_s: Seconds = Field(
        30.0, description="move_roles: seconds between two moves, at least"
    )
    roles_min_requests: int = Field(
        10, ge=1, description="move_roles: with fewer requests in the window, nothing moves"
    )
    max_index_blocks: int = Field(
        4_000_000, ge=1_000, description="blocks in the index of one namespace, at most"
    )
    remembered_blocks: int = Field(
        1 << 20,
        ge=1024,
        le=1 << 30,
        description="blocks whose last change is remembered, to explain misses (8 bytes each)",
    )
    redis_sentinel_name: str = Field(
        "mymaster", description="the Sentinels' name for the Redis server"
    )
    redis_timeout_s: Seconds = Field(
        0.5, description="seconds to wait for Redis; after that the conductor goes on without it"
    )
    strategy_seed: int = Field(0, description="seed of the strategies that choose at random")
    dynamo_temperature: float = Field(
        0.0, ge=0, le=1000, description="dynamo: 0 takes the cheapest worker, more spreads requests"
    )
    dynamo_prefill_scale: float = Field(
        1.0, ge=0, le=1000, description="dynamo: weight of prefill against blocks in use by decodes"
    )
    dynamo_engine_credit: Credit = Field(
        1.0, description="dynamo: credit for a block in the engine"
    )
    dynamo_host_credit: Credit = Field(
        0.75, description="dynamo: credit for a block in memory of the same host"
    )
    dynamo_remote_credit: Credit = Field(
        0.5, description="dynamo: credit for a block in memory of another host"
    )
    dynamo_disk_credit: Credit = Field(0.25, description="dynamo: credit for a block on a disk")
    sglang_imbalance_requests: int = Field(
        32,
        ge=0,
        description="sglang: balance the load if queues differ by more requests than this, and "
        "by the "
        "next setting",
    )
    sglang_imbalance_ratio: float = Field(
        1.1,
        ge=1,
        le=1000,
        description="sglang: longest queue over shortest, as the second condition",
    )

    @model_validator(mode="after")
    def _silence_grows(self) -> Self:
        if not self.heartbeat_s < self.suspect_after_s < self.dead_after_s:
            raise ValueError(
                "heartbeat_s < suspect_after_s < dead_after_s must hold, got "
                f"{self.heartbeat_s:g}, {self.suspect_after_s:g}, {self.dead_after_s:g}"
            )
        return self


class ConductorConfig(ServerConfig):
    """The control plane: where it listens, what it promises, and how it schedules."""

    wire_port: Port = Field(7800, description="port of the wire protocol; 0: any free port")
    http_port: Port = Field(7801, description="port of HTTP; 0: any free port")
    grpc_port: Port = Field(7802, description="port of gRPC; 0: any free port")
    model_path: OptionalPath = Field(
        None, description="directory of the tokenizer; none: prompts must be token ids"
    )
    engines: Engines = Field(
        (),
        description="OpenAI-compatible engine servers (vLLM, SGLang) that serve beside kvpool's "
        "workers",
    )
    strategy: Strategy = Field("kv-centric", description="how workers are chosen")
    profile: OptionalPath = Field(
        None,
        description="measured costs (`kvpool worker profile`) that predictions start from; none: "
        "those of "
        "a small model on a CPU",
    )
    slo_ttft_s: OptionalSeconds = Field(
        None,
        description="objective for the time to first token, in seconds; requests that would miss "
        "it are refused. none: no request is refused for its latency",
    )
    slo_tpot_s: OptionalSeconds = Field(
        None, description="objective for the time per output token, as slo_ttft_s"
    )
    tenant_objectives: Objectives = Field(
        {},
        description="objectives of tenants, TTFT/TPOT in seconds, instead of slo_ttft_s and "
        'slo_tpot_s: "acme=0.5/0.05,bolt=2"',
    )
    admission: Literal["none", "arrival", "predicted"] = Field(
        "predicted",
        description="when to refuse requests that would miss their objectives: never, by the "
        "present load, "
        "by the load predicted for their decode",
    )
    max_active_requests: int = Field(
        256, ge=1, le=1_000_000, description="requests in work at once; more wait"
    )
    request_timeout_s: Seconds = Field(120.0, description="seconds that a request may take")
    tenant_priorities: Priorities = Field(
        {},
        description="highest priority of a tenant's requests, and their default: "
        '"acme=high,bolt=low"',
    )
    move_roles: bool = Field(
        False, description="move workers between prefill and decode by the SLOs that are missed"
    )
    rules_path: OptionalPath = Field(
        None, description="YAML file of routing rules; read again when it changes"
    )
    index: Literal["memory", "redis"] = Field(
        "memory",
        description="redis: keep index, members and namespaces in Redis or Valkey, so that several "
        "conductors serve one pool",
    )
    pool: str = Field(
        "default",
        pattern=r"[A-Za-z0-9_.-]{1,64}",
        description="name of the pool in Redis; conductors of one name share it",
    )
    redis_url: str = Field(
        "redis://127.0.0.1:6379/0",
        description="redis://, rediss:// (TLS) or unix://; several with commas for Sentinels or a "
        "cluster. The password goes into redis_password",
    )
    redis_mode: Literal["standalone", "sentinel", "cluster"] = Field(
        "standalone", description="what redis_url names"
    )
    redis_username: OptionalText = Field(None, description="user name in Redis; none: the default")
    redis_password: SecretStr = Field(SecretStr(""), description="password in Redis")
    advanced: ConductorAdvanced = Field(default_factory=ConductorAdvanced)

    @model_validator(mode="after")
    def _no_password_in_url(self) -> Self:
        for url in self.redis_url.split(","):
            authority = url.partition("://")[2].partition("/")[0]
            if ":" in authority.rpartition("@")[0]:
                raise ValueError("redis_url holds a password: put it into redis_password")
        return self
