"""Records each request: its decision, its miss reasons and its measurements.

It feeds the request log, the counters and the log line. It never delays a request or changes how it
is served.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable

import structlog

from conductor.cluster.lookups import Lookups
from conductor.cluster.members import Members
from conductor.gateway.request import GenerationRequest
from conductor.index.block_history import BlockHistory
from conductor.requests import miss_reasons
from conductor.requests.events import FellBack
from conductor.requests.lifecycle import RequestLifecycle
from conductor.requests.miss_reasons import Miss
from conductor.requests.request import Plan
from conductor.requests.request_log import RequestLog, RequestOutcome
from conductor.scheduling.decision import Decision
from kvpool.blocks.hashing import hash_chain
from kvpool.errors import KvpoolError

log = structlog.get_logger(__name__)

MAX_KIN = 4  # other namespaces of the same model in which a missing prompt is looked up


class RequestRecorder:
    """Writes the request log and the counters.

    Args:
        history: for the reasons of misses.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        request_log: RequestLog,
        members: Members,
        lookups: Lookups,
        history: BlockHistory,
        counters: Counter[str],
        clock: Callable[[], float],
    ) -> None:
        self._request_log = request_log
        self._members = members
        self._lookups = lookups
        self._history = history
        self._counters = counters
        self._clock = clock
        self._under_way: dict[str, asyncio.Task[None]] = {}  # in other namespaces, by request

    async def close(self) -> None:
        """Cancel the look-ups under way."""
        for task in self._under_way.values():
            task.cancel()
        await asyncio.gather(*self._under_way.values(), return_exceptions=True)

    def refused(self, request: GenerationRequest, decision: Decision) -> None:
        """Record a refused request."""
        self._write(request, Plan(decision))
        self._request_log.ended(request.request_id, RequestOutcome("refused"))
        self._counters[f"rejected:{decision.reason}"] += 1

    def admitted(self, request: GenerationRequest, lifecycle: RequestLifecycle, plan: Plan) -> None:
        """Record the plan and the miss reasons of a request that is about to run.

        The reasons are taken now, because the request itself will soon store the missing blocks.
        The look-up in other namespaces goes on in the background; a request that ends first keeps
        "never_stored".
        """
        self._write(request, plan)
        if request.facts.pool != "on":
            return
        misses = self._misses_of_unknown_blocks(request, plan)
        lifecycle.measured.misses = misses
        if plan.found_blocks or not misses or misses[0].reason != "never_stored":
            return
        task = asyncio.create_task(
            self._look_in_other_namespaces(request, lifecycle), name="look-up in other namespaces"
        )
        self._under_way[request.request_id] = task
        task.add_done_callback(lambda _: self._under_way.pop(request.request_id, None))

    def fell_back(self, request: GenerationRequest, fallback: FellBack) -> None:
        """Count and log a fallback."""
        self._counters[f"fallback:{fallback.reason}"] += 1
        if fallback.error is not None:
            log.warning(
                "a worker failed, another goes on",
                request_id=request.request_id,
                worker=fallback.worker_id,
                reason=fallback.reason,
                error=str(fallback.error),
            )

    def ended(self, request: GenerationRequest, lifecycle: RequestLifecycle) -> None:
        """Record the end of a request that was not refused."""
        lookup = self._under_way.pop(request.request_id, None)
        if lookup is not None:
            lookup.cancel()
        counters, measured = self._counters, lifecycle.measured
        status, decision = lifecycle.status, lifecycle.decision
        counters[f"requests:{status}"] += 1
        if lifecycle.error is not None:
            counters[f"failed:{lifecycle.error.code}"] += 1
        if status == "ok" and measured.meets(request.facts.objectives):
            counters["goodput_requests"] += 1  # as in DistServe: both objectives met
        counters["prompt_tokens"] += len(request.prompt)
        counters["pool_tokens"] += measured.reused_tokens
        counters["output_tokens"] += measured.output_tokens
        if request.facts.pool == "on" and measured.output_tokens:
            measured.misses = [
                *self._misses_of_known_blocks(request, lifecycle),
                *measured.misses,
            ]
            for miss in measured.misses:
                counters[f"miss:{miss.reason}"] += miss.blocks
        ttft_error, tpot_error = measured.prediction_errors(decision, lifecycle.fallback_reason)
        outcome = RequestOutcome(
            status,
            measured.ttft_s,
            measured.tpot_s,
            measured.output_tokens,
            measured.pool_tokens,
            measured.computed_tokens,
            lifecycle.fallback_reason,
            dict(measured.phases),
            tuple(measured.misses),
            ttft_error,
            tpot_error,
            dict(measured.tokens_by_tier),
        )
        self._request_log.ended(request.request_id, outcome)
        log.info(
            "request done",
            request_id=request.request_id,
            status=status,
            mode=decision.mode if decision else "",
            prompt_tokens=len(request.prompt),
            pool_tokens=measured.pool_tokens,
            output_tokens=measured.output_tokens,
            ttft_s=round(measured.ttft_s, 4),
            fallback=lifecycle.fallback_reason,
            phases={name: round(seconds, 5) for name, seconds in measured.phases.items()},
            tokens_by_tier=measured.tokens_by_tier,
            misses={miss.reason: miss.blocks for miss in measured.misses},
        )

    def _write(self, request: GenerationRequest, plan: Plan) -> None:
        record = self._request_log.decided(plan.decision, self._clock(), request.namespace.tenant)
        record.at_unix_s = time.time()
        record.namespace = request.namespace.name
        record.priority = request.facts.priority
        record.routing = plan.routing
        record.found_blocks = plan.found_blocks
        record.block_tokens = request.namespace.layout.block_tokens

    def _misses_of_unknown_blocks(self, request: GenerationRequest, plan: Plan) -> list[Miss]:
        readable = {node.member_id for node in self._members.nodes.readable()}
        return miss_reasons.of_unknown_blocks(
            request.hashes,
            plan.found_blocks,
            self._history.last_event,
            lambda node: node in readable,
        )

    async def _look_in_other_namespaces(
        self, request: GenerationRequest, lifecycle: RequestLifecycle
    ) -> None:
        """Refine "never_stored" if the pool has the prompt under another namespace of the model."""
        for other in self._members.namespaces.kin(request.namespace, MAX_KIN):
            first = hash_chain(other, request.prompt[: other.layout.block_tokens])
            try:
                holders = (
                    (await self._lookups.find(other.namespace_id, first)).holders if first else ()
                )
            except KvpoolError as error:
                log.warning("look-up in another namespace failed", error=str(error))
                return
            if holders:
                fields = miss_reasons.differing_fields(request.namespace, other)
                measured = lifecycle.measured
                measured.misses = miss_reasons.in_other_namespace(measured.misses, fields)
                return

    def _misses_of_known_blocks(
        self, request: GenerationRequest, lifecycle: RequestLifecycle
    ) -> list[Miss]:
        record = self._request_log.get(request.request_id)
        if record is None:
            return []
        measured = lifecycle.measured
        is_remote = measured.is_prefilled_remotely
        fallback = measured.prefill_fallback if is_remote else lifecycle.fallback_reason
        # The last token is always computed. If it completes a block, that block is not a miss.
        found = min(record.found_blocks, request.facts.reusable_blocks)
        reused = measured.reused_tokens // request.namespace.layout.block_tokens
        return miss_reasons.of_known_blocks(found, record.decision.reuse_blocks, reused, fallback)
