"""Reads and writes blocks range by range: each layer as soon as it is needed or final.

A reader holds its lease until it has all ranges, and then compares the checksums. A writer reserves
slots, writes the ranges, and makes the blocks visible at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvpool.blocks.layout import Namespace
from kvpool.blocks.resharding import TransferPlan
from kvpool.client.data.buffers import part_addresses
from kvpool.client.data.pinning import PinnedBlocks
from kvpool.client.node.deadlines import time_left
from kvpool.client.node.directory import NodeDirectory
from kvpool.client.node.grants import WriteReservation
from kvpool.client.node.node_link import NodeLink
from kvpool.errors import DeadlineExceeded, KvpoolError, LeaseExpired, NoRoom, Unavailable
from kvpool.transports import Pieces
from kvpool.transports.copy import Int64Array, sum_runs
from kvpool.wire import messages as m


class LayeredReader:
    """Reads ranges of the blocks of one `pin` of one part into rows of the caller's memory.

    Args:
        pinned: stays leased, and is renewed, until `close`.
        out: memory for all blocks, as for `get`. The caller never uses it again if a read fails, as
            with `is_disposable`.
        deadline: for all reads together (monotonic seconds).
    """

    def __init__(self, pinned: PinnedBlocks, out: Any, deadline: float) -> None:
        layout = pinned.namespace.layout
        self._addresses, self._owner = part_addresses(
            out, pinned.found, layout.part_bytes, writable=True
        )
        self._pinned = pinned
        self._deadline = deadline
        self._keepalives = [link.keep_alive(lease, deadline) for link, lease, _ in pinned.held]

    async def read(self, offsets: Sequence[int], length: int) -> None:
        """Read `length` bytes at each of `offsets` of every block, unverified.

        Raises:
            LeaseExpired, TransferFailed, DeadlineExceeded: discard all of `out`.
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
        """Indices of blocks whose bytes differ from the committed ones.

        Call it after all ranges (invariant 5).

        Raises:
            LeaseExpired: the blocks may have changed during the read.
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
        """End the leases."""
        for keepalive in self._keepalives:
            await keepalive.end()
        self._pinned.release()


class LayeredWriter:
    """Writes ranges of blocks from rows of the caller's memory into slots that `open` reserves.

    Attributes:
        granted: indices of the blocks to write; the pool has the others, or another writer is
            writing them.
        rejected: how many blocks found no room.
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
        directory: NodeDirectory,
        namespace: Namespace,
        hashes: Sequence[bytes],
        *,
        parent: bytes = b"",
        part: int = 0,
        deadline: float,
    ) -> LayeredWriter:
        """Reserve slots at the first node by placement that accepts the blocks.

        Raises:
            NoRoom: the node has no slot for any of them.
            Unavailable, DeadlineExceeded: no node answers.
        """
        error: KvpoolError = Unavailable("the pool has no live node", hint="start one: kvpool node")
        async for link in directory.write_targets(namespace, None, hashes[0], deadline):
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
                directory.forget_node(link.node.node_id, why)
                continue
            writer = cls(link, reservation, deadline)
            if writer.rejected == len(hashes):
                raise NoRoom(f"node {link.node.node_id} has no free slot")
            return writer
        raise error

    async def write(
        self, addresses: Int64Array, owner: Any, offsets: Sequence[int], length: int
    ) -> None:
        """Write `length` bytes at each of `offsets` of every granted block.

        Args:
            addresses: of the granted blocks, in order; each range is at the same offset in memory
                and in the block.
            owner: keeps that memory alive.

        Raises:
            TransferFailed, DeadlineExceeded: call `abort`.
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
        """Make the granted blocks visible.

        Args:
            checksums: xxh3-64 of each granted block's whole part.
        """
        await self._link.commit(
            self._reservation.reservation_id, checksums, timeout_s=time_left(self._deadline)
        )

    async def abort(self, error: BaseException) -> None:
        """Give the slots back after `error`.

        A write past its deadline may still arrive (invariant 2).
        """
        has_stopped = not isinstance(error, (DeadlineExceeded, asyncio.CancelledError))
        with contextlib.suppress(KvpoolError):
            await self._link.abort(
                self._reservation.reservation_id, writer_stopped=has_stopped, timeout_s=1.0
            )


def _ranges(offsets: Sequence[int], length: int, part_bytes: int) -> TransferPlan:
    """A plan that reads the same ranges of each part to the same offsets."""
    at = np.asarray(offsets, dtype=np.int64)
    rows = np.zeros(len(at), dtype=np.int64)
    return TransferPlan(
        (0,), rows, at, at, np.full(len(at), length, dtype=np.int64), part_bytes, False
    )
