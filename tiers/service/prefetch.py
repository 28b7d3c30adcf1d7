"""Prefetch: promote blocks to DRAM or HBM ahead of a read. The queue is bounded.

A prefetch takes no lease: its blocks may be evicted before they are read. Every declined block has
    a reason, and the client may ask for it again.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

from kvpool.blocks.hashing import unpack_hashes
from kvpool.blocks.tier import Tier
from kvpool.errors import InvalidArgument
from kvpool.wire import messages as m
from tiers.service.migrator import Migrator
from tiers.store.store import Store

SLICE_BLOCKS = 16  # promoted together; promotions that requests wait for come in between


class PrefetchQueue:
    """Promotes requested blocks in the order of the requests, beside the traffic.

    Args:
        max_blocks: how many may wait; more are declined as "queue_full".
    """

    def __init__(
        self,
        store: Store,
        migrator: Migrator,
        max_blocks: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._store = store
        self._migrator = migrator
        self._max_blocks = max_blocks
        self._clock = clock
        self._queue: deque[tuple[bytes, list[bytes], Tier]] = deque()
        self._waiting: set[tuple[bytes, bytes, Tier]] = set()
        self._wake = asyncio.Event()

    def prefetch(self, request: m.Prefetch) -> m.PrefetchReply:
        """Queue the leading run of the requested blocks.

        Raises:
            UnknownNamespace, InvalidArgument: too many hashes, or no such tier.
        """
        target = request.tier
        if target == Tier.NVME:
            raise InvalidArgument(f"cannot prefetch into {target}", hint="dram or hbm")
        space = request.namespace_id
        hashes = unpack_hashes(request.hashes)
        tiers = self._store.lookup(space, hashes)
        reason = "not_here" if len(tiers) < len(hashes) else ""
        if target not in self._store.tiers:
            tiers, reason = [], f"no_{target}"
        accepted: list[bytes] = []
        taken = resident = 0
        for block_hash, tier in zip(hashes, tiers, strict=False):
            if tier == target or target in self._store.resident_tiers(space, block_hash):
                resident += 1
                continue
            if (space, block_hash, target) in self._waiting:
                taken += 1
                continue
            if tier == Tier.NVME and not self._migrator.can_promote:
                reason = "disk_failed"
                break
            if len(self._waiting) >= self._max_blocks:
                reason = "queue_full"
                break
            accepted.append(block_hash)
            self._waiting.add((space, block_hash, target))
        if accepted:
            self._queue.append((space, accepted, target))
            self._wake.set()
        taken += len(accepted)
        declined = len(hashes) - taken - resident
        self._count("prefetch_accepted", taken)
        self._decline(reason, declined)
        return m.PrefetchReply(taken, resident, declined, reason)

    async def run(self) -> None:
        """Promote until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                namespace_id, hashes, target = self._queue.popleft()
                for start in range(0, len(hashes), SLICE_BLOCKS):
                    await self._promote(namespace_id, hashes[start : start + SLICE_BLOCKS], target)

    async def _promote(self, namespace_id: bytes, hashes: Sequence[bytes], target: Tier) -> None:
        try:
            migrations, reason = self._store.promote(namespace_id, hashes, self._clock(), target)
            if migrations:
                await self._migrator.promote(migrations)
        finally:
            self._waiting.difference_update((namespace_id, name, target) for name in hashes)
        there = sum(target in self._store.resident_tiers(namespace_id, name) for name in hashes)
        self._count("prefetched", there)
        # The reply counted these as accepted; only the counters can say that they are missing.
        self._decline(reason or "lost", len(hashes) - there)

    def _decline(self, reason: str, count: int) -> None:
        self._count("prefetch_declined", count)
        self._count(f"prefetch_declined:{reason}", count)

    def _count(self, name: str, count: int) -> None:
        if count:
            self.counters[name] += count
