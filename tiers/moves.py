"""Moves between dram and nvme: which copies to make, and what their end means. Decides, copies nothing.

Promotion brings a run into dram, because only dram copies can be leased. Demotion cleans: it gives the
coldest dram copies a second one in nvme, so that evicting them later loses nothing. The dram copy stays until
its room is needed. Both slots of a move are held until it is finished. Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kvpool.errors import InvalidArgument
from tiers.blocks import DRAM, NVME, TIER_NAMES, Block, Copy, Move, Space
from tiers.residency import Residency


class MoveBook:
    """The moves under way.

    Args:
        residency: where the slots are.
        high_watermark: share of dram in use above which demotion begins.
        low_watermark: share of dram that demotion makes dispensable down to.
        is_write_through: demote every block, whatever the watermarks.
        retry_s: seconds before a block whose demotion failed is tried again.
    """

    def __init__(
        self,
        residency: Residency,
        high_watermark: float,
        low_watermark: float,
        is_write_through: bool,
        retry_s: float,
    ) -> None:
        self._residency = residency
        self._high = high_watermark
        self._low = low_watermark
        self._is_write_through = is_write_through
        self._retry_s = retry_s
        self._next_id = 1
        self._moves: dict[int, tuple[Move, Copy, Copy]] = {}
        self._cleaning_bytes = 0  # dram bytes of the parts whose demotion is under way
        self._retry: deque[tuple[float, Copy]] = deque()

    def __len__(self) -> int:
        return len(self._moves)

    def values(self) -> list[tuple[Move, Copy, Copy]]:
        """Each move with its source and its target."""
        return list(self._moves.values())

    def promote_run(
        self, space: Space, hashes: Sequence[bytes]
    ) -> tuple[list[Block], list[Move], str]:
        """Start promoting what the leading run has in nvme only.

        Returns the blocks that can be leased now, the moves, and "promoting" when there are any (own or
        others'), "no_room" when the run was cut for want of it, else "".
        """
        dram, nvme = space.visible
        run: list[Block] = []
        for name in hashes:
            block = dram.get(name) or nvme.get(name)
            if block is None:
                break
            run.append(block)
        self._residency.touch(run)
        moves: list[Move] = []
        is_waiting = False
        with self._residency.shield(run):
            for position, block in enumerate(run):
                if block.name in dram:
                    continue
                if block.copies[DRAM] is not None:
                    is_waiting = True
                    continue
                started = self._begin(block, NVME, DRAM, None)
                if started is None:
                    if not is_waiting:
                        return run[:position], [], "no_room"
                    break
                is_waiting = True
                moves += started
        return ([], moves, "promoting") if is_waiting else (run, [], "")

    def plan_demotions(self, max_blocks: int, now: float) -> list[Move]:
        """Moves for the coldest dram blocks that have no nvme copy, `max_blocks` at most.

        A block takes the place of a colder one only: else a full disk would be rewritten for ever.
        """
        residency = self._residency
        if len(residency.tiers) < 2:
            return []
        while self._retry and self._retry[0][0] <= now:
            residency.dirty.offer(self._retry.popleft()[1])
        moves: list[Move] = []
        skipped: set[Block] = set()  # pinned: hot, and not worth a write yet
        planned = 0
        while planned < max_blocks and self._is_demotion_due():
            copy = residency.dirty.lowest(lambda copy: copy.block in skipped)
            if copy is None:
                break
            block = copy.block
            if block.pins and not self._is_write_through:
                skipped.add(block)
                continue
            planned_moves = self._begin(block, DRAM, NVME, block.last_use)
            if planned_moves is None:
                break
            planned += 1
            moves += planned_moves
        return moves

    def finish(self, move_id: int, is_ok: bool | None, now: float) -> None:
        """The bytes of one move are in place, or never will be; nothing touches its slots any more.

        Args:
            is_ok: None for a move that was not begun, which is no failure.

        Raises:
            InvalidArgument: no such move is under way.
        """
        if move_id not in self._moves:
            raise InvalidArgument(f"no move {move_id} is under way")
        move, source, target = self._moves.pop(move_id)
        residency = self._residency
        kind = "promoted" if target.tier == DRAM else "demoted"
        if target.tier == NVME:
            self._cleaning_bytes -= source.block.space.slot_bytes[DRAM]
        source.reading -= 1
        if is_ok:
            if residency.fill(target, move.part, move.checksum):
                residency.counters[kind] += 1
        else:
            residency.counters["moves_cancelled" if is_ok is None else "moves_failed"] += 1
            residency.vacate(target, move.part, is_late_write_possible=False)
        if not target.filling:
            residency.discard_partial(target)  # some other part failed
        residency.settle_state(source)
        if not is_ok and source.tier == DRAM:
            self._retry.append((now + self._retry_s, source))

    # ------------------------------------------------------------ within

    def _is_demotion_due(self) -> bool:
        if self._is_write_through:
            return True
        dram = self._residency.tiers[DRAM]
        capacity = dram.slots.capacity_bytes
        if dram.free_bytes >= (1.0 - self._high) * capacity:
            return False
        dispensable = dram.free_bytes + self._residency.clean_bytes + self._cleaning_bytes
        return dispensable < (1.0 - self._low) * capacity

    def _begin(
        self,
        block: Block,
        source_tier: int,
        target_tier: int,
        colder_than: int | None,
    ) -> list[Move] | None:
        source = block.copies[source_tier]
        if source is None or not source.is_whole:
            raise InvalidArgument(
                f"block {block.name.hex()} is not whole in {TIER_NAMES[source_tier]}"
            )
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
                TIER_NAMES[source_tier],
                place,
                TIER_NAMES[target_tier],
                to,
                space.part_bytes,
                checksum,
                block.parent,
            )
            self._moves[self._next_id] = (move, source, target)
            self._next_id += 1
            moves.append(move)
        if target_tier == NVME:
            residency.dirty.discard(source)  # comes back when the move fails, after a while
            self._cleaning_bytes += space.slot_bytes[DRAM] * space.tp_size
        return moves
