"""The keys of a pool's namespaces in Redis, and scripts that run on them.

All keys of one namespace are in one slot of a Redis Cluster; two namespaces may be on two servers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from conductor.redis import scripts as lua
from conductor.redis.client import RedisClient

SLICE_BLOCKS = 2_000  # per script, during which Redis serves no other client: about 2 ms
SCRIPTS_AT_ONCE = 16


class Spaces:
    """Runs scripts, counts the entries of each namespace, and reclaims hidden ones."""

    def __init__(self, redis: RedisClient, pool: bytes, ttl_s: int) -> None:
        self._redis = redis
        self._pool = pool
        self._ttl_s = ttl_s
        self._counts: dict[bytes, int] = {}
        self._retired: set[bytes] = set()  # namespaces with blocks to reclaim

    async def run(self, script: lua.Script, namespace_id: bytes, *args: Any) -> Any:
        """Run a script on the keys of one namespace. Raises `Unavailable`."""
        return await self._redis.run(script, self._keys(namespace_id), args)

    async def run_in_each(
        self, script: lua.Script, namespace_ids: Sequence[bytes], args: Sequence[Any]
    ) -> list[Any]:
        """Run a script in several namespaces, a few at a time. Raises `Unavailable`."""
        results: list[Any] = []
        for at in range(0, len(namespace_ids), SCRIPTS_AT_ONCE):
            some = namespace_ids[at : at + SCRIPTS_AT_ONCE]
            results += await asyncio.gather(*(self.run(script, space, *args) for space in some))
        return results

    async def look_up(
        self, namespace_id: bytes, packed: bytes, *, beyond_gaps: bool
    ) -> tuple[list[Any], list[bytes]]:
        """Runs of equal holdings among these hashes, and the holdings by id. Raises `Unavailable`.

        Args:
            beyond_gaps: whether to go on after a block that nobody holds.
        """
        keys = self._keys(namespace_id)[:2]
        args = (packed, int(beyond_gaps))
        runs, holdings, entries = await self._redis.run(lua.LOOKUP, keys, args)
        self.counted(namespace_id, entries)
        return runs, holdings

    def counted(self, namespace_id: bytes, entries: int) -> None:
        """Note the number of entries of a namespace, as a script returned it."""
        if entries:
            self._counts[namespace_id] = entries
        else:
            self._counts.pop(namespace_id, None)

    def entries(self) -> int:
        """The number of entries in the namespaces used here, as Redis last counted them."""
        return sum(self._counts.values())

    def retired(self, *namespace_ids: bytes) -> None:
        """Note that these namespaces may have hidden blocks."""
        self._retired.update(namespace_ids)

    async def reclaim(self, max_blocks: int) -> bool:
        """Free about `max_blocks` hidden entries; return whether none is left."""
        left = max_blocks
        while self._retired and left > 0:
            namespace_id = next(iter(self._retired))
            part = min(left, SLICE_BLOCKS)
            waiting, entries = await self.run(lua.RECLAIM, namespace_id, part)
            self.counted(namespace_id, entries)
            left -= part
            if not waiting:
                self._retired.discard(namespace_id)
        return not self._retired

    async def touch(self, namespace_id: bytes) -> bool:
        """Renew the keys of a namespace, and find blocks that other conductors left to reclaim.

        Returns:
            Whether the namespace has blocks.
        """
        entries, waiting = await self.run(lua.TOUCH, namespace_id, self._ttl_s)
        self.counted(namespace_id, entries)
        if waiting:
            self._retired.add(namespace_id)
        return bool(entries)

    def _keys(self, namespace_id: bytes) -> list[bytes]:
        tag = b"kvpool:{%b:%b}:" % (self._pool, namespace_id.hex().encode())
        names = (b"blocks", b"holdings", b"nodes", b"retired", b"ids", b"set:")
        return [tag + name for name in names]
