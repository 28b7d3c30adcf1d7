"""What this conductor has seen of the shared index lately: all it knows of others' blocks while Redis is away.

Never consulted while Redis answers. It may be stale, and a stale hit costs one failed pin. Bounded.
"""

from __future__ import annotations

from collections.abc import Sequence

from conductor.index.contract import Holders


class LookupCache:
    """The holders of the blocks that were looked up last.

    Args:
        capacity: blocks remembered, about; the ones not asked for longest go first, half of them at a time.
    """

    def __init__(self, capacity: int = 262_144) -> None:
        self._half = max(1, capacity // 2)
        self._young: dict[tuple[bytes, bytes], Holders] = {}
        self._old: dict[tuple[bytes, bytes], Holders] = {}

    def note(self, namespace_id: bytes, hashes: Sequence[bytes], found: Sequence[Holders]) -> None:
        """Remember an answer about the leading blocks of `hashes`; the next one was held by nobody."""
        young = self._young
        for block_hash, holders in zip(hashes, found, strict=False):
            young[namespace_id, block_hash] = holders
        if len(found) < len(hashes):
            self.drop(namespace_id, hashes[len(found)])
        if len(young) >= self._half:
            self._old, self._young = young, {}

    def get(self, namespace_id: bytes, block_hash: bytes) -> Holders:
        """Who held the block when it was last looked up."""
        key = (namespace_id, block_hash)
        return self._young.get(key) or self._old.get(key, ())

    def drop(self, namespace_id: bytes, block_hash: bytes) -> None:
        """It proved wrong."""
        self._young.pop((namespace_id, block_hash), None)
        self._old.pop((namespace_id, block_hash), None)

    def __len__(self) -> int:
        return len(self._young.keys() | self._old.keys())
