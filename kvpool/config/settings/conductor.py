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
    OptionalPath,
    OptionalText,
    Port,
    Priorities,
    Priority,
    Seconds,
    ServerConfig,
    Strategy,
)


class ConductorConfig(ServerConfig):
    """The control plane: where it listens, when it gives members up, what it promises and refuses."""

    wire_port: Port = 7800
    http_port: Port = 7801
    grpc_port: Port = 7802
    model_path: OptionalPath = Field(
        None, description="directory of the tokenizer; None: prompts must be token ids"
    )
    heartbeat_s: Seconds = 1.0
    suspect_after_s: Seconds = Field(3.0, description="silence before a member gets no new work")
    dead_after_s: Seconds = Field(10.0, description="silence before its blocks are forgotten")
    slo_ttft_s: Seconds = 30.0
    slo_tpot_s: Seconds = 1.0
    profile: OptionalPath = Field(
        None,
        description="YAML or JSON that predictions start from (`kvpool worker profile`); None: a small "
        "model on a CPU. Measurements correct it either way",
    )
    strategy: Strategy = Field("kv-centric", description="how workers are chosen")
    admission: Literal["none", "arrival", "predicted"] = Field(
        "predicted",
        description="refuse early by objectives: never, by the load of now, by that predicted for later",
    )
    strategy_seed: int = Field(0, description="of the strategies that draw lots")
    balancing_threshold: float = Field(
        1.5,
        ge=0,
        description="kv-centric: copy a prefix toward a worker when the pool has more than this many "
        "times what stands near it; 0: never",
    )
    stall_weight: float = Field(
        0.1,
        ge=0,
        le=1000,
        description="kv-centric: of a second that a sequence which decodes stands still for a prefill "
        "beside it, against a second of the request; 0 disregards others, more prefills elsewhere",
    )
    replications_at_once: int = Field(
        2, ge=0, le=1024, description="background copies of hot prefixes under way; 0: none"
    )
    prefetch: bool = Field(
        True, description="move blocks off disks and toward a worker before it reads them"
    )
    session_ttl_s: Seconds = Field(
        3600.0, description="how long the blocks of a conversation's last request are remembered"
    )
    max_sessions: int = Field(10_000, ge=1, le=10_000_000, description="conversations remembered")
    dynamo_temperature: float = Field(
        0.0, ge=0, le=1000, description="dynamo: 0 takes the cheapest worker, more spreads requests"
    )
    dynamo_prefill_scale: float = Field(
        1.0, ge=0, le=1000, description="dynamo: weight of prefill against blocks in use by decodes"
    )
    dynamo_engine_credit: Credit = Field(1.0, description="dynamo: of a block in the engine")
    dynamo_host_credit: Credit = Field(0.75, description="dynamo: of one in memory of the host")
    dynamo_remote_credit: Credit = Field(0.5, description="dynamo: of one on another host")
    dynamo_disk_credit: Credit = Field(0.25, description="dynamo: of one on a disk")
    sglang_imbalance_requests: int = Field(
        32, ge=0, description="sglang: queues differ by more than this, and ..."
    )
    sglang_imbalance_ratio: float = Field(
        1.1, ge=1, le=1000, description="... the longest is more than this many times the shortest"
    )
    min_remote_prefill_tokens: int = Field(
        192, ge=0, description="shorter prompts (after reuse) are prefilled by the decode worker"
    )
    move_roles: bool = Field(
        False, description="move workers between prefill and decode by measured SLO violations"
    )
    roles_window_s: Seconds = Field(30.0, description="outcomes older than this count no more")
    roles_hold_s: Seconds = Field(5.0, description="how long a breach lasts before a worker moves")
    roles_cooldown_s: Seconds = Field(30.0, description="after a move, before the next")
    roles_min_requests: int = Field(10, ge=1, description="fewer in the window say nothing")
    rules_path: OptionalPath = Field(
        None, description="YAML file of the routing rules, read again when it changes"
    )
    engines: Engines = Field(
        (),
        description="OpenAI-compatible engine servers (vLLM, SGLang) that serve beside kvpool's workers",
    )
    engine_check_s: Seconds = Field(1.0, description="between two looks at each of them")
    always_reuse: bool = Field(
        False,
        description="read what the pool has even where recomputation is predicted to be faster",
    )
    request_timeout_s: Seconds = 120.0
    prefill_timeout_s: Seconds = Field(
        60.0, description="longest wait for a remote prefill before the decode worker does it"
    )
    first_token_timeout_s: Seconds = Field(
        60.0, description="longest wait for a decode worker's first token before another is tried"
    )
    max_active_requests: int = Field(
        256, ge=1, le=1_000_000, description="requests in work at once; more wait"
    )
    max_queued_requests: int = Field(
        256,
        ge=0,
        le=100_000,
        description="requests that wait because they cannot start now but in time; 0: none does",
    )
    max_queue_wait_s: Seconds = Field(
        30.0, description="longest wait there; slo_ttft_s, less the predicted TTFT, bounds it, too"
    )
    default_priority: Priority = Field(
        "normal", description="class of requests that name none: low, normal or high"
    )
    tenant_priorities: Priorities = Field(
        {},
        description="class by tenant: the default of its requests, and the highest they may have",
    )
    max_body_bytes: Bytes = Field(8 * MIB, ge=KIB, le=GIB)
    max_prompt_tokens: int = Field(131_072, ge=1, le=16_777_216)
    max_output_tokens: int = Field(16_384, ge=1, le=1_048_576)
    remembered_blocks: int = Field(
        1 << 20,
        ge=1024,
        le=1 << 30,
        description="blocks whose last news is kept (8 bytes each), to give every miss a reason",
    )
    max_index_blocks: int = Field(4_000_000, ge=1_000, description="bound of the index's memory")
    index: Literal["memory", "redis"] = Field(
        "memory",
        description="redis: index, members and namespaces live in Redis or Valkey, so that several "
        "conductors serve one pool and any may die",
    )
    pool: str = Field(
        "default",
        pattern=r"[A-Za-z0-9_.-]{1,64}",
        description="conductors of one name and one Redis share a pool",
    )
    redis_url: str = Field(
        "redis://127.0.0.1:6379/0",
        description="redis://, rediss:// (TLS) or unix://; of Sentinels or Cluster nodes several, with "
        "commas; no password in it, see redis_password",
    )
    redis_mode: Literal["standalone", "sentinel", "cluster"] = "standalone"
    redis_sentinel_name: str = Field("mymaster", description="what the Sentinels call the server")
    redis_username: OptionalText = None
    redis_password: SecretStr = SecretStr("")
    redis_timeout_s: Seconds = Field(
        0.5,
        description="longest wait for Redis; after one in vain the conductor goes on without it",
    )

    @model_validator(mode="after")
    def _no_password_in_url(self) -> Self:
        for url in self.redis_url.split(","):
            authority = url.partition("://")[2].partition("/")[0]
            if ":" in authority.rpartition("@")[0]:
                raise ValueError("redis_url holds a password: put it into redis_password")
        return self

    @model_validator(mode="after")
    def _silence_grows(self) -> Self:
        if not self.heartbeat_s < self.suspect_after_s < self.dead_after_s:
            raise ValueError(
                "heartbeat_s < suspect_after_s < dead_after_s must hold, got "
                f"{self.heartbeat_s:g}, {self.suspect_after_s:g}, {self.dead_after_s:g}"
            )
        return self
