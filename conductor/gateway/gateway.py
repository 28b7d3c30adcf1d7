"""The life of one request: decide, reserve, prefill, decode, stream; fall back when anything fails.

KV never passes through here. The gateway only plans which worker reads and writes which blocks where, and
relays tokens. Whatever fails before the answer is complete is done again on a decode worker alone, from
the tokens that were already given out: a request is never lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator

import structlog

from conductor.cluster.cluster import Cluster
from conductor.cluster.connections import Connections
from conductor.gateway.admission import Entrance, Limits, Refused
from conductor.gateway.decider import Decider
from conductor.gateway.decode import Decoding, learn
from conductor.gateway.hot_replication import Replicator
from conductor.gateway.prefetch import Prefetcher
from conductor.gateway.remote_prefill import RemotePrefill
from conductor.gateway.request import Job, Result
from conductor.gateway.request_log import RequestLog
from conductor.gateway.request_recorder import Recorder
from conductor.gateway.sessions import Sessions
from conductor.gateway.slo_attainment import Judge, OnOutcome
from conductor.index.segments import cut
from conductor.routing.rules_file import RulesFile
from conductor.scheduling.decision import Decision
from conductor.scheduling.strategies.candidates import NO_PLACE
from kvpool.errors import (
    DeadlineExceeded,
    EngineFailed,
    KvpoolError,
    Overloaded,
    Unavailable,
)
from kvpool.security.credentials import NO_CREDENTIALS, Credentials
from kvpool.wire import messages as m

log = structlog.get_logger(__name__)

MAX_ATTEMPTS = 3
PLACE_POLL_S = 0.05
NOBODY = frozenset(("no_decode_worker", "no_prefill_choice", "prompt_too_long"))
WAIT_S = 60.0  # default of the longest waits for a prefill and for a first token


class Gateway:
    """Serves jobs over a cluster.

    Args:
        default_ttft_s, default_tpot_s: objectives of requests that name none.
        limits: how many requests are in work at once, and how many wait for how long.
        prefill_timeout_s: longest wait for a remote prefill.
        first_token_timeout_s: longest wait for a decode worker's first token.
        replications_at_once: copies of hot prefixes under way in the background.
        rules: the routing rules; None: empty ones.
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
        rules: RulesFile | None = None,
        on_outcome: OnOutcome = lambda _ttft, _tpot: None,
        credentials: Credentials = NO_CREDENTIALS,
        prefetches: bool = True,
        sessions: Sessions | None = None,
    ) -> None:
        self.cluster = cluster
        self.rules = rules or RulesFile()
        self.request_log = request_log
        self._recorder = Recorder(cluster, request_log, default_ttft_s, default_tpot_s)
        self._judge = Judge(default_ttft_s, default_tpot_s, on_outcome)
        self._decider = Decider(cluster, self.rules, default_ttft_s, default_tpot_s)
        self._place_wait_s = limits.max_wait_s
        self.connections = Connections(cluster, credentials)
        self._decoding = Decoding(cluster, self.connections, self._recorder, first_token_timeout_s)
        self._remote_prefill = RemotePrefill(cluster, self.connections, prefill_timeout_s)
        self._replicator = Replicator(cluster, self.connections, replications_at_once)
        self.prefetcher = Prefetcher(cluster, self.connections, is_active=prefetches)
        self.sessions = sessions or Sessions()
        self.entrance = Entrance(
            cluster, limits, self._decider.decide, self.prefetcher.while_waiting
        )

    @property
    def active(self) -> int:
        """Requests in work."""
        return self.entrance.active

    async def close(self) -> None:
        """Turn away who waits, give up background copies, close connections to workers and nodes."""
        await self.entrance.close()
        await self.prefetcher.close()
        await self._replicator.close()
        await self.connections.close()

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
            self._judge.refused(refused.reason)
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
        self._judge.began(job.request_id, result, received_at)
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
            self._judge.ended(job.request_id)
            status = "ok" if result.is_stopped else status
            if status == "ok":
                self._judge.judge(result)
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
                decoded = self._decoding.run(job, decision, segments, result, is_last=is_last)
                async with contextlib.aclosing(decoded) as pieces:
                    async for piece in pieces:
                        result.add_tokens(piece.token_ids, time.monotonic() - received_at)
                        self._judge.progressed(result)
                        yield piece
                return
            except (Unavailable, EngineFailed, Overloaded, DeadlineExceeded) as error:
                assert decision.decode is not None
                tried.add(decision.decode)
                self.cluster.in_flight.finished(job.request_id)
                is_full = isinstance(error, Overloaded)
                if not is_full or full_until == float("inf"):  # asked again, it is no news
                    self._recorder.fell_back(result, f"decode:{error.code}")
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
        retry = await self._decider.decide(job, frozenset(tried), mode="local")
        if not retry.is_refused:
            return retry
        while True:
            await asyncio.sleep(PLACE_POLL_S)
            retry = await self._decider.decide(job, mode="local")
            if retry.reason != NO_PLACE or time.monotonic() >= min(until, job.deadline):
                return retry

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
                self._recorder.fell_back(result, f"prefill:{error.code}")
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
        learn(
            self.cluster.cost,
            decision.prefill,
            reply.computed_tokens,
            reply.reused_tokens,
            reply.phases,
            reply.bytes_read,
        )

    def judge_overdue(self) -> None:
        """See `Judge.judge_overdue`."""
        self._judge.judge_overdue()
