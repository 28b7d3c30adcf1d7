"""Runs a transport's blocking calls in threads, for callers on an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeVar

from kvpool.errors import DeadlineExceeded
from kvpool.transports import Transport
from kvpool.wire import messages as m

T = TypeVar("T")


async def run_transfer(
    transport: Transport, node: m.NodeDescriptor, size: int, work: Callable[..., T], *args: Any
) -> T:
    """Run a transfer of `size` bytes in a thread; directly if that is faster than starting one.

    When the caller is cancelled, this still waits for the thread: until the thread ends it may
    touch the caller's memory and the node's slots. The thread ends by its own deadline. If that
    passes with a transfer still running, the cancellation carries the `DeadlineExceeded` as its
    cause.
    """
    if size <= transport.quick_bytes and transport.is_connected(node):
        return work(*args)
    loop = asyncio.get_running_loop()
    future = loop.run_in_executor(transport.threads, functools.partial(work, *args))
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError as cancelled:
        while not future.done():  # however often the waiter is cancelled
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([future])
        error = None if future.cancelled() else future.exception()
        raise cancelled from error


async def close_in_thread(close: Callable[[], None]) -> None:
    """Call `close` in a thread.

    Directly if the interpreter is exiting, when no executor accepts work.
    """
    try:
        closing = asyncio.get_running_loop().run_in_executor(None, close)
    except RuntimeError:
        close()
    else:
        await closing


async def load_transport(
    load: Callable[[], Transport], node_id: str, timeout_s: float
) -> Transport:
    """Call `load` in a thread, because NIXL takes long to load.

    The thread continues after `timeout_s`.

    Raises:
        DeadlineExceeded: loading did not end in time. A later call may find it loaded.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.to_thread(load)
    except TimeoutError:
        raise DeadlineExceeded(
            f"the transport to {node_id} is still loading", hint="call connect() first"
        ) from None
