"""Cursors over long runs that are reserved or committed in slices.

Other calls run between two slices.

Between two slices, granted slots stay reserved, and parts that are being committed belong to nobody
else. Slots that are not granted yet may go to others, as if those had come first.
`ReservationTable` advances the cursors.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from kvpool.blocks.tier import Tier
from tiers.store.blocks import Block, Copy, Reservation, Space
from tiers.store.slab_allocator import Place


class LiveReservation:
    """A live reservation: the copies that its writer may fill; None for committed ones."""

    __slots__ = ("copies", "deadline", "part", "remaining", "reservation_id", "writer_id")

    def __init__(self, reservation_id: int, writer_id: str, part: int, deadline: float) -> None:
        self.reservation_id = reservation_id
        self.writer_id = writer_id
        self.copies: list[Copy | None] = []
        self.part = part
        self.remaining = 0
        self.deadline = deadline

    def add(self, copies: Sequence[Copy]) -> None:
        """Grant more copies."""
        self.copies += copies
        self.remaining += len(copies)


@dataclass(slots=True, eq=False)
class ReserveCursor:
    """A run of one chain that is being reserved; blocks [0, len(statuses)) are done."""

    space: Space
    hashes: Sequence[bytes]
    parent: bytes
    part: int
    writer_id: str
    ttl_s: float
    deadline: float
    tier: Tier
    tick: int  # for the next block that is here
    shielded: Collection[Block]
    statuses: list[int] = field(default_factory=list)  # `BlockStatus`
    places: list[Place] = field(default_factory=list)  # of those granted
    grant: LiveReservation | None = None

    @property
    def is_done(self) -> bool:
        return len(self.statuses) == len(self.hashes)

    def result(self) -> Reservation:
        """What was reserved by now."""
        reservation_id = self.grant.reservation_id if self.grant is not None else 0
        slot_bytes = self.space.slot_bytes[Tier.DRAM]
        return Reservation(
            reservation_id, self.statuses, self.places, slot_bytes, self.ttl_s, self.deadline
        )


@dataclass(slots=True, eq=False)
class CommitCursor:
    """Parts that were taken from their grant to be committed; the first `done` are committed."""

    reservation_id: int
    part: int
    copies: list[Copy | None]  # in the order in which they become visible; None once they are
    checksums: Sequence[int]
    tick: int
    done: int = 0
    visible: list[bytes] = field(default_factory=list)  # hashes of blocks that became visible

    @property
    def is_done(self) -> bool:
        return self.done == len(self.copies)
