"""What a client remembers of failed pins and reads, per node and block, for a while. Pure: `now` is given.

A stale "present" in the index must not lead one request after the other into the same failure.
"""

from __future__ import annotations

from collections.abc import Sequence

FAILURE_TTL_S = 3.0  # about as long as a conductor doubts a reported copy
MAX_FAILURES = 65_536
SILENCE_IS_NEWS_S = 0.5  # shorter says more of the caller's haste than of the node


class NegativeCache:
    """Failures remembered, oldest forgotten first.

    Args:
        memory_s: for how long a failure is believed to last.
        limit: entries kept at most.
    """

    def __init__(self, memory_s: float = FAILURE_TTL_S, limit: int = MAX_FAILURES) -> None:
        self._memory_s = memory_s
        self._limit = limit
        self._until: dict[tuple[str, bytes, bytes], float] = {}  # in order of their end
        self._silent_s: dict[str, float] = {}  # by node, since it last answered

    def remember(
        self, node_id: str, namespace_id: bytes, hashes: Sequence[bytes], now: float
    ) -> None:
        """Pins or reads of these blocks at this node failed."""
        for block_hash in hashes:
            key = (node_id, namespace_id, block_hash)
            self._until.pop(key, None)
            self._until[key] = now + self._memory_s
        while len(self._until) > self._limit:
            del self._until[next(iter(self._until))]

    def leading(
        self, node_id: str, namespace_id: bytes, hashes: Sequence[bytes], now: float
    ) -> int:
        """How many leading blocks may be asked of this node."""
        self._forget(now)
        if not self._until:
            return len(hashes)
        for i, block_hash in enumerate(hashes):
            if (node_id, namespace_id, block_hash) in self._until:
                return i
        return len(hashes)

    def is_silent(self, node_id: str, waited_s: float) -> bool:
        """Whether a wait for this node that ended in vain is one too many; those of hasty callers add up."""
        silent_s = self._silent_s[node_id] = self._silent_s.get(node_id, 0.0) + waited_s
        return silent_s >= SILENCE_IS_NEWS_S

    def answered(self, node_id: str) -> None:
        """The node spoke: earlier waits for it say nothing any more."""
        self._silent_s.pop(node_id, None)

    def nodes_lacking(self, namespace_id: bytes, block_hash: bytes, now: float) -> set[str]:
        """Nodes that failed to give this block."""
        self._forget(now)
        return {
            node_id
            for node_id, space, name in self._until
            if name == block_hash and space == namespace_id
        }

    def forget_node(self, node_id: str) -> None:
        """The node restarted: what its earlier life lacked says nothing."""
        self.answered(node_id)
        for key in [key for key in self._until if key[0] == node_id]:
            del self._until[key]

    def __len__(self) -> int:
        return len(self._until)

    def _forget(self, now: float) -> None:
        while self._until:
            key = next(iter(self._until))
            if self._until[key] > now:
                return
            del self._until[key]
