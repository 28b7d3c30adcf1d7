"""What a restarted node restores: blocks in NVMe files, their order of use, and retention.

Other parts read and write the files. This one decides what the store takes in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvpool.blocks.tier import Tier
from kvpool.errors import InvalidArgument, NoRoom
from tiers.store.block_table import BlockTable
from tiers.store.blocks import FOREVER, Block
from tiers.store.fp8 import Encoding
from tiers.store.namespaces import NamespaceTable
from tiers.store.retention import Retention, RetentionTable
from tiers.store.slab_allocator import Place


class Access(NamedTuple):
    """The tick of a block's last use. Ticks go on growing through restarts."""

    namespace_id: bytes
    block_hash: bytes
    tick: int


class Recovery:
    """Restores a store, and lists what must be saved for that.

    Args:
        table: the blocks.
        namespaces: the namespaces.
        retention: the soft and hard pins.
    """

    def __init__(
        self, table: BlockTable, namespaces: NamespaceTable, retention: RetentionTable
    ) -> None:
        self._table = table
        self._namespaces = namespaces
        self._retention = retention

    def recover_part(
        self,
        namespace_id: bytes,
        block_hash: bytes,
        parent: bytes,
        part: int,
        place: Place,
        checksum: int,
        encoding: Encoding = "as_is",
    ) -> bool:
        """Enter one part that was found on NVMe; False if its place or part is taken or impossible.

        Parts that are encoded in different ways do not make a block.

        Args:
            checksum: of the bytes on disk.
            encoding: of the part on disk.

        Raises:
            UnknownNamespace.
        """
        table, space = self._table, self._namespaces.space(namespace_id)
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

    def discard_partial(self) -> list[tuple[bytes, bytes]]:
        """Free the blocks with parts that are missing; returns (namespace id, hash) of each."""
        partial: list[tuple[bytes, bytes]] = []
        for space in self._table.spaces.values():
            for block in list(space.blocks.values()):
                copy = block.copies[Tier.NVME]
                if copy is not None and copy.committed and not copy.is_whole and not copy.filling:
                    partial.append((space.namespace_id, block.name))
                    self._table.discard_partial(copy)
        return partial

    @property
    def tick(self) -> int:
        """The last tick. It grows with every use of a block and with every new block."""
        return self._table.access_clock.tick

    def accesses(self, count: int) -> Iterator[list[tuple[int, Access]]]:
        """(device, last use) of every block on NVMe, `count` blocks at a time.

        The store may change between two of them.
        """
        for space in list(self._table.spaces.values()):
            resident = space.visible[Tier.NVME]
            names = list(resident)
            for start in range(0, len(names), count):
                rows: list[tuple[int, Access]] = []
                for name in names[start : start + count]:
                    copy = resident.get(name)
                    if copy is not None:
                        access = Access(space.namespace_id, name, copy.last_use)
                        devices = {place.arena_id for place in copy.whole_places}
                        rows += [(device, access) for device in devices]
                yield rows

    def restore_accesses(self, known: Sequence[Access]) -> None:
        """Order the recovered blocks by their last use.

        Blocks without one were written after the last checkpoint, so they come last. Policies that
        use more than recency start anew.
        """
        ticks = {(access.namespace_id, access.block_hash): access.tick for access in known}
        used: list[tuple[int, Block]] = []
        fresh: list[Block] = []
        for space in self._table.spaces.values():
            for block in space.blocks.values():
                tick = ticks.get((space.namespace_id, block.name))
                if tick is None:
                    fresh.append(block)
                else:
                    used.append((tick, block))
        used.sort(key=lambda row: row[0])
        ordered = [block for _, block in used] + fresh
        # Later than what any device recorded: a device that returns later then has the older
        # record.
        latest = max(ticks.values(), default=0)
        self._table.access_clock.advance_to(latest)
        tick = self._table.access_clock.advance(len(ordered)) - len(ordered)
        for number, block in enumerate(ordered, 1):
            block.last_use = tick + number

    def restore_retentions(self, saved: Sequence[Retention], now: float) -> int:
        """Retain the blocks that are here again; returns how many `retention_share` excludes."""
        groups: dict[tuple[float, bytes], list[bytes]] = {}
        for retention in saved:
            group = groups.setdefault((-retention.until, retention.namespace_id), [])
            group.append(retention.block_hash)
        refused = 0
        # The longest first: a parent is retained as long as its children, or longer.
        for until, namespace_id in sorted(groups):
            hashes = groups[until, namespace_id]
            space = self._table.spaces.get(namespace_id)
            if space is None:
                continue
            try:
                end = None if -until == FOREVER else -until
                self._retention.retain_in(space, hashes, end, now)
            except (NoRoom, InvalidArgument):
                refused += len(hashes)
        self._table.counters["retentions_not_restored"] += refused
        return refused
