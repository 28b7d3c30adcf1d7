"""Waiting for a member's answer only as long as there is a point in it.

A process that was stopped, or whose host lost power, closes no connection: only membership tells. Each
wait brings a question ("why is it in vain?"), which is put at its start and at each sweep.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from kvpool.errors import DeadlineExceeded, Unavailable


@dataclass(slots=True, eq=False)
class _Wait:
    why_in_vain: Callable[[], str]
    limit: asyncio.Timeout
    reason: str = ""


class PeerGuard:
    """All waits of this process; `check` ends those that became vain."""

    def __init__(self) -> None:
        self._waits: set[_Wait] = set()

    @contextlib.asynccontextmanager
    async def waiting(
        self, who: str, why_in_vain: Callable[[], str], within_s: float
    ) -> AsyncIterator[None]:
        """Cancel the body when the wait is in vain or `within_s` is over.

        Args:
            who: named in errors, e.g. "worker 1234".
            why_in_vain: "" as long as waiting makes sense, else the reason.

        Raises:
            Unavailable: with the reason.
            DeadlineExceeded: `within_s` passed.
        """
        reason = why_in_vain()
        if reason:
            raise Unavailable(f"{who} {reason}")
        limit = asyncio.timeout(max(0.0, within_s))
        wait = _Wait(why_in_vain, limit)
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
            raise DeadlineExceeded(f"{who} did not answer within {within_s:.3g} s") from None

    def check(self) -> None:
        """Put each wait's question again. Call it after each sweep of membership."""
        now = asyncio.get_running_loop().time() if self._waits else 0.0
        for wait in list(self._waits):
            if not wait.reason and not wait.limit.expired():
                wait.reason = wait.why_in_vain()
                if wait.reason:
                    wait.limit.reschedule(now)

    def __len__(self) -> int:
        return len(self._waits)
