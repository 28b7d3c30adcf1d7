"""The client's recent writes: blocks that it committed before the conductor's index learns of them.

A writer thus finds its own blocks at once. A stale entry costs one failed pin. Callers pass the
time.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.blocks.tier import Tier
from kvpool.bounded import ExpiringDict
from kvpool.wire import messages as m

RECENT_S = 3.0  # nodes report their commits several times a second
MAX_RECENT = 65_536


class RecentWrites:
    """The node of each block written recently. Forgets the oldest first.

    Args:
        ttl_s: how long a write is remembered.
        limit: the most entries kept.
    """

    def __init__(self, ttl_s: float = RECENT_S, limit: int = MAX_RECENT) -> None:
        self._ttl_s = ttl_s
        # The node of each block, by namespace and hash.
        self._places: ExpiringDict[tuple[bytes, bytes], str] = ExpiringDict(limit)

    def remember(
        self, node_id: str, namespace_id: bytes, hashes: Sequence[bytes], now: float
    ) -> None:
        """Record that all parts of these blocks are committed at this node."""
        for block_hash in hashes:
            self._places[namespace_id, block_hash] = (node_id, now + self._ttl_s)

    def forget(self, node_id: str | None, namespace_id: bytes, hashes: Sequence[bytes]) -> None:
        """Record that this node no longer has these blocks; None: no node has."""
        for block_hash in hashes:
            place = self._places.get((namespace_id, block_hash))
            if place is not None and node_id in (None, place[0]):
                del self._places[namespace_id, block_hash]

    def forget_node(self, node_id: str) -> None:
        """Forget a node's blocks. Call it after the node restarted or left."""
        for key in [key for key, place in self._places.items() if place[0] == node_id]:
            del self._places[key]

    def extend(
        self,
        found: m.LookupReply,
        namespace_id: bytes,
        hashes: Sequence[bytes],
        now: float,
    ) -> m.LookupReply:
        """Extend the reply to a look-up of `hashes` by the next blocks that this client wrote."""
        self._places.expire(now)
        if not self._places or found.found == len(hashes):
            return found
        segments = list(found.segments)
        at = found.found
        for at in range(found.found, len(hashes)):
            place = self._places.get((namespace_id, hashes[at]))
            if place is None:
                break
            last = segments[-1] if at > found.found else None
            if last is not None and last.node_id == place[0]:
                segments[-1] = m.Segment(place[0], last.start, last.count + 1, last.tier)
            else:
                segments.append(m.Segment(place[0], at, 1, Tier.DRAM))
        else:
            at = len(hashes)
        return m.LookupReply(at, segments, found.wait_s) if at > found.found else found

    def contains(self, namespace_id: bytes, hashes: Sequence[bytes], now: float) -> list[bool]:
        """For each of these blocks, whether this client wrote it recently."""
        self._places.expire(now)
        return [(namespace_id, block_hash) in self._places for block_hash in hashes]

    def __len__(self) -> int:
        return len(self._places)
