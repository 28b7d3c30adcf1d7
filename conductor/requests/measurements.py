"""What was measured of one request, from its workers' reports and its tokens' times. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from conductor.requests import timings
from conductor.requests.miss_reasons import Miss
from conductor.requests.reports import DecodeReport, PrefillReport
from conductor.requests.request import Objectives
from conductor.scheduling.cost_model import CostModel
from conductor.scheduling.decision import Decision

BEFORE_DECISION = ("request_read_time", "admission_wait")


@dataclass(slots=True)
class Measurements:
    """Seconds, tokens and bytes of one request, filled in while it runs.

    `tokens_by_tier` counts the reused tokens of the prompt. `prefill_fallback` says why the prefill
    worker read less than planned.
    """

    ttft_s: float = 0.0
    tpot_s: float = 0.0
    output_tokens: int = 0
    pool_tokens: int = 0
    local_tokens: int = 0
    computed_tokens: int = 0
    prefill_reused_tokens: int = 0
    verified_blocks: int = 0
    is_prefilled_remotely: bool = False
    prefill_fallback: str = ""
    phases: dict[str, float] = field(default_factory=dict)  # seconds (`conductor.requests.timings`)
    tokens_by_tier: dict[str, int] = field(default_factory=dict)
    bytes_read: dict[str, int] = field(default_factory=dict)  # by transport
    bytes_written: dict[str, int] = field(default_factory=dict)
    misses: list[Miss] = field(default_factory=list)  # why blocks were not reused

    @property
    def reused_tokens(self) -> int:
        """Prompt tokens that no worker computed for this request.

        Tokens that a prefill worker computed and the decode worker then read are not hits.
        """
        if self.is_prefilled_remotely:
            return self.prefill_reused_tokens
        return max(self.pool_tokens, self.local_tokens)

    def meets(self, objectives: Objectives) -> bool:
        """Whether the request met both objectives, as goodput counts (DistServe, OSDI 2024)."""
        is_late = 0 < objectives.ttft_s < self.ttft_s
        return not is_late and not 0 < objectives.tpot_s < self.tpot_s

    def prediction_errors(
        self, decision: Decision | None, fallback_reason: str
    ) -> tuple[float, float]:
        """Predicted over measured TTFT and TPOT; 0 if there is nothing to compare.

        The prediction covers the time after the decision. After a fallback the predicted plan did
        not happen.
        """
        if decision is None or fallback_reason.startswith(("decode:", "prefill:")):
            return 0.0, 0.0
        ttft_s = self.ttft_s - sum(self.phases.get(name, 0.0) for name in BEFORE_DECISION)
        ttft_error = decision.ttft_s / ttft_s if self.ttft_s and ttft_s > 0 else 0.0
        has_tpot = self.output_tokens > 1 and self.tpot_s > 0
        return ttft_error, decision.tpot_s / self.tpot_s if has_tpot else 0.0

    def add_tokens(self, count: int, since_received_s: float) -> None:
        """Add tokens that just arrived."""
        if not self.output_tokens:
            self.ttft_s = since_received_s
        self.output_tokens += count
        if self.output_tokens > 1:
            self.tpot_s = (since_received_s - self.ttft_s) / (self.output_tokens - 1)

    def add_prefill(self, reply: PrefillReport, seconds: float) -> None:
        """Add a prefill worker's report, and how long the call took."""
        self.is_prefilled_remotely = True
        self.prefill_reused_tokens = reply.reused_tokens
        self.prefill_fallback = reply.fallback_reason
        self.tokens_by_tier = dict(reply.tokens_by_tier)
        self._add_bytes(reply.bytes_read, reply.bytes_written)
        timings.add(self.phases, timings.of_prefill(reply.phases))
        self.phases["remote_prefill_time"] = seconds

    def add_decode(self, reply: DecodeReport) -> None:
        """Add a decode worker's last report, before its stream ended or was closed."""
        self.pool_tokens = reply.pool_tokens
        self.local_tokens = reply.local_tokens
        self.computed_tokens = reply.computed_tokens
        self.verified_blocks += reply.verified_blocks
        reported = timings.of_decode(reply.phases, is_prefilled_remotely=self.is_prefilled_remotely)
        timings.add(self.phases, reported)
        if not self.is_prefilled_remotely:
            self.tokens_by_tier = dict(reply.tokens_by_tier)
        self.tpot_s = reply.phases.get("per_token_decode_time", self.tpot_s)
        self._add_bytes(reply.bytes_read, reply.bytes_written)

    def _add_bytes(self, read: Mapping[str, int], written: Mapping[str, int]) -> None:
        for target, source in ((self.bytes_read, read), (self.bytes_written, written)):
            for transport, count in source.items():
                target[transport] = target.get(transport, 0) + count


def observe_costs(cost: CostModel, worker_id: str, reply: PrefillReport | DecodeReport) -> None:
    """Give the times that a worker measured for one request to the cost model."""
    phases, bytes_read = reply.phases, reply.bytes_read
    reused = reply.reused_tokens if isinstance(reply, PrefillReport) else reply.pool_tokens
    if phases.get("prefill_compute_time"):
        prefill_s = phases["prefill_compute_time"] + phases.get("kv_cache_pack_time", 0.0)
        cost.observe_prefill(worker_id, reply.computed_tokens, reused, prefill_s)
    if len(bytes_read) == 1 and phases.get("kv_cache_transfer_time"):
        [(transport, count)] = bytes_read.items()
        seconds = phases["kv_cache_transfer_time"] - phases.get("kv_cache_promotion_time", 0.0)
        cost.observe_transfer(count, seconds, same_host=transport == "shm")
