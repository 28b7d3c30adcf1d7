"""An event loop in a thread of its own, for engines that call from their own threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import uvloop

from kvpool.errors import Unavailable

T = TypeVar("T")


class LoopThread:
    """Runs coroutines and callbacks on its loop. End it with `stop`."""

    def __init__(self, name: str) -> None:
        self.loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def start(self, job: Coroutine[Any, Any, T]) -> Future[T]:
        """Run `job` without waiting for it.

        Raises:
            Unavailable: the loop has been stopped.
        """
        try:
            return asyncio.run_coroutine_threadsafe(job, self.loop)
        except RuntimeError as error:
            job.close()
            raise Unavailable("the backend is closed") from error

    def open(self, job: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run `job` and wait for it. If it fails, stop the loop and raise the error of `job`."""
        try:
            return self.start(job).result(timeout_s)
        except BaseException:
            self.stop()
            raise

    def call_soon(self, function: Callable[..., object], *args: Any) -> None:
        """Call `function` on the loop soon. Raises as `start`."""
        try:
            self.loop.call_soon_threadsafe(function, *args)
        except RuntimeError as error:
            raise Unavailable("the backend is closed") from error

    def stop(self) -> None:
        """End the loop and its thread. Call it from another thread. A second call does nothing."""
        if not self._thread.is_alive():
            return
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=5)
        if not self._thread.is_alive():
            self.loop.close()
