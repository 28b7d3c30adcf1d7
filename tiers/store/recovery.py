"""Taking in what a restarted node finds in its NVMe files, and what it has to keep for that. Pure: the files are read
elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvpool.blocks.tier import Tier
from kvpool.errors import InvalidArgument, NoRoom
from tiers.store.block_table import BlockTable
from tiers.store.blocks import FOREVER, Block, Space
from tiers.store.fp8 import Encoding
from tiers.store.retention import RetentionTable
from tiers.store.slab_allocator import Place


class Access(NamedTuple):
    """The tick of a block's last use, as of some life of the node."""

    namespace_id: bytes
    block_hash: bytes
    tick: int


class Retention(NamedTuple):
    """Until when a block is protected; see `Store.protect`."""

    namespace_id: bytes
    block_hash: bytes
    until: float  # monotonic seconds; infinite: for ever


def recover_part(
    table: BlockTable,
    space: Space,
    block_hash: bytes,
    parent: bytes,
    part: int,
    place: Place,
    checksum: int,
    encoding: Encoding,
) -> bool:
    """Enter one part at its place in nvme; False when the place or the part is taken or impossible.

    Parts of one block that are encoded in different ways do not make a block.
    """
    if Tier.NVME not in table.tiers or not 0 <= part < space.tp_size:
        return False
    block = table.block(space, block_hash, parent)
    copy = block.copies[Tier.NVME]
    is_known = any(other is not None and other is not copy for other in block.copies) or (
        copy is not None and (copy.places[part] is not None or copy.encoding != encoding)
    )
    if is_known or not table.claim(block, Tier.NVME, part, place, encoding):
        table.forget_if_gone(block)
        return False
    copy = block.copies[Tier.NVME]
    if copy is not None and table.fill(copy, part, checksum):
        table.counters["recovered"] += 1
    return True


def discard_partial(table: BlockTable) -> list[tuple[bytes, bytes]]:
    """Free the blocks that were recovered in part only; returns (namespace id, hash) of each."""
    partial: list[tuple[bytes, bytes]] = []
    for space in table.spaces.values():
        for block in list(space.blocks.values()):
            copy = block.copies[Tier.NVME]
            if copy is not None and copy.committed and not copy.is_whole and not copy.filling:
                partial.append((space.namespace_id, block.name))
                table.discard_partial(copy)
    return partial


def accesses(table: BlockTable, count: int) -> Iterator[list[tuple[int, Access]]]:
    """(device, last use) of what stands in nvme, `count` blocks at a time; the store may change in between."""
    for space in list(table.spaces.values()):
        resident = space.visible[Tier.NVME]
        names = list(resident)
        for start in range(0, len(names), count):
            rows: list[tuple[int, Access]] = []
            for name in names[start : start + count]:
                copy = resident.get(name)
                if copy is not None:
                    access = Access(space.namespace_id, name, copy.last_use)
                    rows += [(number, access) for number in {p.arena_id for p in copy.whole_places}]
            yield rows


def restore_accesses(table: BlockTable, known: Sequence[Access]) -> None:
    """Order the blocks that were recovered by their last use, and those without one, which came last, after them."""
    ticks = {(access.namespace_id, access.block_hash): access.tick for access in known}
    used: list[tuple[int, Block]] = []
    fresh: list[Block] = []
    for space in table.spaces.values():
        for block in space.blocks.values():
            tick = ticks.get((space.namespace_id, block.name))
            if tick is None:
                fresh.append(block)
            else:
                used.append((tick, block))
    used.sort(key=lambda row: row[0])
    ordered = [block for _, block in used] + fresh
    # Later than all that any device knows: one that comes back later tells of earlier times.
    latest = max(ticks.values(), default=0)
    table.advance_to(latest)
    tick = table.advance(len(ordered)) - len(ordered)
    for number, block in enumerate(ordered, 1):
        block.last_use = tick + number


def restore_retentions(
    book: RetentionTable, table: BlockTable, retained: Sequence[Retention], now: float
) -> int:
    """Protect again what stands here; returns how many blocks could not be, as there is no room for the promise."""
    groups: dict[tuple[float, bytes], list[bytes]] = {}
    for retention in retained:
        group = groups.setdefault((-retention.until, retention.namespace_id), [])
        group.append(retention.block_hash)
    refused = 0
    for until, namespace_id in sorted(
        groups
    ):  # parents, which are protected as long at least, first
        space, hashes = table.spaces.get(namespace_id), groups[until, namespace_id]
        if space is None:
            continue
        try:
            book.retain(space, hashes, None if -until == FOREVER else -until, now)
        except (NoRoom, InvalidArgument):
            refused += len(hashes)
    table.counters["retentions_not_restored"] += refused
    return refused
