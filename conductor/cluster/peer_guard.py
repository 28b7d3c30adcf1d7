"""Ends waits for replies of members that are lost.

A process that is stopped, or whose host loses power, closes no connection; only membership detects
it. Each wait has a function that says why its peer is lost. It is called at the start of the wait
and at each sweep.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from kvpool.errors import DeadlineExceeded, Unavailable


@dataclass(slots=True, eq=False)
class _Wait:
    why_lost: Callable[[], str]
    limit: asyncio.Timeout
    reason: str = ""


class PeerGuard:
    """All waits of this process; `check` ends those whose peer is lost."""

    def __init__(self) -> None:
        self._waits: set[_Wait] = set()

    @contextlib.asynccontextmanager
    async def waiting(
        self, who: str, why_lost: Callable[[], str], within_s: float
    ) -> AsyncIterator[None]:
        """Cancel the body when the peer is lost or `within_s` has passed.

        Args:
            who: the peer's name in errors, e.g. "worker 1234".
            why_lost: returns why the peer is lost; "" while it is not.

        Raises:
            Unavailable: the peer is lost; the error has the reason.
            DeadlineExceeded: `within_s` passed.
        """
        reason = why_lost()
        if reason:
            raise Unavailable(f"{who} {reason}")
        limit = asyncio.timeout(max(0.0, within_s))
        wait = _Wait(why_lost, limit)
        try:
            async with limit:
                self._waits.add(wait)
                try:
                    yield
                finally:
                    self._waits.discard(wait)
        except TimeoutError:
            if wait.reason:
                raise Unavailable(f"{who} {wait.reason}") from None
            raise DeadlineExceeded(f"{who} did not reply within {within_s:.3g} s") from None

    def check(self) -> None:
        """Check every wait. Call it after each sweep of membership."""
        now = asyncio.get_running_loop().time() if self._waits else 0.0
        for wait in list(self._waits):
            if not wait.reason and not wait.limit.expired():
                wait.reason = wait.why_lost()
                if wait.reason:
                    wait.limit.reschedule(now)

    def __len__(self) -> int:
        return len(self._waits)
