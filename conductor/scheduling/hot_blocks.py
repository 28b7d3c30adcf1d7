"""Finds hot blocks: those requested near a node more than once.

A request's own blocks are not hot.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.bounded import BoundedDict

HOT_REQUESTS = 2  # requests from which on a block is hot


class HotBlocks:
    """Counts requests for a block near a node, and remembers which copies were started lately.

    Args:
        capacity: (node, block) pairs to remember. The pairs requested longest ago are dropped
            first.
        rest_s: how long to wait before a copy is started again.

    Raises:
        InvalidArgument: the capacity is not positive.
    """

    def __init__(self, capacity: int = 65_536, rest_s: float = 60.0) -> None:
        self._rest_s = rest_s
        self._requests: BoundedDict[tuple[str, bytes], int] = BoundedDict(capacity)
        self._rests: BoundedDict[tuple[str, bytes], float] = BoundedDict(capacity)  # until when

    def requested(self, node_id: str, hashes: Sequence[bytes], now: float) -> tuple[int, int]:
        """Count one more request for a run of blocks near a node.

        Returns:
            The part of the run to copy now: index of its first block, and count. The part follows
            the blocks whose copies were started lately, and every block of it is hot.
        """
        counts = []
        for block_hash in hashes:
            counts.append(self._requests.get((node_id, block_hash), 0) + 1)
            self._requests[node_id, block_hash] = counts[-1]
        start = 0
        while start < len(hashes) and self._rests.get((node_id, hashes[start]), 0.0) > now:
            start += 1
        end = start
        while end < len(hashes) and counts[end] >= HOT_REQUESTS:
            end += 1
        return start, end - start

    def copying(self, node_id: str, hashes: Sequence[bytes], now: float) -> None:
        """Copies of these blocks were started: do not start them again for `rest_s`."""
        for block_hash in hashes:
            self._rests[node_id, block_hash] = now + self._rest_s

    def __len__(self) -> int:
        return len(self._requests)
