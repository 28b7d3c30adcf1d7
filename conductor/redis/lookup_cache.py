"""A cache of recent look-ups, for the blocks of other conductors' nodes while Redis is down.

It may be stale; a stale hit costs one failed pin. Bounded.
"""

from __future__ import annotations

from collections.abc import Sequence

from conductor.index.contract import Holders


class LookupCache:
    """The holders of the blocks that were looked up last.

    Args:
        capacity: approximate number of blocks. The half that was looked up longest ago is dropped
            first.
    """

    def __init__(self, capacity: int = 262_144) -> None:
        self._half = max(1, capacity // 2)
        self._young: dict[tuple[bytes, bytes], Holders] = {}
        self._old: dict[tuple[bytes, bytes], Holders] = {}

    def note(self, namespace_id: bytes, hashes: Sequence[bytes], found: Sequence[Holders]) -> None:
        """Remember that the leading blocks of `hashes` were found, and the next one was not."""
        young = self._young
        for block_hash, holders in zip(hashes, found, strict=False):
            young[namespace_id, block_hash] = holders
        if len(found) < len(hashes):
            self.drop(namespace_id, hashes[len(found)])
        if len(young) >= self._half:
            self._old, self._young = young, {}

    def get(self, namespace_id: bytes, block_hash: bytes) -> Holders:
        """The holders of the block when it was last looked up; empty if unknown."""
        key = (namespace_id, block_hash)
        return self._young.get(key) or self._old.get(key, ())

    def drop(self, namespace_id: bytes, block_hash: bytes) -> None:
        """Drop an entry that proved to be wrong."""
        self._young.pop((namespace_id, block_hash), None)
        self._old.pop((namespace_id, block_hash), None)

    def __len__(self) -> int:
        return len(self._young.keys() | self._old.keys())
