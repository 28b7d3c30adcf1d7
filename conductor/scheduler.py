"""Where to prefill, where to decode, what to reuse, what to refuse: the decision for one request.

The KV-cache-centric strategy is Mooncake's Algorithm 1 (FAST'25) with its choices made by predicted cost:
for every prefill worker TTFT = queue + fetch of what the pool has and it lacks + prefill of the rest, where
reuse is declined as far as fetching costs more than computing; beside these stands local prefill on each
decode worker. Decode workers are judged by the TPOT predicted for when the prefill ends. When no choice
meets the objectives the request is refused now, not after its prefill (early rejection by prediction).

Pure and deterministic: no I/O, no clock, no randomness. The simulator runs this very code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from conductor.estimate import Estimate
from conductor.membership import State
from conductor.requests import Candidate, Decision, InFlight
from conductor.view import (
    IDLE,
    ClusterView,
    NodeView,
    Policy,
    ScheduleRequest,
    WorkerView,
)
from kvpool.errors import ConfigError

__all__ = [
    "IDLE",
    "Candidate",
    "ClusterView",
    "Decision",
    "InFlight",
    "KvCentric",
    "NodeView",
    "Policy",
    "ScheduleRequest",
    "Strategy",
    "WorkerView",
    "refuse",
    "register_strategy",
    "schedule",
    "strategies",
]


class Strategy(Protocol):
    """A way to decide. Must be pure, and serve or refuse with a reason; never raise for lack of workers."""

    def decide(self, request: ScheduleRequest, state: ClusterView, now: float) -> Decision: ...


_STRATEGIES: dict[str, Strategy] = {}


def register_strategy(name: str, strategy: Strategy) -> None:
    """Make a strategy choosable by `Policy.strategy`.

    Raises:
        ConfigError: the name is taken.
    """
    if name in _STRATEGIES:
        raise ConfigError(f"scheduling strategy {name!r} is registered already")
    _STRATEGIES[name] = strategy


def strategies() -> list[str]:
    """Names that `Policy.strategy` may have."""
    return sorted(_STRATEGIES)


def schedule(request: ScheduleRequest, state: ClusterView, now: float) -> Decision:
    """Decide with the strategy that the policy names. Changes nothing; see `InFlight.assigned`.

    Raises:
        ConfigError: no such strategy.
    """
    strategy = _STRATEGIES.get(state.policy.strategy)
    if strategy is None:
        raise ConfigError(
            f"unknown scheduling strategy {state.policy.strategy!r}",
            hint=f"use one of {', '.join(strategies())}",
        )
    return strategy.decide(request, state, now)


def refuse(
    request: ScheduleRequest,
    reason: str,
    retry_after_s: float,
    candidates: Sequence[Candidate] = (),
) -> Decision:
    """A refusal. Predicted times are those of the best candidate there was; 0 when there was none."""
    best = candidates[0] if candidates else None
    return Decision(
        request_id=request.request_id,
        mode="refused",
        prefill=None,
        decode=None,
        reuse_blocks=0,
        target_node=None,
        ttft_s=best.ttft_s if best else 0.0,
        tpot_s=best.tpot_s if best else 0.0,
        reason=reason,
        candidates=tuple(candidates),
        retry_after_s=retry_after_s,
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens,
    )


class KvCentric:
    """The default strategy; see the module's docstring."""

    def decide(self, request: ScheduleRequest, state: ClusterView, now: float) -> Decision:
        policy = state.policy
        decoders = _eligible(request, state, ("decode", "both"), request.pin_decode)
        if not decoders:
            return refuse(request, "no_decode_worker", policy.retry_after_s)
        fitting = [w for w in decoders if _fits(w, request)]
        if not fitting:
            return refuse(request, "prompt_too_long", 0.0)
        estimate = Estimate(request, state, now)
        found: list[Candidate] = []
        if request.mode != "disaggregated" and request.pin_prefill in (None, request.pin_decode):
            found += [estimate.local(worker) for worker in fitting]
        short = {
            c.decode
            for c in found
            if not c.rejected
            and request.prompt_tokens - c.reuse_blocks * request.block_tokens
            < policy.min_remote_prefill_tokens
        }
        if request.mode != "local" and not short:
            found += self._remote(request, estimate, state, fitting)
        if not found and request.mode == "disaggregated" and request.pin_prefill is None:
            # All blocks stand in the pool, or none is full, or nobody is there to compute them.
            found += [estimate.local(worker) for worker in fitting]
        if not found:
            return refuse(request, "no_prefill_choice", policy.retry_after_s)
        found.sort(key=lambda c: (bool(c.rejected), c.decode not in short, *estimate.rank(c)))
        if found[0].rejected:
            return self._refuse_late(request, found, policy)
        return self._serve(request, estimate, state, found, is_short=bool(short))

    def _remote(
        self,
        request: ScheduleRequest,
        estimate: Estimate,
        state: ClusterView,
        decoders: list[WorkerView],
    ) -> list[Candidate]:
        """Prefill elsewhere: every prefill worker with the best decode workers, or with all if need be."""
        prefillers = [
            worker
            for worker in _eligible(request, state, ("prefill", "both"), request.pin_prefill)
            if worker.max_model_tokens == 0 or worker.max_model_tokens >= request.prompt_tokens
        ]
        ranked = sorted(decoders, key=estimate.decode_rank)
        cut = state.policy.decode_shortlist
        found: list[Candidate] = []
        for group in (ranked[:cut], ranked[cut:]):
            for decoder in group:
                for prefiller in prefillers:
                    candidate = estimate.remote(prefiller, decoder)
                    if candidate is not None:
                        found.append(candidate)
            if any(not c.rejected for c in found):
                break
        return found

    def _serve(
        self,
        request: ScheduleRequest,
        estimate: Estimate,
        state: ClusterView,
        found: list[Candidate],
        *,
        is_short: bool,
    ) -> Decision:
        best = found[0]
        reason = "forced" if request.mode else "short" if is_short else "cost"
        if request.mode not in ("", best.mode):
            reason = "nothing_remote"
        target = None
        if best.mode == "disaggregated":
            new_blocks = request.full_blocks - best.reuse_blocks
            target = estimate.target_node(state.workers[best.decode].host, new_blocks)
        return Decision(
            request_id=request.request_id,
            mode=best.mode,
            prefill=best.prefill,
            decode=best.decode,
            reuse_blocks=best.reuse_blocks,
            target_node=target.node_id if target else None,
            ttft_s=best.ttft_s,
            tpot_s=best.tpot_s,
            reason=reason,
            candidates=tuple(found[: state.policy.max_candidates]),
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens,
            work_s=best.work_s,
        )

    def _refuse_late(
        self, request: ScheduleRequest, found: list[Candidate], policy: Policy
    ) -> Decision:
        """Every choice misses an objective: name the least bad one's, and when its queue is shorter."""
        best = found[0]
        excess_s = best.ttft_s - request.ttft_s if best.rejected == "ttft_slo" else 0.0
        retry_s = min(policy.max_retry_after_s, max(policy.retry_after_s, excess_s))
        return refuse(request, best.rejected, retry_s, found[: policy.max_candidates])


def _eligible(
    request: ScheduleRequest, state: ClusterView, roles: tuple[str, ...], pinned: str | None
) -> list[WorkerView]:
    """Workers that may be given this request, in order of their ids."""
    return [
        worker
        for _, worker in sorted(state.workers.items())
        if worker.state is State.LIVE
        and worker.role in roles
        and worker.namespace_id == request.namespace_id
        and worker.worker_id not in request.excluded
        and pinned in (None, worker.worker_id)
    ]


def _fits(worker: WorkerView, request: ScheduleRequest) -> bool:
    needed = request.prompt_tokens + 1
    return worker.max_model_tokens == 0 or worker.max_model_tokens >= needed


register_strategy("kv-centric", KvCentric())
