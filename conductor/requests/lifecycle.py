"""One request from arrival to its last token, as a state machine. Pure: no await, no clock.

    ADMISSION -> PREFILL -> DECODING -> DONE      disaggregated
    ADMISSION -> DECODING -> DONE                 local

`conductor.requests.prefill_leg` has the steps of PREFILL. A failed prefill costs the request nothing but time: it looks the chain up again (LOOKING_UP) and the
decode worker prefills. A failed decode is scheduled again (SCHEDULING), on another worker if there
is one, and goes on after the tokens that the client has. If all workers are full, the request waits
for a place (PLACE). LEAVING waits for a reservation whose answer is still due, so that it can be
given back.

Feed events in the order in which they happen and carry out the actions in their order. At most one
call is under way (`conductor.requests.events.CALLS`); after a `Cancel` its answer is not fed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from conductor.requests import events as e
from conductor.requests.measurements import Measurements
from conductor.requests.miss_reasons import DECLINED, READ
from conductor.requests.prefill_leg import PrefillLeg, Step
from conductor.requests.reports import DecodeReport
from conductor.requests.request import Plan, Request
from conductor.requests.slo_record import SloRecord
from conductor.scheduling.decision import Decision
from conductor.scheduling.strategies.candidates import NO_PLACE
from kvpool.blocks.records import Segment
from kvpool.errors import (
    DeadlineExceeded,
    EngineFailed,
    KvpoolError,
    Overloaded,
    Unavailable,
)

MAX_ATTEMPTS = 3  # to decode, on workers that were not full
PLACE_POLL_S = 0.05  # between two decisions while every worker is full

_RETRIED = (Unavailable, EngineFailed, Overloaded, DeadlineExceeded)


class State(StrEnum):
    """Where a request is."""

    ADMISSION = "admission"
    PREFILL = "prefill"
    LOOKING_UP = "looking_up"
    DECODING = "decoding"
    SCHEDULING = "scheduling"
    PLACE = "place"
    LEAVING = "leaving"
    DONE = "done"


@dataclass(slots=True, frozen=True)
class Patience:
    """How long a request waits, in seconds.

    Args:
        prefill_s: for a remote prefill. Half of the request's time is always kept for the fallback.
        first_token_s: for a decode worker's first token.
        place_s: for a place on a worker, after workers that had been chosen turned out to be full.
    """

    prefill_s: float = 60.0
    first_token_s: float = 60.0
    place_s: float = 30.0


class RequestLifecycle:
    """The state of one request. It is the only place that holds it."""

    def __init__(self, request: Request, patience: Patience) -> None:
        self.request = request
        self.state = State.ADMISSION
        self.plan: Plan | None = None
        self.refusal: Decision | None = None
        self.token_ids: list[int] = []  # that the client has
        self.measured = Measurements()
        self.fallback_reason = ""  # the first one
        self.finish_reason = ""
        self.status = ""  # as of `Finish`
        self.error: KvpoolError | None = None
        self._patience = patience
        self._actions: list[e.Action] = []
        self._slo = SloRecord(request.objectives, request.received_at)
        self._told_wake_at: float | None = None
        self._wake_at: float | None = None  # for the present state
        self._prefill: PrefillLeg | None = None
        # the decode
        self._segments: list[Segment] = []
        self._report: DecodeReport | None = None
        self._tried: set[str] = set()
        self._failures = 0
        self._last_error: KvpoolError | None = None
        self._refused: Plan | None = None  # while it waits for a place
        self._full_until = float("inf")  # until when full workers are asked again
        self._steps: dict[State, Callable[[e.Event, float], None]] = {
            State.ADMISSION: self._on_admission,
            State.PREFILL: self._on_prefill,
            State.LOOKING_UP: self._on_looking_up,
            State.DECODING: self._on_decoding,
            State.SCHEDULING: self._on_scheduling,
            State.PLACE: self._on_place,
            State.LEAVING: self._on_leaving,
        }

    @property
    def decision(self) -> Decision | None:
        """The decision in force, or the refusal; None before there is one."""
        return self.plan.decision if self.plan is not None else self.refusal

    def on(self, event: e.Event, now: float) -> list[e.Action]:
        """Take what happened; return what is to be done, in this order.

        Raises:
            RuntimeError: the event does not answer the call under way. The runner is wrong.
        """
        if self.state is State.DONE:
            return []
        self._actions = []
        if isinstance(event, e.Tick):
            self._told_wake_at = None  # that time is used up
        if isinstance(event, e.Tokens):  # nearly all events are
            self._steps[self.state](event, now)
        elif isinstance(event, e.ClientLeft):
            self._leave("cancelled", now)
        elif isinstance(event, e.Completed):
            self.finish_reason = "stop"
            self._leave("ok", now)
        elif isinstance(event, e.Tick) and (due := self._due()) is not None and now >= due:
            self._actions += self._slo.tell(self.measured, self.decision, is_late=True)
        else:
            self._steps[self.state](event, now)
        self._tell_wake_at()
        return self._actions

    # ------------------------------------------------------------ admission

    def _on_admission(self, event: e.Event, now: float) -> None:
        match event:
            case e.Admitted(plan):
                request = self.request
                waited_s = max(0.0, now - request.tokenized_at)
                self.measured.phases = {
                    "request_read_time": max(0.0, request.tokenized_at - request.received_at),
                    "admission_wait": waited_s,
                    "request_queue_wait": waited_s,
                }
                self._actions += (e.Replicate(plan.decision), e.Promote(plan))
                self._start(plan, now)
            case e.Refused(decision):
                self.refusal = decision
                self._actions += self._slo.refused(decision.reason)
                self._finish("refused")
            case e.Failed(error):
                self._finish("failed", error)
            case _:
                self._unexpected(event)

    def _start(self, plan: Plan, now: float) -> None:
        """Carry a plan out, from its prefill or from its decode on."""
        self.plan = plan
        self._actions.append(e.Assign(plan.decision))
        if now >= self.request.deadline:
            self._attempt_failed(_too_long(), now)
        elif self.request.pool != "on":
            self._decode([], now)
        elif plan.decision.mode == "disaggregated":
            self._prefill = PrefillLeg(self.request, plan, self.measured)
            self.state = State.PREFILL
            self._actions += self._prefill.begin(self._patience.prefill_s, now)
            self._after_prefill(now)
        else:
            limit = plan.decision.reuse_blocks
            if limit == self.request.reusable_blocks:
                # Read all. If the prompt is whole blocks, its last token is computed again.
                limit = self.request.blocks
            self._decode(plan.near(limit), now)

    # ------------------------------------------------------------ remote prefill

    def _on_prefill(self, event: e.Event, now: float) -> None:
        assert self._prefill is not None
        self._actions += self._prefill.on(event, now)
        self._after_prefill(now)

    def _after_prefill(self, now: float) -> None:
        """Go on if the prefill is over."""
        assert self._prefill is not None
        self._wake_at = self._prefill.wake_at
        if self._prefill.error is not None:
            self._prefill_failed(self._prefill.error)
        elif self._prefill.step is Step.OVER:
            self._decode(self._prefill.segments, now)

    def _prefill_failed(self, error: KvpoolError) -> None:
        assert self.plan is not None
        self._fall_back(f"prefill:{error.code}", self.plan.decision.prefill or "", error)
        self._actions += (e.MarkPrefilled(), e.LookUp())
        self.state = State.LOOKING_UP

    def _on_looking_up(self, event: e.Event, now: float) -> None:
        match event:
            case e.LookedUp(found):
                assert self.plan is not None
                self.plan = replace(self.plan, found=found)
                self._decode(self.plan.near(self.request.blocks), now)
            case e.Failed():
                self._decode([], now)  # without the pool, the decode worker computes everything
            case e.Tick():
                pass
            case _:
                self._unexpected(event)

    # ------------------------------------------------------------ decode

    def _decode(self, segments: list[Segment], now: float) -> None:
        plan = self.plan
        assert plan is not None
        assert plan.decision.decode is not None
        self._wake_at = None
        self._segments = segments
        max_tokens = self.request.max_tokens - len(self.token_ids)
        if max_tokens <= 0:
            self.finish_reason = "length"
            self._finish("ok")
            return
        left_s = self.request.deadline - now
        if left_s <= 0:
            self._attempt_failed(_too_long(), now)
            return
        first_within_s = self._patience.first_token_s
        if plan.has_other and self._failures < MAX_ATTEMPTS - 1:
            first_within_s = min(first_within_s, left_s / 2)  # keep the rest for another worker
        self.state = State.DECODING
        self._actions.append(
            e.SendGenerate(plan.decision.decode, tuple(segments), max_tokens, first_within_s)
        )

    def _on_decoding(self, event: e.Event, now: float) -> None:
        match event:
            case e.Tokens(token_ids, item, so_far):
                self._take_tokens(token_ids, now)
                self._report = so_far or self._report
                self._actions.append(e.Emit(item))
            case e.Decoded(reply):
                self._report = reply or self._report
                self._take_report()
                if reply is None:
                    assert self.decision is not None
                    text = f"worker {self.decision.decode} ended the stream without a result"
                    self._attempt_failed(Unavailable(text), now)
                    return
                self.finish_reason = reply.finish_reason
                self._finish("ok")
            case e.Failed(error):
                self._take_report()
                self._attempt_failed(error, now)
            case e.Tick():
                pass
            case _:
                self._unexpected(event)

    def _take_tokens(self, token_ids: Sequence[int], now: float) -> None:
        if not self.token_ids and not self.measured.is_prefilled_remotely:
            self._actions.append(e.MarkPrefilled())
        self.token_ids += token_ids
        self.measured.add_tokens(len(token_ids), now - self.request.received_at)
        if not self._slo.is_told:
            self._actions += self._slo.progressed(self.measured, self.decision)

    def _take_report(self) -> None:
        """Take the decode worker's last report, once."""
        reply, self._report = self._report, None
        if reply is None:
            return
        assert self.decision is not None
        worker_id = self.decision.decode or ""
        self.measured.add_decode(reply)
        if reply.fallback_reason:
            self._fall_back(reply.fallback_reason, worker_id, None)
            if reply.fallback_reason.removeprefix(READ) not in DECLINED:
                self._report_miss(reply)
        self._actions.append(e.Observe(worker_id, reply))

    def _report_miss(self, reply: DecodeReport) -> None:
        """The first block that was planned and not read has failed."""
        read = sum(reply.bytes_read.values()) // self.request.block_bytes
        for segment in self._segments:
            if segment.start + segment.count > read:
                first = max(segment.start, read)
                self._actions.append(e.ReportMiss(segment.node_id, first))
                return

    # ------------------------------------------------------------ another attempt

    def _attempt_failed(self, error: KvpoolError, now: float) -> None:
        assert self.decision is not None
        if not isinstance(error, _RETRIED):
            self._finish("failed", error)
            return
        worker_id = self.decision.decode or ""
        self._tried.add(worker_id)
        self._actions.append(e.Unassign())
        is_full = isinstance(error, Overloaded)
        if not is_full or self._full_until == float("inf"):  # tell of full workers once
            self._fall_back(f"decode:{error.code}", worker_id, error)
        if is_full:  # other requests, perhaps of another conductor, hold its places
            self._full_until = min(self._full_until, now + self._patience.place_s)
        else:
            self._failures += 1
        self._last_error = error
        if self._failures == MAX_ATTEMPTS or now >= self._until:
            self._finish("failed", error)
            return
        self.state = State.SCHEDULING
        self._actions.append(e.Schedule(frozenset(self._tried), None))

    @property
    def _until(self) -> float:
        """When a request without a worker is given up."""
        return min(self.request.deadline, self._full_until)

    def _on_scheduling(self, event: e.Event, now: float) -> None:
        match event:
            case e.Scheduled(plan) if not plan.decision.is_refused:
                self._refused = None
                self._start(plan, now)
            case e.Scheduled(plan):
                # No worker is left that was not tried: wait for any that has a place.
                is_waiting = self._refused is not None
                if now >= self._until or (is_waiting and plan.decision.reason != NO_PLACE):
                    self._finish("failed", self._last_error)
                    return
                self.state = State.PLACE
                self._refused = plan
                self._wake_at = now + PLACE_POLL_S
            case e.Failed():
                self._finish("failed", self._last_error)
            case e.Tick():
                pass
            case _:
                self._unexpected(event)

    def _on_place(self, event: e.Event, now: float) -> None:
        if not isinstance(event, e.Tick):
            self._unexpected(event)
        elif self._wake_at is not None and now >= self._wake_at:
            self._wake_at = None
            self.state = State.SCHEDULING
            self._actions.append(e.Schedule(frozenset(), self._refused))

    # ------------------------------------------------------------ ending

    def _leave(self, status: str, now: float) -> None:
        """End at once, whatever is under way."""
        match self.state:
            case State.PREFILL if self._prefill is not None:
                if self._prefill.step is Step.RESERVING:
                    # Its answer is needed to give the slots back.
                    self.state, self.status = State.LEAVING, status
                    return
                if self._prefill.has_call:
                    self._actions.append(e.Cancel())
                self._actions += self._prefill.abort(has_stopped=False)
            case State.LEAVING:
                return
            case State.DECODING:
                self._actions.append(e.Cancel())
                self._take_report()
            case State.LOOKING_UP | State.SCHEDULING:
                self._actions.append(e.Cancel())
            case _:
                pass
        self._finish(status)

    def _on_leaving(self, event: e.Event, now: float) -> None:
        if isinstance(event, e.Reserved | e.Failed):
            assert self._prefill is not None
            self._actions += self._prefill.give_back(event)
            self._finish(self.status)
        elif not isinstance(event, e.Tick):
            self._unexpected(event)

    def _finish(self, status: str, error: KvpoolError | None = None) -> None:
        if status == "ok":
            self._actions += self._slo.tell(self.measured, self.decision)
        if self.plan is not None:
            self._actions.append(e.Unassign())
        self.state, self.status, self.error = State.DONE, status, error
        self._wake_at = None
        self._actions.append(e.Finish(status, error))

    # ------------------------------------------------------------ objectives and time

    def _due(self) -> float | None:
        """When the request is late without a first token; None if that does not matter."""
        is_open = self.state not in (State.ADMISSION, State.LEAVING, State.DONE)
        return self._slo.due(self.measured) if is_open else None

    def _fall_back(self, reason: str, worker_id: str, error: KvpoolError | None) -> None:
        self.fallback_reason = self.fallback_reason or reason
        self._actions.append(e.FellBack(reason, worker_id, error))

    def _tell_wake_at(self) -> None:
        if self.state is State.DONE:
            return
        wake_at = self._wake_at
        due = self._due() if not self.token_ids else None
        if due is not None and (wake_at is None or due < wake_at):
            wake_at = due
        if wake_at != self._told_wake_at:
            self._told_wake_at = wake_at
            self._actions.append(e.WaitUntil(wake_at))

    def _unexpected(self, event: e.Event) -> None:
        raise RuntimeError(f"{type(event).__name__} while {self.state} is no answer")


def _too_long() -> DeadlineExceeded:
    return DeadlineExceeded(
        "the request took too long", hint="conductor.request_timeout_s sets the limit"
    )
