"""The remote prefill of one request: reserve, prefill, and what the decode worker reads then. Pure.

Without a reservation there is no remote prefill. An engine server reserves and commits by itself:
its blocks are waited for in the index.
"""

from __future__ import annotations

from enum import StrEnum

from conductor.index.contract import Found
from conductor.index.segments import cut, extend
from conductor.requests import events as e
from conductor.requests.measurements import Measurements
from conductor.requests.reports import PrefillReport
from conductor.requests.request import Plan, Request
from kvpool.blocks.records import Segment
from kvpool.errors import KvpoolError, Unavailable

STORED_WITHIN_S = 0.5  # longest wait until an engine server's connector commits
STORED_POLL_S = 0.01


class Step(StrEnum):
    """What a remote prefill waits for."""

    RESERVING = "reserving"
    PREFILLING = "prefilling"
    STORING = "storing"
    OVER = "over"


class PrefillLeg:
    """A prefill on another worker. Feed it events until it is over; then it has `segments` to read, or an `error`.

    Args:
        within_s: longest time for all of it.
    """

    def __init__(self, request: Request, plan: Plan, measured: Measurements) -> None:
        self.step = Step.OVER
        self.segments: list[Segment] = []
        self.error: KvpoolError | None = None
        self.wake_at: float | None = None  # STORING: when to look again; None: a look-up is asked
        self._request = request
        self._plan = plan
        self._measured = measured
        self._until = 0.0
        self._sent_at = 0.0
        self._reuse: list[Segment] = []
        self._reserved: e.Reserved | None = None
        self._stored_until = 0.0

    def begin(self, patience_s: float, now: float) -> list[e.Action]:
        """Start, and give up after `patience_s` at the latest.

        Half of the request's time is always kept for the fallback.
        """
        plan, decision = self._plan, self._plan.decision
        if decision.prefill is None or decision.target_node is None:
            return self._fail(Unavailable("no node can take the blocks"))
        within_s = min(patience_s, (self._request.deadline - now) / 2)
        if plan.choice is not None and plan.choice.transfer_timeout_s is not None:
            within_s = min(within_s, plan.choice.transfer_timeout_s)
        self._until = now + within_s
        if not plan.stores_itself and plan.found is not None:
            self._reuse = cut(plan.found.segments(plan.prefill_host), decision.reuse_blocks)
        if plan.stores_itself or self._have == self._request.blocks:
            return self._send(None, now)
        self.step = Step.RESERVING
        return [e.Reserve(decision.target_node, decision.prefill, self._have, within_s)]

    def on(self, event: e.Event, now: float) -> list[e.Action]:
        """Take an answer or a tick.

        Raises:
            RuntimeError: the event does not answer the call under way.
        """
        match self.step, event:
            case (Step.RESERVING, e.Reserved()):
                self._reserved = event
                return self._send(event.grant, now)
            case (Step.PREFILLING, e.Prefilled(report)):
                return self._prefilled(report, now)
            case (Step.PREFILLING, e.Failed(error)):
                aborted = self.abort(has_stopped=False)  # the worker may still write (invariant 2)
                return [*aborted, *self._fail(error)]
            case (Step.STORING, e.LookedUp(found)):
                return self._looked_up(found, now)
            case (Step.STORING, e.Failed()):
                return self._end([])  # without the index, the decode worker asks by itself
            case (_, e.Failed(error)):
                return self._fail(error)
            case (Step.STORING, e.Tick()) if self.wake_at is not None and now >= self.wake_at:
                self.wake_at = None
                return [e.LookUp()]
            case (_, e.Tick()):
                return []
        raise RuntimeError(f"{type(event).__name__} is no answer to a prefill that is {self.step}")

    def abort(self, *, has_stopped: bool) -> list[e.Action]:
        """Give the reservation back, if there is one."""
        reserved, self._reserved = self._reserved, None
        if reserved is None or reserved.grant is None:
            return []
        node_id = self._plan.decision.target_node or ""
        return [e.AbortReservation(node_id, reserved.grant, has_stopped)]

    def give_back(self, event: e.Event) -> list[e.Action]:
        """Take a reservation's answer that came after the client had left."""
        if isinstance(event, e.Reserved):
            self._reserved = event
        return self.abort(has_stopped=True)

    @property
    def has_call(self) -> bool:
        """Whether a call is under way that can be given up."""
        return self.step is Step.PREFILLING or (self.step is Step.STORING and self.wake_at is None)

    @property
    def _have(self) -> int:
        """Leading blocks that the prefill worker reads."""
        return sum(segment.count for segment in self._reuse)

    def _send(self, grant: object, now: float) -> list[e.Action]:
        assert self._plan.decision.prefill is not None
        self.step = Step.PREFILLING
        self._sent_at = now
        within_s = max(0.0, self._until - now)
        return [e.SendPrefill(self._plan.decision.prefill, tuple(self._reuse), grant, within_s)]

    def _prefilled(self, report: PrefillReport, now: float) -> list[e.Action]:
        self._measured.add_prefill(report, now - self._sent_at)
        told: list[e.Action] = [
            e.Observe(self._plan.decision.prefill or "", report),
            e.MarkPrefilled(),
        ]
        if not self._plan.stores_itself:
            return [*told, *self._end(self._written(report))]
        self.step = Step.STORING
        self._stored_until = now + STORED_WITHIN_S
        return [*told, e.LookUp()]

    def _written(self, report: PrefillReport) -> list[Segment]:
        """What the decode worker should read.

        If another request writes part of this chain now, only the blocks before that part.
        """
        near = self._plan.near(self._have) if self._have else []
        covered: dict[int, str] = {}
        if self._reserved is not None:
            node_id = self._plan.decision.target_node or ""
            covered = dict.fromkeys(self._reserved.existing, node_id)
            if report.committed_blocks:
                covered |= dict.fromkeys(self._reserved.granted, node_id)
        return extend(near, covered, self._request.blocks)

    def _looked_up(self, found: Found, now: float) -> list[e.Action]:
        blocks = self._request.blocks
        segments = cut(found.segments(self._plan.decode_host), blocks)
        is_stored = sum(segment.count for segment in segments) == blocks
        if is_stored:
            return self._end(segments)
        if now >= self._stored_until:
            return [e.Count("engine_servers:not_stored"), *self._end(segments)]
        self.wake_at = now + STORED_POLL_S
        return []

    def _end(self, segments: list[Segment]) -> list[e.Action]:
        self.step, self.segments, self.wake_at = Step.OVER, segments, None
        return []

    def _fail(self, error: KvpoolError) -> list[e.Action]:
        self.step, self.error, self.wake_at = Step.OVER, error, None
        return []
