"""Mutations: each guard of the request's promises is removed in turn, and the walks must notice.

A model that passes without a guard checks nothing. The same walks pass with all guards in place
(`test_lifecycle_model`).
"""

from __future__ import annotations

import inspect
import sys
from types import ModuleType

import pytest

from conductor.requests import lifecycle, prefill_leg, slo_record
from conductor.requests.lifecycle import RequestLifecycle
from tests.support.request_model import Walk

WALKS = 3_000
MODULES = (lifecycle, prefill_leg, slo_record)

# name -> (the source text of the guard, what stands there instead)
MUTATIONS = {
    "the end is not final": (
        "        if self.state is State.DONE:\n            return []\n        self._actions = []",
        "        self._actions = []\n        if self.state is State.DONE:\n            self._finish('ok')",
    ),
    "a reservation is forgotten when the client leaves": (
        "self.state, self.status = State.LEAVING, status\n                    return",
        "pass",
    ),
    "the slots of a failed prefill are kept": (
        "aborted = self.abort(has_stopped=False)  # the worker may still write (invariant 2)",
        "aborted = []",
    ),
    "the slots of a failed prefill are freed at once": (
        "aborted = self.abort(has_stopped=False)  # the worker may still write (invariant 2)",
        "aborted = self.abort(has_stopped=True)",
    ),
    "a client that leaves during a prefill leaves the slots": (
        "self._actions += self._prefill.abort(has_stopped=False)",
        "pass",
    ),
    "a late grant is kept": (
        "            self._reserved = event\n        return self.abort(has_stopped=True)",
        "            pass\n        return []",
    ),
    "a decode goes on after the client has left": (
        "case State.DECODING:\n                self._actions.append(e.Cancel())\n",
        "case State.DECODING:\n",
    ),
    "a look-up goes on after the client has left": (
        "case State.LOOKING_UP | State.SCHEDULING:\n                self._actions.append(e.Cancel())",
        "case State.LOOKING_UP | State.SCHEDULING:\n                pass",
    ),
    "a look-up that is not under way is given up": (
        "if self._prefill.has_call:",
        "if True:",
    ),
    "a fallback starts again from the prompt": (
        "max_tokens = self.request.max_tokens - len(self.token_ids)",
        "max_tokens = self.request.max_tokens",
    ),
    "tokens are not passed on": (
        "            self._actions.append(e.Emit(item))\n".replace(
            "            ", "                ", 1
        ),
        "",
    ),
    "tokens are passed on twice": (
        "self._actions.append(e.Emit(item))",
        "self._actions += (e.Emit(item), e.Emit(item))",
    ),
    "a complete answer is asked to go on": (
        "        if max_tokens <= 0:\n",
        "        if False:\n",
    ),
    "no time is kept for another worker": (
        "first_within_s = min(first_within_s, left_s / 2)  # keep the rest for another worker",
        "pass",
    ),
    "no time is kept for the fallback of a prefill": (
        "min(patience_s, (self._request.deadline - now) / 2)",
        "min(patience_s, self._request.deadline - now)",
    ),
    "a prefill is waited for from its reservation's answer on": (
        "within_s = max(0.0, self._until - now)",
        "within_s = 5.0",
    ),
    "a decode begins after the deadline": (
        "        if left_s <= 0:\n",
        "        if False:\n",
    ),
    "a plan begins after the deadline": (
        "        if now >= self.request.deadline:\n            self._attempt_failed",
        "        if False:\n            self._attempt_failed",
    ),
    "attempts have no end": ("self._failures == MAX_ATTEMPTS or now", "now"),
    "one attempt is enough": ("MAX_ATTEMPTS = 3 ", "MAX_ATTEMPTS = 1 "),
    "a full worker counts as a failure": (
        "self._full_until = min(self._full_until, now + self._patience.place_s)\n        else:\n"
        "            self._failures += 1",
        "self._full_until = min(self._full_until, now + self._patience.place_s)\n"
        "        self._failures += 1",
    ),
    "every error is tried again": (
        "        if not isinstance(error, _RETRIED):\n",
        "        if False:\n",
    ),
    "nobody waits for a place": (
        "if now >= self._until or (is_waiting and plan.decision.reason != NO_PLACE):",
        "if True:",
    ),
    "a place is waited for without end": (
        "if now >= self._until or (is_waiting and",
        "if (is_waiting and",
    ),
    "the first worker stays assigned": (
        "self._tried.add(worker_id)\n        self._actions.append(e.Unassign())",
        "self._tried.add(worker_id)",
    ),
    "an ended request stays assigned": (
        "        if self.plan is not None:\n            self._actions.append(e.Unassign())\n",
        "",
    ),
    "a failed worker is chosen again": (
        "e.Schedule(frozenset(self._tried), None)",
        "e.Schedule(frozenset(), None)",
    ),
    "what others write now is read": (
        "return extend(near, covered, self._request.blocks)",
        "return extend(near, dict.fromkeys(range(self._request.blocks), 'n1'), self._request.blocks)",
    ),
    "what was granted and not committed is read": (
        "if report.committed_blocks:",
        "if True:",
    ),
    "without the pool, blocks are read": (
        'elif self.request.pool != "on":\n            self._decode([], now)',
        'elif self.request.pool != "on":\n            self._decode([Segment("n1", 0, 1, 0)], now)',
    ),
    "the objectives are recorded twice": (
        "        if self.is_told:\n            return []\n        self.is_told = True\n        is_late",
        "        is_late",
    ),
    "the objectives of a served request are not recorded": (
        '        if status == "ok":\n            self._actions += self._slo.tell(self.measured, self.decision)\n',
        "",
    ),
    "a late first token is not told in time": (
        "elif isinstance(event, e.Tick) and (due := self._due()) is not None and now >= due:",
        "elif False:",
    ),
    "a failed prefill fails the request": (
        "self._actions += (e.MarkPrefilled(), e.LookUp())\n        self.state = State.LOOKING_UP",
        'self._finish("failed", error)',
    ),
    "a failed look-up fails the request": (
        "self._decode([], now)  # without the pool, the decode worker computes everything",
        'self._finish("failed", Unavailable("no index"))',
    ),
    "an engine server's blocks are not waited for": (
        "        if is_stored:\n",
        "        if True:\n",
    ),
    "an engine server's blocks are waited for without end": (
        "        if now >= self._stored_until:\n",
        "        if False:\n",
    ),
    "the chain is looked up before each decode": (
        "            self._decode(plan.near(limit), now)",
        "            self._actions.append(e.LookUp())\n            self.state = State.LOOKING_UP",
    ),
    "a wait has no time": (
        "                self._wake_at = now + PLACE_POLL_S\n",
        "",
    ),
    "a miss beyond the chain is told": (
        "first = max(segment.start, read)",
        "first = read + self.request.blocks",
    ),
}


def _mutant(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> type[RequestLifecycle]:
    """The lifecycle without a guard, which may be in one of its parts."""
    [original] = [one for one in MODULES if inspect.getsource(one).count(old)]
    source = inspect.getsource(original)
    assert source.count(old) == 1, f"the guard is not there once: {old}"
    module = ModuleType("mutant")
    monkeypatch.setitem(sys.modules, "mutant", module)  # for dataclasses
    exec(compile(source.replace(old, new), "mutant", "exec"), module.__dict__)
    for name in ("PrefillLeg", "Step", "SloRecord"):
        if original is not lifecycle and hasattr(module, name):
            monkeypatch.setattr(lifecycle, name, getattr(module, name))
    made: type[RequestLifecycle] = getattr(module, "RequestLifecycle", RequestLifecycle)
    return made


def test_the_same_walks_pass_with_all_guards() -> None:
    for seed in range(WALKS):
        Walk(seed).run()


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_walks_notice_a_missing_guard(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make = _mutant(monkeypatch, *MUTATIONS[name])
    caught = ""
    for seed in range(WALKS):
        try:
            Walk(seed, make).run()
        except Exception as error:  # noqa: BLE001 - a crash is noticed too
            caught = str(error) or type(error).__name__
            break
    assert caught, f"no walk noticed: {name}"
