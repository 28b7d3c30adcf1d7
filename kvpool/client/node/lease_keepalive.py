"""Renews a lease while its blocks are being read, so that a slow read is not discarded.

Readers still check the bytes against the lease's deadline after the read (invariant 3).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from kvpool.client.node.grants import ReadLease
from kvpool.errors import KvpoolError

RENEW_AFTER = 1 / 3  # of the lease's remaining time; two thirds remain for the reply to arrive
MIN_PAUSE_S = 0.005  # between two renewals, if a node grants very short ones

# lease, ttl in seconds, time-out in seconds
Renew = Callable[[ReadLease, float, float], Awaitable[None]]


class LeaseKeepalive:
    """Renews one lease until `deadline` or `end`, whichever comes first.

    It stops when the node refuses or does not answer; the lease then ends at its own deadline. A
    read that ends before the first renewal is due costs one timer.

    Args:
        lease: each renewal extends its `deadline`.
        deadline: when the read ends at the latest (monotonic seconds).
        margin_s: the lease must outlast the read by this long.
        renew: asks the node to renew; raises KvpoolError.
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
        """Stop renewing.

        Waits for a running renewal only if the lease would have ended without it.
        """
        if self._timer is not None:
            self._timer.cancel()
        task = self._task
        if task is None or task.done():
            return
        try:
            if time.monotonic() > self._lease.deadline - self._margin_s:
                # Only the node can say whether the lease was valid all the time.
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
                return  # refused or unanswered; the deadline check after the read reports it
            await asyncio.sleep(self._pause_s())
