"""The simulated cluster as values: instances, nodes, links, objectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from conductor.roles.controller import RoleLimits
from conductor.routing.rules import RoutingRules
from conductor.scheduling.cost_model import LinkProfile, Profile
from conductor.scheduling.inputs import SchedulerConfig
from kvpool.errors import ConfigError

Serving = Literal["coupled", "disaggregated", "pooled"]
SERVINGS: tuple[Serving, ...] = ("coupled", "disaggregated", "pooled")


TpotCheck = Literal["scheduler", "decode", "both"]


class Cache(Protocol):
    """Blocks of one tier or engine under an eviction policy."""

    def use(self, chain: Sequence[bytes]) -> list[bytes]:
        """Use a chain's blocks, and add those that are missing. Returns the blocks evicted for them."""

    def __contains__(self, block_hash: bytes, /) -> bool: ...


CacheFactory = Callable[[int], Cache]  # makes an empty cache of a number of blocks


@dataclass(slots=True, frozen=True)
class InstanceSpec:
    """One engine instance (its GPUs together). `cost`: its real costs; the scheduler has its own estimate."""

    worker_id: str
    role: Literal["prefill", "decode", "both"]
    host: str
    cost: Profile
    kv_capacity_tokens: int
    dollars_per_hour: float = 0.0
    kind: str = ""  # e.g. "h100 x8"


@dataclass(slots=True, frozen=True)
class NodeSpec:
    """One pool node, its tiers in blocks."""

    node_id: str
    host: str
    dram_blocks: int
    nvme_blocks: int = 0
    nvme_bytes_per_s: float = 6e9


@dataclass(slots=True, frozen=True)
class Setup:
    """A whole cluster and how it serves.

    Args:
        serving: "coupled": each instance prefills in chunks and decodes, and reuses what its own
            engine keeps; "disaggregated": instances prefill or decode, and nothing is kept in
            between; "pooled": the same, and every block stays in the pool for later requests.
        is_overlapped: layers are sent while the next ones compute; otherwise the prefill waits for
            its send.
        chunk_tokens: of a step that prefills beside decodes (Sarathi-Serve); 0: whole prompts stall
            decoding.
        engine_share: the share of an engine's KV memory that keeps prefixes; the rest is for
            running sequences.
        tpot_check: who refuses requests that would break the TPOT objective: "scheduler" before the
            prefill, "decode": the decode instance after it, or "both".
        heartbeat_s: the interval between reports of the load.
        roles: limits of the role controller; None: roles are fixed.
        max_waiting: length of the admission queue.

    Raises:
        ConfigError: the cluster cannot serve anything.
    """

    serving: Serving
    instances: tuple[InstanceSpec, ...]
    nodes: tuple[NodeSpec, ...]
    block_tokens: int
    block_bytes: int
    layers: int
    same_host: LinkProfile
    other_host: LinkProfile
    scheduling: SchedulerConfig = field(default_factory=SchedulerConfig)
    routing: RoutingRules | None = None
    slo_ttft_s: float = 0.0
    slo_tpot_s: float = 0.0
    is_overlapped: bool = True
    chunk_tokens: int = 2048
    max_sequences: int = 256
    engine_share: float = 0.5
    tpot_check: TpotCheck = "scheduler"
    heartbeat_s: float = 1.0
    roles: RoleLimits | None = None
    max_waiting: int = 0
    max_wait_s: float = 30.0
    max_active: int = 1_000_000

    def __post_init__(self) -> None:
        roles = {instance.role for instance in self.instances}
        if not roles & {"decode", "both"}:
            raise ConfigError("no instance decodes", hint="give at least one decode instance")
        if self.serving not in SERVINGS:
            raise ConfigError(
                f"unknown serving {self.serving!r}", hint=f"use one of {', '.join(SERVINGS)}"
            )
        if self.serving != "coupled" and not roles & {"prefill", "both"}:
            raise ConfigError("no instance prefills", hint="give at least one prefill instance")
        if not 0 <= self.engine_share < 1:
            raise ConfigError(f"engine share {self.engine_share}", hint="0 to below 1")
        if min(self.block_tokens, self.block_bytes, self.layers) < 1 or self.heartbeat_s <= 0:
            raise ConfigError("block sizes, layers and heartbeat_s must be positive")

    @property
    def dollars_per_hour(self) -> float:
        return sum(instance.dollars_per_hour for instance in self.instances)
