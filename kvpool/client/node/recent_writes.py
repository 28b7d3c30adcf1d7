"""What a client itself wrote a moment ago, and where: the conductor's index hears of it a little later.

So whoever writes a block finds it at once. A memory that is wrong by now costs one failed pin. Pure: `now` is given.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.wire import messages as m

RECENT_S = 3.0  # nodes report what they committed several times a second
MAX_RECENT = 65_536


class RecentWrites:
    """Blocks written, oldest forgotten first.

    Args:
        memory_s: for how long a write is remembered.
        limit: entries kept at most.
    """

    def __init__(self, memory_s: float = RECENT_S, limit: int = MAX_RECENT) -> None:
        self._memory_s = memory_s
        self._limit = limit
        self._places: dict[tuple[bytes, bytes], tuple[str, float]] = {}  # in order of their end

    def remember(
        self, node_id: str, namespace_id: bytes, hashes: Sequence[bytes], now: float
    ) -> None:
        """These blocks stand whole at this node."""
        for block_hash in hashes:
            key = (namespace_id, block_hash)
            self._places.pop(key, None)
            self._places[key] = (node_id, now + self._memory_s)
        while len(self._places) > self._limit:
            del self._places[next(iter(self._places))]

    def forget(self, node_id: str | None, namespace_id: bytes, hashes: Sequence[bytes]) -> None:
        """This node has not got them (any more); None: no node has."""
        for block_hash in hashes:
            place = self._places.get((namespace_id, block_hash))
            if place is not None and node_id in (None, place[0]):
                del self._places[namespace_id, block_hash]

    def forget_node(self, node_id: str) -> None:
        """The node restarted, or is gone."""
        for key in [key for key, place in self._places.items() if place[0] == node_id]:
            del self._places[key]

    def extend(
        self,
        found: m.LookupReply,
        namespace_id: bytes,
        hashes: Sequence[bytes],
        now: float,
    ) -> m.LookupReply:
        """The reply to a look-up of `hashes`, with the blocks behind it that this client wrote."""
        self._expire(now)
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
                segments.append(m.Segment(place[0], at, 1, "dram"))
        else:
            at = len(hashes)
        return m.LookupReply(at, segments, found.wait_s) if at > found.found else found

    def remembered(self, namespace_id: bytes, hashes: Sequence[bytes], now: float) -> list[bool]:
        """Which of these this client wrote."""
        self._expire(now)
        return [(namespace_id, block_hash) in self._places for block_hash in hashes]

    def _expire(self, now: float) -> None:
        while self._places:
            key = next(iter(self._places))
            if self._places[key][1] > now:
                return
            del self._places[key]

    def __len__(self) -> int:
        return len(self._places)
