"""The life of one request: decide, reserve, prefill, decode, stream; fall back when anything fails.

KV never passes through here. The gateway only plans which worker reads and writes which blocks where, and
relays tokens. Whatever fails before the answer is complete is done again on a decode worker alone, from
the tokens that were already given out: a request is never lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence

import structlog

from conductor.cluster import Cluster
from conductor.entrance import Entrance, Limits, Refused
from conductor.jobs import Job, Result
from conductor.links import Links
from conductor.misses import READ
from conductor.policy_holder import PolicyHolder
from conductor.policy_service import pool_facts
from conductor.prefetcher import Prefetcher
from conductor.recorder import Recorder
from conductor.remote_prefill import RemotePrefill
from conductor.replicator import Replicator
from conductor.requests import Decision, RequestLog
from conductor.routing import Facts
from conductor.scheduler import ClusterView, ScheduleRequest, schedule
from conductor.segments import cut
from conductor.sessions import Sessions
from conductor.strategies.choices import NO_PLACE
from kvpool.credentials import NO_CREDENTIALS, Credentials
from kvpool.errors import (
    DeadlineExceeded,
    EngineFailed,
    KvpoolError,
    Overloaded,
    Unavailable,
)
from kvpool.hashing import hash_chain, pack_hashes, token_bytes
from kvpool.wire import messages as m

log = structlog.get_logger(__name__)

MAX_ATTEMPTS = 3
PLACE_POLL_S = 0.05
NOBODY = frozenset(("no_decode_worker", "no_prefill_choice", "prompt_too_long"))
JUDGE_AFTER_TOKENS = 16  # TPOT is known well enough by then
MODES = {"auto": "", "remote": "disaggregated", "local": "local"}
WAIT_S = 60.0  # default of the longest waits for a prefill and for a first token


class Gateway:
    """Serves jobs over a cluster.

    Args:
        default_ttft_s, default_tpot_s: objectives of requests that name none.
        limits: how many requests are in work at once, and how many wait for how long.
        prefill_timeout_s: longest wait for a remote prefill.
        first_token_timeout_s: longest wait for a decode worker's first token.
        replications_at_once: copies of hot prefixes under way in the background.
        policy: the routing policy; None: an empty one.
        on_outcome: told of every request served or refused whether prefill and decode met its objectives.
        credentials: shown to workers and nodes.
        prefetches: whether blocks are moved ahead of their reads.
        sessions: what is remembered of conversations; None: as much as usual.
    """

    def __init__(
        self,
        cluster: Cluster,
        request_log: RequestLog,
        *,
        default_ttft_s: float,
        default_tpot_s: float,
        limits: Limits,
        prefill_timeout_s: float = WAIT_S,
        first_token_timeout_s: float = WAIT_S,
        replications_at_once: int = 0,
        policy: PolicyHolder | None = None,
        on_outcome: Callable[[bool, bool], None] = lambda _ttft, _tpot: None,
        credentials: Credentials = NO_CREDENTIALS,
        prefetches: bool = True,
        sessions: Sessions | None = None,
    ) -> None:
        self.cluster = cluster
        self.policy = policy or PolicyHolder()
        self._on_outcome = on_outcome
        self.request_log = request_log
        self._recorder = Recorder(cluster, request_log, default_ttft_s, default_tpot_s)
        self._waiting: dict[str, tuple[Result, float]] = {}  # requests in work
        self._ttft_s = default_ttft_s
        self._tpot_s = default_tpot_s
        self._first_token_timeout_s = first_token_timeout_s
        self._place_wait_s = limits.max_wait_s
        self.links = Links(cluster, credentials)
        self._remote_prefill = RemotePrefill(cluster, self.links, prefill_timeout_s)
        self._replicator = Replicator(cluster, self.links, replications_at_once)
        self.prefetcher = Prefetcher(cluster, self.links, is_active=prefetches)
        self.sessions = sessions or Sessions()
        self.entrance = Entrance(cluster, limits, self._decide, self.prefetcher.while_waiting)

    @property
    def active(self) -> int:
        """Requests in work."""
        return self.entrance.active

    async def close(self) -> None:
        """Turn away who waits, give up background copies, close connections to workers and nodes."""
        await self.entrance.close()
        await self.prefetcher.close()
        await self._replicator.close()
        await self.links.close()

    async def admit(self, job: Job, result: Result) -> Decision:
        """Decide where the job runs, before anything is sent to the caller; it may wait for that.

        The job holds a slot until `run` ends or `release` is called.

        Raises:
            Overloaded: no choice meets the objectives, or too many requests are in work and waiting.
            Unavailable: there is no worker for this namespace.
        """
        try:
            decision = await self.entrance.admit(job)
        except Refused as refused:
            result.decision = refused.decision
            self._recorder.refused(job, refused.decision)
            if refused.reason in ("ttft_slo", "tpot_slo"):
                self._on_outcome(refused.reason != "ttft_slo", refused.reason != "tpot_slo")
            if refused.reason in NOBODY:
                raise Unavailable(
                    f"nobody can serve this: {refused.reason}", hint="kvpool stats"
                ) from None
            raise
        try:
            result.decision = decision
            now = self.cluster.clock()
            waited_s = max(0.0, now - (job.received_at or now))
            result.phases = {"admission_wait": waited_s, "request_queue_wait": waited_s}
            await self._recorder.decided(job, result, decision)
        except BaseException:
            self.release(job)
            raise
        self._replicator.offer(job, decision)
        self.prefetcher.offer(job, decision)
        if job.pool == "on":
            self.sessions.note(job.namespace.namespace_id, job.key, job.hashes, now)
        return decision

    def release(self, job: Job) -> None:
        """The job will not run, or has run: give its slot back. Releasing twice is allowed."""
        self.entrance.release(job)

    async def run(
        self, job: Job, result: Result, received_at: float
    ) -> AsyncGenerator[m.GenerateChunk, None]:
        """Tokens as they come. Call `admit` first.

        A reader that leaves early has cancelled the request, unless it called `result.stop()`.

        Raises:
            DeadlineExceeded, Unavailable, EngineFailed: nothing worked, with the last reason.
        """
        status = "cancelled"
        self._waiting[job.request_id] = (result, received_at)
        try:
            async with contextlib.aclosing(self._attempts(job, result, received_at)) as pieces:
                async for piece in pieces:
                    yield piece
            status = "ok"
        except KvpoolError as error:
            status = "failed"
            self.cluster.counters[f"failed:{error.code}"] += 1
            raise
        finally:
            self.release(job)
            self._waiting.pop(job.request_id, None)
            status = "ok" if result.is_stopped else status
            if status == "ok":
                self._judge(result)
            self._recorder.ended(job, result, status)

    async def _attempts(
        self, job: Job, result: Result, received_at: float
    ) -> AsyncGenerator[m.GenerateChunk, None]:
        tried: set[str] = set()
        decision = result.decision
        assert decision is not None
        failures = 0
        full_until = float("inf")  # how long a worker without a place is asked again
        while True:
            self.cluster.in_flight.assigned(decision, self.cluster.clock())
            try:
                segments = await self._prepare(job, decision, result)
                self.cluster.in_flight.prefilled(job.request_id, self.cluster.clock())
                is_last = failures == MAX_ATTEMPTS - 1
                decoded = self._decode(job, decision, segments, result, is_last=is_last)
                async with contextlib.aclosing(decoded) as pieces:
                    async for piece in pieces:
                        result.add_tokens(piece.token_ids, time.monotonic() - received_at)
                        if len(result.token_ids) >= JUDGE_AFTER_TOKENS:
                            self._judge(result)
                        yield piece
                return
            except (Unavailable, EngineFailed, Overloaded, DeadlineExceeded) as error:
                assert decision.decode is not None
                tried.add(decision.decode)
                self.cluster.in_flight.finished(job.request_id)
                is_full = isinstance(error, Overloaded)
                if not is_full or full_until == float("inf"):  # asked again, it is no news
                    self._count_fallback(result, f"decode:{error.code}")
                    log.warning(
                        "decode failed",
                        request_id=job.request_id,
                        worker=decision.decode,
                        error=str(error),
                    )
                if is_full:  # its places are others': of another conductor, say
                    full_until = min(full_until, time.monotonic() + self._place_wait_s)
                else:
                    failures += 1
                now = time.monotonic()
                if failures == MAX_ATTEMPTS or now >= min(job.deadline, full_until):
                    raise
                # Go on from what the caller has already got, on another worker if there is one.
                job.pin_decode = None
                retry = await self._elsewhere(job, tried, min(job.deadline, full_until))
                if retry.is_refused:
                    raise
                decision = result.decision = retry

    async def _elsewhere(self, job: Job, tried: set[str], until: float) -> Decision:
        """Where to go on: a worker not tried, else one again, a moment later; a place there is waited for."""
        retry = await self._decide(job, frozenset(tried), mode="local")
        if not retry.is_refused:
            return retry
        while True:
            await asyncio.sleep(PLACE_POLL_S)
            retry = await self._decide(job, mode="local")
            if retry.reason != NO_PLACE or time.monotonic() >= min(until, job.deadline):
                return retry

    # ------------------------------------------------------------ deciding

    async def _decide(
        self, job: Job, excluded: frozenset[str] = frozenset(), mode: str = ""
    ) -> Decision:
        if not job.hashes:
            job.hashes = hash_chain(job.namespace, job.prompt)
        layout = job.namespace.layout
        namespace_id = job.namespace.namespace_id
        found = await self.cluster.find(namespace_id, job.hashes) if job.pool == "on" else None
        # Nothing is awaited from here on: the decision is about the cluster as it is now.
        view = self.cluster.view(job.namespace.tenant)
        hosts = {worker.host for worker in view.workers.values()}
        segments = {host: found.segments(host) for host in hosts} if found else {}
        job.found_blocks = max((sum(s.count for s in run) for run in segments.values()), default=0)
        wanted = mode or self._routed(job, view)
        request = ScheduleRequest(
            job.request_id,
            namespace_id,
            len(job.prompt),
            layout.block_tokens,
            layout.block_bytes,
            layout.layers,
            segments,
            engine_blocks=self.cluster.engines.leading(namespace_id, job.hashes),
            output_tokens=job.sampling.max_tokens,
            ttft_s=self._ttft_s,
            tpot_s=self._tpot_s,
            mode=wanted,
            pin_decode=job.pin_decode,
            excluded=excluded,
        )
        return schedule(request, view, self.cluster.clock())

    def _routed(self, job: Job, view: ClusterView) -> str:
        """The mode that the request asks for, or the policy says; "" leaves it to the scheduler."""
        if job.pool != "on":
            return "local"
        facts = Facts(
            model=job.model,
            tenant=job.namespace.tenant,
            endpoint=job.endpoint,
            key=job.key or job.request_id,
            prompt_tokens=len(job.prompt),
            found_tokens=job.found_blocks * job.namespace.layout.block_tokens,
            output_tokens=job.sampling.max_tokens,
        )
        verdict = self.policy.decide(pool_facts(view, facts))
        job.transfer_timeout_s = verdict.transfer_timeout_s
        job.routing = f"{verdict.rule}:{verdict.reason}"
        asked = MODES[job.prefill]
        # A rollback is the operator's word; everything else the request may overrule.
        return verdict.mode if self.policy.is_rolled_back or not asked else asked

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
                segments, reply = await self._remote_prefill.run(job, decision, host, result)
                result.planned_blocks = sum(segment.count for segment in segments)
                self._learn_prefill(decision, reply)
                return segments
            except KvpoolError as error:
                self._count_fallback(result, f"prefill:{error.code}")
                log.warning(
                    "remote prefill failed, going local",
                    request_id=job.request_id,
                    error=str(error),
                )
        found = await self.cluster.find(job.namespace.namespace_id, job.hashes)
        limit = decision.reuse_blocks
        if decision.mode != "local" or limit == (len(job.prompt) - 1) // layout.block_tokens:
            limit = len(job.hashes)  # all: of a prompt of whole blocks the last token is recomputed
        segments = cut(found.segments(host), limit)
        result.planned_blocks = sum(segment.count for segment in segments)
        return segments

    def _learn_prefill(self, decision: Decision, reply: m.PrefillReply) -> None:
        assert decision.prefill is not None
        self._learn(
            decision.prefill,
            reply.computed_tokens,
            reply.reused_tokens,
            reply.phases,
            reply.bytes_read,
        )

    # ------------------------------------------------------------ decode

    async def _decode(
        self,
        job: Job,
        decision: Decision,
        segments: list[m.Segment],
        result: Result,
        *,
        is_last: bool,
    ) -> AsyncGenerator[m.GenerateChunk, None]:
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
        left_s = job.left_s()
        message = m.Generate(
            job.request_id,
            job.namespace.namespace_id,
            bytes(token_bytes(tokens)),
            pack_hashes(job.hashes),
            segments,
            self.cluster.live_nodes(job.namespace.tenant),
            sampling,
            left_s,
            use_pool=job.pool == "on",
            local_prefix=job.pool == "local",
            local_prefix_tokens=job.local_prefix_tokens,
            max_wait_s=self.cluster.worthwhile_s(worker, job.namespace, len(tokens), segments),
        )
        first_within_s = self._first_token_timeout_s
        if not is_last and self.links.has_other(worker):
            first_within_s = min(first_within_s, left_s / 2)  # the rest is for the other
        reply: m.GenerateReply | None = None
        is_complete = False
        try:
            stream = self.links.stream(worker, message, job.deadline, first_within_s)
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
            self._count_fallback(result, reply.fallback_reason)
        if reply.fallback_reason and reply.fallback_reason.removeprefix(READ) not in m.DECLINED:
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
            worker_id, reply.computed_tokens, reply.pool_tokens, reply.phases, reply.bytes_read
        )

    def _learn(
        self,
        worker_id: str,
        computed: int,
        reused: int,
        phases: dict[str, float],
        bytes_read: dict[str, int],
    ) -> None:
        """Feed what was measured to the cost model."""
        cost = self.cluster.cost
        if phases.get("prefill_compute_time"):
            prefill_s = phases["prefill_compute_time"] + phases.get("kv_cache_pack_time", 0.0)
            cost.observe_prefill(worker_id, computed, reused, prefill_s)
        if len(bytes_read) == 1 and phases.get("kv_cache_transfer_time"):
            [(transport, count)] = bytes_read.items()
            seconds = phases["kv_cache_transfer_time"] - phases.get("kv_cache_promotion_time", 0.0)
            cost.observe_transfer(count, seconds, same_host=transport == "shm")

    def judge_overdue(self) -> None:
        """Count what waits for its first token beyond its objective as late now, not when it ends.

        A worker that is overwhelmed ends nothing: whoever waits for outcomes would learn of it last.
        """
        now = time.monotonic()
        for result, received_at in self._waiting.values():
            if self._ttft_s and not result.token_ids and now - received_at > self._ttft_s:
                self._judge(result, is_late=True)

    def _judge(self, result: Result, *, is_late: bool = False) -> None:
        """Tell once of each request which role served it well; an objective of 0 is none.

        A decode worker that prefilled too late lacks help as much as one that decodes too slowly.
        """
        if result.is_judged:
            return
        result.is_judged = True
        is_late = is_late or bool(self._ttft_s and result.ttft_s > self._ttft_s)
        is_slow = bool(self._tpot_s and result.tpot_s > self._tpot_s)
        is_local = result.decision is not None and result.decision.mode == "local"
        self._on_outcome(not is_late or is_local, not is_slow and not (is_late and is_local))

    def _count_fallback(self, result: Result, reason: str) -> None:
        result.fallback_reason = result.fallback_reason or reason
        self.cluster.counters[f"fallback:{reason}"] += 1
