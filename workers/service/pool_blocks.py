"""Reads a request's blocks from the pool, and stores those computed here. A failure costs reuse, not the request."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import structlog

from kvpool.blocks.layout import Namespace
from kvpool.client import AsyncPool, GetResult
from kvpool.errors import KvpoolError
from kvpool.wire import messages as m
from workers.service.layer_sender import LayerSender, moved
from workers.service.load import Rates
from workers.service.progress import Progress

log = structlog.get_logger(__name__)

STORE_TIMEOUT_S = 10.0


class PoolBlocks:
    """Reads and stores blocks of one namespace.

    Args:
        rates, counters: take what is measured and counted.
    """

    def __init__(
        self, pool: AsyncPool, namespace: Namespace, rates: Rates, counters: Counter[str]
    ) -> None:
        self._pool = pool
        self._namespace = namespace
        self._rates = rates
        self._counters = counters

    async def read(
        self,
        request: m.Prefill | m.Generate,
        hashes: Sequence[bytes],
        deadline: float,
        progress: Progress,
    ) -> np.ndarray | None:
        """The leading blocks that the pool holds, verified; None if there are none.

        Declines blocks that would take longer to read than to compute.
        """
        segments = request.segments
        count = sum(segment.count for segment in segments)
        if not count:
            return None
        for node in request.nodes:
            self._pool.directory.link_to(node)
        layout = self._namespace.layout
        blocks = np.empty((count, layout.part_bytes), dtype=np.uint8)
        started = time.monotonic()
        with progress.phase("kv_cache_transfer_time"):
            try:
                result = await self._pool.get(
                    self._namespace,
                    hashes[:count],
                    blocks,
                    segments=segments,
                    is_disposable=True,
                    max_wait_s=request.max_wait_s,
                    timeout_s=max(0.05, (deadline - time.monotonic()) / 2),
                )
            except KvpoolError as error:
                result = GetResult(0, (), {}, 0, error.code)
        if result.waited_s:
            progress.phases["kv_cache_promotion_time"] = result.waited_s
        progress.bytes_read = result.bytes_moved
        progress.verified_blocks = result.verified
        progress.tiers = result.tiers
        progress.pool_tokens = result.found * layout.block_tokens
        if result.found < count:
            progress.fallback_reason = f"pool_read:{result.miss_reason}"
            kind = "miss" if result.miss_reason in m.DECLINED else "fallback"
            self._counters[f"{kind}:{result.miss_reason}"] += 1
            log.warning(
                "read less than planned",
                request_id=request.request_id,
                found=result.found,
                planned=count,
                reason=result.miss_reason,
            )
        if not result.found:
            return None
        self._rates.update(
            "fetch_bytes_per_s",
            result.found * layout.part_bytes / max(1e-6, time.monotonic() - started),
        )
        return blocks[: result.found]

    async def reserve(
        self,
        nodes: Sequence[m.NodeDescriptor],
        hashes: list[bytes],
        have: int,
        deadline: float,
    ) -> tuple[LayerSender | None, Any]:
        """Reserve slots for the blocks that will be computed here, on this host's node if it has one.

        Returns:
            A sender and its link, or (None, None) if nothing was reserved.
        """
        here = [node for node in nodes if node.host == self._pool.directory.host_label] or list(
            nodes
        )
        wanted = hashes[have:]
        if not here or not wanted:
            return None, None
        timeout_s = min(1.0, max(0.05, deadline - time.monotonic()))
        try:
            link = self._pool.directory.link_to(here[0])
            reservation = await link.reserve(
                self._namespace,
                wanted,
                parent=hashes[have - 1] if have else b"",
                part=0,
                ttl_s=STORE_TIMEOUT_S + 20.0,
                timeout_s=timeout_s,
                writer_id=self._pool.client_id,
            )
        except KvpoolError as error:
            self._counters[f"store_declined:{error.code}"] += 1
            return None, None
        if not reservation.granted:
            return None, None
        indices = np.array(reservation.granted) + have
        left = max(1.0, deadline - time.monotonic())
        return LayerSender(link, reservation, indices, self._namespace.layout, left), link

    async def store(
        self, sender: LayerSender, link: Any, progress: Progress, request_id: str
    ) -> None:
        """Commit what was computed here. A failure costs later reuse, not this request."""
        try:
            await sender.commit()
            progress.bytes_written = moved(sender, link)
        except KvpoolError as error:
            self._counters[f"store_failed:{error.code}"] += 1
            log.warning(
                "blocks computed here were not stored", request_id=request_id, error=str(error)
            )
