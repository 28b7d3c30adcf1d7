"""The negative cache: copies left out of look-ups for a while, because a pin of them failed.

Bounded; no clock.
"""

from __future__ import annotations

import heapq

Copies = dict[str, float]  # node id -> when the entry ends, in monotonic seconds


class NegativeCache:
    """Entries by namespace, block and node.

    Args:
        capacity: maximum number of entries. Above it those that end first are dropped.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._spaces: dict[bytes, dict[bytes, Copies]] = {}
        self._ends: list[tuple[float, bytes, bytes, str]] = []  # a heap

    def of(self, namespace_id: bytes) -> dict[bytes, Copies] | None:
        """The entries of one namespace by block; None if there are none. Do not change it."""
        return self._spaces.get(namespace_id)

    def add(self, node_id: str, namespace_id: bytes, block_hash: bytes, until: float) -> None:
        """Add an entry or prolong it. An earlier `until` changes nothing."""
        blocks = self._spaces.setdefault(namespace_id, {})
        copies = blocks.setdefault(block_hash, {})
        if copies.get(node_id, float("-inf")) >= until:
            return
        copies[node_id] = until
        heapq.heappush(self._ends, (until, namespace_id, block_hash, node_id))
        while len(self._ends) > self.capacity:
            self._end(*heapq.heappop(self._ends))

    def clear(self, namespace_id: bytes, block_hash: bytes, node_id: str) -> None:
        """Drop the entry of one copy."""
        blocks = self._spaces.get(namespace_id)
        copies = blocks.get(block_hash) if blocks is not None else None
        if blocks is None or copies is None:
            return
        copies.pop(node_id, None)
        if not copies:
            del blocks[block_hash]
            if not blocks:
                del self._spaces[namespace_id]

    def expire(self, now: float) -> int:
        """Drop the entries whose time has passed; return how many."""
        ended = 0
        while self._ends and self._ends[0][0] <= now:
            ended += self._end(*heapq.heappop(self._ends))
        return ended

    def _end(self, until: float, namespace_id: bytes, block_hash: bytes, node_id: str) -> int:
        copies = self._spaces.get(namespace_id, {}).get(block_hash, {})
        if copies.get(node_id) != until:
            return 0  # cleared, or prolonged
        self.clear(namespace_id, block_hash, node_id)
        return 1
