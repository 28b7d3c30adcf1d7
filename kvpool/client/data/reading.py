"""One `get`: reads all segments at once, and tries other replicas if a node fails.

The directory remembers each failure and tells the conductor, so that no later request repeats it.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvpool.blocks.layout import Namespace
from kvpool.blocks.resharding import TransferPlan
from kvpool.blocks.tier import Tier
from kvpool.client.node.directory import NodeDirectory
from kvpool.client.node.grants import BytesMoved, ReadLease
from kvpool.client.node.lookup import lookup
from kvpool.client.node.node_link import BlockChecksumMismatch, NodeLink
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

MAX_ROUNDS = 8  # look-ups of one `get`; each after the first follows a failure
MIN_WAIT_S = 1e-3  # the limit once `max_wait_s` is used up; 0 would mean no limit


@dataclass(slots=True, frozen=True)
class GetResult:
    """What `get` read: blocks [0, found) of the chain. `tiers` names the tier of each."""

    found: int
    tiers: tuple[Tier, ...]
    bytes_moved: dict[str, int]  # by transport
    verified: int  # blocks whose checksum was compared
    miss_reason: str  # why block number `found` was not read; "" if all were
    wait_s: float = 0.0  # predicted for blocks on disks, including declined ones; -1: unknown
    waited_s: float = 0.0  # for the blocks that came from disks


@dataclass(slots=True, frozen=True)
class _Piece:
    """What one segment gave: how many leading blocks, and why no more."""

    found: int
    tiers: tuple[Tier, ...]
    transport: str
    reason: str
    wait_s: float = 0.0
    waited_s: float = 0.0


class ChainReader:
    """Reads one chain into memory of the caller.

    Args:
        addresses, owner: where each block goes, and what keeps that memory alive.
        plan: which parts are read, and which of their bytes go where.
        deadline: monotonic seconds.
        max_wait_s: as for `AsyncPool.get`. It limits each node of a round, because nodes are read
            at once.
        tier: HBM to read blocks from device memory.
    """

    def __init__(
        self,
        directory: NodeDirectory,
        namespace: Namespace,
        hashes: Sequence[bytes],
        addresses: Int64Array,
        owner: Any,
        *,
        plan: TransferPlan,
        verify: bool,
        deadline: float,
        is_disposable: bool,
        max_wait_s: float = 0.0,
        tier: Tier = Tier.DRAM,
    ) -> None:
        self._directory = directory
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
        self._declined: list[m.Segment] = []  # declined for lack of time, and the segments after it
        self._insists = False  # give all remaining time to one node
        self._tier = tier
        self._found = 0
        self._tiers: list[Tier] = []
        self._moved = BytesMoved()
        self._reason = ""
        self._failed_nodes: set[str] = set()
        self._refusal: UnverifiableRead | None = None

    async def read(self, segments: Sequence[m.Segment]) -> GetResult:
        """Read `segments`; after a failure, look up other replicas within the deadline.

        Raises:
            UnverifiableRead: checksums are required and a node's transport cannot compare them.
                Raised after all reads have ended.
        """
        count = len(self._hashes)
        for _ in range(MAX_ROUNDS):
            is_broken = await self._read_round(segments)
            if self._refusal is not None:
                raise self._refusal
            if not is_broken or self._found == count or not self._directory.has_conductor:
                break
            segments = await self._alternatives()
            if not segments and self._declined and not self._insists:
                # No other node has it, so no time need be kept for one.
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
        """Read segments at once.

        Returns whether one gave fewer blocks than the look-up promised.
        """
        segments, is_broken = self._without_failed(segments)
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

    def _without_failed(self, segments: Sequence[m.Segment]) -> tuple[list[m.Segment], bool]:
        """The segments up to a block that its node recently failed to give; whether any was cut."""
        if not self._directory.has_conductor:
            return list(segments), False
        kept: list[m.Segment] = []
        for s in segments:
            hashes = self._hashes[s.start : s.start + s.count]
            leading = self._directory.count_unfailed(s.node_id, self._namespace, hashes)
            if leading:
                kept.append(m.Segment(s.node_id, s.start, leading, s.tier))
            if leading < s.count:
                self._reason = self._reason or "failed_recently"
                return kept, True
        return kept, False

    async def _alternatives(self) -> list[m.Segment]:
        """Other places of the rest of the chain; empty if there are none or no time is left."""
        if time.monotonic() >= self._deadline:
            return []
        rest = self._hashes[self._found :]
        lacking = self._directory.negative_cache.nodes_lacking(
            self._namespace.namespace_id, rest[0], time.monotonic()
        )
        try:
            reply = await lookup(
                self._directory,
                self._namespace,
                rest,
                self._deadline,
                exclude=sorted(self._failed_nodes | lacking),
            )
        except KvpoolError:
            return []  # keep the first failure as the reason
        return [
            m.Segment(s.node_id, s.start + self._found, s.count, s.tier) for s in reply.segments
        ]

    # ------------------------------------------------------------ one segment

    async def _read_segment(self, segment: m.Segment) -> _Piece:
        directory, node_id = self._directory, segment.node_id
        hashes = self._hashes[segment.start : segment.start + segment.count]
        left = self._deadline - time.monotonic()
        # A silent node must leave time to try another one.
        node_s = left / 2 if directory.has_conductor and not self._insists else left
        try:
            link, lease = await directory.call_node(
                node_id,
                self._deadline,
                functools.partial(
                    self._pin, hashes=hashes, ttl_s=max(1.0, left + 1.0), timeout_s=node_s
                ),
            )
        except UnverifiableRead as error:
            self._refusal = error
            return _Piece(0, (), "", error.code)
        except KvpoolError as error:
            return self._failed(node_id, hashes, error, node_s)
        directory.negative_cache.reset_silence(node_id)
        if lease.miss_reason in m.DECLINED:
            # For this call only: another node may have it in memory.
            self._failed_nodes.add(node_id)
        elif lease.found < len(hashes):
            directory.report_misses(node_id, self._namespace, [hashes[lease.found]])
        if not lease.found:
            reason = lease.miss_reason or "miss"
            return _Piece(0, (), "", reason, lease.wait_s, lease.waited_s)
        return await self._read_leased(link, lease, segment, hashes)

    async def _pin(
        self, link: NodeLink, *, hashes: Sequence[bytes], ttl_s: float, timeout_s: float
    ) -> ReadLease:
        max_wait_s = self._max_wait_s
        if max_wait_s:
            max_wait_s = max(MIN_WAIT_S, max_wait_s - self._waited_s)
        if self._verify:
            await link.transports.check_verifiable(self._plan, timeout_s)
        return await link.pin(
            self._namespace,
            hashes,
            ttl_s=ttl_s,
            timeout_s=timeout_s,
            parts=self._plan.parts,
            max_wait_s=max_wait_s,
            # Only mapped memory allows comparing pieces of parts with their checksums.
            tier=self._tier if self._plan.is_whole else Tier.DRAM,
        )

    async def _read_leased(
        self, link: NodeLink, lease: ReadLease, segment: m.Segment, hashes: Sequence[bytes]
    ) -> _Piece:
        left = self._deadline - time.monotonic()
        try:
            await link.read(
                self._namespace,
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
            self._directory.report_misses(segment.node_id, self._namespace, [hashes[error.index]])
            return _Piece(0, (), "", error.code)
        except (TransferFailed, DeadlineExceeded, LeaseExpired, StaleEpoch, Unavailable) as error:
            if isinstance(error, DeadlineExceeded):
                # The bytes may still arrive, in the caller's memory if that is disposable: stop
                # here.
                self._deadline = time.monotonic()
            return self._failed(segment.node_id, hashes, error, left)
        finally:
            link.release(lease)
        name = link.transports.to(lease.places).name
        return _Piece(
            lease.found, lease.tiers, name, lease.miss_reason, lease.wait_s, lease.waited_s
        )

    def _failed(
        self, node_id: str, hashes: Sequence[bytes], error: KvpoolError, node_s: float
    ) -> _Piece:
        """Remember that a node failed, and ask other nodes for the rest of this call."""
        self._directory.report_failure(node_id, self._namespace, hashes, error, node_s)
        if not isinstance(error, StaleEpoch):  # the node restarted: a new link may read it
            self._failed_nodes.add(node_id)
        return _Piece(0, (), "", error.code)
