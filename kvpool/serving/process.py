"""Run a server process: event loop, signals, and the announcement that it is ready."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import uvloop

Ready = Callable[[dict[str, Any]], None]
Main = Callable[[Ready, asyncio.Event], Awaitable[None]]


def announce(facts: dict[str, Any]) -> None:
    """Print one JSON line with addresses and ids to stdout, for scripts and `kvpool up`."""
    sys.stdout.write(json.dumps({"ready": True, "pid": os.getpid(), **facts}) + "\n")
    sys.stdout.flush()


def run_process(main: Main) -> None:
    """Run `main(ready, stop)` until it returns.

    SIGINT and SIGTERM set `stop`; a second signal exits at once.

    A process that `kvpool up` started also stops when its parent is gone.
    """

    async def body() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        def on_signal() -> None:
            if stop.is_set():
                os._exit(130)
            stop.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal)
        watcher = None
        parent = os.environ.get("KVPOOL_PARENT_PID", "")
        if parent.isdigit():
            watcher = asyncio.create_task(_watch_parent(int(parent), stop))
        try:
            await main(announce, stop)
        finally:
            if watcher is not None:
                watcher.cancel()

    uvloop.run(body())


async def _watch_parent(parent: int, stop: asyncio.Event) -> None:
    while os.getppid() == parent:  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(0.5)
    stop.set()


async def wait_for_stop(stop: asyncio.Event, tasks: list[asyncio.Task[Any]]) -> None:
    """Wait until `stop` is set.

    Raises the error of a task that ends before; cancels all tasks at the end.
    """
    waiter = asyncio.create_task(stop.wait())
    try:
        done, _ = await asyncio.wait([waiter, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if task is not waiter:
                await task
                raise RuntimeError(f"background task {task.get_name()} ended")
    finally:
        waiter.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
