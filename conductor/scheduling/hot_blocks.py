"""Which blocks were wanted near a node more than once: those of a hot prefix, and not a request's own.

Bounded. Pure: `now` is monotonic seconds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvpool.errors import InvalidArgument

WANTED = 2  # wishes from which on a block counts as hot


class HotBlocks:
    """Counts wishes for copies by (node, block), and remembers what was asked for.

    Args:
        capacity: pairs remembered; beyond it those wanted longest ago are forgotten.
        rest_s: how long a copy that was asked for is not asked for again.

    Raises:
        InvalidArgument: the capacity is not positive.
    """

    def __init__(self, capacity: int = 65_536, rest_s: float = 60.0) -> None:
        if capacity < 1:
            raise InvalidArgument(f"a capacity of {capacity} blocks")
        self._capacity = capacity
        self._rest_s = rest_s
        self._wishes: OrderedDict[tuple[str, bytes], int] = OrderedDict()
        self._asked: OrderedDict[tuple[str, bytes], float] = OrderedDict()

    def wanted(self, node_id: str, hashes: Sequence[bytes], now: float) -> tuple[int, int]:
        """One more wish for a run of blocks at a node.

        Returns:
            Which part of the run is to be asked for now: first block and count, 0 for nothing. It is hot, and
            follows on what was asked for lately.
        """
        counts = []
        for block_hash in hashes:
            key = (node_id, block_hash)
            counts.append(self._wishes.pop(key, 0) + 1)
            self._wishes[key] = counts[-1]
        while len(self._wishes) > self._capacity:
            self._wishes.popitem(last=False)
        start = 0
        while start < len(hashes) and self._asked.get((node_id, hashes[start]), 0.0) > now:
            start += 1
        end = start
        while end < len(hashes) and counts[end] >= WANTED:
            end += 1
        return start, end - start

    def asked(self, node_id: str, hashes: Sequence[bytes], now: float) -> None:
        """These are being copied: wishes for them are heard again after a while."""
        for block_hash in hashes:
            self._asked.pop((node_id, block_hash), None)
            self._asked[node_id, block_hash] = now + self._rest_s
        while len(self._asked) > self._capacity:
            self._asked.popitem(last=False)

    def __len__(self) -> int:
        return len(self._wishes)
