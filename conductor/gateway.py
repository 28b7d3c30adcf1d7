"""The life of one request: decide, reserve, prefill, decode, stream; fall back when anything fails.

KV never passes through here. The gateway only plans which worker reads and writes which blocks where, and
relays tokens. Whatever fails before the answer is complete is done again on a decode worker alone, from
the tokens that were already given out: a request is never lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

import numpy as np
import structlog

from conductor.cluster import Cluster
from conductor.requests import Decision, Outcome, RequestLog
from conductor.scheduler import ScheduleRequest, schedule
from kvpool.errors import (
    DeadlineExceeded,
    EngineFailed,
    InvalidArgument,
    KvpoolError,
    Overloaded,
    Unavailable,
)
from kvpool.hashing import hash_chain, pack_hashes, token_bytes
from kvpool.layout import Namespace
from kvpool.wire import WireClient
from kvpool.wire import messages as m

log = structlog.get_logger(__name__)

MAX_ATTEMPTS = 3
MODES = {"auto": "", "remote": "disaggregated", "local": "local"}
RESERVE_TIMEOUT_S = 1.0
RESERVATION_MARGIN_S = 15.0


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
    hashes: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class Result:
    """What became of a request; filled in as it goes."""

    decision: Decision | None = None
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    planned_blocks: int = 0
    pool_tokens: int = 0
    local_tokens: int = 0
    computed_tokens: int = 0
    prefill_reused_tokens: int = 0
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    verified_blocks: int = 0
    fallback_reason: str = ""
    phases: dict[str, float] = field(default_factory=dict)
    bytes_read: dict[str, int] = field(default_factory=dict)
    bytes_written: dict[str, int] = field(default_factory=dict)

    def add_bytes(self, read: dict[str, int], written: dict[str, int]) -> None:
        """Count bytes moved, by transport."""
        for target, source in ((self.bytes_read, read), (self.bytes_written, written)):
            for name, count in source.items():
                target[name] = target.get(name, 0) + count


class Gateway:
    """Serves jobs over a cluster.

    Args:
        default_ttft_s, default_tpot_s: objectives of requests that name none.
        max_active: more at once are refused.
    """

    def __init__(
        self,
        cluster: Cluster,
        request_log: RequestLog,
        *,
        default_ttft_s: float,
        default_tpot_s: float,
        max_active: int,
    ) -> None:
        self.cluster = cluster
        self.request_log = request_log
        self.active = 0
        self._ttft_s = default_ttft_s
        self._tpot_s = default_tpot_s
        self._max_active = max_active
        self._links: dict[str, WireClient] = {}

    async def close(self) -> None:
        """Close the connections to workers and nodes."""
        for link in self._links.values():
            await link.close()

    def admit(self, job: Job, result: Result) -> None:
        """Decide where the job runs, before anything is sent to the caller.

        Raises:
            Overloaded: no choice meets the objectives, or too many requests are in work.
            Unavailable: there is no worker for this namespace.
        """
        if self.active >= self._max_active:
            self.cluster.counters["rejected:queue_full"] += 1
            raise Overloaded(f"{self.active} requests are in work", retry_after_s=1.0)
        job.hashes = hash_chain(job.namespace, job.prompt)
        now = self.cluster.clock()
        decision = self._decide(job, frozenset(), now)
        result.decision = decision
        self.request_log.decided(decision, now)
        if decision.is_refused:
            self.cluster.counters[f"rejected:{decision.reason}"] += 1
            self.request_log.ended(job.request_id, Outcome("refused"))
            if not decision.candidates:
                raise Unavailable(f"nobody can serve this: {decision.reason}", hint="kvpool stats")
            raise Overloaded(
                f"refused early: {decision.reason}", retry_after_s=decision.retry_after_s
            )

    async def run(
        self, job: Job, result: Result, received_at: float
    ) -> AsyncGenerator[list[int], None]:
        """Token ids as they come. Call `admit` first.

        Raises:
            DeadlineExceeded, Unavailable, EngineFailed: nothing worked, with the last reason.
        """
        status = "cancelled"
        self.active += 1
        try:
            async for token_ids in self._attempts(job, result, received_at):
                yield token_ids
            status = "ok"
        except KvpoolError as error:
            status = "failed"
            self.cluster.counters[f"failed:{error.code}"] += 1
            raise
        finally:
            self.active -= 1
            self.cluster.in_flight.finished(job.request_id)
            self._finish(job, result, status)

    async def _attempts(
        self, job: Job, result: Result, received_at: float
    ) -> AsyncGenerator[list[int], None]:
        tried: set[str] = set()
        decision = result.decision
        assert decision is not None
        for attempt in range(MAX_ATTEMPTS):
            self.cluster.in_flight.assigned(decision, self.cluster.clock())
            try:
                segments = await self._prepare(job, decision, result)
                self.cluster.in_flight.prefilled(job.request_id, self.cluster.clock())
                async for token_ids in self._decode(job, decision, segments, result):
                    if not result.token_ids:
                        result.ttft_s = time.monotonic() - received_at
                    result.token_ids += token_ids
                    yield token_ids
                return
            except (Unavailable, EngineFailed, Overloaded, DeadlineExceeded) as error:
                assert decision.decode is not None
                tried.add(decision.decode)
                self.cluster.in_flight.finished(job.request_id)
                self._count_fallback(result, f"decode:{error.code}")
                log.warning(
                    "decode failed",
                    request_id=job.request_id,
                    worker=decision.decode,
                    error=str(error),
                )
                if attempt == MAX_ATTEMPTS - 1 or time.monotonic() >= job.deadline:
                    raise
                # Go on from what the caller has already got, on another worker if there is one.
                job.pin_decode = None
                retry = self._decide(job, frozenset(tried), self.cluster.clock(), mode="local")
                if retry.is_refused:
                    retry = self._decide(job, frozenset(), self.cluster.clock(), mode="local")
                if retry.is_refused:
                    raise
                decision = result.decision = retry

    # ------------------------------------------------------------ deciding

    def _decide(self, job: Job, excluded: frozenset[str], now: float, mode: str = "") -> Decision:
        layout = job.namespace.layout
        view = self.cluster.view()
        namespace_id = job.namespace.namespace_id
        hosts = {worker.host for worker in view.workers.values()}
        segments = {}
        if job.pool == "on":
            segments = {
                host: self.cluster.segments(namespace_id, job.hashes, host) for host in hosts
            }
        request = ScheduleRequest(
            job.request_id,
            namespace_id,
            len(job.prompt),
            layout.block_tokens,
            layout.block_bytes,
            layout.layers,
            segments,
            output_tokens=job.sampling.max_tokens,
            ttft_s=self._ttft_s,
            tpot_s=self._tpot_s,
            mode=mode or (MODES[job.prefill] if job.pool == "on" else "local"),
            pin_decode=job.pin_decode,
            excluded=excluded,
        )
        return schedule(request, view, now)

    # ------------------------------------------------------------ prefill elsewhere

    async def _prepare(self, job: Job, decision: Decision, result: Result) -> list[m.Segment]:
        """Have the prompt's KV put where the decode worker can read it; returns what it should read."""
        assert decision.decode is not None
        if job.pool != "on":
            return []
        decoder = self.cluster.workers.get(decision.decode)
        host = decoder.descriptor.host if decoder else ""
        layout = job.namespace.layout
        if decision.mode == "disaggregated":
            try:
                return await self._prefill(job, decision, host, result)
            except KvpoolError as error:
                self._count_fallback(result, f"prefill:{error.code}")
                log.warning(
                    "remote prefill failed, going local",
                    request_id=job.request_id,
                    error=str(error),
                )
        found = self.cluster.segments(job.namespace.namespace_id, job.hashes, host)
        limit = decision.reuse_blocks
        if decision.mode != "local" or limit == (len(job.prompt) - 1) // layout.block_tokens:
            limit = len(job.hashes)  # all: of a prompt of whole blocks the last token is recomputed
        segments = _cut(found, limit)
        result.planned_blocks = sum(segment.count for segment in segments)
        return segments

    async def _prefill(
        self, job: Job, decision: Decision, decode_host: str, result: Result
    ) -> list[m.Segment]:
        """Reserve first, prefill second. No reservation, no remote prefill."""
        assert decision.prefill is not None
        if decision.target_node is None:
            raise Unavailable("no node can take the blocks")
        prefiller = self.cluster.workers.get(decision.prefill)
        target = self.cluster.nodes.get(decision.target_node)
        if prefiller is None or target is None:
            raise Unavailable("the prefill worker or the node left meanwhile")
        namespace_id = job.namespace.namespace_id
        reuse = _cut(
            self.cluster.segments(namespace_id, job.hashes, prefiller.descriptor.host),
            decision.reuse_blocks,
        )
        have = sum(segment.count for segment in reuse)
        grant, existing = await self._reserve(job, prefiller.member_id, target.descriptor, have)
        # Of a chain that others write at the same time, only the part before theirs can be planned for.
        granted = set(np.frombuffer(grant.indices, dtype="<u4").tolist()) if grant else set()
        message = m.Prefill(
            job.request_id,
            namespace_id,
            bytes(token_bytes(job.prompt)),
            pack_hashes(job.hashes),
            reuse,
            self.cluster.live_nodes(),
            grant,
            max(0.1, job.deadline - time.monotonic()),
        )
        started = time.monotonic()
        try:
            reply: m.PrefillReply = await self._link(prefiller.descriptor.address).call(
                message, max(0.1, job.deadline - time.monotonic())
            )
        except (KvpoolError, asyncio.CancelledError):
            if grant is not None:
                # The worker may be writing still: the slots go through quarantine.
                abort = m.Abort(grant.reservation.reservation_id, False)
                with contextlib.suppress(KvpoolError):
                    await self._link(target.descriptor.address).send(abort)
            raise
        result.prefill_reused_tokens = reply.reused_tokens
        result.add_bytes(reply.bytes_read, reply.bytes_written)
        for name, seconds in reply.phases.items():
            result.phases[f"prefill:{name}"] = seconds
        result.phases["remote_prefill_time"] = time.monotonic() - started
        self._learn(
            prefiller.descriptor,
            reply.computed_tokens,
            reply.reused_tokens,
            reply.phases,
            reply.bytes_read,
        )
        node_id = target.member_id
        covered = dict.fromkeys(existing, node_id)
        if reply.committed_blocks:
            covered |= dict.fromkeys(granted, node_id)
        near = self.cluster.segments(namespace_id, job.hashes, decode_host)
        prefix = _cut(near, have) if have else []
        segments = _extend(prefix, covered, len(job.hashes))
        result.planned_blocks = sum(segment.count for segment in segments)
        return segments

    async def _reserve(
        self, job: Job, writer_id: str, node: m.NodeDescriptor, have: int
    ) -> tuple[m.Grant | None, list[int]]:
        """Slots for the blocks from `have` on; also which of them that node holds already.

        Raises:
            NoRoom, Unavailable, DeadlineExceeded: no reservation, so no remote prefill.
        """
        wanted = job.hashes[have:]
        if not wanted:
            return None, []
        left_s = max(0.1, job.deadline - time.monotonic())
        request = m.Reserve(
            job.namespace.namespace_id,
            pack_hashes(wanted),
            job.hashes[have - 1] if have else b"",
            0,
            min(left_s, 45.0) + RESERVATION_MARGIN_S,
            writer_id,
        )
        link = self._link(node.address)
        timeout_s = min(RESERVE_TIMEOUT_S, left_s)
        await link.call(m.RegisterNamespace(job.namespace), timeout_s)
        reply: m.ReserveReply = await link.call(request, timeout_s)
        statuses = reply.statuses
        if m.BlockStatus.NO_ROOM in statuses:
            if reply.reservation_id:
                await link.send(m.Abort(reply.reservation_id, True))
            raise Unavailable(f"node {node.node_id} has no room for {len(wanted)} blocks")
        granted = [have + i for i, s in enumerate(statuses) if s == m.BlockStatus.GRANTED]
        existing = [have + i for i, s in enumerate(statuses) if s == m.BlockStatus.EXISTS]
        if not granted:
            return None, existing
        return m.Grant(node, reply, np.array(granted, dtype="<u4").tobytes()), existing

    # ------------------------------------------------------------ decode

    async def _decode(
        self, job: Job, decision: Decision, segments: list[m.Segment], result: Result
    ) -> AsyncGenerator[list[int], None]:
        assert decision.decode is not None
        worker = self.cluster.workers.get(decision.decode)
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
        message = m.Generate(
            job.request_id,
            job.namespace.namespace_id,
            bytes(token_bytes(tokens)),
            pack_hashes(job.hashes),
            segments,
            self.cluster.live_nodes(),
            sampling,
            max(0.1, job.deadline - time.monotonic()),
            use_pool=job.pool == "on",
            local_prefix=job.pool == "local",
            local_prefix_tokens=job.local_prefix_tokens,
        )
        link = self._link(worker.descriptor.address)
        reply: m.GenerateReply | None = None
        left_s = max(0.1, job.deadline - time.monotonic())
        async with contextlib.aclosing(link.stream(message, left_s)) as items:
            async for item in items:
                if isinstance(item, m.GenerateChunk):
                    yield item.token_ids
                else:
                    reply = item
        if reply is None:
            raise Unavailable(f"worker {decision.decode} ended the stream without a result")
        self._take(job, worker.descriptor, segments, reply, result)

    def _take(
        self,
        job: Job,
        worker: m.WorkerDescriptor,
        segments: Sequence[m.Segment],
        reply: m.GenerateReply,
        result: Result,
    ) -> None:
        result.finish_reason = reply.finish_reason
        result.pool_tokens = reply.pool_tokens
        result.local_tokens = reply.local_tokens
        result.computed_tokens = reply.computed_tokens
        result.verified_blocks += reply.verified_blocks
        result.phases.update(reply.phases)
        result.tpot_s = reply.phases.get("per_token_decode_time", 0.0)
        result.add_bytes(reply.bytes_read, reply.bytes_written)
        if reply.fallback_reason:
            self._count_fallback(result, reply.fallback_reason)
            size = job.namespace.layout.block_bytes
            read = sum(reply.bytes_read.values()) // size
            for segment in segments:
                if segment.start + segment.count > read:
                    first = max(segment.start, read)
                    self.cluster.suspect_blocks(
                        segment.node_id, job.namespace.namespace_id, job.hashes[first : first + 1]
                    )
                    break
        self._learn(
            worker, reply.computed_tokens, reply.pool_tokens, reply.phases, reply.bytes_read
        )

    def _learn(
        self,
        worker: m.WorkerDescriptor,
        computed: int,
        reused: int,
        phases: dict[str, float],
        bytes_read: dict[str, int],
    ) -> None:
        """Feed what was measured to the cost model."""
        cost = self.cluster.cost
        if phases.get("prefill_compute_time"):
            cost.observe_prefill(worker.worker_id, computed, reused, phases["prefill_compute_time"])
        if len(bytes_read) == 1 and phases.get("kv_cache_transfer_time"):
            [(transport, count)] = bytes_read.items()
            seconds = phases["kv_cache_transfer_time"]
            cost.observe_transfer(count, seconds, same_host=transport == "shm")

    def _count_fallback(self, result: Result, reason: str) -> None:
        result.fallback_reason = result.fallback_reason or reason
        self.cluster.counters[f"fallback:{reason}"] += 1

    def _finish(self, job: Job, result: Result, status: str) -> None:
        counters = self.cluster.counters
        counters[f"requests:{status}"] += 1
        counters["prompt_tokens"] += len(job.prompt)
        counters["pool_tokens"] += max(result.pool_tokens, result.prefill_reused_tokens)
        counters["output_tokens"] += len(result.token_ids)
        outcome = Outcome(
            status,
            result.ttft_s,
            result.tpot_s,
            len(result.token_ids),
            result.pool_tokens,
            result.computed_tokens,
            result.fallback_reason,
            dict(result.phases),
        )
        self.request_log.ended(job.request_id, outcome)
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
        )

    def _link(self, address: str) -> WireClient:
        link = self._links.get(address)
        if link is None:
            link = self._links[address] = WireClient(
                address, self.cluster.conductor_id, kind="conductor", epoch=self.cluster.epoch
            )
        return link


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


def _cut(segments: Sequence[m.Segment], limit: int) -> list[m.Segment]:
    """The segments up to block `limit`."""
    kept = []
    for segment in segments:
        count = min(segment.count, limit - segment.start)
        if count > 0:
            kept.append(m.Segment(segment.node_id, segment.start, count, segment.tier))
    return kept


def _extend(segments: Sequence[m.Segment], covered: dict[int, str], blocks: int) -> list[m.Segment]:
    """`segments` followed by the covered blocks, as far as they go without a gap."""
    out = list(segments)
    at = sum(segment.count for segment in out)
    while at < blocks and at in covered:
        start = at
        while at < blocks and covered.get(at) == covered[start]:
            at += 1
        out.append(m.Segment(covered[start], start, at - start, "dram"))
    return out
