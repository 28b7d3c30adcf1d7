"""Reserving and committing long runs slice by slice, so that whoever owns the store can serve others in between.

What is promised stays promised between two slices: granted slots are reserved, and what is being committed is
nobody else's. What is not yet granted may be taken by others meanwhile, as if they had come first.
Plain state; `ReservationTable` works on it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from kvpool.blocks.tier import Tier
from tiers.store.blocks import Block, Copy, Space
from tiers.store.slab_allocator import Place


class Grant:
    """A live reservation: the copies and parts that its writer may fill. A committed one is None."""

    __slots__ = ("copies", "deadline", "part", "remaining", "reservation_id", "writer_id")

    def __init__(self, reservation_id: int, writer_id: str, part: int, deadline: float) -> None:
        self.reservation_id = reservation_id
        self.writer_id = writer_id
        self.copies: list[Copy | None] = []
        self.part = part
        self.remaining = 0
        self.deadline = deadline

    def add(self, copies: Sequence[Copy]) -> None:
        """Grant more of them."""
        self.copies += copies
        self.remaining += len(copies)


@dataclass(slots=True, eq=False)
class ReserveCursor:
    """A run of one chain that is being reserved for a writer: what was said of blocks [0, len(statuses))."""

    space: Space
    hashes: Sequence[bytes]
    parent: bytes
    part: int
    writer_id: str
    ttl_s: float
    deadline: float
    tier: Tier
    tick: int  # of recency, for the next block that is here
    shielded: Collection[Block]
    statuses: list[int] = field(default_factory=list)  # `BlockStatus`
    places: list[Place] = field(default_factory=list)  # of those granted
    grant: Grant | None = None

    @property
    def is_done(self) -> bool:
        return len(self.statuses) == len(self.hashes)


@dataclass(slots=True, eq=False)
class CommitCursor:
    """Granted parts on their way to be committed: taken from the grant, and committed up to `done`."""

    reservation_id: int
    part: int
    copies: list[Copy | None]  # in the order in which they become visible; None once they are
    checksums: Sequence[int]
    tick: int
    done: int = 0
    visible: list[bytes] = field(default_factory=list)  # what became visible by it

    @property
    def is_done(self) -> bool:
        return self.done == len(self.copies)
