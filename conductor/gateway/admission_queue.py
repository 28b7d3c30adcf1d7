"""Who waits for a place, in which order, and for how long at most: the queue before the gateway. Pure.

A request that cannot start now waits when it is predicted to start in time. It is served by priority, then
by arrival; when the queue is full, a higher class takes the place of the last one of a lower class. It
decides nothing about workers (`conductor.scheduling.scheduler`). `now` is monotonic seconds.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from kvpool.errors import InvalidArgument
from kvpool.smoothing import smoothed

Priority = Literal["low", "normal", "high"]
PRIORITIES: tuple[Priority, ...] = ("low", "normal", "high")
SMOOTHING = 0.2  # weight of the last interval between two starts


def priority_of(
    asked: Priority | None, tenant: str, of_tenants: Mapping[str, Priority], default: Priority
) -> Priority:
    """The class of a request: what it asks for, but never above that of its tenant, where that has one."""
    given = of_tenants.get(tenant)
    if asked is None:
        return given or default
    if given is not None and PRIORITIES.index(asked) > PRIORITIES.index(given):
        return given
    return asked


@dataclass(slots=True, frozen=True)
class Ticket:
    """One waiting request. `start_by`: when it is too late to start, for its objective or its deadline."""

    request_id: str
    priority: Priority
    arrived_at: float
    start_by: float


@dataclass(slots=True, frozen=True)
class Entry:
    """What came of entering. `refused`: "" when it waits now, else "queue_full" or "queue_slow".

    `displaced`: who lost its place for it. `retry_after_s`: when a place may be expected.
    """

    refused: str = ""
    displaced: Ticket | None = None
    retry_after_s: float = 0.0


class AdmissionQueue:
    """Tickets in the order in which they are to be served.

    Args:
        capacity: tickets at most; 0: nobody waits.

    Raises:
        InvalidArgument: the capacity is negative.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise InvalidArgument(f"a queue for {capacity} requests")
        self._capacity = capacity
        self._order: list[tuple[int, int, str]] = []  # (class, highest first; arrival; id)
        self._tickets: dict[str, tuple[tuple[int, int, str], Ticket]] = {}
        self._arrivals = 0
        self._interval_s = 0.0  # between two starts while others waited; 0: not known yet
        self._last_start: float | None = None

    def enter(self, ticket: Ticket, now: float) -> Entry:
        """Wait from now on, unless there is no place or the wait is predicted to be too long.

        Raises:
            InvalidArgument: a request with this id waits already.
        """
        if ticket.request_id in self._tickets:
            raise InvalidArgument(f"request {ticket.request_id} waits already")
        wait_s = self.wait_s(ticket.priority)
        if not self.has_place(ticket.priority):
            return Entry("queue_full", retry_after_s=wait_s)
        if now + wait_s > ticket.start_by:
            return Entry("queue_slow", retry_after_s=now + wait_s - ticket.start_by)
        displaced = None
        if len(self._order) >= self._capacity:
            displaced = self._tickets[self._order[-1][2]][1]
            self.leave(displaced.request_id)
        self._arrivals += 1
        key = (-PRIORITIES.index(ticket.priority), self._arrivals, ticket.request_id)
        insort(self._order, key)
        self._tickets[ticket.request_id] = (key, ticket)
        if len(self._order) == 1:
            self._last_start = None  # what passed while nobody waited says nothing of the pace
        return Entry(displaced=displaced)

    def has_place(self, priority: Priority) -> bool:
        """Whether a request of this class would be taken: there is room, or somebody of a lower class."""
        if len(self._order) < self._capacity:
            return True
        return bool(self._order) and -self._order[-1][0] < PRIORITIES.index(priority)

    def outranks_all(self, priority: Priority) -> bool:
        """Nobody who waits would be served before a newcomer of this class."""
        return not self._order or -self._order[0][0] < PRIORITIES.index(priority)

    def wait_s(self, priority: Priority) -> float:
        """Predicted wait of a newcomer of this class, by the pace of late; 0 while that is unknown."""
        ahead = bisect_left(self._order, (-PRIORITIES.index(priority) + 1,))
        return (ahead + 1) * self._interval_s

    def in_order(self, limit: int) -> list[Ticket]:
        """The next `limit` to be served."""
        return [self._tickets[request_id][1] for _, _, request_id in self._order[:limit]]

    def started(self, request_id: str, now: float) -> None:
        """It was served; unknown ids are ignored."""
        if self.leave(request_id) is None:
            return
        if self._last_start is not None:
            interval_s = max(0.0, now - self._last_start)
            self._interval_s = smoothed(self._interval_s, interval_s, SMOOTHING)
        self._last_start = now

    def leave(self, request_id: str) -> Ticket | None:
        """It gave up or was given up; None when it did not wait."""
        found = self._tickets.pop(request_id, None)
        if found is None:
            return None
        key, ticket = found
        del self._order[bisect_left(self._order, key)]
        return ticket

    def expire(self, now: float) -> list[Ticket]:
        """Take out those for which it is too late, in order."""
        late = [ticket for _, ticket in self._tickets.values() if ticket.start_by <= now]
        late.sort(key=lambda ticket: self._tickets[ticket.request_id][0])
        for ticket in late:
            self.leave(ticket.request_id)
        return late

    def next_expiry(self) -> float | None:
        """When the first of them is too late; None when nobody waits."""
        return min((ticket.start_by for _, ticket in self._tickets.values()), default=None)

    def by_priority(self) -> dict[Priority, int]:
        """How many wait, of each class."""
        counts = dict.fromkeys(PRIORITIES, 0)
        for _, ticket in self._tickets.values():
            counts[ticket.priority] += 1
        return counts

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._tickets
