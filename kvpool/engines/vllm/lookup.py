"""Looks up and leases one request's blocks in the background of the scheduling loop.

With a single node this takes one round trip: the call that finds blocks also leases them. With a
conductor, the node of this host leases its blocks while the conductor says which nodes have more.
Only blocks on other nodes take a second round trip.
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

# as `max_wait_s` of a pin: lease blocks in memory, and predict the wait for the rest
NO_DISK_S = 1e-4


class Lookup:
    """One look-up.

    The owner polls it, and must release it. All methods except `wait` return at once.

    Args:
        worth_s: how long a load of so many blocks is worth waiting for; 0 or less: not at all.
        lease_s: how long blocks are held.
        timeout_s: time limit of the whole look-up.
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
            0.0  # monotonic seconds: until then, blocks from a disk are worth waiting for
        )
        self._namespace = namespace
        self._health = health
        self._worth_s = worth_s
        self._lease_s = lease_s
        self._timeout_s = timeout_s
        self._is_released = False
        self._knows_where = False  # whether a conductor has answered
        self._lock = threading.Lock()
        self._pinned: PinnedBlocks | None = None
        self._pool = pool
        self._future: Future[None] = pool.submit(self._run)

    @property
    def is_done(self) -> bool:
        """Whether the look-up has ended."""
        return self._future.done()

    @property
    def is_over(self) -> bool:
        """Whether the lease is too old to begin a load."""
        pinned = self._pinned
        return (
            self.is_done
            and pinned is not None
            and time.monotonic() > pinned.deadline - self._lease_s / 4
        )

    @property
    def found(self) -> int:
        """How many leading blocks are leased; 0 until the look-up ends."""
        return self._pinned.found if self.is_done and self._pinned is not None else 0

    @property
    def segments(self) -> tuple[m.Segment, ...]:
        """The nodes that hold the leased blocks."""
        if self._pinned is None:
            return ()
        return tuple(
            m.Segment(link.node.node_id, start, lease.found, Tier.DRAM)
            for link, lease, start in self._pinned.held
            if lease.found
        )

    def wait(self, timeout_s: float) -> bool:
        """Wait for the look-up to end. Returns whether it has."""
        wait_for_all([self._future], max(0.0, timeout_s))
        return self._future.done()

    def release(self) -> None:
        """End the lease, now or as soon as it is granted. A second call does nothing."""
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
            if not self._knows_where:  # otherwise only a node failed
                self._health.failed(error)
            return
        except Exception:  # it would end vLLM's scheduler
            log.exception("a look-up failed because of a defect")
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
        """Lease the blocks at the nodes that the conductor names."""
        if found is None:
            found = await pool.lookup(self._namespace, self.hashes, timeout_s=self._timeout_s)
        self._knows_where = True
        try:
            return await self._hold_found(pool, found)
        except KvpoolError as error:
            log.info("a node failed: looking up its blocks at other nodes", error=str(error))
        # The client's negative cache says which one. Other nodes may have its blocks.
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
        """The lease, extended by blocks on disks if they are worth waiting for."""
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
