"""Decides which instances prefill and which decode, by measured misses of the objectives.

It also advises on scaling. DistServe (OSDI'24) and Splitwise (ISCA'24) fix the split in advance.
Mooncake (FAST'25) converts instances as the load changes. Here an objective must be missed for some
time before an instance moves, and no other moves for some time after, so that the controller does
not react to its own effects. One instance moves at a time, the one with the least load. It gets no
new work of its old kind and finishes what it has. Pure; `now` is monotonic seconds.
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
    """The thresholds of the controller.

    Args:
        window_s: age up to which a request counts.
        min_requests: number of requests in the window below which the controller does nothing.
        high: share of requests that miss an objective above which the role lacks instances.
        low: share up to which a role can give an instance away.
        hold_s: how long a role must lack instances before one moves.
        cooldown_s: time after a move without another move.
        min_prefill, min_decode: number of instances that each role keeps.
        idle: share of used places below which a role may shrink.
        busy: share of used places above which a role gives no instance away.

    Raises:
        ConfigError: a value is out of range.
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
            raise ConfigError("roles: min_prefill and min_decode must not be negative")


@dataclass(slots=True, frozen=True)
class Instance:
    """One worker. A worker with role "both" never moves."""

    worker_id: str
    role: str
    running: int
    places: int
    queued_tokens: int = 0
    can_move: bool = True

    @property
    def pressure(self) -> float:
        """The share of its places that are used. It may exceed 1."""
        return self.running / max(1, self.places)


@dataclass(slots=True, frozen=True)
class Advice:
    """How many instances to add to a role (positive) or to remove, and why."""

    role: Role
    change: int
    reason: str


@dataclass(slots=True, frozen=True)
class RoleMove:
    """Give this worker the other role."""

    worker_id: str
    role: Role
    reason: str


@dataclass(slots=True, frozen=True)
class RoleDecision:
    """A move to make now, and advice for an operator or autoscaler.

    Shares are of the window's requests.
    """

    move: RoleMove | None
    advice: tuple[Advice, ...]
    ttft_violations: float
    tpot_violations: float
    requests: int


class RoleController:
    """Counts requests that miss their objectives, and decides at each step what to change."""

    def __init__(self, limits: RoleLimits | None = None) -> None:
        self.limits = limits or RoleLimits()
        self._outcomes: deque[tuple[float, bool, bool]] = deque()
        self._breach: tuple[Role, float] | None = None  # the role that lacks instances, since when
        self._moved_at = float("-inf")

    def ended(self, now: float, *, is_ttft_met: bool, is_tpot_met: bool) -> None:
        """Record a request that ended, or that was refused because an objective could not be met.

        Args:
            is_ttft_met: whether prefill met its objective. If a decode worker prefilled late, pass
                False for `is_tpot_met` instead, because the decode role lacks instances.
        """
        self._outcomes.append((now, is_ttft_met, is_tpot_met))

    def step(self, instances: Sequence[Instance], now: float) -> RoleDecision:
        """Decide what to do now. The controller assumes that a returned move is carried out."""
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
            # The requests so far were measured under the old split.
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
            return None  # the other instances could not take its load
        objective = "TTFT" if lacking == "prefill" else "TPOT"
        return RoleMove(chosen.worker_id, lacking, f"{objective} missed, {giver} has room")


def _lacking(late: float, slow: float, limits: RoleLimits) -> Role | None:
    """The role that lacks instances, if the other role can give one away."""
    if late > limits.high and slow <= limits.low:
        return "prefill"
    if slow > limits.high and late <= limits.low:
        return "decode"
    return None


def _advice(
    late: float, slow: float, instances: Sequence[Instance], limits: RoleLimits
) -> tuple[Advice, ...]:
    """Add to a role that misses its objective.

    Remove from an idle one if both objectives are met.
    """
    found = []
    roles: tuple[tuple[Role, float, str, int], ...] = (
        ("prefill", late, "TTFT", limits.min_prefill),
        ("decode", slow, "TPOT", limits.min_decode),
    )
    for role, violations, objective, least in roles:
        members = [each for each in instances if each.role in (role, "both")]
        if violations > limits.high:
            # Add in proportion: n instances that miss a share v of requests need n * v more.
            more = max(1, round(len(members) * violations))
            found.append(Advice(role, more, f"{violations:.0%} of requests miss their {objective}"))
            continue
        taken = sum(each.running for each in members) / max(1, sum(i.places for i in members))
        is_well = late <= limits.low and slow <= limits.low
        if is_well and len(members) > least and taken < limits.idle:
            found.append(Advice(role, -1, f"{taken:.0%} of its places are used"))
    return tuple(found)
