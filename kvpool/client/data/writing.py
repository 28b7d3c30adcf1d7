"""One `put`: reserve, write and commit the parts of a run of blocks, all at one node."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvpool.blocks.layout import Namespace
from kvpool.blocks.resharding import Plan
from kvpool.client.admin import replication as copies
from kvpool.client.node.deadlines import time_left
from kvpool.client.node.node_link import BytesMoved, NodeLink, WriteReservation
from kvpool.errors import DeadlineExceeded, KvpoolError, NoRoom, Unavailable
from kvpool.transports import Pieces
from kvpool.transports.copy import Int64Array
from kvpool.wire import messages as m

if TYPE_CHECKING:
    from kvpool.client.async_pool import AsyncPool


@dataclass(slots=True, frozen=True)
class PutResult:
    """What became of each block of a `put`; of several parts, the worst."""

    stored: int
    existing: int
    in_progress: int  # another writer has them; nothing to do
    rejected: int  # no room; may be tried again
    bytes_moved: dict[str, int]
    replicas: int = (
        1  # nodes on which all that was stored or existed stands; 0: not even on the first
    )
    replica_failures: dict[str, str] = field(default_factory=dict)  # node id -> why it has no copy


class ChainWriter:
    """Writes a run of one chain from memory of the caller.

    Args:
        addresses, owner: where each block is, and what keeps that alive.
        plan: which parts are written, and from which of the caller's bytes.
        deadline: monotonic seconds.
        tier: "hbm" to write to device memory as far as there is room.
    """

    def __init__(
        self,
        pool: AsyncPool,
        namespace: Namespace,
        hashes: Sequence[bytes],
        addresses: Int64Array,
        owner: Any,
        *,
        parent: bytes,
        plan: Plan,
        deadline: float,
        tier: str = "",
    ) -> None:
        self._pool = pool
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
        """Write to the node named, or to the first by placement that takes it. Raises as `AsyncPool.put`."""
        link, first = await self._reserve_anywhere(node_id)
        written = await asyncio.gather(
            self._write(link, 0, first),
            *(self._write(link, row) for row in range(1, len(self._plan.parts))),
            return_exceptions=True,
        )
        statuses = np.empty((len(self._plan.parts), len(self._hashes)), dtype=np.uint8)
        for row, outcome in enumerate(written):
            if isinstance(outcome, BaseException):
                raise outcome
            statuses[row] = np.frombuffer(outcome, dtype=np.uint8)
        counts = _counts(statuses)
        standing = len(self._hashes) - counts[m.BlockStatus.NO_ROOM]
        if not standing:
            raise NoRoom(
                f"node {link.node.node_id} has no slot to give", hint="all is pinned; try again"
            )
        self._remember(link, statuses)
        copies_made = 0
        failures: dict[str, str] = {}
        if replicas > 1:
            copies_made, failures = await copies.add_replicas(
                self._pool,
                self._namespace,
                self._hashes[:standing],
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
            replicas=copies_made + (not counts[m.BlockStatus.IN_PROGRESS]),
            replica_failures=failures,
        )

    def _remember(self, link: NodeLink, statuses: np.ndarray) -> None:
        """Find at once what stands whole now: the index hears of it a little later."""
        if len(self._plan.parts) < self._namespace.layout.tp_size or not self._pool.has_conductor:
            return
        stands = (statuses == m.BlockStatus.GRANTED) | (statuses == m.BlockStatus.EXISTS)
        hashes = [self._hashes[at] for at in np.flatnonzero(stands.all(axis=0))]
        namespace_id = self._namespace.namespace_id
        self._pool.recent_writes.remember(link.node.node_id, namespace_id, hashes, time.monotonic())

    async def _write(
        self, link: NodeLink, row: int, reservation: WriteReservation | None = None
    ) -> bytes:
        """Write one part of all blocks that are granted; returns the status of each block."""
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
            # A write past its deadline may still arrive: the slots must be quarantined.
            late = (error, error.__cause__)
            has_stopped = not any(isinstance(e, DeadlineExceeded) for e in late)
            with contextlib.suppress(KvpoolError):
                await link.abort(
                    reservation.reservation_id, writer_stopped=has_stopped, timeout_s=1.0
                )
            raise
        self._moved.add(link.transport_to(reservation.places).name, pieces.total_bytes)
        return reservation.statuses

    async def _reserve_anywhere(self, node_id: str | None) -> tuple[NodeLink, WriteReservation]:
        """Reserve the first part at the first node that does not drain or prove gone."""
        error: KvpoolError = Unavailable("the pool has no live node", hint="start one: kvpool node")
        async for link in self._pool.places(
            self._namespace, node_id, self._hashes[0], self._deadline
        ):
            try:
                return link, await self._reserve(link, 0)
            except Unavailable as why:  # nothing was written: another node is as good
                error = why
                self._pool.forget_node(link.node.node_id, why)
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
    """How many blocks have each status, [parts, blocks] given: rejected, stored, in progress, existing."""
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
