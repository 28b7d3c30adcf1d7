"""One `get`: all segments at once, and another replica where a node fails or lacks what it was said to have.

What failed is remembered by the pool and told to the conductor, so that no later request runs into it again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvpool.blocks.layout import Namespace
from kvpool.blocks.resharding import Plan
from kvpool.client.node.node_link import BlockChecksumMismatch, BytesMoved, NodeLink, ReadLease
from kvpool.errors import (
    DeadlineExceeded,
    KvpoolError,
    LeaseExpired,
    StaleEpoch,
    TransferFailed,
    Unavailable,
    UnverifiableRead,
)
from kvpool.transports.copy import Int64Array
from kvpool.wire import messages as m

if TYPE_CHECKING:
    from kvpool.client.async_pool import AsyncPool

MAX_ROUNDS = 8  # look-ups of one `get`; each but the first follows a failure
MIN_WAIT_S = 1e-3  # a limit that is used up; 0 would be none


@dataclass(slots=True, frozen=True)
class GetResult:
    """What `get` read: blocks [0, found) of the chain."""

    found: int
    tiers: tuple[str, ...]
    bytes_moved: dict[str, int]  # by transport
    verified: int  # blocks whose checksum was compared
    miss_reason: str  # why block number `found` was not read; "" when all were
    wait_s: float = 0.0  # predicted for blocks on disks, the declined ones included; -1: unknown
    waited_s: float = 0.0  # for those that came


@dataclass(slots=True, frozen=True)
class _Piece:
    """What one segment gave: its leading blocks, and why no more of them."""

    found: int
    tiers: tuple[str, ...]
    transport: str
    reason: str
    wait_s: float = 0.0
    waited_s: float = 0.0


class ChainReader:
    """Reads one chain into memory of the caller.

    Args:
        addresses, owner: where each block goes, and what keeps that alive.
        plan: which parts are read, and which of their bytes go where.
        deadline: monotonic seconds.
        max_wait_s: see `AsyncPool.get`; each node of a round, since they are read at once.
        tier: "hbm" to read from device memory what stands there.
    """

    def __init__(
        self,
        pool: AsyncPool,
        namespace: Namespace,
        hashes: Sequence[bytes],
        addresses: Int64Array,
        owner: Any,
        *,
        plan: Plan,
        verify: bool,
        deadline: float,
        is_disposable: bool,
        max_wait_s: float = 0.0,
        tier: str = "",
    ) -> None:
        self._pool = pool
        self._namespace = namespace
        self._hashes = hashes
        self._addresses = addresses
        self._owner = owner
        self._plan = plan
        self._verify = verify
        self._deadline = deadline
        self._is_disposable = is_disposable
        self._max_wait_s = max_wait_s
        self._wait_s = self._waited_s = 0.0
        self._declined: list[m.Segment] = []  # for want of time, and what follows
        self._insists = False  # all the time that is left goes to one node
        self._tier = tier
        self._found = 0
        self._tiers: list[str] = []
        self._moved = BytesMoved()
        self._reason = ""
        self._failed_nodes: set[str] = set()
        self._refusal: UnverifiableRead | None = None

    async def read(self, segments: Sequence[m.Segment]) -> GetResult:
        """Read what `segments` say, then look further where one failed, within the deadline.

        Raises:
            UnverifiableRead: see `NodeLink.check_verifiable`; raised when nothing is being read any more.
        """
        count = len(self._hashes)
        for _ in range(MAX_ROUNDS):
            is_broken = await self._read_round(segments)
            if self._refusal is not None:
                raise self._refusal
            if not is_broken or self._found == count or not self._pool.has_conductor:
                break
            segments = await self._alternatives()
            if not segments and self._declined and not self._insists:
                # Nobody else has it: no time need be kept for another.
                segments, self._insists = self._declined, True
            if not segments:
                break
        if self._found == count:
            self._reason = ""
        elif not self._reason:
            self._reason = "not_in_index"
        verified = self._found if self._verify else 0
        return GetResult(
            self._found,
            tuple(self._tiers),
            self._moved.by_transport,
            verified,
            self._reason,
            self._wait_s,
            self._waited_s,
        )

    async def _read_round(self, segments: Sequence[m.Segment]) -> bool:
        """Read segments at once; whether one gave less than it was said to hold."""
        segments, is_broken = self._without_known_misses(segments)
        pieces = await asyncio.gather(*(self._read_segment(segment) for segment in segments))
        if pieces:
            waits = [piece.wait_s for piece in pieces]
            self._wait_s = min(waits) if min(waits) < 0 else max(self._wait_s, *waits)
            self._waited_s += max(piece.waited_s for piece in pieces)
        for segment, piece in zip(segments, pieces, strict=True):
            if segment.start != self._found:
                break
            self._found += piece.found
            self._tiers += piece.tiers
            if piece.found:
                self._moved.add(piece.transport, piece.found * self._plan.rank_bytes)
            if piece.found < segment.count:
                self._reason = piece.reason
                self._declined = []
                if piece.reason == m.DECLINED_DEADLINE:
                    rest = segment.count - piece.found
                    again = m.Segment(segment.node_id, self._found, rest, segment.tier)
                    self._declined = [again, *segments[segments.index(segment) + 1 :]]
                return True
        return is_broken

    def _without_known_misses(self, segments: Sequence[m.Segment]) -> tuple[list[m.Segment], bool]:
        """The segments up to the first block that its node failed to give just now."""
        if not self._pool.has_conductor:
            return list(segments), False
        kept: list[m.Segment] = []
        for s in segments:
            hashes = self._hashes[s.start : s.start + s.count]
            leading = self._pool.negative_cache.leading(
                s.node_id, self._namespace.namespace_id, hashes, time.monotonic()
            )
            if leading:
                kept.append(m.Segment(s.node_id, s.start, leading, s.tier))
            if leading < s.count:
                self._reason = self._reason or "failed_recently"
                return kept, True
        return kept, False

    async def _alternatives(self) -> list[m.Segment]:
        """Where else the rest of the chain stands; empty when nowhere, or when no time is left."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            return []
        rest = self._hashes[self._found :]
        lacking = self._pool.negative_cache.nodes_lacking(
            self._namespace.namespace_id, rest[0], time.monotonic()
        )
        try:
            reply = await self._pool.lookup(
                self._namespace, rest, exclude=sorted(self._failed_nodes | lacking), timeout_s=left
            )
        except KvpoolError:
            return []  # the failure that brought us here is the reason to give
        return [
            m.Segment(s.node_id, s.start + self._found, s.count, s.tier) for s in reply.segments
        ]

    # ------------------------------------------------------------ one segment

    async def _read_segment(self, segment: m.Segment) -> _Piece:
        pool, namespace = self._pool, self._namespace
        hashes = self._hashes[segment.start : segment.start + segment.count]
        node_id = segment.node_id
        left = self._deadline - time.monotonic()
        # A node that does not answer must leave time for another one.
        patience_s = left / 2 if pool.has_conductor and not self._insists else left
        max_wait_s = self._max_wait_s
        if max_wait_s:
            max_wait_s = max(MIN_WAIT_S, max_wait_s - self._waited_s)

        async def pin(link: NodeLink) -> ReadLease:
            if self._verify:
                await link.check_verifiable(self._plan, patience_s)
            return await link.pin(
                namespace,
                hashes,
                ttl_s=max(1.0, left + 1.0),
                timeout_s=patience_s,
                parts=self._plan.parts,
                max_wait_s=max_wait_s,
                # Pieces of parts can be compared with their checksums in mapped memory only.
                tier=self._tier if self._plan.is_whole else "",
            )

        try:
            link, lease = await pool.at_node(node_id, self._deadline, pin)
        except UnverifiableRead as error:
            self._refusal = error
            return _Piece(0, (), "", error.code)
        except KvpoolError as error:
            return self._failed(node_id, hashes, error, patience_s)
        pool.negative_cache.answered(node_id)
        if lease.miss_reason in m.DECLINED:
            self._failed_nodes.add(node_id)  # for this call: another may have it in memory
        elif lease.found < len(hashes):
            pool.note_misses(node_id, namespace, [hashes[lease.found]])
        if not lease.found:
            reason = lease.miss_reason or "miss"
            return _Piece(0, (), "", reason, lease.wait_s, lease.waited_s)
        left = self._deadline - time.monotonic()
        try:
            await link.read(
                namespace,
                lease,
                hashes,
                self._addresses[segment.start : segment.start + lease.found],
                self._owner,
                verify=self._verify,
                timeout_s=max(0.001, left),
                is_disposable=self._is_disposable,
                plan=self._plan,
            )
        except BlockChecksumMismatch as error:
            pool.note_misses(node_id, namespace, [hashes[error.index]])
            return _Piece(0, (), "", error.code)
        except (TransferFailed, DeadlineExceeded, LeaseExpired, StaleEpoch, Unavailable) as error:
            if isinstance(error, DeadlineExceeded):
                # It may still arrive, and in the caller's memory if that is disposable: the end.
                self._deadline = time.monotonic()
            return self._failed(node_id, hashes, error, left)
        finally:
            link.release(lease)
        name = link.transport_to(lease.places).name
        return _Piece(
            lease.found, lease.tiers, name, lease.miss_reason, lease.wait_s, lease.waited_s
        )

    def _failed(
        self, node_id: str, hashes: Sequence[bytes], error: KvpoolError, patience_s: float
    ) -> _Piece:
        """The node as a whole failed us: ask others in this call, and remember."""
        self._pool.note_failure(node_id, self._namespace, hashes, error, patience_s)
        if not isinstance(error, StaleEpoch):  # then our own knowledge was old: meet it afresh
            self._failed_nodes.add(node_id)
        return _Piece(0, (), "", error.code)
