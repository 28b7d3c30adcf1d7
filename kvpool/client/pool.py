"""`Pool`: the blocking client of a pool, for callers without an event loop.

It runs an `AsyncPool` on an event loop in a thread of its own. Each method delegates to the method
of the same name and keeps its signature and docstring.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import uvloop

from kvpool.blocks.layout import Namespace
from kvpool.client.async_pool import AsyncPool
from kvpool.client.data.pinning import PinnedBlocks
from kvpool.errors import DeadlineExceeded, Unavailable

P = ParamSpec("P")
T = TypeVar("T")

# A call keeps its own deadline; the margin covers a native call that holds it up.
MARGIN_S = 2.0
DRAIN_MARGIN_S = 5.0 + MARGIN_S  # `AsyncPool.drain` waits 5 s longer than its node


def _blocking(
    method: Callable[Concatenate[AsyncPool, P], Coroutine[Any, Any, T]],
    margin_s: float = MARGIN_S,
) -> Callable[Concatenate[Pool, P], T]:
    """The blocking form of a coroutine method of `AsyncPool`.

    Waits `margin_s` longer than its `timeout_s`.
    """
    default_s = inspect.signature(method).parameters["timeout_s"].default

    @functools.wraps(method)
    def call(pool: Pool, /, *args: P.args, **kwargs: P.kwargs) -> T:
        timeout_s = kwargs.get("timeout_s", default_s) or pool.timeout_s
        assert isinstance(timeout_s, (int, float))
        return pool._wait(method(pool._pool, *args, **kwargs), timeout_s + margin_s)

    return call


def _direct(
    method: Callable[Concatenate[AsyncPool, P], T],
) -> Callable[Concatenate[Pool, P], T]:
    """A method of `AsyncPool` that does not wait, called in the caller's thread."""

    @functools.wraps(method)
    def call(pool: Pool, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(pool._pool, *args, **kwargs)

    return call


def _with_arguments_of(
    method: Callable[Concatenate[AsyncPool, P], T],
) -> Callable[[Callable[..., T]], Callable[Concatenate[Pool, P], T]]:
    """Give a method the signature of a method of `AsyncPool`."""

    def decorate(own: Callable[..., T]) -> Callable[Concatenate[Pool, P], T]:
        return functools.wraps(method)(own)

    return decorate


class Pool:
    """Blocking client of a pool; threads may share it.

    Use it as `with Pool(conductor="127.0.0.1:7800") as pool:`.

    Arguments, methods and errors are those of `AsyncPool`. Every call returns within its
    `timeout_s` and a small margin.
    """

    @_with_arguments_of(AsyncPool.__init__)
    def __init__(self, **options: Any) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="kvpool-client", daemon=True
        )
        self._thread.start()
        self._is_closed = False

        async def make() -> AsyncPool:
            return AsyncPool(**options)

        try:
            self._pool = self._wait(make(), 10.0)
        except BaseException:
            self._stop()
            raise
        self.timeout_s = self._pool.timeout_s

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every connection and stop the thread. A second call does nothing."""
        if self._is_closed:
            return
        try:
            with contextlib.suppress(DeadlineExceeded):
                self._wait(self._pool.close(), 5.0)
        finally:
            self._is_closed = True
            self._stop()

    register = _blocking(AsyncPool.register)
    lookup = _blocking(AsyncPool.lookup)
    exists = _blocking(AsyncPool.exists)
    get = _blocking(AsyncPool.get)
    put = _blocking(AsyncPool.put)
    pin = _blocking(AsyncPool.pin)
    read_pinned = _blocking(AsyncPool.read_pinned)
    namespaces = _blocking(AsyncPool.namespaces)
    compatible_namespaces = _blocking(AsyncPool.compatible_namespaces)
    tokenize = _blocking(AsyncPool.tokenize)
    nodes = _blocking(AsyncPool.nodes)
    connect = _blocking(AsyncPool.connect)
    stats = _blocking(AsyncPool.stats)
    ask_conductor = _blocking(AsyncPool.ask_conductor)
    list_blocks = _blocking(AsyncPool.list_blocks)
    replicate = _blocking(AsyncPool.replicate)
    prefetch = _blocking(AsyncPool.prefetch)
    protect = _blocking(AsyncPool.protect)
    unprotect = _blocking(AsyncPool.unprotect)
    drop = _blocking(AsyncPool.drop)
    drain = _blocking(AsyncPool.drain, DRAIN_MARGIN_S)
    resize = _blocking(AsyncPool.resize)

    register_memory = _direct(AsyncPool.register_memory)
    deregister_memory = _direct(AsyncPool.deregister_memory)
    peers = _direct(AsyncPool.peers)

    def release(self, pinned: PinnedBlocks) -> None:
        """End the leases of pinned blocks."""
        self._loop.call_soon_threadsafe(pinned.release)

    @contextlib.contextmanager
    def pinned(
        self, namespace: Namespace, hashes: Sequence[bytes], **options: Any
    ) -> Iterator[PinnedBlocks]:
        """`pin` for the length of a `with` block; takes the options of `pin`."""
        pinned = self.pin(namespace, hashes, **options)
        try:
            yield pinned
        finally:
            self.release(pinned)

    def submit(self, start: Callable[[AsyncPool], Coroutine[Any, Any, T]]) -> Future[T]:
        """Start one or several calls as a coroutine, without waiting for them.

        Args:
            start: makes the coroutine from the client that it uses; called on the client's event
                loop.

        Returns:
            A future. Cancelling it cancels the coroutine. Its callbacks run on the client's event
            loop.

        Raises:
            Unavailable: the client is closed.
        """
        if self._is_closed:
            raise Unavailable("the pool client is closed")

        async def run() -> T:
            return await start(self._pool)

        return asyncio.run_coroutine_threadsafe(run(), self._loop)

    def _wait(self, job: Coroutine[Any, Any, T], timeout_s: float) -> T:
        if self._is_closed:
            job.close()
            raise Unavailable("the pool client is closed")
        has_ended = threading.Event()

        async def run() -> T:
            try:
                return await job
            finally:
                has_ended.set()

        future = asyncio.run_coroutine_threadsafe(run(), self._loop)
        try:
            return future.result(timeout=timeout_s)
        except FutureTimeout:
            future.cancel()
            # Until the job has ended it may write into the caller's memory.
            has_ended.wait(timeout_s)
            raise DeadlineExceeded(f"the call did not end within {timeout_s:g} s") from None

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)
        if not self._thread.is_alive():
            self._loop.close()
