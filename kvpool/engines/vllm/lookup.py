"""Lookup and lease of one request's blocks, in the background of the scheduling loop.

With one node that is one round trip: the call that finds blocks also holds them. With a conductor the node of
this host is asked to hold what it has while the conductor says who has more; only what stands elsewhere takes
a second one.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_all

import structlog

from kvpool.blocks.layout import Namespace
from kvpool.blocks.tier import Tier
from kvpool.client.async_pool import AsyncPool
from kvpool.client.data.pinning import PinnedBlocks
from kvpool.client.pool import Pool
from kvpool.engines.vllm.pool_health import PoolHealth
from kvpool.errors import KvpoolError
from kvpool.wire import messages as m

log = structlog.get_logger(__name__)

NO_DISK_S = 1e-4  # to a pin: hold what stands in memory, and say what the rest would take


class Lookup:
    """One look-up. Its owner polls it and releases it, whatever became of it; all methods return at once,
    but for `wait`.

    Args:
        worth_s: of so many blocks, how long they may be waited for; 0 or less: they are not worth a load.
        lease_s: how long blocks are held.
        timeout_s: for the whole.
    """

    def __init__(
        self,
        pool: Pool,
        health: PoolHealth,
        namespace: Namespace,
        hashes: Sequence[bytes],
        *,
        worth_s: Callable[[int], float],
        lease_s: float,
        timeout_s: float,
    ) -> None:
        self.hashes = tuple(hashes)
        self.waiting_until = (
            0.0  # monotonic seconds; blocks come from a disk, and are worth it until then
        )
        self._namespace = namespace
        self._health = health
        self._worth_s = worth_s
        self._lease_s = lease_s
        self._timeout_s = timeout_s
        self._is_released = False
        self._knows_where = False  # a conductor has answered
        self._lock = threading.Lock()
        self._pinned: PinnedBlocks | None = None
        self._pool = pool
        self._future: Future[None] = pool.submit(self._run)

    @property
    def is_done(self) -> bool:
        """Whether the answer is there."""
        return self._future.done()

    @property
    def is_over(self) -> bool:
        """Whether what it found may not stand any more: too late to begin a load."""
        pinned = self._pinned
        return (
            self.is_done
            and pinned is not None
            and time.monotonic() > pinned.deadline - self._lease_s / 4
        )

    @property
    def found(self) -> int:
        """Leading blocks that are held; 0 while there is no answer."""
        return self._pinned.found if self.is_done and self._pinned is not None else 0

    @property
    def segments(self) -> tuple[m.Segment, ...]:
        """Which nodes hold them."""
        if self._pinned is None:
            return ()
        return tuple(
            m.Segment(link.node.node_id, start, lease.found, Tier.DRAM)
            for link, lease, start in self._pinned.held
            if lease.found
        )

    def wait(self, timeout_s: float) -> bool:
        """Wait for the answer; whether it is there."""
        wait_for_all([self._future], max(0.0, timeout_s))
        return self._future.done()

    def release(self) -> None:
        """Give back what is held, or will be; a second call does nothing."""
        with self._lock:
            if self._is_released:
                return
            self._is_released = True
            pinned = self._pinned
        if pinned is not None:
            self._pool.release(pinned)
        else:
            self._future.cancel()

    async def _run(self, pool: AsyncPool) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                pinned = await self._pin(pool)
        except (KvpoolError, TimeoutError) as error:
            if not self._knows_where:  # else a node failed, which says nothing of the others
                self._health.failed(error)
            return
        except Exception:  # vLLM's scheduler would die of it
            log.exception("a look-up failed by a defect")
            return
        self._health.answered()
        with self._lock:
            self._pinned = pinned
            is_wanted = not self._is_released
        if pinned is not None and not is_wanted:
            pinned.release()

    async def _pin(self, pool: AsyncPool) -> PinnedBlocks | None:
        if not pool.has_conductor:
            pinned = await self._hold(pool, self.hashes, None, NO_DISK_S)
            return await self._with_disk(pool, pinned, None)
        home = self._health.home
        if not home:
            return await self._ask(pool)
        here = [m.Segment(home, 0, len(self.hashes), Tier.DRAM)]
        near, far = await asyncio.gather(
            self._hold(pool, self.hashes, here, NO_DISK_S, is_guess=True),
            pool.lookup(self._namespace, self.hashes, timeout_s=self._timeout_s),
            return_exceptions=True,
        )
        if isinstance(near, PinnedBlocks):
            if isinstance(far, BaseException) or far.found <= near.found:
                return near
            near.release()
        if isinstance(far, BaseException):
            raise far
        return await self._ask(pool, far)

    async def _ask(
        self, pool: AsyncPool, found: m.LookupReply | None = None
    ) -> PinnedBlocks | None:
        """By what the conductor says."""
        if found is None:
            found = await pool.lookup(self._namespace, self.hashes, timeout_s=self._timeout_s)
        self._knows_where = True
        try:
            return await self._hold_found(pool, found)
        except KvpoolError as error:
            log.info("blocks are held elsewhere, or fewer: a node failed", error=str(error))
        # The client remembers which one: its blocks may stand at another, and those before them do.
        lacking = pool.directory.negative_cache.nodes_lacking(
            self._namespace.namespace_id, self.hashes[0], time.monotonic()
        )
        found = await pool.lookup(
            self._namespace, self.hashes, exclude=sorted(lacking), timeout_s=self._timeout_s
        )
        return await self._hold_found(pool, found)

    async def _hold_found(self, pool: AsyncPool, found: m.LookupReply) -> PinnedBlocks | None:
        if not found.found:
            return None
        hashes = self.hashes[: found.found]
        pinned = await self._hold(pool, hashes, found.segments, NO_DISK_S)
        return await self._with_disk(pool, pinned, found.segments)

    async def _with_disk(
        self, pool: AsyncPool, pinned: PinnedBlocks, segments: Sequence[m.Segment] | None
    ) -> PinnedBlocks | None:
        """What is held, or more of it where the rest stands on a disk and is worth waiting for."""
        if pinned.miss_reason not in m.DECLINED:
            return pinned
        limit_s = self._worth_s(len(self.hashes))
        if limit_s <= 0:
            return pinned
        self.waiting_until = time.monotonic() + limit_s
        pinned.release()
        return await self._hold(pool, self.hashes, segments, limit_s)

    async def _hold(
        self,
        pool: AsyncPool,
        hashes: Sequence[bytes],
        segments: Sequence[m.Segment] | None,
        max_wait_s: float,
        *,
        is_guess: bool = False,
    ) -> PinnedBlocks:
        return await pool.pin(
            self._namespace,
            hashes,
            ttl_s=self._lease_s,
            max_wait_s=max_wait_s,
            segments=segments,
            is_guess=is_guess,
            timeout_s=self._timeout_s,
        )
