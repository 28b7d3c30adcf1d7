"""Has a decode worker generate, and takes in what it reports: tokens, times, and blocks that it could not read.

It either streams to the end or raises; whom to try next is the gateway's business.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence

from conductor.cluster.cluster import Cluster
from conductor.cluster.connections import Connections
from conductor.gateway.miss_reasons import READ
from conductor.gateway.request import Job, Result
from conductor.gateway.request_recorder import Recorder
from conductor.scheduling.cost_model import CostModel
from conductor.scheduling.decision import Decision
from kvpool.blocks.hashing import pack_hashes, token_bytes
from kvpool.errors import Unavailable
from kvpool.wire import messages as m


class Decoding:
    """Streams from the worker that a decision names.

    Args:
        first_token_timeout_s: longest wait for its first token.
    """

    def __init__(
        self,
        cluster: Cluster,
        connections: Connections,
        recorder: Recorder,
        first_token_timeout_s: float,
    ) -> None:
        self._cluster = cluster
        self._connections = connections
        self._recorder = recorder
        self._first_token_timeout_s = first_token_timeout_s

    async def run(
        self,
        job: Job,
        decision: Decision,
        segments: list[m.Segment],
        result: Result,
        *,
        is_last: bool,
    ) -> AsyncGenerator[m.GenerateChunk, None]:
        """Tokens that follow the prompt and what was already given out.

        Args:
            segments: what the worker should read of the prompt.
            is_last: nobody else would be tried: all time that is left may be spent here.

        Raises:
            Unavailable, EngineFailed, Overloaded, DeadlineExceeded: the text is not complete.
        """
        assert decision.decode is not None
        worker = self._cluster.workers.get(decision.decode)
        if worker is None:
            raise Unavailable(f"worker {decision.decode} left meanwhile")
        tokens = job.prompt + result.token_ids
        left = job.sampling.max_tokens - len(result.token_ids)
        if left <= 0:
            result.finish_reason = "length"
            return
        sampling = m.Sampling(
            left,
            job.sampling.temperature,
            job.sampling.top_p,
            job.sampling.seed,
            job.sampling.ignore_eos,
        )
        left_s = job.left_s()
        message = m.Generate(
            job.request_id,
            job.namespace.namespace_id,
            bytes(token_bytes(tokens)),
            pack_hashes(job.hashes),
            segments,
            self._cluster.live_nodes(job.namespace.tenant),
            sampling,
            left_s,
            use_pool=job.pool == "on",
            local_prefix=job.pool == "local",
            local_prefix_tokens=job.local_prefix_tokens,
            max_wait_s=self._cluster.worthwhile_s(worker, job.namespace, len(tokens), segments),
        )
        first_within_s = self._first_token_timeout_s
        if not is_last and self._connections.has_other(worker):
            first_within_s = min(first_within_s, left_s / 2)  # the rest is for the other
        reply: m.GenerateReply | None = None
        is_complete = False
        try:
            stream = self._connections.stream(worker, message, job.deadline, first_within_s)
            async with contextlib.aclosing(stream) as items:
                async for item in items:
                    if isinstance(item, m.GenerateChunk):
                        reply = item.so_far or reply
                        yield item
                    else:
                        reply, is_complete = item, True
        finally:
            if reply is not None:
                self._take(job, decision.decode, segments, reply, result)
        if not is_complete:
            raise Unavailable(f"worker {decision.decode} ended the stream without a result")

    def _take(
        self,
        job: Job,
        worker_id: str,
        segments: Sequence[m.Segment],
        reply: m.GenerateReply,
        result: Result,
    ) -> None:
        result.take(reply)
        if reply.fallback_reason:
            self._recorder.fell_back(result, reply.fallback_reason)
        if reply.fallback_reason and reply.fallback_reason.removeprefix(READ) not in m.DECLINED:
            size = job.namespace.layout.block_bytes
            read = sum(reply.bytes_read.values()) // size
            for segment in segments:
                if segment.start + segment.count > read:
                    first = max(segment.start, read)
                    self._cluster.record_misses(
                        segment.node_id, job.namespace.namespace_id, job.hashes[first : first + 1]
                    )
                    break
        learn(
            self._cluster.cost,
            worker_id,
            reply.computed_tokens,
            reply.pool_tokens,
            reply.phases,
            reply.bytes_read,
        )


def learn(
    cost: CostModel,
    worker_id: str,
    computed: int,
    reused: int,
    phases: dict[str, float],
    bytes_read: dict[str, int],
) -> None:
    """Feed what a worker measured of one request to the cost model."""
    if phases.get("prefill_compute_time"):
        prefill_s = phases["prefill_compute_time"] + phases.get("kv_cache_pack_time", 0.0)
        cost.observe_prefill(worker_id, computed, reused, prefill_s)
    if len(bytes_read) == 1 and phases.get("kv_cache_transfer_time"):
        [(transport, count)] = bytes_read.items()
        seconds = phases["kv_cache_transfer_time"] - phases.get("kv_cache_promotion_time", 0.0)
        cost.observe_transfer(count, seconds, same_host=transport == "shm")
