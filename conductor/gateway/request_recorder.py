"""What is written down of a request: the decision, the reasons of its misses, and what was measured.

It feeds the request log, the counters and the log line; it changes nothing of how a request is served.
"""

from __future__ import annotations

import time

import structlog

from conductor.cluster.cluster import Cluster
from conductor.gateway import miss_reasons
from conductor.gateway.miss_reasons import Miss
from conductor.gateway.request import Job, Result
from conductor.gateway.request_log import RequestLog, RequestOutcome
from conductor.scheduling.decision import Decision
from kvpool.blocks.hashing import hash_chain

log = structlog.get_logger(__name__)

MAX_KIN = 4  # namespaces of the same model in which a missing prompt is looked for


class Recorder:
    """Keeps the request log.

    Args:
        ttft_s, tpot_s: objectives by which a request counts as goodput.
    """

    def __init__(
        self, cluster: Cluster, request_log: RequestLog, ttft_s: float, tpot_s: float
    ) -> None:
        self._cluster = cluster
        self._request_log = request_log
        self._ttft_s = ttft_s
        self._tpot_s = tpot_s

    def refused(self, job: Job, decision: Decision) -> None:
        """It was not let in."""
        self._write(job, decision)
        self._request_log.ended(job.request_id, RequestOutcome("refused"))
        self._cluster.counters[f"rejected:{decision.reason}"] += 1

    async def decided(self, job: Job, result: Result, decision: Decision) -> None:
        """It is about to be served. What the pool lacks is explained now: soon the request itself stores it."""
        self._write(job, decision)
        if job.pool == "on":
            result.misses = await self._unknown(job)

    def fell_back(self, result: Result, reason: str) -> None:
        """Something had to be done in another way than planned; the first reason is the request's."""
        result.fallback_reason = result.fallback_reason or reason
        self._cluster.counters[f"fallback:{reason}"] += 1

    def ended(self, job: Job, result: Result, status: str) -> None:
        """It was served, or was not after all."""
        counters = self._cluster.counters
        counters[f"requests:{status}"] += 1
        if status == "ok" and result.ttft_s <= self._ttft_s and result.tpot_s <= self._tpot_s:
            counters["goodput_requests"] += 1  # DistServe: those that meet both objectives
        counters["prompt_tokens"] += len(job.prompt)
        counters["pool_tokens"] += result.reused_tokens
        counters["output_tokens"] += len(result.token_ids)
        if job.pool == "on" and result.token_ids:
            result.misses = [*self._not_reused(job, result), *result.misses]
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
        self._request_log.ended(job.request_id, outcome)
        decision = result.decision
        log.info(
            "request done",
            request_id=job.request_id,
            status=status,
            mode=decision.mode if decision else "",
            prompt_tokens=len(job.prompt),
            pool_tokens=result.pool_tokens,
            output_tokens=len(result.token_ids),
            ttft_s=round(result.ttft_s, 4),
            fallback=result.fallback_reason,
            phases={name: round(seconds, 5) for name, seconds in result.phases.items()},
            tokens_by_tier=result.tokens_by_tier,
            misses={miss.reason: miss.blocks for miss in result.misses},
        )

    def _write(self, job: Job, decision: Decision) -> None:
        record = self._request_log.decided(decision, self._cluster.clock(), job.namespace.tenant)
        record.at_unix_s = time.time()
        record.namespace = job.namespace.name
        record.priority = job.priority
        record.routing = job.routing
        record.found_blocks = job.found_blocks
        record.block_tokens = job.namespace.layout.block_tokens

    async def _unknown(self, job: Job) -> list[Miss]:
        cluster = self._cluster
        readable = {node.member_id for node in cluster.nodes.readable()}
        found = miss_reasons.unknown(
            job.hashes,
            job.found_blocks,
            cluster.block_history.last_event,
            lambda node: node in readable,
        )
        if job.found_blocks or not found or found[0].reason != "never_stored":
            return found
        for other in cluster.namespaces.kin(job.namespace, MAX_KIN):
            first = hash_chain(other, job.prompt[: other.layout.block_tokens])
            if first and (await cluster.find(other.namespace_id, first)).holders:
                return miss_reasons.elsewhere(found, miss_reasons.differing(job.namespace, other))
        return found

    def _not_reused(self, job: Job, result: Result) -> list[Miss]:
        record = self._request_log.get(job.request_id)
        if record is None:
            return []
        block_tokens = job.namespace.layout.block_tokens
        is_remote = result.is_prefilled_remotely
        fallback = result.prefill_fallback if is_remote else result.fallback_reason
        # Of a prompt of whole blocks the last token is computed in any case: no reason is needed for that.
        found = min(record.found_blocks, (len(job.prompt) - 1) // block_tokens)
        planned = record.decision.reuse_blocks
        return miss_reasons.not_reused(
            found, planned, result.reused_tokens // block_tokens, fallback
        )
