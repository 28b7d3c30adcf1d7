"""Random walks through `AdmissionControl`, checked by an independent model; and mutations of it."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType
from typing import Any
from unittest.mock import ANY

import pytest

from conductor.requests import admission
from conductor.requests.request import Plan, Request
from conductor.scheduling.decision import Decision
from conductor.scheduling.strategies.candidates import NO_PLACE
from tests.support.admission_model import AdmissionWalk
from tests.support.sizes import scaled

WALKS = scaled(400, 4_000)
SOURCE = inspect.getsource(admission)

# name -> (the source text of the guard, what stands there instead)
MUTATIONS = {
    "slots have no bound": ("if self._slots < self._limits.max_active:", "if True:"),
    "newcomers pass those who wait": (
        "if not (is_first and self._try_slot",
        "if not (self._try_slot",
    ),
    "one that can start waits behind those who cannot": (
        "            self._try_slot(known)\n        if known.has_slot and",
        "            pass\n        if known.has_slot and",
    ),
    "a slot is kept when a request leaves": (
        "            self.queue.leave(request_id)\n            self._free_slot(known)\n",
        "            self.queue.leave(request_id)\n",
    ),
    "a slot is kept while a request waits": (
        "            self._free_slot(known)  # the next of this round takes it",
        "            pass",
    ),
    "a request that left stays in the queue": (
        "            self.queue.leave(request_id)\n            self._free_slot",
        "            self._free_slot",
    ),
    "a request without a slot is admitted": (
        "if known.has_slot and not decision.is_refused:",
        "if not decision.is_refused:",
    ),
    "a refusal is admitted": (
        "if known.has_slot and not decision.is_refused:",
        "if known.has_slot:",
    ),
    "an admitted request stays in the queue": (
        "            self.queue.started(request_id, now)\n",
        "",
    ),
    "what cannot pass is waited for": (
        "is_transient = is_busy and decision.reason in TRANSIENT_REASONS",
        "is_transient = True",
    ),
    "what passes is not waited for": (
        "is_transient = is_busy and decision.reason in TRANSIENT_REASONS",
        "is_transient = decision.reason in TRANSIENT_REASONS",
    ),
    "nobody is told that it is too late": (
        "        for late in self.queue.expire(now):\n"
        '            self._refuse(self._known[late.request_id], "queue_deadline")\n',
        "",
    ),
    "a request waits beyond its deadline": (
        "start_by = min(now + limits.max_wait_s, request.deadline)",
        "start_by = now + limits.max_wait_s",
    ),
    "a request waits too long": (
        "start_by = min(now + limits.max_wait_s, request.deadline)",
        "start_by = request.deadline",
    ),
    "who was displaced is not told": (
        '            self._refuse(self._known[entry.displaced.request_id], "displaced")',
        "            pass",
    ),
    "a slot of a newcomer that waits is kept": (
        "            self._free_slot(known)\n            self._changes += 1  # somebody",
        "            self._changes += 1  # somebody",
    ),
    "nobody is told of a slot that became free": (
        "            self._changes += 1  # somebody may have waited for it\n",
        "",
    ),
    "one try uses up a round": (
        "            self._untried = deque(ticket.request_id for ticket in self.queue.in_order(LOOK_AHEAD))",
        "            self._untried = deque(t.request_id for t in self.queue.in_order(1))",
    ),
    "rounds have no pause": (
        "if self._is_round_due and now >= self._last_round + ROUND_S:",
        "if self._is_round_due:",
    ),
    "a round that is due is forgotten": (
        "            wake_at = min(wake_at, self._last_round + ROUND_S)",
        "            pass",
    ),
    "a request that leaves wakes nobody": (
        "            self._changes += 1  # a slot is free, or others move up\n",
        "",
    ),
    "a change wakes nobody": (
        "            case ClusterChanged():\n                self._changes += 1",
        "            case ClusterChanged():\n                pass",
    ),
    "a request is tried again though nothing changed": (
        "and is_worth and not known.is_deciding:",
        "and not known.is_deciding:",
    ),
    "a request is decided twice at once": (
        "and is_worth and not known.is_deciding:",
        "and is_worth:",
    ),
    "a used-up time counts as told": (
        "self._told_wake_at = None  # that time is used up",
        "pass",
    ),
    "a queued request is queued again": ("elif request_id not in self.queue:", "else:"),
    "a full queue still hashes and decides": (
        "and not self.queue.has_place(request.priority):",
        "and False:",
    ),
}


def _walk_all(make: type[admission.AdmissionControl]) -> list[AdmissionWalk]:
    return [AdmissionWalk(seed, make).run() for seed in range(WALKS)]


def test_every_walk_keeps_every_promise_and_sees_every_reason() -> None:
    reasons = set().union(*(walk.refusals for walk in _walk_all(admission.AdmissionControl)))
    assert {"queue_full", "queue_slow", "queue_deadline", "displaced", "ttft_slo"} <= reasons


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_walks_notice_a_missing_guard(name: str) -> None:
    old, new = MUTATIONS[name]
    assert SOURCE.count(old) == 1, f"the guard is not there once: {old}"
    mutant = ModuleType("mutant")
    sys.modules["mutant"] = mutant  # for dataclasses
    code = SOURCE.replace(old, new)
    exec(compile(code, "mutant", "exec"), mutant.__dict__)
    for kind in ("Arrived", "Decided", "Left", "ClusterChanged", "Tick", "Closed"):
        setattr(mutant, kind, getattr(admission, kind))
    for kind in ("Decide", "Admit", "Refuse", "Queued", "WakeAt"):
        setattr(mutant, kind, getattr(admission, kind))
    with pytest.raises(Exception):  # noqa: B017, PT011 - a crash is noticed too
        _walk_all(mutant.AdmissionControl)


def _arrive(control: admission.AdmissionControl, name: str, now: float) -> list[admission.Action]:
    return control.on(admission.Arrived(Request(name, 10, 4, 1_000, 8, now, 60.0, now)), now)


def _decided(
    control: admission.AdmissionControl, name: str, now: float, refused: str = ""
) -> list[admission.Action]:
    decode = None if refused else "d"
    mode: Any = "refused" if refused else "local"
    decision = Decision(name, mode, None, decode, 0, None, 0.0, 0.0, refused)
    return control.on(admission.Decided(name, Plan(decision), is_busy=True), now)


def test_a_round_goes_on_with_the_next_when_one_cannot_start() -> None:
    control = admission.AdmissionControl(admission.AdmissionLimits(1, 4))
    for name in ("a", "b", "c"):
        _arrive(control, name, 0.0)
        _decided(control, name, 0.0)
    assert admission.Decide("b", ANY) in control.on(admission.Left("a"), 1.0)
    assert admission.Decide("c", ANY) in _decided(control, "b", 1.5, NO_PLACE)
    assert admission.Admit("c", ANY) in _decided(control, "c", 1.6)


def test_a_newcomer_waits_for_those_who_may_be_able_to_start() -> None:
    control = admission.AdmissionControl(admission.AdmissionLimits(1, 4))
    for name in ("a", "b"):
        _arrive(control, name, 0.0)
        _decided(control, name, 0.0)
    control.on(admission.Left("a"), 1.0)
    _decided(control, "b", 1.0)
    _arrive(control, "c", 1.0)
    _decided(control, "c", 1.0)
    _arrive(control, "newcomer", 1.0)
    control.on(admission.Left("b"), 1.01)  # too early for another round
    assert admission.Queued("newcomer", ANY) in _decided(control, "newcomer", 1.012)
    assert admission.Decide("c", ANY) in control.on(admission.Tick(), 1.0 + admission.ROUND_S)
