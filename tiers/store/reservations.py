"""Reservations: who may write to which empty slots, until when, and what happens to late writes.

A one-sided write cannot be cancelled, so the slots of an expired or aborted reservation go to
quarantine (invariant 2). They are free when the writer confirms that it has stopped, or after
`quarantine_s`.

The end of a connection or of a process frees nothing: no node can know from it that a writer is
dead.
- The process may live on after its connection closed, with transfers under way or the arena still
  mapped.
- A mapping is inherited by child processes, which outlive the one that asked for it.
- Over TCP the node itself applies what a peer sent, and may do so after that peer has died.

`now` is an argument, in monotonic seconds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from kvpool.blocks.hashing import HASH_BYTES
from kvpool.blocks.records import BlockStatus
from kvpool.blocks.tier import Tier
from kvpool.errors import InvalidArgument, ReservationGone
from tiers.store.block_table import BlockTable
from tiers.store.blocks import Block, Copy, Space, check_memory_tier
from tiers.store.config import StoreConfig
from tiers.store.namespaces import NamespaceTable
from tiers.store.reservation_cursors import CommitCursor, LiveReservation, ReserveCursor
from tiers.store.slab_allocator import Place


class QuarantinedSlot(NamedTuple):
    """A slot that a writer may still write to."""

    tier: Tier
    place: Place
    slot_bytes: int


@dataclass(slots=True, frozen=True)
class Quarantine:
    """What an ended reservation leaves: slots that nobody may use yet."""

    writer_id: str
    slots: list[QuarantinedSlot]
    until: float  # monotonic seconds


class ReservationTable:
    """All live reservations, and the slots in quarantine.

    Args:
        table: the blocks and their slots.
        namespaces: the namespaces.
        config: the longest reservation, the quarantine, and the number of the first reservation.
    """

    def __init__(self, table: BlockTable, namespaces: NamespaceTable, config: StoreConfig) -> None:
        self._table = table
        self._namespaces = namespaces
        self._config = config
        self._quarantine_s = config.quarantine_s
        self._next_id = config.first_id
        self._grants: dict[int, LiveReservation] = {}
        self._by_writer: dict[str, set[int]] = {}
        self._due: list[tuple[float, int]] = []
        self._committing: dict[CommitCursor, None] = {}
        # By reservation, in the order of `until`: time only moves forward.
        self._quarantines: OrderedDict[int, Quarantine] = OrderedDict()

    def __len__(self) -> int:
        return len(self._grants)

    def values(self) -> list[LiveReservation | CommitCursor]:
        """All live reservations, and the parts that were taken from them to be committed."""
        return [*self._grants.values(), *self._committing]

    def writer_of(self, reservation_id: int) -> str | None:
        """Who may write to a reservation's slots, in quarantine as well; else None."""
        grant = self._grants.get(reservation_id)
        if grant is not None:
            return grant.writer_id
        quarantine = self._quarantines.get(reservation_id)
        return quarantine.writer_id if quarantine is not None else None

    def quarantined(self) -> list[QuarantinedSlot]:
        """All slots in quarantine."""
        return [slot for quarantine in self._quarantines.values() for slot in quarantine.slots]

    def begin_reserve(
        self,
        namespace_id: bytes,
        hashes: Sequence[bytes],
        parent: bytes,
        part: int,
        writer_id: str,
        ttl_s: float,
        now: float,
        tier: Tier = Tier.DRAM,
    ) -> ReserveCursor:
        """As `Store.reserve`, in slices: call `Store.reserve_some` until the cursor is done.

        Neither the run nor its ancestors are evicted to make room for it. With HBM, blocks that
        find no room there are granted in DRAM; all parts of a block are in one tier.

        Raises:
            UnknownNamespace, InvalidArgument: as `Store.reserve`.
        """
        space = self._namespaces.space(namespace_id, len(hashes))
        ttl_s = self._config.reservation_ttl(ttl_s)
        if not 0 <= part < space.tp_size:
            raise InvalidArgument(f"part {part} of {space.tp_size}")
        if len(parent) not in (0, HASH_BYTES) or any(len(name) != HASH_BYTES for name in hashes):
            raise InvalidArgument(f"block hashes have {HASH_BYTES} bytes each")
        check_memory_tier(tier)
        known = [b for b in map(space.blocks.get, hashes) if b is not None]
        return ReserveCursor(
            space,
            hashes,
            parent,
            part,
            writer_id,
            ttl_s,
            now + ttl_s,
            tier,
            self._table.access_clock.advance(len(known)),
            {*known, *_ancestors(space, parent)},
        )

    def reserve_some(self, cursor: ReserveCursor, count: int) -> None:
        """Go on with up to `count` blocks. After one `NO_ROOM` all that follow have none either.

        Raises:
            ReservationGone: it ended in between: its client left or its time has passed.
        """
        if (
            cursor.grant is not None
            and self._grants.get(cursor.grant.reservation_id) is not cursor.grant
        ):
            raise reservation_over(cursor.grant.reservation_id)
        if self._table.spaces.get(cursor.space.namespace_id) is not cursor.space:
            raise reservation_over(
                0
            )  # the namespace was forgotten before any of its blocks was here
        start, part = len(cursor.statuses), cursor.part
        names = cursor.hashes[start : start + count]
        here = [
            b for b in map(cursor.space.blocks.get, names) if b is not None and _has_part(b, part)
        ]
        self._table.touch(here, tick=cursor.tick)
        cursor.tick -= len(here)
        parent = cursor.hashes[start - 1] if start else cursor.parent
        copies: list[Copy] = []
        with self._table.shield(cursor.shielded):
            for name in names:
                status, copy = self._reserve_part(cursor.space, name, parent, part, cursor.tier)
                if status == BlockStatus.NO_ROOM:
                    cursor.statuses += [status] * (len(cursor.hashes) - len(cursor.statuses))
                    self._table.counters["no_room"] += 1
                    break
                cursor.statuses.append(status)
                if copy is not None and (place := copy.places[part]) is not None:
                    cursor.places.append(place)
                    copies.append(copy)
                parent = name
        if copies:
            cursor.grant = cursor.grant or self._grant(part, cursor.writer_id, cursor.deadline)
            cursor.grant.add(copies)

    def cancel(self, cursor: ReserveCursor, now: float) -> None:
        """Give up a run whose places nobody was told: its slots are free at once."""
        if cursor.grant is not None:
            self.abort(cursor.grant.reservation_id, True, now)

    def renew(self, reservation_id: int, ttl_s: float, now: float) -> float:
        """Extend a reservation to `now + ttl_s`, never shorten it; returns the seconds left.

        Args:
            ttl_s: seconds, cut to `max_reservation_s`.

        Raises:
            ReservationGone: it is over. InvalidArgument: `ttl_s` is not positive.
        """
        ttl_s = self._config.reservation_ttl(ttl_s)
        grant = self._live(reservation_id, now)
        grant.deadline = max(grant.deadline, now + ttl_s)
        return grant.deadline - now

    def begin_commit(
        self,
        reservation_id: int,
        checksums: Sequence[int],
        now: float,
        indices: Sequence[int] | None = None,
    ) -> CommitCursor:
        """As `Store.commit`, in slices: call `commit_some` until the cursor is done.

        From here on the commit cannot fail, even if the reservation expires or its writer leaves.

        Raises:
            ReservationGone, InvalidArgument: as `Store.commit`.
        """
        grant = self._live(reservation_id, now)
        if indices is None:
            indices = range(len(grant.copies))
        if len(checksums) != len(indices):
            raise InvalidArgument(f"{len(checksums)} checksums for {len(indices)} blocks")
        if len(set(indices)) != len(indices):
            raise InvalidArgument("an index to commit comes twice")
        copies: list[Copy | None] = []
        for index in indices:
            if not 0 <= index < len(grant.copies):
                raise InvalidArgument(f"index {index} of {len(grant.copies)} granted blocks")
            copy = grant.copies[index]
            if copy is None:
                raise ReservationGone(
                    f"index {index} of reservation {reservation_id} was committed"
                )
            copies.append(copy)
        for index in indices:
            grant.copies[index] = None
        grant.remaining -= len(copies)
        if not grant.remaining:
            self._remove(grant)
        tick = self._table.access_clock.advance(len(copies))
        cursor = CommitCursor(reservation_id, grant.part, copies, checksums, tick)
        if copies:
            self._committing[cursor] = None
        self._table.counters["committed"] += len(copies)
        return cursor

    def commit_some(self, cursor: CommitCursor, count: int) -> None:
        """Commit the next `count` parts; their blocks become visible in order."""
        end = min(cursor.done + count, len(cursor.copies))
        batch = [copy for copy in cursor.copies[cursor.done : end] if copy is not None]
        self._table.touch([copy.block for copy in batch], is_use=False, tick=cursor.tick)
        cursor.tick -= len(batch)
        for number, copy in enumerate(batch, cursor.done):
            cursor.copies[number] = None
            if self._table.fill(copy, cursor.part, cursor.checksums[number]):
                cursor.visible.append(copy.block.name)
        cursor.done = end
        if cursor.is_done:
            self._committing.pop(cursor, None)

    def abort(self, reservation_id: int, writer_stopped: bool, now: float) -> None:
        """End a reservation. Its open slots are free if the writer stopped, else in quarantine.

        A later call with `writer_stopped` frees the slots in quarantine. Unknown reservations are
        ignored.
        """
        grant = self._grants.get(reservation_id)
        if grant is not None:
            self._end(grant, is_late_write_possible=not writer_stopped, now=now)
        elif writer_stopped:
            self._end_quarantine(reservation_id)

    def writer_gone(self, writer_id: str, now: float) -> None:
        """The writer is gone, its writes perhaps not: its reservations go to quarantine."""
        for reservation_id in sorted(self._by_writer.get(writer_id, ())):
            self._end(self._grants[reservation_id], is_late_write_possible=True, now=now)

    def expire(self, now: float) -> int:
        """End overdue reservations and quarantines; returns how many ended, plus slots freed."""
        ended = 0
        while self._due and self._due[0][0] <= now:
            _, reservation_id = heappop(self._due)
            grant = self._grants.get(reservation_id)
            if grant is None:
                continue
            if grant.deadline > now:
                heappush(self._due, (grant.deadline, reservation_id))
                continue
            self._end(grant, is_late_write_possible=True, now=now)
            self._table.counters["reservations_expired"] += 1
            ended += 1
        return ended + self._expire_quarantines(now)

    # ------------------------------------------------------------ within

    def _grant(self, part: int, writer_id: str, deadline: float) -> LiveReservation:
        reservation_id = self._next_id
        self._next_id += 1
        grant = self._grants[reservation_id] = LiveReservation(
            reservation_id, writer_id, part, deadline
        )
        self._by_writer.setdefault(writer_id, set()).add(reservation_id)
        heappush(self._due, (deadline, reservation_id))
        return grant

    def _reserve_part(
        self, space: Space, name: bytes, parent: bytes, part: int, tier: Tier
    ) -> tuple[int, Copy | None]:
        if any(name in names for names in space.visible):
            return BlockStatus.EXISTS, None
        table = self._table
        begun = _begun_copy(space.blocks.get(name))
        if begun is not None and begun.tier == Tier.HBM and tier != Tier.HBM:
            # This writer cannot write to HBM, where others began: all parts of a block are in one
            # tier.
            if begun.filling:
                return BlockStatus.IN_PROGRESS, None
            table.discard_partial(begun)
            begun = None
        if begun is not None:
            if begun.places[part] is not None:
                is_committed = begun.checksums[part] is not None
                return (BlockStatus.EXISTS if is_committed else BlockStatus.IN_PROGRESS), None
            tier = begun.tier
        tiers = (Tier.HBM, Tier.DRAM) if tier == Tier.HBM and begun is None else (tier,)
        for index in tiers:
            if index not in table.tiers:
                continue
            block = table.block(
                space, name, parent
            )  # each time: a failed attempt removed the record
            recovered = block.copies[Tier.NVME]
            if table.hold(block, index, part) is not None:
                if recovered is not None:  # recovered in part: the new bytes replace it
                    table.discard_partial(recovered)
                return BlockStatus.GRANTED, block.copies[index]
        return BlockStatus.NO_ROOM, None

    def _live(self, reservation_id: int, now: float) -> LiveReservation:
        grant = self._grants.get(reservation_id)
        if grant is not None and now >= grant.deadline:
            self._end(grant, is_late_write_possible=True, now=now)
            self._table.counters["reservations_expired"] += 1
            grant = None
        if grant is None:
            raise reservation_over(reservation_id)
        return grant

    def _remove(self, grant: LiveReservation) -> None:
        del self._grants[grant.reservation_id]
        of_writer = self._by_writer[grant.writer_id]
        of_writer.discard(grant.reservation_id)
        if not of_writer:
            del self._by_writer[grant.writer_id]
        if len(self._due) > 1024 and len(self._due) > 2 * len(self._grants):
            self._due = sorted((g.deadline, i) for i, g in self._grants.items())

    def _end(self, grant: LiveReservation, *, is_late_write_possible: bool, now: float) -> None:
        self._remove(grant)
        # The last block first: the tail of a chain leaves before its ancestors.
        open_copies = [copy for copy in reversed(grant.copies) if copy is not None]
        places = [
            self._table.vacate(copy, grant.part, is_late_write_possible=is_late_write_possible)
            for copy in open_copies
        ]
        if not is_late_write_possible:
            return
        slots = [
            QuarantinedSlot(copy.tier, place, copy.block.space.slot_bytes[copy.tier])
            for place, copy in zip(places, open_copies, strict=True)
        ]
        self._quarantines[grant.reservation_id] = Quarantine(
            grant.writer_id, slots, now + self._quarantine_s
        )

    def _expire_quarantines(self, now: float) -> int:
        over: list[int] = []
        for reservation_id, quarantine in self._quarantines.items():
            if quarantine.until > now:
                break
            over.append(reservation_id)
        return sum(self._end_quarantine(reservation_id) for reservation_id in over)

    def _end_quarantine(self, reservation_id: int) -> int:
        """Free the slots of one reservation; returns how many there were."""
        quarantine = self._quarantines.pop(reservation_id, None)
        if quarantine is None:
            return 0
        for tier, place, slot_bytes in quarantine.slots:
            self._table.tiers[tier].end_quarantine(place, slot_bytes)
        return len(quarantine.slots)


def reservation_over(reservation_id: int) -> ReservationGone:
    """The error for a reservation that ended or never existed."""
    return ReservationGone(
        f"reservation {reservation_id} was committed, aborted or has expired", hint="reserve again"
    )


def _has_part(block: Block, part: int) -> bool:
    return any(copy is not None and copy.checksums[part] is not None for copy in block.copies)


def _begun_copy(block: Block | None) -> Copy | None:
    """The copy that writers have begun to fill; not one that was recovered in part."""
    copies = block.copies if block is not None else []
    return next((copies[tier] for tier in (Tier.HBM, Tier.DRAM) if copies and copies[tier]), None)


def _ancestors(space: Space, parent: bytes) -> Iterator[Block]:
    """The known ancestors, from `parent` up."""
    while parent:
        block = space.blocks.get(parent)
        if block is None:
            return
        yield block
        parent = block.parent
