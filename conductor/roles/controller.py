"""Which instances prefill and which decode: moved by measured violations of the objectives, and advice on scaling.

DistServe (OSDI'24) and Splitwise (ISCA'24) fix the split ahead; Mooncake (FAST'25) converts instances as the load
shifts. Here a breach must last before anything is moved, and after a move nothing is for a while, so that the
controller does not chase its own effects. One instance moves at a time, the one with the least to do. It is drained
by being given no more work of its old kind. Pure: `now` is monotonic seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvpool.errors import ConfigError

Role = Literal["prefill", "decode"]


@dataclass(slots=True, frozen=True)
class RoleLimits:
    """When to act.

    Args:
        window_s: outcomes older than this count no more.
        min_requests: fewer in the window say nothing.
        high, low: share of requests over an objective that is a breach, and that leaves room to give.
        hold_s: how long a breach must last. cooldown_s: after a move.
        min_prefill, min_decode: instances that each role keeps.
        idle: share of places taken below which a role may shrink; busy: above which it may give none away.

    Raises:
        ConfigError: a value makes no sense.
    """

    window_s: float = 30.0
    min_requests: int = 10
    high: float = 0.1
    low: float = 0.03
    hold_s: float = 5.0
    cooldown_s: float = 30.0
    min_prefill: int = 1
    min_decode: int = 1
    idle: float = 0.3
    busy: float = 0.8

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high <= 1 or not 0 <= self.idle < self.busy <= 1:
            raise ConfigError("roles: 0 <= low < high <= 1 and 0 <= idle < busy <= 1 must hold")
        if min(self.window_s, self.hold_s, self.cooldown_s, self.min_requests) <= 0:
            raise ConfigError("roles: times and min_requests must be positive")
        if min(self.min_prefill, self.min_decode) < 0:
            raise ConfigError("roles: a role cannot keep less than no instance")


@dataclass(slots=True, frozen=True)
class Instance:
    """One worker as the controller sees it; `role` "both" never moves."""

    worker_id: str
    role: str
    running: int
    places: int
    queued_tokens: int = 0
    can_move: bool = True

    @property
    def pressure(self) -> float:
        """Share of its places that are taken; may exceed 1."""
        return self.running / max(1, self.places)


@dataclass(slots=True, frozen=True)
class Advice:
    """How many instances to add to (positive) or take from a role, and why."""

    role: Role
    change: int
    reason: str


@dataclass(slots=True, frozen=True)
class RoleMove:
    """Have this worker take the other role."""

    worker_id: str
    role: Role
    reason: str


@dataclass(slots=True, frozen=True)
class RoleDecision:
    """What to do now, and what an operator or autoscaler should do. Shares are of the window."""

    move: RoleMove | None
    advice: tuple[Advice, ...]
    ttft_violations: float
    tpot_violations: float
    requests: int


class RoleController:
    """Learns outcomes, and says at each step what to change.

    Args:
        limits: when to act.
    """

    def __init__(self, limits: RoleLimits | None = None) -> None:
        self.limits = limits or RoleLimits()
        self._outcomes: deque[tuple[float, bool, bool]] = deque()
        self._breach: tuple[Role, float] | None = None  # who lacks instances, and since when
        self._moved_at = float("-inf")

    def ended(self, now: float, *, is_ttft_met: bool, is_tpot_met: bool) -> None:
        """A request ended, or was refused for want of an objective that could not be met.

        Args:
            is_ttft_met: by the prefill workers. What a decode worker prefilled late counts as its own miss,
                that is against `is_tpot_met`: it is there that help is lacking.
        """
        self._outcomes.append((now, is_ttft_met, is_tpot_met))

    def step(self, instances: Sequence[Instance], now: float) -> RoleDecision:
        """What to do now. A move that comes back is taken for done."""
        limits = self.limits
        while self._outcomes and self._outcomes[0][0] < now - limits.window_s:
            self._outcomes.popleft()
        count = len(self._outcomes)
        late = sum(not ttft for _, ttft, _ in self._outcomes) / count if count else 0.0
        slow = sum(not tpot for _, _, tpot in self._outcomes) / count if count else 0.0
        is_known = count >= limits.min_requests
        lacking = _lacking(late, slow, limits) if is_known else None
        if lacking is None:
            self._breach = None
        elif self._breach is None or self._breach[0] != lacking:
            self._breach = (lacking, now)
        move = self._move(lacking, instances, now) if lacking else None
        if move is not None:
            self._moved_at = now
            self._breach = None
            # What was measured until now was of the old split.
            self._outcomes.clear()
        advice = _advice(late, slow, instances, limits) if is_known else ()
        return RoleDecision(move, advice, late, slow, count)

    def _move(self, lacking: Role, instances: Sequence[Instance], now: float) -> RoleMove | None:
        limits, breach = self.limits, self._breach
        if breach is None or now - breach[1] < limits.hold_s:
            return None
        if now - self._moved_at < limits.cooldown_s:
            return None
        giver: Role = "decode" if lacking == "prefill" else "prefill"
        givers = [each for each in instances if each.role == giver]
        least = limits.min_decode if giver == "decode" else limits.min_prefill
        movable = [each for each in givers if each.can_move]
        if len(givers) <= least or not movable:
            return None
        chosen = min(movable, key=lambda i: (i.pressure, i.queued_tokens, i.worker_id))
        others = [each for each in givers if each is not chosen]
        taken = sum(each.running for each in givers)
        places = sum(max(1, each.places) for each in others)
        if taken > limits.busy * places:
            return None  # the rest could not carry it
        objective = "TTFT" if lacking == "prefill" else "TPOT"
        return RoleMove(chosen.worker_id, lacking, f"{objective} missed, {giver} has room")


def _lacking(late: float, slow: float, limits: RoleLimits) -> Role | None:
    """The role that lacks instances while the other has some to give."""
    if late > limits.high and slow <= limits.low:
        return "prefill"
    if slow > limits.high and late <= limits.low:
        return "decode"
    return None


def _advice(
    late: float, slow: float, instances: Sequence[Instance], limits: RoleLimits
) -> tuple[Advice, ...]:
    """Scale out what misses its objective, scale in what idles while both objectives are met."""
    found = []
    roles: tuple[tuple[Role, float, str, int], ...] = (
        ("prefill", late, "TTFT", limits.min_prefill),
        ("decode", slow, "TPOT", limits.min_decode),
    )
    for role, violations, objective, least in roles:
        members = [each for each in instances if each.role in (role, "both")]
        if violations > limits.high:
            # By as much as is too late: of n instances that fail a share v, n * v more.
            more = max(1, round(len(members) * violations))
            found.append(Advice(role, more, f"{violations:.0%} of requests miss their {objective}"))
            continue
        taken = sum(each.running for each in members) / max(1, sum(i.places for i in members))
        is_well = late <= limits.low and slow <= limits.low
        if is_well and len(members) > least and taken < limits.idle:
            found.append(Advice(role, -1, f"{taken:.0%} of its places are taken"))
    return tuple(found)
