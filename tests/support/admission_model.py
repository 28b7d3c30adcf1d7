"""An independent model of admission, and random walks that feed it and check every action."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from conductor.requests import admission as a
from conductor.requests.admission import (
    LOOK_AHEAD,
    ROUND_S,
    AdmissionControl,
    AdmissionLimits,
)
from conductor.requests.admission_queue import PRIORITIES
from conductor.requests.request import Objectives, Plan, Request
from conductor.scheduling.decision import Decision
from conductor.scheduling.strategies.candidates import NO_PLACE
from tests.support.request_model import check

SETTLE_S = 60.0
SCHEDULERS_OWN = (NO_PLACE, "tpot_slo", "ttft_slo", "no_decode_worker")


@dataclass
class Asked:
    """What the model knows of one request."""

    request: Request
    state: str = "deciding"  # then "waiting", "running", "over"
    is_being_decided: bool = False
    decisions: int = 0
    waits_since: float = 0.0
    is_refusal: bool = False  # its last decision
    ttft_s: float = 0.0
    has_slot: bool = False
    tried_at: float = float("-inf")
    tried_changes: int = -1
    tries: list[float] = field(default_factory=list)


class AdmissionWalk:
    """Requests that arrive, are decided, run and leave by chance."""

    def __init__(
        self, seed: int, make: Callable[[AdmissionLimits], AdmissionControl] = AdmissionControl
    ) -> None:
        self.random = Random(seed)
        self.limits = AdmissionLimits(
            max_active=self.random.choice((1, 2, 4)),
            max_waiting=self.random.choice((0, 1, 3, 12)),
            max_wait_s=self.random.choice((0.5, 5.0)),
        )
        self.control = make(self.limits)
        # A crowd, or a few requests with time between the things that happen.
        self.odds = self.random.choice(((0.25, 0.6, 0.75, 0.8, 0.87), (0.1, 0.5, 0.55, 0.56, 0.6)))
        self.now = 10.0
        self.asked: dict[str, Asked] = {}
        self.changes = 0  # things that could admit a waiting request
        self.wake_at: float | None = None
        self.changed_at = float("-inf")
        self.refusals: set[str] = set()

    def run(self, steps: int = 300) -> AdmissionWalk:
        for _ in range(steps):
            self._step()
        self._drain()
        return self

    # ------------------------------------------------------------ what can happen

    def _step(self) -> None:
        chance = self.random.random()
        deciding = [one for one in self.asked.values() if one.is_being_decided]
        running = [one for one in self.asked.values() if one.state == "running"]
        present = [one for one in self.asked.values() if one.state != "over"]
        arrives, decides, ends, leaves, changes = self.odds
        if chance < arrives:
            self._arrive()
        elif chance < decides and deciding:
            self._decide(self.random.choice(deciding))
        elif chance < ends and running:
            self._leave(self.random.choice(running))
        elif chance < leaves and present:
            self._leave(self.random.choice(present))
        elif chance < changes:
            self.changes, self.changed_at = self.changes + 1, self.now
            self._feed(a.ClusterChanged())
        else:
            self._wait(self.random.choice((0.001, 0.02, 0.1, 1.0)))

    def _arrive(self) -> None:
        random = self.random
        request = Request(
            f"r{len(self.asked)}",
            *(10, 4, 1_000, 8),
            self.now,
            self.now + random.choice((0.2, 3.0, 60.0)),
            self.now,
            objectives=Objectives(random.choice((0.0, 0.0, 2.0))),
            priority=random.choice(PRIORITIES),
        )
        others = [o for o in self.asked.values() if o.is_being_decided]
        waiting = [o for o in self.asked.values() if o.state == "waiting"]
        slots = self.control.active
        one = self.asked[request.request_id] = Asked(request)
        self._feed(a.Arrived(request))
        if [o for o in self.asked.values() if o.is_being_decided and o is not one] != others:
            return  # a round came between
        one.has_slot = self.control.active > slots
        rank = PRIORITIES.index(request.priority)
        ahead = [o for o in waiting if PRIORITIES.index(o.request.priority) >= rank]
        check(not (one.has_slot and ahead), "a newcomer does not pass those who wait")
        if one.is_being_decided and not one.has_slot:
            has_place = len(waiting) < self.limits.max_waiting or len(ahead) < len(waiting)
            check(has_place, "a request that finds a full queue costs no decision")

    def _decide(self, one: Asked) -> None:
        random = self.random
        one.is_being_decided = False
        one.decisions += 1
        one.ttft_s = random.choice((0.0, 0.1, 3.0))
        one.is_refusal = random.random() < 0.4
        reason = random.choice((NO_PLACE, "tpot_slo", "ttft_slo", "no_decode_worker"))
        is_busy = random.random() < 0.8
        decision = Decision(
            one.request.request_id,
            "refused" if one.is_refusal else "local",
            *(None, None if one.is_refusal else "d", 0, None),
            one.ttft_s,
            0.0,
            reason if one.is_refusal else "",
        )
        one.tried_at = self.now
        if one.state == "deciding" and one.has_slot and one.is_refusal:
            self.changes, self.changed_at = self.changes + 1, self.now  # a slot becomes free
        is_settled = self.now > self.changed_at + 2 * ROUND_S
        slots = self.control.active
        self._feed(a.Decided(one.request.request_id, Plan(decision), is_busy))
        if not one.is_refusal and not one.has_slot and slots < self.limits.max_active:
            check(not is_settled or one.state == "running", "who can start does")
        if one.is_refusal:
            is_hopeless = not is_busy or reason in ("ttft_slo", "no_decode_worker")
            check(
                not is_hopeless or one.state == "over",
                "a request that waiting cannot help is refused at once",
            )

    def _leave(self, one: Asked) -> None:
        one.state, one.is_being_decided = "over", False
        self.changes, self.changed_at = self.changes + 1, self.now
        self._feed(a.Left(one.request.request_id))

    def _wait(self, seconds: float) -> None:
        self.now = min(self.now + seconds, max(self.now, self.wake_at or float("inf")))
        if self.wake_at is not None and self.now >= self.wake_at:
            self.wake_at = None
            self._feed(a.Tick())
        self._check_tried([o for o in self.asked.values() if o.state == "waiting"])

    def _drain(self) -> None:
        """Everything is decided and ends: nobody is left waiting."""
        for _ in range(2_000):
            present = [one for one in self.asked.values() if one.state != "over"]
            if not present:
                break
            one = next((o for o in present if o.is_being_decided), None)
            if one is not None:
                self._decide(one)
            elif running := [o for o in present if o.state == "running"]:
                self._leave(running[0])
            else:
                check(self.wake_at is not None, "a waiting request is looked at again")
                self._wait(SETTLE_S)
        check(not any(o.state != "over" for o in self.asked.values()), "everybody is answered")
        check(self.control.active == 0, "no slot is held at the end")
        check(len(self.control.queue) == 0, "nobody is queued at the end")

    # ------------------------------------------------------------ checking

    def _feed(self, event: a.Event) -> None:
        actions = self.control.on(event, self.now)
        decided = []
        for action in actions:
            self._take(action)
            if isinstance(action, a.Decide):
                decided.append(action.request_id)
        self._check_round(event, decided)
        held = [o for o in self.asked.values() if o.state == "running"]
        check(len(held) <= self.limits.max_active, "no more requests run than there are slots")
        check(self.control.active <= self.limits.max_active, "no more slots are held than exist")
        waiting = [o for o in self.asked.values() if o.state == "waiting"]
        self._check_tried(waiting)
        check(len(waiting) <= self.limits.max_waiting, "no more requests wait than may")
        for one in waiting:
            check(self.now < self._start_by(one), "nobody waits when it is too late")
        check(not waiting or self.wake_at is not None, "a wait has an end")

    def _take(self, action: a.Action) -> None:
        if isinstance(action, a.WakeAt):
            check(action.at != self.wake_at, "a time is told once")
            self.wake_at = action.at
            return
        one = self.asked[action.request_id]
        check(one.state != "over", "nothing is done for a request that has ended")
        match action:
            case a.Decide():
                check(not one.is_being_decided, "a request is decided once at a time")
                check(one.state in ("deciding", "waiting"), "a running request is not decided")
                one.is_being_decided = True
                one.has_slot = one.state == "waiting"
            case a.Admit():
                check(one.state != "running", "a request is admitted once")
                check(not one.is_refusal, "a refusal is not carried out")
                one.state = "running"
            case a.Queued():
                check(one.state == "deciding", "a request is queued once")
                one.state, one.waits_since = "waiting", self.now
            case a.Refuse(_, decision):
                check(one.state != "running", "a running request is not refused")
                check(decision.is_refused and bool(decision.reason), "a refusal has a reason")
                if decision.reason not in SCHEDULERS_OWN:
                    check(decision.retry_after_s > 0, "a refusal says when to come again")
                if decision.reason == "displaced":
                    self._check_displaced(one)
                self.refusals.add(decision.reason)
                self.changes, self.changed_at = self.changes + 1, self.now  # others move up
                one.state, one.is_being_decided = "over", False

    def _check_displaced(self, one: Asked) -> None:
        others = [
            o for o in self.asked.values() if o.state in ("waiting", "deciding") and o is not one
        ]
        rank = PRIORITIES.index(one.request.priority)
        check(
            any(PRIORITIES.index(o.request.priority) > rank for o in others),
            "only a higher class displaces",
        )

    def _check_round(self, event: a.Event, decided: list[str]) -> None:
        again = [self.asked[i] for i in decided if self.asked[i].state == "waiting"]
        for one in again:
            check(
                self.changes > one.tried_changes,
                "waiting requests are decided again only when something changed",
            )
            one.tried_changes = self.changes
            one.tries = [*one.tries[-1:], self.now]
            is_often = len(one.tries) == 2 and self.now - one.tries[0] < ROUND_S / 2
            check(not is_often, "rounds are not too frequent")
        if isinstance(event, a.Arrived) and self.control.active < self.limits.max_active:
            self._check_arrival(event.request, decided)

    def _check_tried(self, waiting: list[Asked]) -> None:
        """Who may be able to start since a change is tried soon after it."""
        if self.control.active >= self.limits.max_active:
            return
        waiting.sort(key=lambda o: (-PRIORITIES.index(o.request.priority), o.request.received_at))
        for one in waiting[:LOOK_AHEAD]:
            is_tried = one.is_being_decided or one.tried_at >= self.changed_at
            check(
                is_tried or self.now <= self.changed_at + 2 * ROUND_S,
                "a change is followed by a round",
            )

    def _check_arrival(self, request: Request, decided: list[str]) -> None:
        """A request that finds free slots and nobody ahead of it is decided at once."""
        rank = PRIORITIES.index(request.priority)
        ahead = [
            o
            for o in self.asked.values()
            if o.state == "waiting" and PRIORITIES.index(o.request.priority) >= rank
        ]
        check(bool(ahead) or request.request_id in decided, "nobody waits for no reason")

    def _start_by(self, one: Asked) -> float:
        return min(one.waits_since + self.limits.max_wait_s, one.request.deadline)
