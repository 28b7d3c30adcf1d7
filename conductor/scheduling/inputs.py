"""The scheduler's inputs: the request, workers, nodes, the cost model, and the scheduler's config.

They are plain values. The cluster and the simulator build them from membership, index and reports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from conductor.members.membership import State
from conductor.scheduling.cost_model import CostModel
from conductor.scheduling.in_flight import InFlight
from kvpool.blocks.records import Segment, WorkerLoad
from kvpool.blocks.tier import Tier
from kvpool.errors import InvalidArgument

IDLE = WorkerLoad(0, 0, 0, 0, 0.0, 0.0)


@dataclass(slots=True, frozen=True)
class ScheduleRequest:
    """What the scheduler needs to know of a request.

    Sizes are in bytes and tokens, times in seconds.

    Args:
        segments: host -> segments that cover the leading blocks in the pool, as they are best read
            from that host. The key "" serves hosts that are not named.
        engine_blocks: worker id -> leading blocks in that engine's own prefix cache.
        output_tokens: expected number of output tokens.
        ttft_s, tpot_s: objectives; 0 means none.
        mode: "" lets the scheduler choose; "local" or "disaggregated" forces the mode.
        pin_prefill, pin_decode: use this worker and no other.
        excluded: ids of workers that must not be used.

    Raises:
        InvalidArgument: a size is not positive, an objective is negative, or the mode is unknown.
    """

    request_id: str
    namespace_id: bytes
    prompt_tokens: int
    block_tokens: int
    block_bytes: int
    layers: int
    segments: Mapping[str, Sequence[Segment]] = field(default_factory=dict)
    engine_blocks: Mapping[str, int] = field(default_factory=dict)
    output_tokens: int = 128  # expected
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    mode: str = ""
    pin_prefill: str | None = None
    pin_decode: str | None = None
    excluded: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "block_tokens", "block_bytes", "layers"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"{name} of a request is {getattr(self, name)}")
        for name in ("output_tokens", "ttft_s", "tpot_s"):
            if not getattr(self, name) >= 0:
                raise InvalidArgument(f"{name} of a request is {getattr(self, name)}")
        if self.mode not in ("", "local", "disaggregated"):
            raise InvalidArgument(f"unknown mode {self.mode!r}", hint="local or disaggregated")

    @property
    def full_blocks(self) -> int:
        """Number of blocks that the prompt fills. The tail beyond them has no hash."""
        return self.prompt_tokens // self.block_tokens

    def segments_at(self, host: str) -> Sequence[Segment]:
        """The segments in the pool, as they are best read from `host`."""
        return self.segments.get(host) or self.segments.get("") or ()


@dataclass(slots=True, frozen=True)
class WorkerStatus:
    """One worker as it is known now. `reported_at`: when `load` arrived (monotonic seconds)."""

    worker_id: str
    role: str  # "prefill", "decode", "both"
    host: str
    namespace_id: bytes
    state: State = State.LIVE
    load: WorkerLoad = IDLE
    reported_at: float = 0.0
    max_model_tokens: int = 0  # 0: unknown
    kv_capacity_tokens: int = 0  # of its engine; 0: unknown


@dataclass(slots=True, frozen=True)
class NodeStatus:
    """One pool node.

    Args:
        available_bytes: what a reservation could get, by eviction too. Excludes pinned and held
            blocks.
        read_bytes_per_s: read rate by tier, as the node measured it.
        queued_read_bytes: bytes that the node's disk reads before a new request.
    """

    node_id: str
    host: str
    available_bytes: int
    state: State = State.LIVE
    read_bytes_per_s: Mapping[Tier, float] = field(default_factory=dict)
    queued_read_bytes: int = 0


AdmissionMode = Literal["none", "arrival", "predicted"]


@dataclass(slots=True, frozen=True)
class DynamoOptions:
    """Options of the strategy `dynamo`. Names and defaults follow NVIDIA Dynamo's KV router.

    Args:
        engine_credit: share of a block's prefill saved if the block is in the engine's own cache.
        host_credit, remote_credit, disk_credit: the same in memory of the worker's host, in memory
            of another host, and on a disk.
        prefill_scale: weight of the blocks to prefill against the blocks in use by decodes.
        temperature: 0 takes the cheapest worker; more spreads requests, by softmax over normalised
            costs.
    """

    engine_credit: float = 1.0
    host_credit: float = 0.75
    remote_credit: float = 0.5
    disk_credit: float = 0.25
    prefill_scale: float = 1.0
    temperature: float = 0.0


@dataclass(slots=True, frozen=True)
class SglangOptions:
    """Options of the strategy `sglang`: queues are out of balance if both bounds are exceeded.

    Args:
        imbalance_requests: difference between the longest and the shortest queue, in requests.
        imbalance_ratio: ratio of the longest queue to the shortest.
    """

    imbalance_requests: int = 32
    imbalance_ratio: float = 1.1


@dataclass(slots=True, frozen=True)
class SchedulerConfig:
    """Thresholds of the scheduler.

    Args:
        strategy: name of the strategy that decides (`conductor.scheduling.strategies`).
        admission: "none" refuses only if there is no space, "arrival" by objectives under the
            present load, "predicted" by objectives under the load predicted for the end of the
            prefill.
        seed: of the strategies that draw at random.
        min_remote_prefill_tokens: with fewer tokens left to compute, prefill locally; 0: by cost
            only.
        balancing_threshold: replicate a prefix toward the chosen worker's host if the pool has more
            than this many times the blocks that are near that worker; 0: never (strategy
            `kv-centric`).
        retry_after_s, max_retry_after_s: bounds of the delay that a refused caller gets.
        decode_shortlist: number of decode workers, best by TPOT, that are paired with every prefill
            worker. The other decode workers are tried only if no pair of these meets the
            objectives.
        max_candidates: candidates kept in the decision, best first.
        stall_weight: weight of one second of delay of a decoding sequence, against one second of
            this request's own time (strategy `kv-centric`); 0 ignores the delay of others.
        always_reuse: read every block that the pool has, even if computing it is predicted to be
            faster.
    """

    strategy: str = "kv-centric"
    admission: AdmissionMode = "predicted"
    seed: int = 0
    min_remote_prefill_tokens: int = 0
    balancing_threshold: float = 1.5
    retry_after_s: float = 1.0
    max_retry_after_s: float = 30.0
    decode_shortlist: int = 8
    max_candidates: int = 64
    stall_weight: float = 0.1
    always_reuse: bool = False
    dynamo: DynamoOptions = field(default_factory=DynamoOptions)
    sglang: SglangOptions = field(default_factory=SglangOptions)


@dataclass(slots=True, frozen=True)
class SchedulingInputs:
    """Everything that a decision may depend on besides the request and the time."""

    workers: Mapping[str, WorkerStatus]
    nodes: Mapping[str, NodeStatus]
    cost: CostModel = field(default_factory=CostModel)
    in_flight: InFlight = field(default_factory=InFlight)
    config: SchedulerConfig = field(default_factory=SchedulerConfig)
