"""Admits a request now, after a wait in the queue, or refuses it with a reason.

`conductor.gateway.admission_queue` orders the queue and the scheduler chooses the workers. This
module holds the slots, the futures and the task that serves the queue; the task runs only while
requests wait.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from conductor.cluster.cluster import Cluster
from conductor.gateway.admission_queue import AdmissionQueue, Ticket
from conductor.gateway.request import GenerationRequest
from conductor.scheduling.decision import Decision
from conductor.scheduling.strategies.candidates import NO_PLACE
from kvpool.errors import Overloaded, Unavailable

log = structlog.get_logger(__name__)

# Reasons that can go away while a request waits. "ttft_slo" cannot: waiting only adds to TTFT.
TRANSIENT_REASONS = frozenset((NO_PLACE, "no_room", "no_kv_room", "tpot_slo"))
LOOK_AHEAD = 8  # queued requests tried per round, so that the first one does not block the others
TICK_S = 0.1  # interval between rounds: reports of workers and nodes do not wake the queue

Decide = Callable[[GenerationRequest], Awaitable[Decision]]


@dataclass(slots=True, frozen=True)
class AdmissionLimits:
    """Bounds of admission.

    Args:
        max_active: maximum number of requests being served at once.
        max_waiting: maximum number of queued requests.
        max_wait_s: longest time in the queue, also for requests without an objective.
        ttft_s: TTFT objective that limits the wait; 0 means none.
        max_retry_after_s: upper bound of Retry-After.
    """

    max_active: int
    max_waiting: int = 0
    max_wait_s: float = 30.0
    ttft_s: float = 0.0
    max_retry_after_s: float = 30.0


@dataclass(slots=True)
class _Waiter:
    request: GenerationRequest
    decided: asyncio.Future[Decision]
    last: Decision


class Admission:
    """Slots for the requests being served, and the queue of those that wait for a slot.

    Args:
        decide: asks the scheduler; called repeatedly while a request waits.
        on_wait: called when a request enters the queue, with the decision that sent it there.
    """

    def __init__(
        self,
        cluster: Cluster,
        limits: AdmissionLimits,
        decide: Decide,
        on_wait: Callable[[GenerationRequest, Decision], None] = lambda _job, _decision: None,
    ) -> None:
        self._on_wait = on_wait
        self._cluster = cluster
        self._limits = limits
        self._decide = decide
        self._queue = AdmissionQueue(limits.max_waiting)
        self._waiters: dict[str, _Waiter] = {}
        self._active: set[str] = set()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def active(self) -> int:
        """The number of requests that hold a slot."""
        return len(self._active)

    @property
    def queue(self) -> AdmissionQueue:
        """The queue, to read only."""
        return self._queue

    async def admit(self, request: GenerationRequest) -> Decision:
        """Wait until the request may run, and return the decision to serve it.

        The request then holds a slot until `release`. Cancelling the call withdraws the request.

        Raises:
            Refused: no choice meets the objectives, the queue is full, or the wait was too long.
            KvpoolError: the decision failed.
        """
        is_free = (
            self._queue.outranks_all(request.priority) and self.active < self._limits.max_active
        )
        if not is_free and not self._queue.has_place(request.priority):
            # Refuse before any other work, so that a flood of requests stays cheap.
            self._refuse(request, "queue_full", self._queue.wait_s(request.priority))
        if is_free:
            self._active.add(request.request_id)
        try:
            decision = await self._decide(request)
            if is_free and not decision.is_refused:
                self._cluster.in_flight.assigned(decision, self._cluster.clock())
                return decision
        except BaseException:
            self.release(request)
            raise
        self.release(request)
        if decision.is_refused and not self._is_transient(decision):
            raise Refused(decision)
        return await self._wait(request, decision)

    def release(self, request: GenerationRequest) -> None:
        """Free the slot of a request that ended or will not run. Releasing twice is allowed."""
        self._cluster.in_flight.finished(request.request_id)
        if request.request_id in self._active:
            self._active.remove(request.request_id)
            self._changed.set()

    async def close(self) -> None:
        """Refuse all queued requests."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._fail_all(Unavailable("the conductor is stopping"))

    # ------------------------------------------------------------ waiting

    async def _wait(self, request: GenerationRequest, decision: Decision) -> Decision:
        now = self._cluster.clock()
        start_by = min(now + self._limits.max_wait_s, request.deadline)
        if self._limits.ttft_s:
            start_by = min(start_by, request.received_at + self._limits.ttft_s - decision.ttft_s)
        if self._limits.max_waiting and start_by <= now:
            self._refuse(
                request, decision.reason if decision.is_refused else "queue_slow", 0.0, decision
            )
        entry = self._queue.enqueue(
            Ticket(request.request_id, request.priority, now, start_by), now
        )
        if entry.refused:
            # Without a queue, give the scheduler's reason instead of "queue_full".
            is_queue = self._limits.max_waiting or not decision.is_refused
            reason = entry.refused if is_queue else decision.reason
            self._refuse(request, reason, entry.retry_after_s, decision)
        if entry.displaced is not None:
            self._refuse_queued(entry.displaced, "displaced")
        self._cluster.counters["queued"] += 1
        waiter = _Waiter(request, asyncio.get_running_loop().create_future(), decision)
        self._waiters[request.request_id] = waiter
        self._changed.set()
        self._on_wait(request, decision)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._serve(), name="admission queue")
        try:
            return await waiter.decided
        except asyncio.CancelledError:
            self.release(request)  # it may have been admitted just now
            raise
        finally:
            self._waiters.pop(request.request_id, None)
            self._queue.leave(request.request_id)

    async def _serve(self) -> None:
        """Admit queued requests as they become able to start, until the queue is empty."""
        try:
            while self._waiters:
                self._changed.clear()
                for late in self._queue.expire(self._cluster.clock()):
                    self._refuse_queued(late, "queue_deadline")
                for ticket in self._queue.in_order(LOOK_AHEAD):
                    if self.active >= self._limits.max_active:
                        break
                    await self._try_admit(ticket)
                await self._pause()
        except Exception as error:
            self._fail_all(error)
            raise

    async def _pause(self) -> None:
        due = self._queue.next_expiry()
        left_s = TICK_S if due is None else max(0.0, min(TICK_S, due - self._cluster.clock()))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), left_s)

    async def _try_admit(self, ticket: Ticket) -> None:
        waiter = self._waiters.get(ticket.request_id)
        if waiter is None:
            return
        request = waiter.request
        self._active.add(request.request_id)
        try:
            decision = await self._decide(request)
        except Exception as error:  # noqa: BLE001 - this request's `admit` raises it
            # The failure belongs to this request alone; the others stay queued.
            self.release(request)
            self._queue.leave(request.request_id)
            if not waiter.decided.done():
                waiter.decided.set_exception(error)
            return
        if waiter.decided.done() or request.request_id not in self._waiters:
            self.release(request)
            return
        waiter.last = decision
        now = self._cluster.clock()
        if not decision.is_refused:
            self._cluster.in_flight.assigned(decision, now)
            self._queue.started(request.request_id, now)
            waiter.decided.set_result(decision)
            return
        self._active.discard(request.request_id)  # no `release`: nothing changed for the others
        if not self._is_transient(decision):
            self._queue.leave(request.request_id)
            waiter.decided.set_exception(Refused(decision))

    def _is_transient(self, decision: Decision) -> bool:
        """Whether the refusal is due to load that will end."""
        is_busy = len(self._cluster.in_flight) > 0 or any(
            worker.report is not None and worker.report.running for worker in self._cluster.workers
        )
        return decision.reason in TRANSIENT_REASONS and is_busy

    # ------------------------------------------------------------ refusing

    def _refuse_queued(self, ticket: Ticket, reason: str) -> None:
        waiter = self._waiters.get(ticket.request_id)
        if waiter is not None and not waiter.decided.done():
            error = self._refusal(waiter.request, reason, 0.0, waiter.last)
            waiter.decided.set_exception(error)

    def _fail_all(self, error: Exception) -> None:
        for waiter in self._waiters.values():
            if not waiter.decided.done():
                waiter.decided.set_exception(error)

    def _refuse(
        self,
        request: GenerationRequest,
        reason: str,
        retry_after_s: float,
        last: Decision | None = None,
    ) -> None:
        raise self._refusal(request, reason, retry_after_s, last)

    def _refusal(
        self, request: GenerationRequest, reason: str, retry_after_s: float, last: Decision | None
    ) -> Refused:
        config = self._cluster.scheduler_config
        retry_after_s = max(
            config.retry_after_s, min(retry_after_s, self._limits.max_retry_after_s)
        )
        if last is not None:
            retry_after_s = max(retry_after_s, last.retry_after_s)
        return Refused(
            Decision(
                request.request_id,
                *("refused", None, None, 0, None),
                last.ttft_s if last else 0.0,
                last.tpot_s if last else 0.0,
                reason,
                last.candidates if last else (),
                retry_after_s,
                len(request.prompt),
                request.sampling.max_tokens,
                strategy=last.strategy if last else config.strategy,
            )
        )


class Refused(Overloaded):
    """The request was refused; `decision` records why."""

    def __init__(self, decision: Decision) -> None:
        super().__init__(
            f"refused early: {decision.reason}",
            reason=decision.reason,
            retry_after_s=decision.retry_after_s,
        )
        self.decision = decision
