"""Lets requests into the gateway: now, after a wait in the queue, or not at all, with a reason.

The order of waiting is `conductor.gateway.admission_queue`'s, the choice of workers the scheduler's; here are slots,
futures and the task that serves the queue. It runs while somebody waits, and no longer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from conductor.cluster.cluster import Cluster
from conductor.gateway.admission_queue import AdmissionQueue, Ticket
from conductor.gateway.request import Job
from conductor.scheduling.decision import Decision
from conductor.scheduling.strategies.candidates import NO_PLACE
from kvpool.errors import Overloaded, Unavailable

log = structlog.get_logger(__name__)

# What may pass while a request waits. A prefill queue that is too long already only gets longer by waiting.
PASSING = frozenset((NO_PLACE, "no_room", "no_kv_room", "tpot_slo"))
LOOK_AHEAD = 8  # waiting requests tried in a row: one that cannot start need not keep up another
TICK_S = 0.1  # how soon a change is noticed that nobody announced: reports of workers and nodes

Decide = Callable[[Job], Awaitable[Decision]]


@dataclass(slots=True, frozen=True)
class Limits:
    """Bounds of what is let in.

    Args:
        max_active: requests in work at once.
        max_waiting: requests in the queue.
        max_wait_s: longest stay there, also of requests without an objective.
        ttft_s: objective by which a wait is judged; 0: none.
        max_retry_after_s: most that a refused caller is told.
    """

    max_active: int
    max_waiting: int = 0
    max_wait_s: float = 30.0
    ttft_s: float = 0.0
    max_retry_after_s: float = 30.0


@dataclass(slots=True)
class _Waiter:
    job: Job
    decided: asyncio.Future[Decision]
    last: Decision


class Entrance:
    """Slots for requests in work, and the queue for those that wait for one.

    Args:
        decide: asks the scheduler; called again for as long as a request waits.
        on_wait: told of each request that begins to wait, with the decision that made it.
    """

    def __init__(
        self,
        cluster: Cluster,
        limits: Limits,
        decide: Decide,
        on_wait: Callable[[Job, Decision], None] = lambda _job, _decision: None,
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
        """Requests that hold a slot."""
        return len(self._active)

    @property
    def queue(self) -> AdmissionQueue:
        """Who waits. Read it only."""
        return self._queue

    async def admit(self, job: Job) -> Decision:
        """The decision to serve the job, which holds a slot from now on; give it back by `release`.

        Cancelling the call withdraws the job.

        Raises:
            Refused: no choice meets the objectives, there is no place to wait, or the wait was too long.
        """
        is_free = self._queue.outranks_all(job.priority) and self.active < self._limits.max_active
        if not is_free and not self._queue.has_place(job.priority):
            # Nothing else was computed for it: this is what a flood costs.
            self._refuse(job, "queue_full", self._queue.wait_s(job.priority))
        if is_free:
            self._active.add(job.request_id)
        try:
            decision = await self._decide(job)
            if is_free and not decision.is_refused:
                self._cluster.in_flight.assigned(decision, self._cluster.clock())
                return decision
        except BaseException:
            self.release(job)
            raise
        self.release(job)
        if decision.is_refused and not self._may_pass(decision):
            raise Refused(decision)
        return await self._wait(job, decision)

    def release(self, job: Job) -> None:
        """The job ended, or will not run: its slot is free. Releasing twice is allowed."""
        self._cluster.in_flight.finished(job.request_id)
        if job.request_id in self._active:
            self._active.remove(job.request_id)
            self._changed.set()

    async def close(self) -> None:
        """Turn away whoever waits."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._turn_all_away(Unavailable("the conductor is stopping"))

    # ------------------------------------------------------------ waiting

    async def _wait(self, job: Job, decision: Decision) -> Decision:
        now = self._cluster.clock()
        start_by = min(now + self._limits.max_wait_s, job.deadline)
        if self._limits.ttft_s:
            start_by = min(start_by, job.received_at + self._limits.ttft_s - decision.ttft_s)
        if self._limits.max_waiting and start_by <= now:
            self._refuse(
                job, decision.reason if decision.is_refused else "queue_slow", 0.0, decision
            )
        entry = self._queue.enter(Ticket(job.request_id, job.priority, now, start_by), now)
        if entry.refused:
            # Without a queue it is the scheduler's reason that counts, not that there is no queue.
            is_queue = self._limits.max_waiting or not decision.is_refused
            reason = entry.refused if is_queue else decision.reason
            self._refuse(job, reason, entry.retry_after_s, decision)
        if entry.displaced is not None:
            self._turn_away(entry.displaced, "displaced")
        self._cluster.counters["queued"] += 1
        waiter = _Waiter(job, asyncio.get_running_loop().create_future(), decision)
        self._waiters[job.request_id] = waiter
        self._changed.set()
        self._on_wait(job, decision)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._serve(), name="admission queue")
        try:
            return await waiter.decided
        except asyncio.CancelledError:
            self.release(job)  # it may have been let in just now
            raise
        finally:
            self._waiters.pop(job.request_id, None)
            self._queue.leave(job.request_id)

    async def _serve(self) -> None:
        """Let in whoever can start, for as long as somebody waits."""
        try:
            while self._waiters:
                self._changed.clear()
                for late in self._queue.expire(self._cluster.clock()):
                    self._turn_away(late, "queue_deadline")
                for ticket in self._queue.in_order(LOOK_AHEAD):
                    if self.active >= self._limits.max_active:
                        break
                    await self._try(ticket)
                await self._pause()
        except Exception as error:
            self._turn_all_away(error)
            raise

    async def _pause(self) -> None:
        due = self._queue.next_expiry()
        left_s = TICK_S if due is None else max(0.0, min(TICK_S, due - self._cluster.clock()))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), left_s)

    async def _try(self, ticket: Ticket) -> None:
        waiter = self._waiters.get(ticket.request_id)
        if waiter is None:
            return
        job = waiter.job
        self._active.add(job.request_id)
        decision = await self._decide(job)
        if waiter.decided.done() or job.request_id not in self._waiters:
            self.release(job)
            return
        waiter.last = decision
        now = self._cluster.clock()
        if not decision.is_refused:
            self._cluster.in_flight.assigned(decision, now)
            self._queue.started(job.request_id, now)
            waiter.decided.set_result(decision)
            return
        self._active.discard(job.request_id)  # not a release: nothing has changed for the others
        if not self._may_pass(decision):
            self._queue.leave(job.request_id)
            waiter.decided.set_exception(Refused(decision))

    def _may_pass(self, decision: Decision) -> bool:
        """The reason is load, and there is some that will end."""
        is_busy = len(self._cluster.in_flight) > 0 or any(
            worker.report is not None and worker.report.running for worker in self._cluster.workers
        )
        return decision.reason in PASSING and is_busy

    # ------------------------------------------------------------ refusing

    def _turn_away(self, ticket: Ticket, reason: str) -> None:
        waiter = self._waiters.get(ticket.request_id)
        if waiter is not None and not waiter.decided.done():
            error = self._refusal(waiter.job, reason, 0.0, waiter.last)
            waiter.decided.set_exception(error)

    def _turn_all_away(self, error: Exception) -> None:
        for waiter in self._waiters.values():
            if not waiter.decided.done():
                waiter.decided.set_exception(error)

    def _refuse(
        self, job: Job, reason: str, retry_after_s: float, last: Decision | None = None
    ) -> None:
        raise self._refusal(job, reason, retry_after_s, last)

    def _refusal(
        self, job: Job, reason: str, retry_after_s: float, last: Decision | None
    ) -> Refused:
        config = self._cluster.scheduler_config
        retry_after_s = max(
            config.retry_after_s, min(retry_after_s, self._limits.max_retry_after_s)
        )
        if last is not None:
            retry_after_s = max(retry_after_s, last.retry_after_s)
        return Refused(
            Decision(
                job.request_id,
                *("refused", None, None, 0, None),
                last.ttft_s if last else 0.0,
                last.tpot_s if last else 0.0,
                reason,
                last.candidates if last else (),
                retry_after_s,
                len(job.prompt),
                job.sampling.max_tokens,
                strategy=last.strategy if last else config.strategy,
            )
        )


class Refused(Overloaded):
    """A request that is not let in; `decision` is the record of it."""

    def __init__(self, decision: Decision) -> None:
        super().__init__(
            f"refused early: {decision.reason}",
            reason=decision.reason,
            retry_after_s=decision.retry_after_s,
        )
        self.decision = decision
