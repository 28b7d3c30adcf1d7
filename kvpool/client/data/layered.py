"""Blocks read and written range by range: an engine's layers, each as soon as it is wanted or final.

What the whole-block calls guarantee in one step is spread over several here: a reader holds its lease until it has
all ranges and compares the checksums then; a writer reserves, writes, and makes the blocks visible at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvpool.blocks.layout import Namespace
from kvpool.blocks.resharding import Plan
from kvpool.client.data.buffers import block_spans
from kvpool.client.data.pinning import PinnedBlocks
from kvpool.client.node.deadlines import time_left
from kvpool.client.node.node_link import NodeLink, WriteReservation
from kvpool.errors import DeadlineExceeded, KvpoolError, LeaseExpired, NoRoom, Unavailable
from kvpool.transports import Pieces
from kvpool.transports.copy import Int64Array, sum_runs
from kvpool.wire import messages as m

if TYPE_CHECKING:
    from kvpool.client.async_pool import AsyncPool


class LayeredReader:
    """Reads ranges of the blocks of one `pin` of one part into rows of the caller's memory.

    Args:
        pinned: stays held, and is renewed, until `close`.
        out: room for all blocks, as for `get`; never used again by the caller if a read fails, as with
            `is_disposable`.
        deadline: monotonic seconds; for everything together.
    """

    def __init__(self, pinned: PinnedBlocks, out: Any, deadline: float) -> None:
        layout = pinned.namespace.layout
        self._addresses, self._owner = block_spans(
            out, pinned.found, layout.part_bytes, writable=True
        )
        self._pinned = pinned
        self._deadline = deadline
        self._keepalives = [link.keep(lease, deadline) for link, lease, _ in pinned.held]

    async def read(self, offsets: Sequence[int], length: int) -> None:
        """Read `length` bytes at each of `offsets` of every block, unverified.

        Raises:
            LeaseExpired, TransferFailed, DeadlineExceeded: nothing of `out` may be used.
        """
        space = self._pinned.namespace
        plan = _ranges(offsets, length, space.layout.part_bytes)
        for link, lease, start in self._pinned.held:
            rows = slice(start, start + lease.found)
            await link.read(
                space,
                lease,
                self._pinned.hashes[rows],
                self._addresses[rows],
                self._owner,
                verify=False,
                timeout_s=time_left(self._deadline),
                is_disposable=True,
                plan=plan,
            )

    async def bad_blocks(self) -> list[int]:
        """Which blocks have not the bytes that were committed, once all ranges were read (invariant 5).

        Raises:
            LeaseExpired: they may have changed under the reader.
        """
        length = self._pinned.namespace.layout.part_bytes
        lengths = np.full(len(self._addresses), length, dtype=np.int64)
        sums = await asyncio.to_thread(sum_runs, self._addresses, lengths)
        bad = []
        for link, lease, start in self._pinned.held:
            mine = sums[start : start + lease.found]
            for row in np.flatnonzero(mine != lease.checksums).tolist():
                bad.append(start + row)
                block = self._pinned.hashes[start + row]
                space_id = self._pinned.namespace.namespace_id
                link.wire.send_nowait(m.ReportCorrupt(space_id, block))
        if time.monotonic() > self._pinned.deadline:
            raise LeaseExpired("the lease ended before the last range was read")
        return bad

    async def close(self) -> None:
        """Give the blocks back."""
        for keepalive in self._keepalives:
            await keepalive.end()
        self._pinned.release()


class LayeredWriter:
    """Writes ranges of blocks from rows of the caller's memory into slots that `open` reserves.

    Attributes:
        granted: which of the blocks are to be written; the pool has the others, or is being given them.
        rejected: how many found no room.
    """

    def __init__(self, link: NodeLink, reservation: WriteReservation, deadline: float) -> None:
        self._link = link
        self._reservation = reservation
        self._deadline = min(deadline, reservation.deadline)
        self.granted = reservation.granted
        self.rejected = reservation.statuses.count(m.BlockStatus.NO_ROOM)
        self.bytes_written = 0

    @classmethod
    async def open(
        cls,
        pool: AsyncPool,
        namespace: Namespace,
        hashes: Sequence[bytes],
        *,
        parent: bytes = b"",
        part: int = 0,
        deadline: float,
    ) -> LayeredWriter:
        """Reserve slots at the first node by placement that takes the blocks.

        Raises:
            NoRoom: there is none for any of them. Unavailable, DeadlineExceeded: no node answers.
        """
        error: KvpoolError = Unavailable("the pool has no live node", hint="start one: kvpool node")
        async for link in pool.places(namespace, None, hashes[0], deadline):
            try:
                reservation = await link.reserve(
                    namespace,
                    hashes,
                    parent=parent,
                    part=part,
                    ttl_s=time_left(deadline) + 1.0,
                    timeout_s=time_left(deadline),
                )
            except Unavailable as why:
                error = why
                pool.forget_node(link.node.node_id, why)
                continue
            writer = cls(link, reservation, deadline)
            if writer.rejected == len(hashes):
                raise NoRoom(f"node {link.node.node_id} has no slot to give")
            return writer
        raise error

    async def write(
        self, addresses: Int64Array, owner: Any, offsets: Sequence[int], length: int
    ) -> None:
        """Write `length` bytes at each of `offsets` of every granted block.

        Args:
            addresses: of the granted blocks, in their order; the same bytes are at the same offsets there.

        Raises:
            TransferFailed, DeadlineExceeded: abort.
        """
        at = np.asarray(offsets, dtype=np.int64)
        local = (addresses[:, None] + at).reshape(-1)
        places = np.repeat(self._reservation.places, len(at), axis=0)
        places[:, 1] += np.tile(at, len(addresses))
        lengths = np.full(len(local), length, dtype=np.int64)
        pieces = Pieces(local, places, lengths, owner)
        await self._link.write(pieces, timeout_s=time_left(self._deadline), deadline=self._deadline)
        self.bytes_written += pieces.total_bytes

    async def commit(self, checksums: np.ndarray) -> None:
        """Make the granted blocks visible; `checksums` are of their whole parts. Raises as `NodeLink.commit`."""
        await self._link.commit(
            self._reservation.reservation_id, checksums, timeout_s=time_left(self._deadline)
        )

    async def abort(self, error: BaseException) -> None:
        """Give the slots back after `error`; a write past its deadline may still arrive (invariant 2)."""
        has_stopped = not isinstance(error, (DeadlineExceeded, asyncio.CancelledError))
        with contextlib.suppress(KvpoolError):
            await self._link.abort(
                self._reservation.reservation_id, writer_stopped=has_stopped, timeout_s=1.0
            )


def _ranges(offsets: Sequence[int], length: int, part_bytes: int) -> Plan:
    """The same ranges of each part, to the same place."""
    at = np.asarray(offsets, dtype=np.int64)
    rows = np.zeros(len(at), dtype=np.int64)
    return Plan((0,), rows, at, at, np.full(len(at), length, dtype=np.int64), part_bytes, False)
