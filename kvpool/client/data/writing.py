"""One `put`: reserves, writes and commits the parts of a run of blocks at one node."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvpool.blocks.layout import Namespace
from kvpool.blocks.resharding import TransferPlan
from kvpool.blocks.tier import Tier
from kvpool.client.admin.replication import add_replicas
from kvpool.client.node.deadlines import time_left
from kvpool.client.node.directory import NodeDirectory
from kvpool.client.node.grants import BytesMoved, WriteReservation
from kvpool.client.node.node_link import NodeLink
from kvpool.errors import DeadlineExceeded, KvpoolError, NoRoom, Unavailable
from kvpool.transports import Pieces
from kvpool.transports.copy import Int64Array
from kvpool.wire import messages as m


@dataclass(slots=True, frozen=True)
class PutResult:
    """How many blocks of a `put` had each outcome. With several parts, the worst part counts."""

    stored: int
    existing: int
    in_progress: int  # another writer is writing them; nothing to do
    rejected: int  # found no room; may be tried again
    bytes_moved: dict[str, int]
    # Nodes that hold every block that was stored or existed; 0 if not even the first node does.
    replicas: int = 1
    replica_failures: dict[str, str] = field(default_factory=dict)  # node id -> why it has no copy


class ChainWriter:
    """Writes a run of one chain from the caller's memory.

    Args:
        addresses, owner: where each block is, and what keeps that memory alive.
        plan: which parts are written, and from which of the caller's bytes.
        deadline: monotonic seconds.
        tier: HBM to write to device memory while it has room.
    """

    def __init__(
        self,
        directory: NodeDirectory,
        namespace: Namespace,
        hashes: Sequence[bytes],
        addresses: Int64Array,
        owner: Any,
        *,
        parent: bytes,
        plan: TransferPlan,
        deadline: float,
        tier: Tier = Tier.DRAM,
    ) -> None:
        self._directory = directory
        self._namespace = namespace
        self._hashes = hashes
        self._addresses = addresses
        self._owner = owner
        self._parent = parent
        self._plan = plan
        self._deadline = deadline
        self._tier = tier
        self._moved = BytesMoved()

    async def write(self, node_id: str | None, replicas: int) -> PutResult:
        """Write to the node named, or to the first by placement that accepts the blocks.

        Raises as `AsyncPool.put`.
        """
        link, first = await self._reserve_anywhere(node_id)
        statuses = np.stack(
            [np.frombuffer(row, dtype=np.uint8) for row in await self._write_rows(link, first)]
        )
        counts = _counts(statuses)
        complete = len(self._hashes) - counts[m.BlockStatus.NO_ROOM]
        if not complete:
            raise NoRoom(
                f"node {link.node.node_id} has no free slot",
                hint="all blocks are pinned; try again",
            )
        self._remember(link, statuses)
        extra_copies = 0
        failures: dict[str, str] = {}
        if replicas > 1:
            extra_copies, failures = await add_replicas(
                self._directory,
                self._namespace,
                self._hashes[:complete],
                self._parent,
                link,
                replicas - 1,
                self._deadline,
            )
        return PutResult(
            stored=counts[m.BlockStatus.GRANTED],
            existing=counts[m.BlockStatus.EXISTS],
            in_progress=counts[m.BlockStatus.IN_PROGRESS],
            rejected=counts[m.BlockStatus.NO_ROOM],
            bytes_moved=self._moved.by_transport,
            replicas=extra_copies + (not counts[m.BlockStatus.IN_PROGRESS]),
            replica_failures=failures,
        )

    async def _write_rows(self, link: NodeLink, first: WriteReservation) -> list[bytes]:
        """Write all parts, and `first` in this very task.

        A task that is cancelled before it begins could not give its reservation back.
        """
        rows = range(1, len(self._plan.parts))
        others = asyncio.gather(*(self._write(link, row) for row in rows), return_exceptions=True)
        try:
            written: list[bytes | BaseException] = [await self._write(link, 0, first)]
        except BaseException:
            others.cancel()
            await asyncio.wait([others])
            raise
        written += await others
        for outcome in written:
            if isinstance(outcome, BaseException):
                raise outcome
        return [outcome for outcome in written if isinstance(outcome, bytes)]

    def _remember(self, link: NodeLink, statuses: np.ndarray) -> None:
        """Remember the blocks whose parts are all committed: the index learns of them later."""
        if (
            len(self._plan.parts) < self._namespace.layout.tp_size
            or not self._directory.has_conductor
        ):
            return
        is_whole = (statuses == m.BlockStatus.GRANTED) | (statuses == m.BlockStatus.EXISTS)
        hashes = [self._hashes[at] for at in np.flatnonzero(is_whole.all(axis=0))]
        namespace_id = self._namespace.namespace_id
        self._directory.recent_writes.remember(
            link.node.node_id, namespace_id, hashes, time.monotonic()
        )

    async def _write(
        self, link: NodeLink, row: int, reservation: WriteReservation | None = None
    ) -> bytes:
        """Write one part of every granted block. Returns the status of each block."""
        if reservation is None:
            reservation = await self._reserve(link, row)
        if not reservation.granted:
            return reservation.statuses
        plan = self._plan if len(self._plan.parts) == 1 else self._plan.of_part(row)
        addresses = self._addresses[np.array(reservation.granted)]
        runs = plan.runs(addresses, reservation.places)
        pieces = Pieces(*runs, self._owner, plan.pieces_per_part)
        has_stopped = True
        try:
            sums = await link.write(
                pieces, timeout_s=time_left(self._deadline), deadline=reservation.deadline
            )
            await link.commit(reservation.reservation_id, sums, timeout_s=time_left(self._deadline))
        except BaseException as error:
            # A write past its deadline may still arrive, so the node must quarantine the slots
            # (invariant 2).
            late = (error, error.__cause__)
            has_stopped = not any(isinstance(e, DeadlineExceeded) for e in late)
            with contextlib.suppress(KvpoolError):
                await link.abort(
                    reservation.reservation_id, writer_stopped=has_stopped, timeout_s=1.0
                )
            raise
        self._moved.add(link.transports.to(reservation.places).name, pieces.total_bytes)
        return reservation.statuses

    async def _reserve_anywhere(self, node_id: str | None) -> tuple[NodeLink, WriteReservation]:
        """Reserve the first part at the first node that is reachable and not draining."""
        error: KvpoolError = Unavailable("the pool has no live node", hint="start one: kvpool node")
        async for link in self._directory.write_targets(
            self._namespace, node_id, self._hashes[0], self._deadline
        ):
            try:
                return link, await self._reserve(link, 0)
            except Unavailable as why:  # nothing was written, so another node will do
                error = why
                self._directory.forget_node(link.node.node_id, why)
        raise error

    async def _reserve(self, link: NodeLink, row: int) -> WriteReservation:
        return await link.reserve(
            self._namespace,
            self._hashes,
            parent=self._parent,
            part=self._plan.parts[row],
            ttl_s=time_left(self._deadline) + 1.0,
            timeout_s=time_left(self._deadline),
            tier=self._tier,
        )


def _counts(statuses: np.ndarray) -> list[int]:
    """How many blocks have each status, by `BlockStatus`; of several parts, the worst counts.

    Args:
        statuses: shape [parts, blocks].
    """
    worst_first = (
        m.BlockStatus.NO_ROOM,
        m.BlockStatus.GRANTED,
        m.BlockStatus.IN_PROGRESS,
        m.BlockStatus.EXISTS,
    )
    counts = [0] * 4
    is_open = np.ones(statuses.shape[1], dtype=bool)
    for status in worst_first:
        has = is_open & (statuses == status).any(axis=0)
        counts[status] = int(has.sum())
        is_open &= ~has
    return counts
