"""The gateway's queue: which requests wait, in which order and for how long.

Pure; `now` is monotonic seconds.

A request that cannot start now waits if it is predicted to start in time. Requests leave the queue
by priority class, then by arrival. If the queue is full, a request of a higher class displaces the
last one of a lower class.
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
SMOOTHING = 0.2  # weight of the newest interval between two starts in the moving average


def priority_of(
    asked: Priority | None, tenant: str, of_tenants: Mapping[str, Priority], default: Priority
) -> Priority:
    """The class that a request asks for, limited to its tenant's class if the tenant has one."""
    given = of_tenants.get(tenant)
    if asked is None:
        return given or default
    if given is not None and PRIORITIES.index(asked) > PRIORITIES.index(given):
        return given
    return asked


@dataclass(slots=True, frozen=True)
class Ticket:
    """A queued request. After `start_by` it cannot meet its objective or its deadline any more."""

    request_id: str
    priority: Priority
    arrived_at: float
    start_by: float


@dataclass(slots=True, frozen=True)
class EnqueueResult:
    """The result of `AdmissionQueue.enqueue`.

    `refused` is "" if the request waits, otherwise "queue_full" or "queue_slow". `displaced` is the
    request that left the queue for it. `retry_after_s` is when a place is expected.
    """

    refused: str = ""
    displaced: Ticket | None = None
    retry_after_s: float = 0.0


class AdmissionQueue:
    """Queued requests in the order in which they will be served.

    Args:
        capacity: maximum number of queued requests; 0 turns the queue off.

    Raises:
        InvalidArgument: the capacity is negative.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise InvalidArgument(f"the queue's capacity is {capacity}", hint="0 or more")
        self._capacity = capacity
        self._order: list[tuple[int, int, str]] = []  # (class, highest first; arrival; id)
        self._tickets: dict[str, tuple[tuple[int, int, str], Ticket]] = {}
        self._arrivals = 0
        self._interval_s = 0.0  # mean time between two starts while others waited; 0: unknown
        self._last_start: float | None = None

    def enqueue(self, ticket: Ticket, now: float) -> EnqueueResult:
        """Add a request, unless the queue is full or the predicted wait is too long.

        Raises:
            InvalidArgument: a request with this id is queued already.
        """
        if ticket.request_id in self._tickets:
            raise InvalidArgument(f"request {ticket.request_id} is queued already")
        wait_s = self.wait_s(ticket.priority)
        if not self.has_place(ticket.priority):
            return EnqueueResult("queue_full", retry_after_s=wait_s)
        if now + wait_s > ticket.start_by:
            return EnqueueResult("queue_slow", retry_after_s=now + wait_s - ticket.start_by)
        displaced = None
        if len(self._order) >= self._capacity:
            displaced = self._tickets[self._order[-1][2]][1]
            self.leave(displaced.request_id)
        self._arrivals += 1
        key = (-PRIORITIES.index(ticket.priority), self._arrivals, ticket.request_id)
        insort(self._order, key)
        self._tickets[ticket.request_id] = (key, ticket)
        if len(self._order) == 1:
            self._last_start = None  # time with an empty queue does not measure the pace
        return EnqueueResult(displaced=displaced)

    def has_place(self, priority: Priority) -> bool:
        """Whether a request of this class gets a place, if need be from one of a lower class."""
        if len(self._order) < self._capacity:
            return True
        return bool(self._order) and -self._order[-1][0] < PRIORITIES.index(priority)

    def outranks_all(self, priority: Priority) -> bool:
        """Whether a new request of this class would be first in the queue."""
        return not self._order or -self._order[0][0] < PRIORITIES.index(priority)

    def wait_s(self, priority: Priority) -> float:
        """Predicted wait of a new request of this class; 0 while the pace is unknown."""
        ahead = bisect_left(self._order, (-PRIORITIES.index(priority) + 1,))
        return (ahead + 1) * self._interval_s

    def in_order(self, limit: int) -> list[Ticket]:
        """The first `limit` requests of the queue."""
        return [self._tickets[request_id][1] for _, _, request_id in self._order[:limit]]

    def started(self, request_id: str, now: float) -> None:
        """Remove a request that starts now, and update the pace. Unknown ids are ignored."""
        if self.leave(request_id) is None:
            return
        if self._last_start is not None:
            interval_s = max(0.0, now - self._last_start)
            self._interval_s = smoothed(self._interval_s, interval_s, SMOOTHING)
        self._last_start = now

    def leave(self, request_id: str) -> Ticket | None:
        """Remove a request; None if it was not queued."""
        found = self._tickets.pop(request_id, None)
        if found is None:
            return None
        key, ticket = found
        del self._order[bisect_left(self._order, key)]
        return ticket

    def expire(self, now: float) -> list[Ticket]:
        """Remove and return the requests whose `start_by` has passed, in queue order."""
        late = [ticket for _, ticket in self._tickets.values() if ticket.start_by <= now]
        late.sort(key=lambda ticket: self._tickets[ticket.request_id][0])
        for ticket in late:
            self.leave(ticket.request_id)
        return late

    def next_expiry(self) -> float | None:
        """The earliest `start_by`; None if the queue is empty."""
        return min((ticket.start_by for _, ticket in self._tickets.values()), default=None)

    def by_priority(self) -> dict[Priority, int]:
        """The number of queued requests of each class."""
        counts = dict.fromkeys(PRIORITIES, 0)
        for _, ticket in self._tickets.values():
            counts[ticket.priority] += 1
        return counts

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._tickets
