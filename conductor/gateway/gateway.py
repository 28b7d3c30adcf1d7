"""Runs one request: decide, reserve, prefill, decode, stream; fall back if a step fails.

KV does not pass through the gateway. The gateway plans which worker reads and writes which blocks,
and relays tokens. If a step fails before the response is complete, a decode worker alone continues
from the tokens already sent to the client, so no request is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator

import structlog

from conductor.cluster.cluster import Cluster
from conductor.cluster.connections import Connections
from conductor.gateway.admission import Admission, AdmissionLimits, Refused
from conductor.gateway.decode import Decoding, observe_costs
from conductor.gateway.hot_replication import HotReplication
from conductor.gateway.prefetch import SessionPrefetch
from conductor.gateway.remote_prefill import RemotePrefill
from conductor.gateway.request import GenerationRequest, GenerationResult
from conductor.gateway.request_log import RequestLog
from conductor.gateway.request_recorder import RequestRecorder
from conductor.gateway.sessions import Sessions
from conductor.gateway.slo_attainment import OnSloRecorded, SloAttainment
from conductor.index.segments import cut
from conductor.routing.rules import Facts
from conductor.routing.rules_file import RulesFile
from conductor.routing.service import pool_facts
from conductor.scheduling.decision import Decision
from conductor.scheduling.scheduler import ScheduleRequest, SchedulingInputs, schedule
from conductor.scheduling.strategies.candidates import NO_PLACE
from kvpool.blocks.hashing import hash_chain
from kvpool.errors import (
    DeadlineExceeded,
    EngineFailed,
    KvpoolError,
    Overloaded,
    Unavailable,
)
from kvpool.wire import messages as m
from kvpool.wire.credentials import NO_CREDENTIALS, Credentials

log = structlog.get_logger(__name__)

MAX_ATTEMPTS = 3
RETRY_POLL_S = 0.05
NO_WORKER_REASONS = frozenset(("no_decode_worker", "no_prefill_choice", "prompt_too_long"))
WAIT_S = 60.0  # default of the longest waits for a prefill and for a first token
MODES = {"auto": "", "remote": "disaggregated", "local": "local"}


class Gateway:
    """Serves requests over a cluster.

    Args:
        default_ttft_s, default_tpot_s: objectives of every request; 0 means none.
        limits: bounds of admission.
        prefill_timeout_s: longest wait for a remote prefill.
        first_token_timeout_s: longest wait for a decode worker's first token.
        replications_at_once: maximum number of concurrent copies of hot prefixes.
        rules: the routing rules; None means none.
        on_slo_recorded: called once per request with whether prefill and decode met its objectives.
        credentials: presented to workers and nodes.
        prefetches: whether blocks are moved ahead of their reads.
        sessions: the table of conversations; None means one with default bounds.
    """

    def __init__(
        self,
        cluster: Cluster,
        request_log: RequestLog,
        *,
        default_ttft_s: float,
        default_tpot_s: float,
        limits: AdmissionLimits,
        prefill_timeout_s: float = WAIT_S,
        first_token_timeout_s: float = WAIT_S,
        replications_at_once: int = 0,
        rules: RulesFile | None = None,
        on_slo_recorded: OnSloRecorded = lambda _ttft, _tpot: None,
        credentials: Credentials = NO_CREDENTIALS,
        prefetches: bool = True,
        sessions: Sessions | None = None,
    ) -> None:
        self.cluster = cluster
        self.rules = rules or RulesFile()
        self.request_log = request_log
        self._recorder = RequestRecorder(cluster, request_log, default_ttft_s, default_tpot_s)
        self._slo = SloAttainment(default_ttft_s, default_tpot_s, on_slo_recorded)
        self._ttft_s = default_ttft_s
        self._tpot_s = default_tpot_s
        self._place_wait_s = limits.max_wait_s
        self.connections = Connections(cluster, credentials)
        self._decoding = Decoding(cluster, self.connections, self._recorder, first_token_timeout_s)
        self._remote_prefill = RemotePrefill(cluster, self.connections, prefill_timeout_s)
        self._hot_replication = HotReplication(cluster, self.connections, replications_at_once)
        self.prefetch = SessionPrefetch(cluster, self.connections, is_active=prefetches)
        self.sessions = sessions or Sessions()
        self.admission = Admission(cluster, limits, self._decide, self.prefetch.while_waiting)

    @property
    def active(self) -> int:
        """The number of requests being served."""
        return self.admission.active

    async def close(self) -> None:
        """Refuse queued requests, cancel background work, and close all connections."""
        await self.admission.close()
        await self.prefetch.close()
        await self._hot_replication.close()
        await self._recorder.close()
        await self.connections.close()

    async def admit(self, request: GenerationRequest, result: GenerationResult) -> Decision:
        """Decide where the request runs, before anything is sent to the client.

        It may wait in the queue.

        The request holds a slot until `run` ends or `release` is called.

        Raises:
            Overloaded: no choice meets the objectives, or too many requests are active and queued.
            Unavailable: no worker serves this namespace.
        """
        try:
            decision = await self.admission.admit(request)
        except Refused as refused:
            result.decision = refused.decision
            self._recorder.refused(request, refused.decision)
            self._slo.refused(refused.reason)
            if refused.reason in NO_WORKER_REASONS:
                raise Unavailable(
                    f"no worker can serve this request: {refused.reason}", hint="kvpool stats"
                ) from None
            raise
        result.decision = decision
        now = self.cluster.clock()
        waited_s = max(0.0, now - (request.tokenized_at or now))
        result.phases = {
            "request_read_time": max(0.0, request.tokenized_at - request.received_at),
            "admission_wait": waited_s,
            "request_queue_wait": waited_s,
        }
        self._recorder.decided(request, result, decision)
        self._hot_replication.offer(request, decision)
        self.prefetch.offer(request, decision)
        if request.pool == "on":
            self.sessions.record(request.namespace.namespace_id, request.key, request.hashes, now)
        return decision

    def release(self, request: GenerationRequest) -> None:
        """Free the slot of a request that has run or will not run. Releasing twice is allowed."""
        self.admission.release(request)

    async def run(
        self, request: GenerationRequest, result: GenerationResult
    ) -> AsyncGenerator[m.GenerateChunk, None]:
        """Stream the tokens. Call `admit` first.

        Closing the stream early cancels the request, unless `result.stop()` was called before.

        Raises:
            DeadlineExceeded, Unavailable, EngineFailed: every attempt failed; this is the last
                failure.
        """
        status = "cancelled"
        self._slo.began(request.request_id, result, request.received_at)
        try:
            async with contextlib.aclosing(self._attempts(request, result)) as pieces:
                async for piece in pieces:
                    yield piece
            status = "ok"
        except KvpoolError as error:
            status = "failed"
            self.cluster.counters[f"failed:{error.code}"] += 1
            raise
        finally:
            self.release(request)
            self._slo.ended(request.request_id)
            status = "ok" if result.is_stopped else status
            if status == "ok":
                self._slo.record(result)
            self._recorder.ended(request, result, status)

    async def _attempts(
        self, request: GenerationRequest, result: GenerationResult
    ) -> AsyncGenerator[m.GenerateChunk, None]:
        tried: set[str] = set()
        decision = result.decision
        assert decision is not None
        failures = 0
        full_until = float("inf")  # until when a full worker is asked again
        while True:
            self.cluster.in_flight.assigned(decision, self.cluster.clock())
            try:
                segments = await self._segments_to_read(request, decision, result)
                self.cluster.in_flight.prefilled(request.request_id, self.cluster.clock())
                is_last = failures == MAX_ATTEMPTS - 1
                decoded = self._decoding.run(request, decision, segments, result, is_last=is_last)
                async with contextlib.aclosing(decoded) as pieces:
                    async for piece in pieces:
                        result.add_tokens(piece.token_ids, time.monotonic() - request.received_at)
                        self._slo.progressed(result)
                        yield piece
                return
            except (Unavailable, EngineFailed, Overloaded, DeadlineExceeded) as error:
                assert decision.decode is not None
                tried.add(decision.decode)
                self.cluster.in_flight.finished(request.request_id)
                is_full = isinstance(error, Overloaded)
                if not is_full or full_until == float("inf"):  # report a full worker once
                    self._recorder.fell_back(result, f"decode:{error.code}")
                    log.warning(
                        "decode failed",
                        request_id=request.request_id,
                        worker=decision.decode,
                        error=str(error),
                    )
                if is_full:  # other requests, perhaps of another conductor, hold its places
                    full_until = min(full_until, time.monotonic() + self._place_wait_s)
                else:
                    failures += 1
                now = time.monotonic()
                if failures == MAX_ATTEMPTS or now >= min(request.deadline, full_until):
                    raise
                # Continue after the tokens that the client already has, on another worker if
                # possible.
                request.pin_decode = None
                retry = await self._decide_retry(request, tried, min(request.deadline, full_until))
                if retry.is_refused:
                    raise
                decision = result.decision = retry

    async def _decide_retry(
        self, request: GenerationRequest, tried: set[str], until: float
    ) -> Decision:
        """Choose a worker that was not tried.

        If there is none, wait for any that has a place, at most until the deadline `until`.
        """
        retry = await self._decide(request, frozenset(tried), mode="local")
        if not retry.is_refused:
            return retry
        while True:
            await asyncio.sleep(RETRY_POLL_S)
            retry = await self._decide(request, mode="local")
            if retry.reason != NO_PLACE or time.monotonic() >= min(until, request.deadline):
                return retry

    # ------------------------------------------------------------ remote prefill

    async def _segments_to_read(
        self, request: GenerationRequest, decision: Decision, result: GenerationResult
    ) -> list[m.Segment]:
        """Run the remote prefill if there is one.

        Return the blocks that the decode worker should read.
        """
        assert decision.decode is not None
        if request.pool != "on":
            return []
        decoder = self.cluster.workers.get(decision.decode)
        host = decoder.descriptor.host if decoder else ""
        layout = request.namespace.layout
        if decision.mode == "disaggregated":
            try:
                segments, reply = await self._remote_prefill.run(request, decision, host, result)
                result.planned_blocks = sum(segment.count for segment in segments)
                self._learn_prefill(decision, reply)
                return segments
            except KvpoolError as error:
                self._recorder.fell_back(result, f"prefill:{error.code}")
                log.warning(
                    "remote prefill failed; the decode worker prefills",
                    request_id=request.request_id,
                    error=str(error),
                )
        found = await self.cluster.find(request.namespace.namespace_id, request.hashes)
        limit = decision.reuse_blocks
        if decision.mode != "local" or limit == (len(request.prompt) - 1) // layout.block_tokens:
            # Read all. If the prompt is whole blocks, its last token is computed again.
            limit = len(request.hashes)
        segments = cut(found.segments(host), limit)
        result.planned_blocks = sum(segment.count for segment in segments)
        return segments

    def _learn_prefill(self, decision: Decision, reply: m.PrefillReply) -> None:
        assert decision.prefill is not None
        observe_costs(
            self.cluster.cost,
            decision.prefill,
            reply.computed_tokens,
            reply.reused_tokens,
            reply.phases,
            reply.bytes_read,
        )

    def record_overdue_slo(self) -> None:
        """Record requests without a token after the TTFT objective as late."""
        self._slo.record_overdue()

    # ------------------------------------------------------------ deciding

    async def _decide(
        self,
        request: GenerationRequest,
        excluded: frozenset[str] = frozenset(),
        mode: str = "",
    ) -> Decision:
        """Ask the scheduler where the request should run now.

        Args:
            excluded: workers that may not decode.
            mode: "local" or "disaggregated" overrides the request and the routing rules; "" does
                not.
        """
        if not request.hashes:
            request.hashes = hash_chain(request.namespace, request.prompt)
        layout = request.namespace.layout
        namespace_id = request.namespace.namespace_id
        uses_pool = request.pool == "on"
        found = await self.cluster.find(namespace_id, request.hashes) if uses_pool else None
        # No await below this line, so that the decision matches one state of the cluster.
        inputs = self.cluster.scheduling_inputs(request.namespace.tenant)
        hosts = {worker.host for worker in inputs.workers.values()}
        segments = {host: found.segments(host) for host in hosts} if found else {}
        request.found_blocks = max(
            (sum(s.count for s in run) for run in segments.values()), default=0
        )
        schedule_request = ScheduleRequest(
            request.request_id,
            namespace_id,
            len(request.prompt),
            layout.block_tokens,
            layout.block_bytes,
            layout.layers,
            segments,
            engine_blocks=self.cluster.engine_feeds.leading(namespace_id, request.hashes),
            output_tokens=request.sampling.max_tokens,
            ttft_s=self._ttft_s,
            tpot_s=self._tpot_s,
            mode=mode or self._routed_mode(request, inputs),
            pin_decode=request.pin_decode,
            excluded=excluded,
        )
        return schedule(schedule_request, inputs, self.cluster.clock())

    def _routed_mode(self, request: GenerationRequest, inputs: SchedulingInputs) -> str:
        """The mode that the request or the routing rules set; "" lets the scheduler choose."""
        if request.pool != "on":
            return "local"
        facts = Facts(
            model=request.model,
            tenant=request.namespace.tenant,
            endpoint=request.endpoint,
            key=request.key or request.request_id,
            prompt_tokens=len(request.prompt),
            found_tokens=request.found_blocks * request.namespace.layout.block_tokens,
            output_tokens=request.sampling.max_tokens,
        )
        verdict = self.rules.choose(pool_facts(inputs, facts))
        request.transfer_timeout_s = verdict.transfer_timeout_s
        request.routing = f"{verdict.rule}:{verdict.reason}"
        asked = MODES[request.prefill]
        # A rollback overrides the request; any other rule does not.
        return verdict.mode if self.rules.is_rolled_back or not asked else asked
