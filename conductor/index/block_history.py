"""The last event of each block, also of removed ones, to find the reason of a miss. Pure.

It is a table of fixed size with 8 bytes per entry. A newer block overwrites an older one in the
same slot. It is not an index: it does not say where a block can be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from kvpool.blocks.records import BlockEvent
from kvpool.errors import InvalidArgument

_NODE_BITS = 14
_KIND_BITS = 2
_SHIFT = np.uint64(_NODE_BITS + _KIND_BITS)  # the other 48 bits are of the hash
_KINDS: dict[str, int] = {"stored": 1, "removed": 2}


class LastEvent(NamedTuple):
    """The last event of a block, and the node that reported it ("" if it is not known any more)."""

    kind: Literal["stored", "removed"]
    node_id: str


class BlockHistory:
    """Last events by block hash.

    Args:
        capacity: maximum number of blocks, rounded up to a power of two.

    Raises:
        InvalidArgument: the capacity is not positive.
    """

    def __init__(self, capacity: int = 1 << 20) -> None:
        if capacity < 1:
            raise InvalidArgument(f"a block history of {capacity} blocks")
        size = 1 << max(0, capacity - 1).bit_length()
        self._mask = np.uint64(size - 1)
        self._table = np.zeros(size, dtype=np.uint64)
        self._numbers: dict[str, int] = {}
        self._names: list[str] = []
        self._next = 0

    def record(self, node_id: str, events: Sequence[BlockEvent]) -> None:
        """Record a node's events, in order. About 10 ns per block."""
        number = self._number_of(node_id)
        for event in events:
            kind = _KINDS.get(event.kind)
            if kind is None or not event.hashes:
                continue
            halves = np.frombuffer(event.hashes, dtype="<u8").reshape(-1, 2)
            code = np.uint64(number << _KIND_BITS | kind)
            marks = (halves[:, 1] >> _SHIFT) << _SHIFT
            self._table[(halves[:, 0] & self._mask).astype(np.int64)] = marks | code

    def last_event(self, block_hash: bytes) -> LastEvent | None:
        """The last event of a block; None if there was none, or if another block overwrote it."""
        first = int.from_bytes(block_hash[:8], "little")
        mark = int.from_bytes(block_hash[8:16], "little") >> int(_SHIFT)
        entry = int(self._table[first & int(self._mask)])
        if not entry or entry >> int(_SHIFT) != mark:
            return None
        number = entry >> _KIND_BITS & (1 << _NODE_BITS) - 1
        name = self._names[number] if number < len(self._names) else ""
        return LastEvent("stored" if entry & 3 == _KINDS["stored"] else "removed", name)

    def _number_of(self, node_id: str) -> int:
        number = self._numbers.get(node_id)
        if number is None:
            number = self._next % (1 << _NODE_BITS)
            self._next += 1
            if number < len(self._names):  # all numbers are used: reuse the oldest one
                self._numbers.pop(self._names[number], None)
                self._names[number] = node_id
            else:
                self._names.append(node_id)
            self._numbers[node_id] = number
        return number
