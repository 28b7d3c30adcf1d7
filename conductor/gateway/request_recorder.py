"""Records each request: its decision, its miss reasons and its measurements.

It feeds the request log, the counters and the log line. It never delays a request or changes how it
is served.
"""

from __future__ import annotations

import asyncio
import time

import structlog

from conductor.cluster.cluster import Cluster
from conductor.gateway import miss_reasons
from conductor.gateway.miss_reasons import Miss
from conductor.gateway.request import GenerationRequest, GenerationResult
from conductor.gateway.request_log import RequestLog, RequestOutcome
from conductor.scheduling.decision import Decision
from kvpool.blocks.hashing import hash_chain
from kvpool.errors import KvpoolError

log = structlog.get_logger(__name__)

MAX_KIN = 4  # other namespaces of the same model in which a missing prompt is looked up


class RequestRecorder:
    """Writes the request log and the counters.

    Args:
        ttft_s, tpot_s: objectives that a request must meet to count as goodput.
    """

    def __init__(
        self, cluster: Cluster, request_log: RequestLog, ttft_s: float, tpot_s: float
    ) -> None:
        self._cluster = cluster
        self._request_log = request_log
        self._ttft_s = ttft_s
        self._tpot_s = tpot_s
        self._lookups: dict[str, asyncio.Task[None]] = {}  # in other namespaces, by request

    async def close(self) -> None:
        """Cancel the look-ups under way."""
        for task in self._lookups.values():
            task.cancel()
        await asyncio.gather(*self._lookups.values(), return_exceptions=True)

    def refused(self, request: GenerationRequest, decision: Decision) -> None:
        """Record a refused request."""
        self._write(request, decision)
        self._request_log.ended(request.request_id, RequestOutcome("refused"))
        self._cluster.counters[f"rejected:{decision.reason}"] += 1

    def decided(
        self, request: GenerationRequest, result: GenerationResult, decision: Decision
    ) -> None:
        """Record the decision and the miss reasons of a request that is about to run.

        The reasons are taken now, because the request itself will soon store the missing blocks.
        The look-up in other namespaces goes on in the background; a request that ends first keeps
        "never_stored".
        """
        self._write(request, decision)
        if request.pool != "on":
            return
        result.misses = self._misses_of_unknown_blocks(request)
        if request.found_blocks or not result.misses or result.misses[0].reason != "never_stored":
            return
        task = asyncio.create_task(
            self._look_in_other_namespaces(request, result), name="look-up in other namespaces"
        )
        self._lookups[request.request_id] = task
        task.add_done_callback(lambda _: self._lookups.pop(request.request_id, None))

    def fell_back(self, result: GenerationResult, reason: str) -> None:
        """Record a fallback. The request keeps its first fallback reason."""
        result.fallback_reason = result.fallback_reason or reason
        self._cluster.counters[f"fallback:{reason}"] += 1

    def ended(self, request: GenerationRequest, result: GenerationResult, status: str) -> None:
        """Record the end of a request, with `status` "ok", "failed" or "cancelled"."""
        lookup = self._lookups.pop(request.request_id, None)
        if lookup is not None:
            lookup.cancel()
        counters = self._cluster.counters
        counters[f"requests:{status}"] += 1
        if status == "ok" and result.ttft_s <= self._ttft_s and result.tpot_s <= self._tpot_s:
            counters["goodput_requests"] += 1  # as in DistServe: both objectives met
        counters["prompt_tokens"] += len(request.prompt)
        counters["pool_tokens"] += result.reused_tokens
        counters["output_tokens"] += len(result.token_ids)
        if request.pool == "on" and result.token_ids:
            result.misses = [*self._misses_of_known_blocks(request, result), *result.misses]
            for miss in result.misses:
                counters[f"miss:{miss.reason}"] += miss.blocks
        ttft_error, tpot_error = result.prediction_errors()
        outcome = RequestOutcome(
            status,
            result.ttft_s,
            result.tpot_s,
            len(result.token_ids),
            result.pool_tokens,
            result.computed_tokens,
            result.fallback_reason,
            dict(result.phases),
            tuple(result.misses),
            ttft_error,
            tpot_error,
            dict(result.tokens_by_tier),
        )
        self._request_log.ended(request.request_id, outcome)
        decision = result.decision
        log.info(
            "request done",
            request_id=request.request_id,
            status=status,
            mode=decision.mode if decision else "",
            prompt_tokens=len(request.prompt),
            pool_tokens=result.pool_tokens,
            output_tokens=len(result.token_ids),
            ttft_s=round(result.ttft_s, 4),
            fallback=result.fallback_reason,
            phases={name: round(seconds, 5) for name, seconds in result.phases.items()},
            tokens_by_tier=result.tokens_by_tier,
            misses={miss.reason: miss.blocks for miss in result.misses},
        )

    def _write(self, request: GenerationRequest, decision: Decision) -> None:
        record = self._request_log.decided(
            decision, self._cluster.clock(), request.namespace.tenant
        )
        record.at_unix_s = time.time()
        record.namespace = request.namespace.name
        record.priority = request.priority
        record.routing = request.routing
        record.found_blocks = request.found_blocks
        record.block_tokens = request.namespace.layout.block_tokens

    def _misses_of_unknown_blocks(self, request: GenerationRequest) -> list[Miss]:
        cluster = self._cluster
        readable = {node.member_id for node in cluster.nodes.readable()}
        return miss_reasons.of_unknown_blocks(
            request.hashes,
            request.found_blocks,
            cluster.block_history.last_event,
            lambda node: node in readable,
        )

    async def _look_in_other_namespaces(
        self, request: GenerationRequest, result: GenerationResult
    ) -> None:
        """Refine "never_stored" if the pool has the prompt under another namespace of the model."""
        cluster = self._cluster
        for other in cluster.namespaces.kin(request.namespace, MAX_KIN):
            first = hash_chain(other, request.prompt[: other.layout.block_tokens])
            try:
                holders = (await cluster.find(other.namespace_id, first)).holders if first else ()
            except KvpoolError as error:
                log.warning("look-up in another namespace failed", error=str(error))
                return
            if holders:
                fields = miss_reasons.differing_fields(request.namespace, other)
                result.misses = miss_reasons.in_other_namespace(result.misses, fields)
                return

    def _misses_of_known_blocks(
        self, request: GenerationRequest, result: GenerationResult
    ) -> list[Miss]:
        record = self._request_log.get(request.request_id)
        if record is None:
            return []
        block_tokens = request.namespace.layout.block_tokens
        is_remote = result.is_prefilled_remotely
        fallback = result.prefill_fallback if is_remote else result.fallback_reason
        # The last token is always computed. If it completes a block, that block is not a miss.
        found = min(record.found_blocks, (len(request.prompt) - 1) // block_tokens)
        planned = record.decision.reuse_blocks
        return miss_reasons.of_known_blocks(
            found, planned, result.reused_tokens // block_tokens, fallback
        )
