"""One generation request in the gateway, and its result. Plain values."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from conductor.gateway import timings
from conductor.gateway.admission_queue import Priority
from conductor.gateway.miss_reasons import Miss
from conductor.scheduling.decision import Decision
from kvpool.blocks.layout import Namespace
from kvpool.errors import DeadlineExceeded, InvalidArgument
from kvpool.wire import messages as m


@dataclass(slots=True)
class GenerationRequest:
    """One request in the gateway."""

    request_id: str
    namespace: Namespace
    prompt: list[int]
    sampling: m.Sampling
    deadline: float  # monotonic seconds
    pool: str = "on"  # "on", "off", "local"
    prefill: str = "auto"  # "auto", "remote", "local"
    pin_decode: str | None = None
    local_prefix_tokens: int = 0
    priority: Priority = "normal"
    received_at: float = 0.0  # monotonic seconds at the first byte; TTFT counts from here
    tokenized_at: float = 0.0  # monotonic seconds
    hashes: list[bytes] = field(default_factory=list)
    found_blocks: int = 0  # leading blocks that the pool had at the last decision
    model: str = ""
    endpoint: str = ""
    key: str = ""  # of the user or conversation: a canary rule routes equal keys alike
    transfer_timeout_s: float | None = None  # routing rules: longest wait for a remote prefill
    routing: str = ""  # the routing rule that applied, as "rule:reason"

    def left_s(self) -> float:
        """Seconds to the deadline.

        Raises:
            DeadlineExceeded: the deadline has passed.
        """
        left_s = self.deadline - time.monotonic()
        if left_s <= 0:
            raise DeadlineExceeded(
                "the request took too long", hint="conductor.request_timeout_s sets the limit"
            )
        return left_s


@dataclass(slots=True)
class GenerationResult:
    """The result of a request, filled in while the request runs."""

    decision: Decision | None = None
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    is_slo_recorded: bool = False  # `conductor.gateway.slo_attainment` records each request once
    is_stopped: bool = False  # a stop string completed the response
    planned_blocks: int = 0
    pool_tokens: int = 0
    local_tokens: int = 0
    computed_tokens: int = 0
    prefill_reused_tokens: int = 0
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    verified_blocks: int = 0
    fallback_reason: str = ""
    phases: dict[str, float] = field(default_factory=dict)  # seconds (`conductor.gateway.timings`)
    tokens_by_tier: dict[str, int] = field(default_factory=dict)  # reused for the prompt
    bytes_read: dict[str, int] = field(default_factory=dict)
    bytes_written: dict[str, int] = field(default_factory=dict)
    is_prefilled_remotely: bool = False
    prefill_fallback: str = ""  # why the prefill worker read less than planned
    misses: list[Miss] = field(default_factory=list)

    def prediction_errors(self) -> tuple[float, float]:
        """Predicted over measured TTFT and TPOT; 0 if they cannot be compared.

        The prediction covers the time after the decision. After a fallback the predicted plan did
        not happen.
        """
        decision = self.decision
        if decision is None or self.fallback_reason.startswith(("decode:", "prefill:")):
            return 0.0, 0.0
        ttft_s = self.ttft_s - sum(
            self.phases.get(name, 0.0) for name in ("request_read_time", "admission_wait")
        )
        ttft_error = decision.ttft_s / ttft_s if self.ttft_s and ttft_s > 0 else 0.0
        has_tpot = len(self.token_ids) > 1 and self.tpot_s > 0
        return ttft_error, decision.tpot_s / self.tpot_s if has_tpot else 0.0

    @property
    def reused_tokens(self) -> int:
        """Prompt tokens that no worker computed for this request.

        Tokens that a prefill worker computed and the decode worker then read are not hits.
        """
        if self.is_prefilled_remotely:
            return self.prefill_reused_tokens
        return max(self.pool_tokens, self.local_tokens)

    def stop(self) -> None:
        """Mark the response as complete before the worker's stream ends, at a stop string."""
        self.is_stopped = True
        self.finish_reason = "stop"

    def add_tokens(self, token_ids: Sequence[int], since_received_s: float) -> None:
        """Add tokens that just arrived."""
        if not self.token_ids:
            self.ttft_s = since_received_s
        self.token_ids += token_ids
        if len(self.token_ids) > 1:
            self.tpot_s = (since_received_s - self.ttft_s) / (len(self.token_ids) - 1)

    def add_bytes(self, read: dict[str, int], written: dict[str, int]) -> None:
        """Add bytes moved, by transport."""
        for target, source in ((self.bytes_read, read), (self.bytes_written, written)):
            for name, count in source.items():
                target[name] = target.get(name, 0) + count

    def add_prefill(self, reply: m.PrefillReply) -> None:
        """Add a prefill worker's report."""
        self.is_prefilled_remotely = True
        self.prefill_reused_tokens = reply.reused_tokens
        self.prefill_fallback = reply.fallback_reason
        self.tokens_by_tier = dict(reply.tokens_by_tier)
        self.add_bytes(reply.bytes_read, reply.bytes_written)
        timings.add(self.phases, timings.of_prefill(reply.phases))

    def add_generation(self, reply: m.GenerateReply) -> None:
        """Add a decode worker's report, the last one before its stream ended or was closed."""
        self.finish_reason = reply.finish_reason or self.finish_reason
        self.pool_tokens = reply.pool_tokens
        self.local_tokens = reply.local_tokens
        self.computed_tokens = reply.computed_tokens
        self.verified_blocks += reply.verified_blocks
        reported = timings.of_decode(reply.phases, is_prefilled_remotely=self.is_prefilled_remotely)
        timings.add(self.phases, reported)
        if not self.is_prefilled_remotely:
            self.tokens_by_tier = dict(reply.tokens_by_tier)
        self.tpot_s = reply.phases.get("per_token_decode_time", self.tpot_s)
        self.add_bytes(reply.bytes_read, reply.bytes_written)


def check_prompt(prompt: Sequence[int], max_prompt_tokens: int, max_new: int, limit: int) -> None:
    """Check that a prompt is within the limits.

    Raises:
        InvalidArgument: the prompt is empty, over the configured limit, or over the model's
            context.
    """
    if not prompt:
        raise InvalidArgument("the prompt is empty")
    if len(prompt) > max_prompt_tokens:
        raise InvalidArgument(
            f"the prompt has {len(prompt)} tokens", hint=f"the limit is {max_prompt_tokens}"
        )
    if len(prompt) + max_new > limit:
        raise InvalidArgument(
            f"prompt and response need {len(prompt)} + {max_new} tokens",
            hint=f"the model's context is {limit}; shorten the prompt or lower max_tokens",
        )
