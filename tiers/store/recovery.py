"""Taking in what a restarted node finds in its NVMe files, and what it has to keep for that. Pure: the files are read
elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvpool.blocks.tier import Tier
from kvpool.errors import InvalidArgument, NoRoom
from tiers.store.block_table import Residency
from tiers.store.blocks import FOREVER, Block, Space
from tiers.store.fp8 import Encoding
from tiers.store.retention import ProtectionBook
from tiers.store.slab_allocator import Place


class Use(NamedTuple):
    """The tick of a block's last use, as of some life of the node."""

    namespace_id: bytes
    block_hash: bytes
    tick: int


class Protection(NamedTuple):
    """Until when a block is protected; see `Store.protect`."""

    namespace_id: bytes
    block_hash: bytes
    until: float  # monotonic seconds; infinite: for ever


def recover_part(
    residency: Residency,
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
    if Tier.NVME not in residency.tiers or not 0 <= part < space.tp_size:
        return False
    block = residency.block(space, block_hash, parent)
    copy = block.copies[Tier.NVME]
    is_known = any(other is not None and other is not copy for other in block.copies) or (
        copy is not None and (copy.places[part] is not None or copy.encoding != encoding)
    )
    if is_known or not residency.claim(block, Tier.NVME, part, place, encoding):
        residency.forget_if_gone(block)
        return False
    copy = block.copies[Tier.NVME]
    if copy is not None and residency.fill(copy, part, checksum):
        residency.counters["recovered"] += 1
    return True


def discard_partial(residency: Residency) -> list[tuple[bytes, bytes]]:
    """Free the blocks that were recovered in part only; returns (namespace id, hash) of each."""
    partial: list[tuple[bytes, bytes]] = []
    for space in residency.spaces.values():
        for block in list(space.blocks.values()):
            copy = block.copies[Tier.NVME]
            if copy is not None and copy.committed and not copy.is_whole and not copy.filling:
                partial.append((space.namespace_id, block.name))
                residency.discard_partial(copy)
    return partial


def uses(residency: Residency, count: int) -> Iterator[list[tuple[int, Use]]]:
    """(device, last use) of what stands in nvme, `count` blocks at a time; the store may change in between."""
    for space in list(residency.spaces.values()):
        standing = space.visible[Tier.NVME]
        names = list(standing)
        for start in range(0, len(names), count):
            rows: list[tuple[int, Use]] = []
            for name in names[start : start + count]:
                copy = standing.get(name)
                if copy is not None:
                    use = Use(space.namespace_id, name, copy.last_use)
                    rows += [(number, use) for number in {p.arena_id for p in copy.whole_places}]
            yield rows


def restore_uses(residency: Residency, known: Sequence[Use]) -> None:
    """Order the blocks that were recovered by their last use, and those without one, which came last, after them."""
    ticks = {(use.namespace_id, use.block_hash): use.tick for use in known}
    used: list[tuple[int, Block]] = []
    fresh: list[Block] = []
    for space in residency.spaces.values():
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
    residency.advance_to(latest)
    tick = residency.advance(len(ordered)) - len(ordered)
    for number, block in enumerate(ordered, 1):
        block.last_use = tick + number


def restore_protections(
    book: ProtectionBook, residency: Residency, kept: Sequence[Protection], now: float
) -> int:
    """Protect again what stands here; returns how many blocks could not be, as there is no room for the promise."""
    groups: dict[tuple[float, bytes], list[bytes]] = {}
    for protection in kept:
        group = groups.setdefault((-protection.until, protection.namespace_id), [])
        group.append(protection.block_hash)
    refused = 0
    for until, namespace_id in sorted(
        groups
    ):  # parents, which are protected as long at least, first
        space, hashes = residency.spaces.get(namespace_id), groups[until, namespace_id]
        if space is None:
            continue
        try:
            book.protect(space, hashes, None if -until == FOREVER else -until, now)
        except (NoRoom, InvalidArgument):
            refused += len(hashes)
    residency.counters["protections_not_restored"] += refused
    return refused
