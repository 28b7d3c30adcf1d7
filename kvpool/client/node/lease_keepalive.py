"""Renewing a lease beside the read that it is for, so that no read is thrown away for having been slow.

Nothing here trusts a lease: what was read is checked against the deadline that the node has told (invariant 3).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from kvpool.errors import KvpoolError

if TYPE_CHECKING:
    from kvpool.client.node.node_link import ReadLease

RENEW_AFTER = 1 / 3  # of what a lease has: two thirds are left for the answer to come
MIN_PAUSE_S = 0.005  # between two renewals, where a node grants next to nothing

Renew = Callable[
    ["ReadLease", float, float], Awaitable[None]
]  # lease, ttl, time-out: both in seconds


class LeaseKeepalive:
    """Keeps one lease in force until `deadline` or until `end`, whichever comes first.

    It gives up when the node refuses or does not answer: then the lease ends when it ends. Costs a timer
    for reads that are over before the first renewal is due.

    Args:
        lease: its `deadline` moves on with each renewal.
        deadline: monotonic seconds; when the read is over at the latest.
        margin_s: the lease must outlast the read by this.
        renew: asks the node; raises KvpoolError.
    """

    def __init__(self, lease: ReadLease, deadline: float, margin_s: float, renew: Renew) -> None:
        self._lease = lease
        self._deadline = deadline
        self._margin_s = margin_s
        self._renew = renew
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        if self._is_needed():
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._pause_s(), self._begin)

    async def end(self) -> None:
        """The read is over. Waits for an answer under way only where the lease would be over without it."""
        if self._timer is not None:
            self._timer.cancel()
        task = self._task
        if task is None or task.done():
            return
        try:
            if time.monotonic() > self._lease.deadline - self._margin_s:
                # The node knows whether the lease was in force throughout.
                await asyncio.wait([task], timeout=max(0.0, self._deadline - time.monotonic()))
        finally:
            task.cancel()

    def _is_needed(self) -> bool:
        return self._lease.deadline - self._margin_s < self._deadline

    def _pause_s(self) -> float:
        return max(MIN_PAUSE_S, RENEW_AFTER * (self._lease.deadline - time.monotonic()))

    def _begin(self) -> None:
        self._task = asyncio.ensure_future(self._keep())

    async def _keep(self) -> None:
        while self._is_needed():
            left_s = self._deadline - time.monotonic()
            if left_s <= 0:
                return
            try:
                await self._renew(self._lease, left_s + 1.0, left_s)
            except KvpoolError:
                return  # over, or nobody answers: the look at the deadline after the read says so
            await asyncio.sleep(self._pause_s())
