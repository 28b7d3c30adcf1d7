"""Moves between tiers: which copies to make, and what their end means. Decides, copies nothing.

Promotion brings a run where its reader can read it: into dram, from nvme or from hbm, or into hbm for those who
ask for that. Demotion cleans: it gives the coldest copies of dram a second one in nvme, and those of hbm one
in dram, so that evicting them later loses nothing. The first copy stays until its room is needed. Both slots
of a move are held until it is finished. Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvpool.blocks.tier import Tier
from kvpool.errors import InvalidArgument
from tiers.store import eviction
from tiers.store.block_table import Residency
from tiers.store.blocks import Copy, Move, Space
from tiers.store.writeback import Boundary

PATIENCE = 16  # times the wait of a block that found no room, when it is refused again unused


class MoveBook:
    """The moves under way.

    Args:
        residency: where the slots are.
        retry_s: seconds before a block whose demotion failed is tried again.
    """

    def __init__(self, residency: Residency, retry_s: float) -> None:
        self._residency = residency
        self._retry_s = retry_s
        self._next_id = 1
        self._moves: dict[int, tuple[Move, Copy, Copy]] = {}
        self.has_more = False  # the last plan ended before the first block that finds room

    def __len__(self) -> int:
        return len(self._moves)

    def values(self) -> list[tuple[Move, Copy, Copy]]:
        """Each move with its source and its target."""
        return list(self._moves.values())

    def promote_run(
        self, space: Space, hashes: Sequence[bytes], readable: Collection[Tier], target: Tier
    ) -> tuple[list[Copy], list[Move], str]:
        """Start bringing into `target` what the leading run has in no tier of `readable`, best first.

        Returns the copies that can be leased now, the moves, and "promoting" when there are any (own or
        others'), "no_room" when the run was cut for want of it, else "".
        """
        run: list[tuple[Copy, bool]] = []
        for name in hashes:
            copy = whole_copy(space, readable, name)
            is_ready = copy is not None
            copy = copy or whole_copy(space, tuple(Tier), name)
            if copy is None:
                break
            run.append((copy, is_ready))
        blocks = [copy.block for copy, _ in run]
        self._residency.touch(blocks)
        moves: list[Move] = []
        is_waiting = False
        with self._residency.shield(blocks):
            for position, (copy, is_ready) in enumerate(run):
                if is_ready:
                    continue
                if copy.block.copies[target] is not None:
                    is_waiting = True
                    continue
                started = self._begin(copy, target, None)
                if started is None:
                    if not is_waiting:
                        return [ready for ready, _ in run[:position]], [], "no_room"
                    break
                is_waiting = True
                moves += started
        if is_waiting:
            return [], moves, "promoting"
        return [copy for copy, _ in run], [], ""

    def plan_demotions(self, max_blocks: int, now: float, sources: Collection[Tier]) -> list[Move]:
        """Moves for the coldest blocks of each source that stand in no tier below it, `max_blocks` of each.

        A block takes the place of a colder one only: else a full disk would be rewritten for ever. One that
        finds none counts as one of `max_blocks`, holds up nobody, and is tried again later.
        """
        moves: list[Move] = []
        self.has_more = False
        for index, boundary in reversed(self._residency.boundaries.items()):  # from below
            if index in sources:
                boundary.offer_again(now)
                moves += self._plan(boundary, max_blocks, now)
        return moves

    def _plan(self, boundary: Boundary, max_blocks: int, now: float) -> list[Move]:
        moves: list[Move] = []
        skipped: set[Copy] = set()  # pinned: hot, and not worth a write yet
        planned = 0
        while planned < max_blocks and boundary.is_due:
            copy = boundary.dirty.lowest(lambda copy: copy in skipped)
            if copy is None:
                break
            if copy.pins and not boundary.is_write_through:
                skipped.add(copy)
                continue
            if self._is_room_coming(boundary, copy):
                break
            planned += 1
            planned_moves = self._begin(copy, boundary.target, copy.last_use)
            if planned_moves is not None:
                moves += planned_moves
                continue
            # All that could go below is hotter. What follows is hotter still, or of another slot size or account,
            # and may find room; this one waits, for longer if it waited before and was not used since.
            wait_s = self._retry_s * (PATIENCE if copy.refused_use == copy.last_use else 1)
            boundary.retry_later(copy, now + wait_s)
            copy.refused_use = (
                copy.last_use
            )  # from hbm it may go when room is needed (`eviction.is_spared`)
            self._residency.counters["demotion_refused"] += 1
            self._residency.settle_state(copy)
        self.has_more = self.has_more or (planned == max_blocks and not moves)
        return moves

    def _is_room_coming(self, boundary: Boundary, copy: Copy) -> bool:
        """The tier below is being cleaned itself: what made room there now would be lost."""
        below = self._residency.boundaries.get(boundary.target)
        return (
            below is not None
            and below.cleaning_bytes > 0
            and below.dispensable_bytes < copy.size_bytes
        )

    def demote(self, copy: Copy) -> list[Move]:
        """Moves that give one copy another in the tier below; none where it has one or finds no room."""
        boundary = self._residency.boundaries.get(copy.tier)
        if boundary is None or not copy.is_whole or eviction.has_backing(copy):
            return []
        if copy.block.copies[boundary.target] is not None:
            return []
        return self._begin(copy, boundary.target, copy.last_use) or []

    def finish(
        self, move_id: int, is_ok: bool | None, now: float, checksum: int | None = None
    ) -> None:
        """The bytes of one move are in place, or never will be; nothing touches its slots any more.

        Args:
            is_ok: None for a move that was not begun, which is no failure.
            checksum: of the bytes that were written; None where they are those that were read.

        Raises:
            InvalidArgument: no such move is under way.
        """
        if move_id not in self._moves:
            raise InvalidArgument(f"no move {move_id} is under way")
        move, source, target = self._moves.pop(move_id)
        residency = self._residency
        is_up = target.tier < source.tier
        boundary = self._crossed(source, target.tier)
        if boundary is not None:
            boundary.cleaning_bytes -= source.block.space.slot_bytes[source.tier]
        source.reading -= 1
        if is_ok and residency.is_lost(target):
            is_ok = False
        if is_ok:
            if residency.fill(target, move.part, move.checksum if checksum is None else checksum):
                kind = "promoted" if is_up else "demoted"
                residency.counters[kind] += 1
                residency.counters[f"{kind}:{move.target_tier}"] += 1
        else:
            residency.counters["moves_cancelled" if is_ok is None else "moves_failed"] += 1
            residency.vacate(target, move.part, is_late_write_possible=False)
        if not target.filling:
            residency.discard_partial(target)  # some other part failed
        residency.settle_state(source)
        if boundary is not None and not target.filling and not target.is_whole:
            boundary.retry_later(source, now + self._retry_s)

    # ------------------------------------------------------------ within

    def _crossed(self, source: Copy, target_tier: Tier) -> Boundary | None:
        """The boundary that a move cleans by crossing it."""
        boundary = self._residency.boundaries.get(source.tier)
        return boundary if boundary is not None and boundary.target == target_tier else None

    def _begin(self, source: Copy, target_tier: Tier, colder_than: int | None) -> list[Move] | None:
        block = source.block
        if not source.is_whole:
            raise InvalidArgument(f"block {block.name.hex()} is not whole in {source.tier}")
        residency, space = self._residency, block.space
        source.reading += space.tp_size  # before room is made: the source is never the victim
        for part in range(space.tp_size):
            if residency.hold(block, target_tier, part, colder_than) is None:
                target = block.copies[target_tier]
                if target is not None:
                    for taken in range(part):
                        residency.vacate(target, taken, is_late_write_possible=False)
                source.reading -= space.tp_size
                residency.settle_state(source)
                return None
        target = block.copies[target_tier]
        moves: list[Move] = []
        for part, (place, checksum) in enumerate(zip(source.places, source.checksums, strict=True)):
            to = target.places[part] if target is not None else None
            if target is None or to is None or place is None or checksum is None:
                raise InvalidArgument(f"block {block.name.hex()} lost a part")
            move = Move(
                self._next_id,
                space.namespace_id,
                block.name,
                part,
                source.tier,
                place,
                target_tier,
                to,
                space.part_bytes,
                checksum,
                block.parent,
                target.encoding if target_tier == Tier.NVME else source.encoding,
            )
            self._moves[self._next_id] = (move, source, target)
            self._next_id += 1
            moves.append(move)
        boundary = self._crossed(source, target_tier)
        if boundary is not None:
            boundary.dirty.discard(source)  # comes back when the move fails, after a while
            boundary.cleaning_bytes += space.slot_bytes[source.tier] * space.tp_size
        return moves


def whole_copy(space: Space, tiers: Collection[Tier], name: bytes) -> Copy | None:
    """The block's whole copy in the first of the tiers that has one."""
    for tier in tiers:
        copy = space.visible[tier].get(name)
        if copy is not None:
            return copy
    return None
