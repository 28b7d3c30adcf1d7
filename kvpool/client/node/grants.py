"""What a node grants a client: leases to read blocks, and reservations to write them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvpool.blocks.tier import Tier
from kvpool.errors import TransferFailed
from kvpool.transports.copy import Int64Array
from kvpool.wire import messages as m


@dataclass(slots=True, eq=False)
class ReadLease:
    """A node's promise that some blocks keep their place until `deadline`.

    Renewing extends the deadline.

    The holder discards everything that it finished reading after `deadline` (invariant 3).
    """

    lease_id: int
    found: int  # leading blocks that the lease covers
    places: Int64Array  # [found * parts, 2]: arena id, byte offset
    checksums: np.ndarray  # uint64 [found * parts]
    tiers: tuple[Tier, ...]
    deadline: float  # monotonic seconds of this process
    miss_reason: str
    wait_s: float = 0.0  # predicted for all blocks that the node has; -1: unknown
    waited_s: float = 0.0  # for blocks that came from a slow tier


@dataclass(slots=True, frozen=True)
class WriteReservation:
    """A node's promise of empty slots.

    This caller may write the blocks whose indices are in `granted`.
    """

    reservation_id: int
    granted: tuple[int, ...]
    statuses: bytes  # one `BlockStatus` for each block asked for
    places: Int64Array  # [len(granted), 2]: arena id, byte offset
    deadline: float  # monotonic seconds of this process


@dataclass(slots=True)
class BytesMoved:
    """Bytes moved, by transport."""

    by_transport: dict[str, int] = field(default_factory=dict)

    def add(self, transport: str, count: int) -> None:
        """Count `count` bytes moved by `transport`."""
        self.by_transport[transport] = self.by_transport.get(transport, 0) + count


def undo_pin(late: m.PinReply) -> m.Message | None:
    """The message that undoes a pin whose caller gave up before the reply came."""
    return m.Release([late.lease_id]) if late.lease_id else None


def undo_reserve(late: m.ReserveReply) -> m.Message | None:
    """The message that undoes a reservation whose caller gave up before the reply came.

    Nobody writes there.
    """
    return m.Abort(late.reservation_id, True) if late.reservation_id else None


def reservation_from_reply(reply: m.ReserveReply, asked: float) -> WriteReservation:
    """A `WriteReservation` from the node's reply to a call made at `asked` (monotonic seconds).

    Raises:
        TransferFailed: the reply grants blocks without a place for each.
    """
    granted = tuple(i for i, status in enumerate(reply.statuses) if status == m.BlockStatus.GRANTED)
    places = np.frombuffer(reply.places, dtype="<i8").reshape(-1, 2)
    if len(places) != len(granted):
        raise TransferFailed("the node granted blocks but did not send a place for each")
    return WriteReservation(
        reply.reservation_id, granted, reply.statuses, places, asked + reply.ttl_s
    )
