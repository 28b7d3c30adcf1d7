"""The one thread on which an engine runs. Callers take turns."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class EngineThread:
    """First come, first served: a request's next step queues behind the steps of the others.

    So concurrent decodes take turns token by token.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kvpool-engine")
        self._lock = threading.Lock()
        self.waiting = 0  # jobs that have not begun

    async def run(self, job: Callable[..., T], *args: Any) -> T:
        """Run `job(*args)` on the engine's thread. Waits for a job that has begun, even if cancelled."""
        with self._lock:
            self.waiting += 1

        def begin() -> T:
            with self._lock:
                self.waiting -= 1
            return job(*args)

        future = self._pool.submit(begin)
        wrapped = asyncio.wrap_future(future)
        try:
            return await asyncio.shield(wrapped)
        except asyncio.CancelledError:
            if future.cancel():
                with self._lock:
                    self.waiting -= 1
            else:
                await asyncio.wait([wrapped])
            raise

    def close(self) -> None:
        """End the thread after its current job."""
        self._pool.shutdown(wait=False, cancel_futures=True)
