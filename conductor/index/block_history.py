"""What was last heard of blocks, of those that are gone as well: so that a miss can be given a reason.

A table of fixed size, 8 bytes an entry, in which a newer block takes the place of an older one with the
same slot. It is no index: it says nothing of where a block can be read. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from kvpool.errors import InvalidArgument
from kvpool.wire.messages import BlockEvent

_NODE_BITS = 14
_KIND_BITS = 2
_SHIFT = np.uint64(_NODE_BITS + _KIND_BITS)  # the rest, 48 bits, tells blocks of one slot apart
_KINDS: dict[str, int] = {"stored": 1, "removed": 2}


class LastEvent(NamedTuple):
    """The last event of a block that was heard, and the node that spoke ("" when that is not known any more)."""

    kind: Literal["stored", "removed"]
    node_id: str


class BlockHistory:
    """See the module's docstring.

    Args:
        capacity: blocks remembered at most, rounded up to a power of two.

    Raises:
        InvalidArgument: the capacity is not positive.
    """

    def __init__(self, capacity: int = 1 << 20) -> None:
        if capacity < 1:
            raise InvalidArgument(f"news of {capacity} blocks")
        size = 1 << max(0, capacity - 1).bit_length()
        self._mask = np.uint64(size - 1)
        self._table = np.zeros(size, dtype=np.uint64)
        self._numbers: dict[str, int] = {}
        self._names: list[str] = []
        self._next = 0

    def record(self, node_id: str, events: Sequence[BlockEvent]) -> None:
        """A node's events, in order. About 10 ns a block."""
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
        """None: never heard of, or so long ago that others took its place."""
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
            if number < len(
                self._names
            ):  # so many nodes came and went that the first number is free
                self._numbers.pop(self._names[number], None)
                self._names[number] = node_id
            else:
                self._names.append(node_id)
            self._numbers[node_id] = number
        return number
