"""An independent model of one request, and random walks that feed a lifecycle and check every action.

The model knows nothing of the lifecycle's states. It keeps what the world would keep: the call that
is under way, the reservations of the node, the tokens that the client has, and the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from conductor.index.contract import Found, Holder
from conductor.requests import events as e
from conductor.requests.lifecycle import PLACE_POLL_S, Patience, RequestLifecycle
from conductor.requests.prefill_leg import STORED_POLL_S, STORED_WITHIN_S
from conductor.requests.reports import DecodeReport, PrefillReport
from conductor.requests.request import Objectives, Plan, Request
from conductor.routing.rules import RoutingChoice
from conductor.scheduling.decision import Decision
from conductor.scheduling.strategies.candidates import NO_PLACE
from kvpool.blocks.tier import Tier
from kvpool.errors import (
    DeadlineExceeded,
    EngineFailed,
    InvalidArgument,
    KvpoolError,
    NoRoom,
    Overloaded,
    Unavailable,
)

HOSTS = {"n1": "host-a", "n2": "host-b"}
WORKERS = {"p1": "host-a", "d1": "host-a", "d2": "host-b", "d3": "host-b"}
PATIENCE = Patience(prefill_s=5.0, first_token_s=8.0, place_s=3.0)
LONGEST_CALL_S = 60.0
RETRIES = 3
RETRIED = (Unavailable, EngineFailed, Overloaded, DeadlineExceeded)


class Violation(AssertionError):
    """An action that breaks a promise to the client, the node or the scheduler."""


def check(is_kept: bool, promise: str) -> None:
    if not is_kept:
        raise Violation(promise)


@dataclass
class World:
    """What is outside the lifecycle, as far as one request goes."""

    request: Request
    call: e.Call | None = None
    called_at: float = 0.0
    open_grants: dict[int, str] = field(default_factory=dict)  # grant -> node
    readable: set[int] = field(default_factory=set)  # blocks that a decode worker may read
    found: int = 0  # leading blocks of the look-up in force
    sent: list[int] = field(default_factory=list)  # token ids, in the order in which workers sent
    emitted: list[int] = field(default_factory=list)
    assigned: Decision | None = None
    wake_at: float | None = None
    is_admitted: bool = False
    is_left: bool = False
    slo_records: int = 0
    is_prefilled: bool = False
    real_failures: int = 0
    first_full_at: float | None = None
    fallbacks: list[str] = field(default_factory=list)
    look_ups: int = 0
    failed_calls: int = 0
    stores_itself: bool = False
    stored_since: float | None = None  # when an engine server had computed the prompt
    finish: e.Finish | None = None

    def take(self, actions: Iterable[e.Action], now: float) -> None:
        """Check the actions of one step, and keep what they change."""
        for action in actions:
            check(self.finish is None, "nothing follows the end of a request")
            self._take(action, now)
        if self.finish is None and self.is_admitted:
            check(
                self.call is not None or self.wake_at is not None,
                "a request that has not ended waits for an answer or for a time",
            )

    def _take(self, action: e.Action, now: float) -> None:
        if isinstance(action, e.CALLS):
            self._take_call(action, now)
        match action:
            case e.Cancel():
                check(self.call is not None, "only a call under way is given up")
                check(
                    not isinstance(self.call, e.Reserve),
                    "a reservation's answer is awaited: it must be given back",
                )
                self.call = None
            case e.AbortReservation(node_id, grant, has_stopped):
                check(self.open_grants.get(grant) == node_id, "an abort names an open reservation")
                check(
                    not (has_stopped and self.was_sent == grant),
                    "slots are quarantined while the worker may write",
                )
                del self.open_grants[grant]
            case e.Emit(item):
                self.emitted += item
            case e.Assign(decision):
                check(self.assigned is None, "a request counts on one plan's workers at a time")
                self.assigned, self.is_prefilled = decision, False
            case e.MarkPrefilled():
                check(self.assigned is not None, "only an assigned request is prefilled")
                self.is_prefilled = True
            case e.Unassign():
                self.assigned = None
            case e.RecordSlo():
                self.slo_records += 1
                check(self.slo_records == 1, "the objectives are recorded once")
            case e.WaitUntil(at):
                check(at != self.wake_at, "a time is told once")
                self.wake_at = at
            case e.FellBack(reason, _, _):
                self.fallbacks.append(reason)
            case e.ReportMiss(_, block):
                check(block < self.request.blocks, "a missed block is one of the chain")
            case e.Finish():
                self._take_finish(action, now)

    was_sent: int | None = None  # the grant that a worker writes into

    def _take_call(self, call: e.Call, now: float) -> None:
        check(self.call is None, "one call is under way at a time")
        check(not self.is_left, "no work is begun for a client that has left")
        check(self.is_admitted, "no work is begun before a slot is held")
        self.call, self.called_at = call, now
        left_s = self.request.deadline - now
        match call:
            case e.Schedule(excluded, last):
                is_fresh = last is None
                self.look_ups += is_fresh
                check(self.failed_calls > 0, "a request is scheduled again after a failure only")
                check(self.real_failures < RETRIES, "attempts have an end")
                check(isinstance(self.decode_error, RETRIED), "other errors are the client's")
                check(
                    excluded == (self.failed_workers if is_fresh else frozenset()),
                    "another worker is tried first",
                )
                check(now < self.until + 2 * PLACE_POLL_S, "a place is waited for so long")
            case e.LookUp():
                self.look_ups += 1
                check(
                    self.failed_calls > 0 or self.stores_itself,
                    "the chain is looked up again after a failure only",
                )
                if self.stored_since is not None and not self.failed_calls:
                    until = self.stored_since + STORED_WITHIN_S + 2 * STORED_POLL_S
                    check(now < until, "an engine server's blocks are waited for so long")
            case e.Reserve(_, _, start, within_s):
                check(left_s > 0, "no prefill begins after the deadline")
                check(0 <= start < self.request.blocks, "a reservation is for missing blocks")
                check(start <= self.found, "no gap is left before the reserved blocks")
                check(within_s <= left_s / 2 + 1e-9, "half of the time is kept for the fallback")
                check(within_s <= PATIENCE.prefill_s, "a prefill is waited for so long")
            case e.SendPrefill(_, reuse, grant, within_s):
                check(within_s <= max(0.0, left_s), "a prefill ends before the deadline")
                check(within_s <= PATIENCE.prefill_s, "a prefill is waited for so long")
                check(grant is None or grant in self.open_grants, "a grant is open when it is used")
                self.was_sent = grant
                read = [i for s in reuse for i in range(s.start, s.start + s.count)]
                check(read == list(range(len(read))), "a prefill reads leading blocks")
                check(len(read) <= self.found, "a prefill reads what was found")
            case e.SendGenerate(_, segments, max_tokens, first_within_s):
                self._take_generate(segments, max_tokens, first_within_s, left_s)

    def _take_generate(
        self, segments: Any, max_tokens: int, first_within_s: float, left_s: float
    ) -> None:
        check(left_s > 0, "no decode begins after the deadline")
        check(not self.open_grants, "no reservation is open when decoding begins")
        check(
            max_tokens == self.request.max_tokens - len(self.emitted),
            "a decode goes on after the tokens that the client has",
        )
        check(max_tokens > 0, "a decode has tokens to generate")
        check(first_within_s <= PATIENCE.first_token_s, "a first token is waited for so long")
        assert self.plan is not None
        if self.plan.has_other and self.real_failures < RETRIES - 1:
            check(first_within_s <= left_s / 2 + 1e-9, "time is kept for another worker")
        read = [i for s in segments for i in range(s.start, s.start + s.count)]
        check(read == list(range(len(read))), "a decode reads leading blocks")
        if self.request.pool != "on":
            check(not read, "without the pool nothing is read")
        check(set(read) <= self.readable, "a decode reads what was found or written")
        if self.stored_since is not None and not self.failed_calls:
            is_early = self.called_at < self.stored_since + STORED_WITHIN_S
            check(
                not is_early or len(read) == self.request.blocks,
                "a decode waits for what an engine server stores",
            )

    plan: Plan | None = None
    decode_error: KvpoolError | None = None
    failed_workers: frozenset[str] = frozenset()

    @property
    def until(self) -> float:
        """When a request without a place is given up."""
        if self.first_full_at is None:
            return self.request.deadline
        return min(self.request.deadline, self.first_full_at + PATIENCE.place_s)

    def _take_finish(self, finish: e.Finish, now: float) -> None:
        check(self.call is None, "no call is under way at the end")
        check(not self.open_grants, "each reservation is committed or given back")
        check(self.assigned is None, "an ended request counts on no worker")
        if not self.is_left:
            check(self.emitted == self.sent, "each token is passed on once, in order")
        if finish.status == "ok":
            check(self.slo_records == 1, "the objectives of a served request are recorded")
        if finish.status == "failed":
            check(finish.error is not None, "a failure has an error")
            is_worth = isinstance(finish.error, RETRIED) and self.is_admitted
            is_early = now < self.until and self.real_failures < RETRIES
            check(
                not (is_worth and is_early) or self.is_hopeless,
                "a request is given up only after its attempts, its time or its workers",
            )
        self.finish = finish

    is_hopeless: bool = False  # no worker is left that could take it


class Walk:
    """A lifecycle in a world that answers by chance.

    Args:
        make: makes the lifecycle.
    """

    def __init__(
        self, seed: int, make: Callable[[Request, Patience], RequestLifecycle] = RequestLifecycle
    ) -> None:
        self.random = Random(seed)
        self.now = 100.0
        self.request = self._any_request()
        self.world = World(self.request)
        self.lifecycle = make(self.request, PATIENCE)
        self._grants = 0
        self._granted: list[int] = []

    def run(self, steps: int = 400) -> World:
        """Walk to the end of the request."""
        for _ in range(steps):
            if self.world.finish is not None:
                break
            self._step()
        check(self.world.finish is not None, "a request ends")
        self._after_the_end()
        return self.world

    # ------------------------------------------------------------ what can happen

    def _any_request(self) -> Request:
        random = self.random
        received_at = self.now - random.choice((0.0, 0.1, 1.0))
        return Request(
            "r",
            prompt_tokens=random.randint(1, 33),
            block_tokens=4,
            block_bytes=1_000,
            max_tokens=random.choice((1, 2, 20, 40)),
            received_at=received_at,
            deadline=received_at + random.choice((0.5, 2.0, 10.0, 60.0, 60.0)),
            tokenized_at=self.now,
            objectives=Objectives(random.choice((0.0, 0.5, 3.0)), random.choice((0.0, 0.01, 1.0))),
            pool=random.choice(("on", "on", "on", "on", "off", "local")),
        )

    def _feed(self, event: e.Event) -> None:
        self.world.take(self.lifecycle.on(event, self.now), self.now)

    def _step(self) -> None:
        world, random = self.world, self.random
        if not world.is_admitted:
            self._admit()
            return
        chance = random.random()
        if chance < 0.02 and not world.is_left:
            self._leave(e.ClientLeft())
        elif chance < 0.04 and not world.is_left and world.emitted:
            self._leave(e.Completed())
        elif world.call is not None and chance < 0.8:
            self._answer(world.call)
        else:
            self._wait()

    def _admit(self) -> None:
        chance = self.random.random()
        self.now += self.random.choice((0.0, 0.2))
        if chance < 0.05:
            self.world.is_left = True
            self._feed(e.ClientLeft())
        elif chance < 0.1:
            reason = self.random.choice(("ttft_slo", "queue_full", NO_PLACE))
            self._feed(e.Refused(self._refusal(reason)))
        elif chance < 0.15:
            self._feed(e.Failed(Unavailable("no index")))
        else:
            self.world.is_admitted = True
            self._feed(e.Admitted(self._any_plan(self.random.choice(("local", "disaggregated")))))

    def _leave(self, event: e.Event) -> None:
        world = self.world
        if world.call is None and world.wake_at is None:
            return
        is_reserving = isinstance(world.call, e.Reserve)
        world.is_left = True
        self._feed(event)
        check(
            is_reserving or world.finish is not None,
            "a request whose client has left ends at once",
        )
        if world.finish is not None and isinstance(event, e.Completed):
            check(world.finish.status == "ok", "a completed response is a success")

    def _wait(self) -> None:
        """Let time pass, at most to the next thing that must happen."""
        world = self.world
        until = self.now + self.random.choice((0.001, 0.05, 0.5, 4.0, 30.0))
        if world.call is not None:
            until = min(until, world.called_at + self._patience_of(world.call))
        if world.wake_at is not None:
            until = min(until, max(self.now, world.wake_at))
        self.now = until
        if world.wake_at is not None and self.now >= world.wake_at:
            told, world.wake_at = world.wake_at, None
            self._feed(e.Tick())
            check(world.wake_at != told, "a tick leads somewhere")
        elif world.call is not None and self.now >= world.called_at + self._patience_of(world.call):
            self._fail(DeadlineExceeded("no answer in time"))

    def _patience_of(self, call: e.Call) -> float:
        match call:
            case e.Reserve(_, _, _, within_s) | e.SendPrefill(_, _, _, within_s):
                return within_s
            case e.SendGenerate(_, _, _, first_within_s):
                return max(0.0, min(first_within_s, self.request.deadline - self.world.called_at))
        return LONGEST_CALL_S

    # ------------------------------------------------------------ answers

    def _answer(self, call: e.Call) -> None:
        world, random = self.world, self.random
        self.now += random.choice((0.0, 0.003, 0.1))
        if random.random() < 0.25:
            self._fail(self._any_error())
            return
        match call:
            case e.Schedule(excluded, _):
                self._scheduled(excluded)
            case e.LookUp():
                world.call = None
                found = self._any_found()
                assert found is not None
                self._feed(e.LookedUp(found))
            case e.Reserve(node_id, _, start, _):
                self._reserved(node_id, start)
            case e.SendPrefill():
                self._prefilled()
            case e.SendGenerate():
                self._generate()

    def _any_error(self) -> KvpoolError:
        kinds = (Unavailable, EngineFailed, Overloaded, NoRoom, InvalidArgument, DeadlineExceeded)
        return self.random.choice(kinds)("by chance")

    def _fail(self, error: KvpoolError) -> None:
        world = self.world
        call, world.call = world.call, None
        world.failed_calls += 1
        if isinstance(call, e.SendGenerate):
            self._decode_failed(call, error)
        if isinstance(call, e.Schedule):
            world.is_hopeless = True
        self._feed(e.Failed(error))

    def _decode_failed(self, call: e.SendGenerate, error: KvpoolError) -> None:
        self.world.decode_error = error
        self.world.failed_workers |= {call.worker_id}
        if isinstance(error, Overloaded):
            if self.world.first_full_at is None:
                self.world.first_full_at = self.now
        else:
            self.world.real_failures += 1

    def _scheduled(self, excluded: frozenset[str]) -> None:
        world, random = self.world, self.random
        world.call = None
        free = sorted({"d1", "d2", "d3"} - excluded)
        if not free or random.random() < 0.3:
            reason = random.choice((NO_PLACE, NO_PLACE, "no_decode_worker"))
            # The first refusal only says that no untried worker is left.
            world.is_hopeless = not excluded and reason != NO_PLACE
            self._feed(e.Scheduled(Plan(self._refusal(reason))))
            return
        self._feed(e.Scheduled(self._any_plan("local", decode=random.choice(free))))

    def _reserved(self, node_id: str, start: int) -> None:
        world, random = self.world, self.random
        world.call = None
        wanted = list(range(start, self.request.blocks))
        existing = [i for i in wanted if random.random() < 0.2]
        granted = [i for i in wanted if i not in existing and random.random() < 0.8]
        world.readable |= set(existing)
        self._granted = granted
        grant = None
        if granted:
            self._grants += 1
            grant = self._grants
            world.open_grants[grant] = node_id
        self._feed(e.Reserved(grant, granted, existing))

    def _prefilled(self) -> None:
        world, random = self.world, self.random
        world.call = None
        committed = 0
        if world.was_sent is not None:
            if random.random() < 0.9:  # the worker commits what it was granted
                committed = len(self._granted)
                world.readable |= set(self._granted)
            del world.open_grants[world.was_sent]  # or it has given the slots back itself
        if world.stores_itself:
            world.stored_since = self.now
        reply = PrefillReport(0, self.request.prompt_tokens, committed)
        self._feed(e.Prefilled(reply))

    def _generate(self) -> None:
        world, random = self.world, self.random
        call = world.call
        assert isinstance(call, e.SendGenerate)
        if random.random() < 0.75 and self._left_of(call) > 0:
            count = random.randint(1, min(8, self._left_of(call)))
            tokens = [len(world.sent) + i for i in range(count)]
            world.sent += tokens
            so_far = self._report("") if random.random() < 0.5 else None
            self._feed(e.Tokens(tokens, tokens, so_far))
        elif random.random() < 0.9:
            world.call = None
            self._feed(e.Decoded(self._report(random.choice(("length", "stop")))))
        else:
            world.call = None
            world.failed_calls += 1
            self._decode_failed(call, Unavailable("no result"))
            self._feed(e.Decoded(None))

    def _left_of(self, call: e.SendGenerate) -> int:
        return self.request.max_tokens - len(self.world.sent)

    def _report(self, reason: str) -> DecodeReport:
        fallback = self.random.choice(("", "", "pool_read:unavailable", "pool_read:declined_cost"))
        return DecodeReport(reason, 0, 0, 1, fallback, bytes_read={"nixl": 1_000})

    # ------------------------------------------------------------ plans

    def _any_found(self) -> Found | None:
        world, random = self.world, self.random
        if self.request.pool != "on":
            return None
        holders = []
        for _ in range(random.randint(0, self.request.blocks)):
            nodes = random.choice((("n1",), ("n2",), ("n1", "n2")))
            holders.append(tuple(Holder(node, Tier.DRAM) for node in nodes))
        world.found = len(holders)
        world.readable |= set(range(len(holders)))
        return Found(holders, HOSTS)

    def _any_plan(self, mode: Any, decode: str = "d1") -> Plan:
        world, random = self.world, self.random
        found = self._any_found()
        mode = mode if self.request.pool == "on" else "local"
        most = min(world.found if found else 0, self.request.reusable_blocks)
        is_remote = mode == "disaggregated"
        target = random.choice(("n1", "n2", "n2", None)) if is_remote else None
        world.failed_calls += is_remote and target is None  # a plan that cannot be carried out
        decision = Decision(
            "r",
            mode,
            "p1" if is_remote else None,
            decode,
            random.choice((0, most)),
            target,
            0.1,
            0.01,
            "",
        )
        world.stores_itself = is_remote and random.random() < 0.3
        world.plan = Plan(
            decision,
            found,
            world.found if found else 0,
            prefill_host=WORKERS["p1"] if is_remote else "",
            decode_host=WORKERS[decode],
            stores_itself=world.stores_itself,
            has_other=random.random() < 0.5,
            choice=random.choice((None, RoutingChoice("", "", "cost", 1.0))),
        )
        return world.plan

    def _refusal(self, reason: str) -> Decision:
        return Decision("r", "refused", None, None, 0, None, 0.0, 0.0, reason)

    # ------------------------------------------------------------ afterwards

    def _after_the_end(self) -> None:
        """Late events change nothing."""
        late: list[e.Event] = [e.Tick(), e.ClientLeft(), e.Completed(), e.Tokens([1], [1])]
        for event in late:
            check(not self.lifecycle.on(event, self.now), "nothing follows the end of a request")
