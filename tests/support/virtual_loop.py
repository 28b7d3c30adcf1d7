"""An event loop on a virtual clock: when nothing is ready, time jumps to the next timer.

For tests of asynchronous code that waits on timers and on other tasks alone. Sockets and threads of
the real world take no virtual time, so they must not be waited for.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class Stuck(RuntimeError):
    """All tasks wait, and no timer will ever wake one."""


class _Selector(selectors.BaseSelector):
    """Does not wait: `advance` moves the clock instead."""

    def __init__(self, advance: Callable[[float], None]) -> None:
        self._real = selectors.SelectSelector()
        self._advance = advance

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._real.select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise Stuck("all tasks wait, and no timer will wake one")
        self._advance(timeout)
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose `time()` is virtual."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now = start_s
        super().__init__(_Selector(self._advance))

    def time(self) -> float:
        return self._now

    def _advance(self, seconds: float) -> None:
        """Go to the next timer, exactly: `seconds` is rounded."""
        timers: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        self._now = max(self._now, timers[0].when()) if timers else self._now + seconds


def run_virtually(work: Callable[[VirtualLoop], Coroutine[Any, Any, T]]) -> T:
    """Run `work(loop)` to its end on a fresh virtual loop."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualLoop)
        return runner.run(work(loop))
