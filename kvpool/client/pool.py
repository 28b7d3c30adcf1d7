"""The pool for callers without an event loop: `AsyncPool` on a loop of its own, in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Self, TypeVar

import uvloop

from kvpool.blocks.layout import Namespace
from kvpool.blocks.resharding import TensorParallelRank
from kvpool.client.admin.listing import NodeListing
from kvpool.client.admin.replication import PrefetchResult, ReplicateResult
from kvpool.client.async_pool import AsyncPool, MemoryTier
from kvpool.client.data.pinning import PinnedBlocks
from kvpool.client.data.reading import GetResult
from kvpool.client.data.writing import PutResult
from kvpool.errors import DeadlineExceeded, Unavailable
from kvpool.security.credentials import NO_CREDENTIALS, Credentials
from kvpool.transports import TransportName
from kvpool.wire import messages as m

T = TypeVar("T")


class Pool:
    """Blocking client of a pool; safe to share between threads. Use as a context manager.

    Arguments and methods are those of `AsyncPool`; every call returns within its `timeout_s`.
    """

    def __init__(
        self,
        *,
        conductor: str | None = None,
        node: str | None = None,
        host_label: str | None = None,
        transport: TransportName = "auto",
        timeout_s: float = 10.0,
        verify_checksums: bool = True,
        credentials: Credentials = NO_CREDENTIALS,
        require_rdma: bool = False,
    ) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="kvpool-client", daemon=True
        )
        self._thread.start()
        self._is_closed = False

        async def make() -> AsyncPool:
            return AsyncPool(
                conductor=conductor,
                node=node,
                host_label=host_label,
                transport=transport,
                timeout_s=timeout_s,
                verify_checksums=verify_checksums,
                credentials=credentials,
                require_rdma=require_rdma,
            )

        try:
            self._pool = self._wait(make(), 10.0)
        except BaseException:
            self._stop()
            raise
        self.timeout_s = timeout_s

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every connection and stop the thread; a second call does nothing."""
        if not self._is_closed:
            with contextlib.suppress(DeadlineExceeded):
                self._wait(self._pool.close(), 5.0)
            self._is_closed = True
            self._stop()

    def register(self, namespace: Namespace, *, timeout_s: float | None = None) -> bytes:
        """See `AsyncPool.register`."""
        return self._call(self._pool.register(namespace, timeout_s=timeout_s), timeout_s)

    def namespaces(self, *, timeout_s: float | None = None) -> list[Namespace]:
        """See `AsyncPool.namespaces`."""
        return self._call(self._pool.namespaces(timeout_s=timeout_s), timeout_s)

    def tokenize(
        self, text: str, *, is_system_prompt: bool = False, timeout_s: float | None = None
    ) -> list[int]:
        """See `AsyncPool.tokenize`."""
        job = self._pool.tokenize(text, is_system_prompt=is_system_prompt, timeout_s=timeout_s)
        return self._call(job, timeout_s)

    def compatible_namespaces(
        self, namespace: Namespace, *, timeout_s: float | None = None
    ) -> list[Namespace]:
        """See `AsyncPool.compatible_namespaces`."""
        job = self._pool.compatible_namespaces(namespace, timeout_s=timeout_s)
        return self._call(job, timeout_s)

    def lookup(
        self, namespace: Namespace, hashes: Sequence[bytes], *, timeout_s: float | None = None
    ) -> m.LookupReply:
        """See `AsyncPool.lookup`."""
        return self._call(self._pool.lookup(namespace, hashes, timeout_s=timeout_s), timeout_s)

    def standing(
        self, namespace: Namespace, hashes: Sequence[bytes], *, timeout_s: float | None = None
    ) -> list[bool]:
        """See `AsyncPool.standing`."""
        return self._call(self._pool.standing(namespace, hashes, timeout_s=timeout_s), timeout_s)

    def register_memory(self, data: Any) -> None:
        """See `AsyncPool.register_memory`."""
        self._pool.register_memory(data)

    def deregister_memory(self, data: Any) -> None:
        """See `AsyncPool.deregister_memory`."""
        self._pool.deregister_memory(data)

    def nodes(self, *, timeout_s: float | None = None) -> list[m.NodeInfo]:
        """See `AsyncPool.nodes`."""
        return self._call(self._pool.nodes(timeout_s=timeout_s), timeout_s)

    def stats(self, *, timeout_s: float | None = None) -> m.PoolStatsReply:
        """See `AsyncPool.stats`."""
        return self._call(self._pool.stats(timeout_s=timeout_s), timeout_s)

    def get(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes],
        out: Any,
        *,
        part: int = 0,
        as_rank: TensorParallelRank | None = None,
        verify: bool | None = None,
        segments: Sequence[m.Segment] | None = None,
        is_disposable: bool = False,
        max_wait_s: float = 0.0,
        tier: MemoryTier = "",
        timeout_s: float | None = None,
    ) -> GetResult:
        """See `AsyncPool.get`."""
        job = self._pool.get(
            namespace,
            hashes,
            out,
            part=part,
            as_rank=as_rank,
            verify=verify,
            segments=segments,
            is_disposable=is_disposable,
            max_wait_s=max_wait_s,
            tier=tier,
            timeout_s=timeout_s,
        )
        return self._call(job, timeout_s)

    def put(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes],
        data: Any,
        *,
        parent: bytes = b"",
        part: int = 0,
        as_rank: TensorParallelRank | None = None,
        node_id: str | None = None,
        replicas: int = 1,
        tier: MemoryTier = "",
        timeout_s: float | None = None,
    ) -> PutResult:
        """See `AsyncPool.put`."""
        job = self._pool.put(
            namespace,
            hashes,
            data,
            parent=parent,
            part=part,
            as_rank=as_rank,
            node_id=node_id,
            replicas=replicas,
            tier=tier,
            timeout_s=timeout_s,
        )
        return self._call(job, timeout_s)

    def replicate(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes],
        *,
        to: str,
        parent: bytes = b"",
        timeout_s: float | None = None,
    ) -> ReplicateResult:
        """See `AsyncPool.replicate`."""
        job = self._pool.replicate(namespace, hashes, to=to, parent=parent, timeout_s=timeout_s)
        return self._call(job, timeout_s)

    def prefetch(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes],
        *,
        tier: MemoryTier = "",
        timeout_s: float | None = None,
    ) -> PrefetchResult:
        """See `AsyncPool.prefetch`."""
        job = self._pool.prefetch(namespace, hashes, tier=tier, timeout_s=timeout_s)
        return self._call(job, timeout_s)

    def protect(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes],
        *,
        ttl_s: float | None = None,
        timeout_s: float | None = None,
    ) -> dict[str, int]:
        """See `AsyncPool.protect`."""
        job = self._pool.protect(namespace, hashes, ttl_s=ttl_s, timeout_s=timeout_s)
        return self._call(job, timeout_s)

    def unprotect(
        self, namespace: Namespace, hashes: Sequence[bytes], *, timeout_s: float | None = None
    ) -> dict[str, int]:
        """See `AsyncPool.unprotect`."""
        return self._call(self._pool.unprotect(namespace, hashes, timeout_s=timeout_s), timeout_s)

    def drop(
        self, namespace: Namespace, hashes: Sequence[bytes], *, timeout_s: float | None = None
    ) -> dict[str, int]:
        """See `AsyncPool.drop`."""
        return self._call(self._pool.drop(namespace, hashes, timeout_s=timeout_s), timeout_s)

    def ask_conductor(self, request: m.Message, *, timeout_s: float | None = None) -> Any:
        """See `AsyncPool.ask_conductor`."""
        return self._call(self._pool.ask_conductor(request, timeout_s=timeout_s), timeout_s)

    def drain(self, node_id: str, *, drop: bool = False, timeout_s: float = 60.0) -> m.DrainReply:
        """See `AsyncPool.drain`."""
        job = self._pool.drain(node_id, drop=drop, timeout_s=timeout_s)
        return self._call(job, timeout_s + 5.0)

    def peers(self) -> list[m.PeerRate]:
        """See `AsyncPool.peers`."""
        return self._pool.peers()

    def list_blocks(
        self,
        *,
        node_id: str = "",
        model: str = "",
        limit: int = 100,
        timeout_s: float | None = None,
    ) -> list[NodeListing]:
        """See `AsyncPool.list_blocks`."""
        job = self._pool.list_blocks(node_id=node_id, model=model, limit=limit, timeout_s=timeout_s)
        return self._call(job, timeout_s)

    def resize(
        self, node_id: str, dram_bytes: int, *, timeout_s: float = 120.0
    ) -> m.ResizeDramReply:
        """See `AsyncPool.resize`."""
        return self._call(self._pool.resize(node_id, dram_bytes, timeout_s=timeout_s), timeout_s)

    def pin(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes],
        *,
        ttl_s: float = 10.0,
        part: int | None = None,
        max_wait_s: float = 0.0,
        tier: MemoryTier = "",
        segments: Sequence[m.Segment] | None = None,
        timeout_s: float | None = None,
    ) -> PinnedBlocks:
        """See `AsyncPool.pin`; give it back with `release`."""
        job = self._pool.pin(
            namespace,
            hashes,
            ttl_s=ttl_s,
            part=part,
            max_wait_s=max_wait_s,
            tier=tier,
            segments=segments,
            timeout_s=timeout_s,
        )
        return self._call(job, timeout_s)

    def release(self, pinned: PinnedBlocks) -> None:
        """Give pinned blocks back."""
        self._loop.call_soon_threadsafe(pinned.release)

    def read_pinned(self, pinned: PinnedBlocks, out: Any, *, timeout_s: float | None = None) -> int:
        """See `AsyncPool.read_pinned`."""
        return self._call(self._pool.read_pinned(pinned, out, timeout_s=timeout_s), timeout_s)

    @contextlib.contextmanager
    def pinned(
        self, namespace: Namespace, hashes: Sequence[bytes], **options: Any
    ) -> Iterator[PinnedBlocks]:
        """`pin` for the length of a `with` block."""
        pinned = self.pin(namespace, hashes, **options)
        try:
            yield pinned
        finally:
            self.release(pinned)

    def submit(self, start: Callable[[AsyncPool], Coroutine[Any, Any, T]]) -> Future[T]:
        """Begin a call, or several in one coroutine, without waiting: for callers who must not.

        Args:
            start: makes the coroutine out of the client that it shall use; called on the client's loop.

        Returns:
            A future; cancelling it cancels the coroutine. Its callbacks run on the client's loop.

        Raises:
            Unavailable: the client is closed.
        """
        if self._is_closed:
            raise Unavailable("the pool client is closed")

        async def run() -> T:
            return await start(self._pool)

        return asyncio.run_coroutine_threadsafe(run(), self._loop)

    def _call(self, job: Coroutine[Any, Any, T], timeout_s: float | None) -> T:
        # The job keeps its own deadline; the margin is for one that a native call holds up.
        return self._wait(job, (timeout_s or self.timeout_s) + 2.0)

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
