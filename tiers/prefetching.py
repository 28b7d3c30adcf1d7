"""Prefetch: bringing blocks from NVMe into DRAM ahead of a read. A bounded queue, and a reason for every no.

A prefetch takes no lease and promises nothing: what it brought may be evicted before it is read. What is
declined may be asked again.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

from kvpool.hashing import unpack_hashes
from kvpool.wire import messages as m
from tiers.mover import Mover
from tiers.store import Store

SLICE_BLOCKS = 16  # promoted together; reads that wait for a promotion come in between


class Prefetcher:
    """Promotes what was asked for, in the order asked, beside the traffic.

    Args:
        max_blocks: waiting at once; what comes on top is declined as "queue_full".
    """

    def __init__(
        self,
        store: Store,
        mover: Mover,
        max_blocks: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._store = store
        self._mover = mover
        self._max_blocks = max_blocks
        self._clock = clock
        self._queue: deque[tuple[bytes, list[bytes]]] = deque()
        self._waiting: set[tuple[bytes, bytes]] = set()
        self._wake = asyncio.Event()

    def prefetch(self, request: m.Prefetch) -> m.PrefetchReply:
        """Queue the leading run of what was asked; answers at once.

        Raises:
            UnknownNamespace, InvalidArgument: too many hashes.
        """
        hashes = unpack_hashes(request.hashes)
        tiers = self._store.lookup(request.namespace_id, hashes)
        reason = "not_here" if len(tiers) < len(hashes) else ""
        accepted: list[bytes] = []
        taken = resident = 0
        for block_hash, tier in zip(hashes, tiers, strict=False):
            if tier == "dram":
                resident += 1
                continue
            if (request.namespace_id, block_hash) in self._waiting:
                taken += 1
                continue
            if not self._mover.can_promote:
                reason = "disk_failed"
                break
            if len(self._waiting) >= self._max_blocks:
                reason = "queue_full"
                break
            accepted.append(block_hash)
            self._waiting.add((request.namespace_id, block_hash))
        if accepted:
            self._queue.append((request.namespace_id, accepted))
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
                namespace_id, hashes = self._queue.popleft()
                for start in range(0, len(hashes), SLICE_BLOCKS):
                    await self._promote(namespace_id, hashes[start : start + SLICE_BLOCKS])

    async def _promote(self, namespace_id: bytes, hashes: Sequence[bytes]) -> None:
        try:
            moves, reason = self._store.promote(namespace_id, hashes, self._clock())
            if moves:
                await self._mover.promote(moves)
        finally:
            self._waiting.difference_update((namespace_id, name) for name in hashes)
        tiers = self._store.lookup(namespace_id, hashes)
        self._count("prefetched", tiers.count("dram"))
        # Accepted, and yet not there: said nowhere else, so it is counted here.
        self._decline(reason or "lost", len(hashes) - tiers.count("dram"))

    def _decline(self, reason: str, count: int) -> None:
        self._count("prefetch_declined", count)
        self._count(f"prefetch_declined:{reason}", count)

    def _count(self, name: str, count: int) -> None:
        if count:
            self.counters[name] += count
