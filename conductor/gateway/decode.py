"""Streams a generation from a decode worker, and records the worker's report.

It streams to the end or raises. The gateway decides which worker to try next.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence

from conductor.cluster.cluster import Cluster
from conductor.cluster.connections import Connections
from conductor.gateway.miss_reasons import READ
from conductor.gateway.request import GenerationRequest, GenerationResult
from conductor.gateway.request_recorder import RequestRecorder
from conductor.scheduling.cost_model import CostModel
from conductor.scheduling.decision import Decision
from kvpool.blocks.hashing import pack_hashes, token_bytes
from kvpool.errors import Unavailable
from kvpool.wire import messages as m


class Decoding:
    """Streams from the decode worker of a decision.

    Args:
        first_token_timeout_s: longest wait for the first token.
    """

    def __init__(
        self,
        cluster: Cluster,
        connections: Connections,
        recorder: RequestRecorder,
        first_token_timeout_s: float,
    ) -> None:
        self._cluster = cluster
        self._connections = connections
        self._recorder = recorder
        self._first_token_timeout_s = first_token_timeout_s

    async def run(
        self,
        request: GenerationRequest,
        decision: Decision,
        segments: list[m.Segment],
        result: GenerationResult,
        *,
        is_last: bool,
    ) -> AsyncGenerator[m.GenerateChunk, None]:
        """Generate the tokens after the prompt and after those already sent to the client.

        Args:
            segments: the blocks of the prompt that the worker should read.
            is_last: no other worker would be tried, so this attempt may use all the time that is
                left.

        Raises:
            Unavailable, EngineFailed, Overloaded, DeadlineExceeded: the response is not complete.
        """
        assert decision.decode is not None
        worker = self._cluster.workers.get(decision.decode)
        if worker is None:
            raise Unavailable(f"worker {decision.decode} has left")
        tokens = request.prompt + result.token_ids
        left = request.sampling.max_tokens - len(result.token_ids)
        if left <= 0:
            result.finish_reason = "length"
            return
        sampling = m.Sampling(
            left,
            request.sampling.temperature,
            request.sampling.top_p,
            request.sampling.seed,
            request.sampling.ignore_eos,
        )
        left_s = request.left_s()
        message = m.Generate(
            request.request_id,
            request.namespace.namespace_id,
            bytes(token_bytes(tokens)),
            pack_hashes(request.hashes),
            segments,
            self._cluster.live_nodes(request.namespace.tenant),
            sampling,
            left_s,
            use_pool=request.pool == "on",
            local_prefix=request.pool == "local",
            local_prefix_tokens=request.local_prefix_tokens,
            max_wait_s=self._cluster.worthwhile_s(worker, request.namespace, len(tokens), segments),
        )
        first_within_s = self._first_token_timeout_s
        if not is_last and self._connections.has_other(worker):
            first_within_s = min(first_within_s, left_s / 2)  # keep the rest for another worker
        reply: m.GenerateReply | None = None
        is_complete = False
        try:
            stream = self._connections.stream(worker, message, request.deadline, first_within_s)
            async with contextlib.aclosing(stream) as items:
                async for item in items:
                    if isinstance(item, m.GenerateChunk):
                        reply = item.so_far or reply
                        yield item
                    else:
                        reply, is_complete = item, True
        finally:
            if reply is not None:
                self._record(request, decision.decode, segments, reply, result)
        if not is_complete:
            raise Unavailable(f"worker {decision.decode} ended the stream without a result")

    def _record(
        self,
        request: GenerationRequest,
        worker_id: str,
        segments: Sequence[m.Segment],
        reply: m.GenerateReply,
        result: GenerationResult,
    ) -> None:
        result.add_generation(reply)
        if reply.fallback_reason:
            self._recorder.fell_back(result, reply.fallback_reason)
        if reply.fallback_reason and reply.fallback_reason.removeprefix(READ) not in m.DECLINED:
            size = request.namespace.layout.block_bytes
            read = sum(reply.bytes_read.values()) // size
            for segment in segments:
                if segment.start + segment.count > read:
                    first = max(segment.start, read)
                    self._cluster.record_misses(
                        segment.node_id,
                        request.namespace.namespace_id,
                        request.hashes[first : first + 1],
                    )
                    break
        observe_costs(
            self._cluster.cost,
            worker_id,
            reply.computed_tokens,
            reply.pool_tokens,
            reply.phases,
            reply.bytes_read,
        )


def observe_costs(
    cost: CostModel,
    worker_id: str,
    computed: int,
    reused: int,
    phases: dict[str, float],
    bytes_read: dict[str, int],
) -> None:
    """Give the times that a worker measured for one request to the cost model."""
    if phases.get("prefill_compute_time"):
        prefill_s = phases["prefill_compute_time"] + phases.get("kv_cache_pack_time", 0.0)
        cost.observe_prefill(worker_id, computed, reused, prefill_s)
    if len(bytes_read) == 1 and phases.get("kv_cache_transfer_time"):
        [(transport, count)] = bytes_read.items()
        seconds = phases["kv_cache_transfer_time"] - phases.get("kv_cache_promotion_time", 0.0)
        cost.observe_transfer(count, seconds, same_host=transport == "shm")
