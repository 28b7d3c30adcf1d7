"""The client's negative cache: which node recently failed to give which block.

It keeps a stale "present" in the index from leading one request after the other into the same
failure. Callers pass the time.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.bounded import ExpiringDict

FAILURE_TTL_S = 3.0  # about as long as a conductor doubts a reported copy
MAX_FAILURES = 65_536
SILENCE_LIMIT_S = 0.5  # a shorter wait says more about the caller's haste than about the node


class NegativeCache:
    """Failed pins and reads, by node and block. Forgets the oldest first.

    Args:
        ttl_s: how long a failure is remembered.
        limit: the most entries kept.
    """

    def __init__(self, ttl_s: float = FAILURE_TTL_S, limit: int = MAX_FAILURES) -> None:
        self._ttl_s = ttl_s
        self._failed: ExpiringDict[tuple[str, bytes, bytes], None] = ExpiringDict(limit)
        self._silent_s: dict[str, float] = {}  # by node: time waited since its last reply

    def remember(
        self, node_id: str, namespace_id: bytes, hashes: Sequence[bytes], now: float
    ) -> None:
        """Record that pins or reads of these blocks at this node failed."""
        for block_hash in hashes:
            self._failed[node_id, namespace_id, block_hash] = (None, now + self._ttl_s)

    def count_leading(
        self, node_id: str, namespace_id: bytes, hashes: Sequence[bytes], now: float
    ) -> int:
        """How many leading blocks have no recent failure at this node."""
        self._failed.expire(now)
        if not self._failed:
            return len(hashes)
        for i, block_hash in enumerate(hashes):
            if (node_id, namespace_id, block_hash) in self._failed:
                return i
        return len(hashes)

    def add_silence(self, node_id: str, waited_s: float) -> bool:
        """Add a wait that this node did not answer. Short waits of several callers add up.

        Returns:
            Whether the node has been silent for long enough to blame the node.
        """
        silent_s = self._silent_s[node_id] = self._silent_s.get(node_id, 0.0) + waited_s
        return silent_s >= SILENCE_LIMIT_S

    def reset_silence(self, node_id: str) -> None:
        """Record that the node answered: earlier silence no longer counts."""
        self._silent_s.pop(node_id, None)

    def nodes_lacking(self, namespace_id: bytes, block_hash: bytes, now: float) -> set[str]:
        """Ids of the nodes that recently failed to give this block."""
        self._failed.expire(now)
        return {
            node_id
            for node_id, space, name in self._failed
            if name == block_hash and space == namespace_id
        }

    def forget_node(self, node_id: str) -> None:
        """Forget a node's failures. Call it after the node restarted."""
        self.reset_silence(node_id)
        for key in [key for key in self._failed if key[0] == node_id]:
            del self._failed[key]

    def __len__(self) -> int:
        return len(self._failed)
