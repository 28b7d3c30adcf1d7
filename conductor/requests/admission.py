"""Which requests start, wait or are refused: the slots, and the queue of those that wait. Pure.

Feed events in the order in which they happen and carry out the actions. Waiting requests are decided
again when something changed that could admit them: a request left, or the cluster reported.
`now` is monotonic seconds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from conductor.requests.admission_queue import AdmissionQueue, Ticket
from conductor.requests.request import Plan, Request
from conductor.scheduling.decision import Decision
from conductor.scheduling.strategies.candidates import NO_PLACE

# Reasons that can go away while a request waits. "ttft_slo" cannot: waiting only adds to TTFT.
TRANSIENT_REASONS = frozenset((NO_PLACE, "no_room", "no_kv_room", "tpot_slo"))
LOOK_AHEAD = 8  # queued requests tried per round, so that the first one does not block the others
ROUND_S = 0.02  # shortest time between two rounds


@dataclass(slots=True, frozen=True)
class AdmissionLimits:
    """Bounds of admission.

    Args:
        max_active: maximum number of requests being served at once.
        max_waiting: maximum number of queued requests.
        max_wait_s: longest time in the queue, also for requests without an objective.
        retry_after_s, max_retry_after_s: bounds of Retry-After.
    """

    max_active: int
    max_waiting: int = 0
    max_wait_s: float = 30.0
    retry_after_s: float = 1.0
    max_retry_after_s: float = 30.0


@dataclass(slots=True, frozen=True)
class Arrived:
    """A request wants to start."""

    request: Request


@dataclass(slots=True, frozen=True)
class Decided:
    """The answer to `Decide`.

    Args:
        is_busy: whether workers have load that will end, so that waiting may help.
    """

    request_id: str
    plan: Plan
    is_busy: bool


@dataclass(slots=True, frozen=True)
class Left:
    """A request has ended, was given up, or could not be decided. Unknown ids are ignored."""

    request_id: str


@dataclass(slots=True, frozen=True)
class ClusterChanged:
    """A worker or node reported, joined or changed its role, or a prefill has ended."""


@dataclass(slots=True, frozen=True)
class Tick:
    """The time of the last `WakeAt` has come."""


@dataclass(slots=True, frozen=True)
class Closed:
    """The conductor stops."""


Event = Arrived | Decided | Left | ClusterChanged | Tick | Closed


@dataclass(slots=True, frozen=True)
class Decide:
    """Ask the scheduler where the request should run; answer with `Decided` or `Left`.

    Args:
        last: the last plan, whose look-up may be used again.
    """

    request_id: str
    last: Plan | None


@dataclass(slots=True, frozen=True)
class Admit:
    """The request holds a slot until `Left`: carry out its plan."""

    request_id: str
    plan: Plan


@dataclass(slots=True, frozen=True)
class Refuse:
    """Tell the request that it will not run, and why."""

    request_id: str
    decision: Decision


@dataclass(slots=True, frozen=True)
class Queued:
    """The request waits; `plan` is what sent it into the queue."""

    request_id: str
    plan: Plan


@dataclass(slots=True, frozen=True)
class WakeAt:
    """Feed a `Tick` at `at`. It replaces the time of an earlier one; None: no tick."""

    at: float | None


Action = Decide | Admit | Refuse | Queued | WakeAt


@dataclass(slots=True)
class _Known:
    request: Request
    has_slot: bool = False
    is_deciding: bool = False
    tried_changes: int = -1  # how much had changed when it was decided last
    last: Plan | None = None


class AdmissionControl:
    """Slots for the requests being served, and the queue of those that wait for one.

    Args:
        strategy: of the scheduler, for decisions that refuse without asking it.
    """

    def __init__(self, limits: AdmissionLimits, strategy: str = "") -> None:
        self.queue = AdmissionQueue(limits.max_waiting)  # to read only
        self._limits = limits
        self._strategy = strategy
        self._known: dict[str, _Known] = {}
        self._slots = 0  # taken
        self._last_round = float("-inf")
        self._changes = 0  # things that happened and could admit a waiting request
        self._round_changes = 0  # of them, those before the last round
        self._untried: deque[str] = deque()  # of the present round
        self._told_wake_at: float | None = None
        self._actions: list[Action] = []

    @property
    def _is_round_due(self) -> bool:
        return self._changes > self._round_changes

    @property
    def active(self) -> int:
        """The number of requests that hold a slot."""
        return self._slots

    def on(self, event: Event, now: float) -> list[Action]:
        """Take what happened; return what is to be done, in this order."""
        self._actions = []
        match event:
            case Arrived(request):
                self._arrive(request)
            case Decided(request_id, plan, is_busy):
                known = self._known.get(request_id)
                if known is not None and known.is_deciding:
                    self._decided(known, plan, is_busy, now)
            case Left(request_id):
                self._leave(request_id)
            case ClusterChanged():
                self._changes += 1
            case Closed():
                for known in list(self._known.values()):
                    if not known.has_slot or known.is_deciding:
                        self._refuse(known, "stopping")
            case Tick():
                self._told_wake_at = None  # that time is used up
        if len(self.queue):
            self._serve(now)
        else:
            self._round_changes = self._changes
        self._tell_wake_at()
        return self._actions

    # ------------------------------------------------------------ arriving

    def _arrive(self, request: Request) -> None:
        known = _Known(request)
        self._known[request.request_id] = known
        is_first = self.queue.outranks_all(request.priority)
        if not (is_first and self._try_slot(known)) and not self.queue.has_place(request.priority):
            # Refuse before any other work, so that a flood of requests stays cheap.
            self._refuse(known, "queue_full", self.queue.wait_s(request.priority))
            return
        self._decide(known)

    def _decide(self, known: _Known) -> None:
        known.is_deciding = True
        known.tried_changes = self._changes
        self._actions.append(Decide(known.request.request_id, known.last))

    def _decided(self, known: _Known, plan: Plan, is_busy: bool, now: float) -> None:
        known.is_deciding = False
        known.last = plan
        decision, request_id = plan.decision, known.request.request_id
        if not decision.is_refused and not known.has_slot and not self._is_round_due:
            # All who are ahead were tried and cannot start, or hold slots while they are tried.
            self._try_slot(known)
        if known.has_slot and not decision.is_refused:
            self.queue.started(request_id, now)
            self._actions.append(Admit(request_id, plan))
            return
        if request_id in self.queue:
            self._free_slot(known)  # the next of this round takes it
        elif known.has_slot:
            self._free_slot(known)
            self._changes += 1  # somebody may have waited for it
        is_transient = is_busy and decision.reason in TRANSIENT_REASONS
        if decision.is_refused and not is_transient:
            self._refuse(known, decision.reason, decision=decision)
        elif request_id not in self.queue:
            self._enqueue(known, plan, now)

    def _enqueue(self, known: _Known, plan: Plan, now: float) -> None:
        request, decision, limits = known.request, plan.decision, self._limits
        start_by = min(now + limits.max_wait_s, request.deadline)
        if request.objectives.ttft_s:
            latest = request.received_at + request.objectives.ttft_s - decision.ttft_s
            start_by = min(start_by, latest)
        if limits.max_waiting and start_by <= now:
            self._refuse(known, decision.reason if decision.is_refused else "queue_slow")
            return
        ticket = Ticket(request.request_id, request.priority, now, start_by)
        entry = self.queue.enqueue(ticket, now)
        if entry.refused:
            # Without a queue, give the scheduler's reason instead of "queue_full".
            has_queue = limits.max_waiting or not decision.is_refused
            reason = entry.refused if has_queue else decision.reason
            self._refuse(known, reason, entry.retry_after_s)
            return
        if entry.displaced is not None:
            self._refuse(self._known[entry.displaced.request_id], "displaced")
        self._actions.append(Queued(request.request_id, plan))

    # ------------------------------------------------------------ the queue

    def _serve(self, now: float) -> None:
        for late in self.queue.expire(now):
            self._refuse(self._known[late.request_id], "queue_deadline")
        if self._is_round_due and now >= self._last_round + ROUND_S:
            self._round_changes = self._changes
            self._last_round = now
            self._untried = deque(ticket.request_id for ticket in self.queue.in_order(LOOK_AHEAD))
        while self._untried:
            known = self._known.get(self._untried[0])
            is_waiting = self._untried[0] in self.queue
            is_worth = known is not None and known.tried_changes < self._changes
            if known is not None and is_waiting and is_worth and not known.is_deciding:
                if not self._try_slot(known):
                    return
                self._decide(known)
            self._untried.popleft()

    def _tell_wake_at(self) -> None:
        wake_at = self.queue.next_expiry()
        if wake_at is not None and self._is_round_due:
            wake_at = min(wake_at, self._last_round + ROUND_S)
        if wake_at != self._told_wake_at:
            self._told_wake_at = wake_at
            self._actions.append(WakeAt(wake_at))

    # ------------------------------------------------------------ leaving

    def _leave(self, request_id: str) -> None:
        known = self._known.pop(request_id, None)
        if known is not None:
            self.queue.leave(request_id)
            self._free_slot(known)
            self._changes += 1  # a slot is free, or others move up

    def _try_slot(self, known: _Known) -> bool:
        if self._slots < self._limits.max_active:
            known.has_slot = True
            self._slots += 1
        return known.has_slot

    def _free_slot(self, known: _Known) -> None:
        if known.has_slot:
            known.has_slot = False
            self._slots -= 1

    def _refuse(
        self,
        known: _Known,
        reason: str,
        retry_after_s: float = 0.0,
        decision: Decision | None = None,
    ) -> None:
        request = known.request
        self._leave(request.request_id)
        refusal = decision or self._refusal(request, reason, retry_after_s, known.last)
        self._actions.append(Refuse(request.request_id, refusal))

    def _refusal(
        self, request: Request, reason: str, retry_after_s: float, plan: Plan | None
    ) -> Decision:
        limits, last = self._limits, plan.decision if plan is not None else None
        retry_after_s = max(limits.retry_after_s, min(retry_after_s, limits.max_retry_after_s))
        return Decision(
            request.request_id,
            *("refused", None, None, 0, None),
            last.ttft_s if last else 0.0,
            last.tpot_s if last else 0.0,
            reason,
            last.candidates if last else (),
            max(retry_after_s, last.retry_after_s) if last else retry_after_s,
            request.prompt_tokens,
            request.max_tokens,
            strategy=last.strategy if last else self._strategy,
        )
