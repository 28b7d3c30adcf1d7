"""One request as the gateway works on it, and what became of it. Plain values."""

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
class Job:
    """One request as the gateway works on it."""

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
    received_at: float = 0.0  # monotonic seconds
    hashes: list[bytes] = field(default_factory=list)
    found_blocks: int = 0  # leading ones that the pool had when it was last decided
    model: str = ""
    endpoint: str = ""
    key: str = ""  # of the user or conversation: a canary treats equal keys alike
    transfer_timeout_s: float | None = (
        None  # longest wait for a remote prefill, by the routing rules
    )
    routing: str = ""  # what the routing rules chose: "rule:reason"

    def left_s(self) -> float:
        """Seconds to the deadline.

        Raises:
            DeadlineExceeded: there are none.
        """
        left_s = self.deadline - time.monotonic()
        if left_s <= 0:
            raise DeadlineExceeded("the request's time is over", hint="conductor.request_timeout_s")
        return left_s


@dataclass(slots=True)
class Result:
    """What became of a request; filled in as it goes."""

    decision: Decision | None = None
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    is_judged: bool = False  # by its objectives, see `conductor.gateway.slo_attainment`
    is_stopped: bool = False  # by whoever reads the tokens: it has all that it wanted
    planned_blocks: int = 0
    pool_tokens: int = 0
    local_tokens: int = 0
    computed_tokens: int = 0
    prefill_reused_tokens: int = 0
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    verified_blocks: int = 0
    fallback_reason: str = ""
    phases: dict[str, float] = field(
        default_factory=dict
    )  # seconds, see `conductor.gateway.timings`
    tokens_by_tier: dict[str, int] = field(default_factory=dict)  # reused for the prompt
    bytes_read: dict[str, int] = field(default_factory=dict)
    bytes_written: dict[str, int] = field(default_factory=dict)
    is_prefilled_remotely: bool = False
    prefill_fallback: str = ""  # why the prefill worker read less than it was told to
    misses: list[Miss] = field(default_factory=list)

    def prediction_errors(self) -> tuple[float, float]:
        """Predicted over measured TTFT and TPOT; 0 where there is nothing to compare.

        The wait before the decision was not part of the prediction; after another worker had to go on, or
        a prefill was given up, neither was what happened.
        """
        decision = self.decision
        if decision is None or self.fallback_reason.startswith(("decode:", "prefill:")):
            return 0.0, 0.0
        ttft_s = self.ttft_s - self.phases.get("admission_wait", 0.0)
        ttft_error = decision.ttft_s / ttft_s if self.ttft_s and ttft_s > 0 else 0.0
        has_tpot = len(self.token_ids) > 1 and self.tpot_s > 0
        return ttft_error, decision.tpot_s / self.tpot_s if has_tpot else 0.0

    @property
    def reused_tokens(self) -> int:
        """Prompt tokens that nobody computed for this request. What a prefill worker computed for it, and
        the decode worker then read from the pool, was no hit.
        """
        if self.is_prefilled_remotely:
            return self.prefill_reused_tokens
        return max(self.pool_tokens, self.local_tokens)

    def stop(self) -> None:
        """The answer is complete before the worker's stream is: a stop string was found."""
        self.is_stopped = True
        self.finish_reason = "stop"

    def add_tokens(self, token_ids: Sequence[int], since_received_s: float) -> None:
        """Tokens that came just now."""
        if not self.token_ids:
            self.ttft_s = since_received_s
        self.token_ids += token_ids
        if len(self.token_ids) > 1:
            self.tpot_s = (since_received_s - self.ttft_s) / (len(self.token_ids) - 1)

    def add_bytes(self, read: dict[str, int], written: dict[str, int]) -> None:
        """Count bytes moved, by transport."""
        for target, source in ((self.bytes_read, read), (self.bytes_written, written)):
            for name, count in source.items():
                target[name] = target.get(name, 0) + count

    def take_prefill(self, reply: m.PrefillReply) -> None:
        """Add what a prefill worker reports: what the decode worker reads then was no hit before."""
        self.is_prefilled_remotely = True
        self.prefill_reused_tokens = reply.reused_tokens
        self.prefill_fallback = reply.fallback_reason
        self.tokens_by_tier = dict(reply.tokens_by_tier)
        self.add_bytes(reply.bytes_read, reply.bytes_written)
        timings.add(self.phases, timings.of_prefill(reply.phases))

    def take(self, reply: m.GenerateReply) -> None:
        """Add what a decode worker reports, at its end or as it was when the reader left."""
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
    """Refuse prompts that no worker could take.

    Raises:
        InvalidArgument: empty, over the configured limit, or over the model's context.
    """
    if not prompt:
        raise InvalidArgument("the prompt is empty")
    if len(prompt) > max_prompt_tokens:
        raise InvalidArgument(
            f"the prompt has {len(prompt)} tokens", hint=f"the limit here is {max_prompt_tokens}"
        )
    if len(prompt) + max_new > limit:
        raise InvalidArgument(
            f"prompt and answer need {len(prompt)} + {max_new} tokens",
            hint=f"the model's context is {limit}; shorten the prompt or lower max_tokens",
        )
