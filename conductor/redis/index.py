"""The block index in Redis or Valkey, shared by any number of conductors.

`conductor.redis.scripts` describes the stored data and each step. A look-up is one script and one
round trip. The negative cache is not shared, because its entries last only seconds.

A node reports to one conductor at a time. Each join opens a session, and Redis refuses messages of
earlier sessions, so that a conductor that was stopped cannot undo what another conductor has
written since.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from conductor.index.contract import Holder, Holders, checked_hashes
from conductor.index.negative_cache import NegativeCache
from conductor.redis import scripts as lua
from conductor.redis.client import RedisClient
from conductor.redis.spaces import SLICE_BLOCKS, Spaces
from kvpool.blocks.hashing import HASH_BYTES, pack_hashes
from kvpool.blocks.records import BlockEvent
from kvpool.blocks.tier import Tier
from kvpool.errors import StaleEpoch

MAX_HOLDERS = 65_536  # decoded holders in the cache; ids never change their meaning
TTL_S = 86_400


@dataclass(slots=True)
class _NodeSession:
    """One join of a node, as this conductor knows it."""

    epoch: int
    number: int
    spaces: set[bytes] = field(default_factory=set)
    is_reporting: bool = False  # between begin and end of a snapshot


class RedisIndex:
    """Implements `conductor.index.contract.BlockIndex`.

    Args:
        pool: name of the pool; several pools may share a Redis.
        max_blocks: maximum number of entries per namespace. Above it new blocks are not recorded
            and become misses; `dropped` counts them.
        ttl_s: time after which keys expire that nobody touches.
        max_misses: maximum number of recorded misses.
    """

    def __init__(
        self,
        redis: RedisClient,
        pool: str,
        *,
        max_blocks: int = 16_000_000,
        ttl_s: int = TTL_S,
        max_misses: int = 65_536,
    ) -> None:
        self.max_blocks = max_blocks
        self.dropped = 0
        self._redis = redis
        self._pool = pool.encode()
        self._ttl_s = ttl_s
        self._spaces = Spaces(redis, self._pool, ttl_s)
        self._misses = NegativeCache(max_misses)
        self._sessions: dict[str, _NodeSession] = {}
        self._holders: dict[tuple[bytes, ...], Holders] = {}

    # ------------------------------------------------------------ reports of nodes

    async def apply(self, node_id: str, epoch: int, events: Sequence[BlockEvent]) -> None:
        for event in events:
            checked_hashes(event)
        session = await self._session(node_id, epoch)
        by_space: dict[bytes, list[BlockEvent]] = {}
        for event in events:
            by_space.setdefault(event.namespace_id, []).append(event)
        for namespace_id, ours in by_space.items():
            await self._enter(node_id, session, namespace_id)
            for batch in _slices(ours):
                await self._apply(node_id, session, namespace_id, batch)
            self._end_misses(node_id, namespace_id, ours)

    async def begin_snapshot(self, node_id: str, epoch: int) -> None:
        await self._open(node_id, epoch, is_new=True, is_reporting=True)

    async def end_snapshot(self, node_id: str) -> bool:
        session = self._sessions.get(node_id)
        if session is None or not session.is_reporting:
            return False
        session.is_reporting = False
        args = (node_id, session.epoch, session.number, self._ttl_s)
        spaces = sorted(session.spaces)
        for namespace_id, kept in zip(
            spaces, await self._spaces.run_in_each(lua.END, spaces, args), strict=True
        ):
            if kept < 0:
                raise self._superseded(node_id, session)
            if not kept:
                session.spaces.discard(namespace_id)
                await self._redis.command("SREM", self._spaces_key(node_id), namespace_id)
        self._spaces.retired(*spaces)
        return True

    async def remove_node(
        self, node_id: str, max_blocks: int, session_number: int | None = None
    ) -> bool:
        """Implements `BlockIndex`.

        With `session_number`, do nothing if the node has joined again since.
        """
        known = self._sessions.pop(node_id, None)
        if session_number is None:
            session_number = known.number if known is not None else 0
        fence, spaces_key = self._member_keys(node_id)
        current = await self._redis.command("HGET", fence, "session")
        if current is not None and int(current) > session_number > 0:
            return await self.reclaim(max_blocks)
        spaces = sorted(await self._redis.command("SMEMBERS", spaces_key))
        await self._spaces.run_in_each(lua.RETIRE, spaces, (node_id, int(current or 0)))
        await self._redis.command("DEL", spaces_key)
        self._spaces.retired(*spaces)
        return await self.reclaim(max_blocks)

    async def reclaim(self, max_blocks: int) -> bool:
        return await self._spaces.reclaim(max_blocks)

    async def touch(self, namespace_id: bytes) -> bool:
        """Renew the keys of a namespace; return whether it has blocks. Raises `Unavailable`."""
        return await self._spaces.touch(namespace_id)

    def session_number(self, node_id: str) -> int:
        """The session of a node at this conductor; 0 if it has none."""
        session = self._sessions.get(node_id)
        return session.number if session is not None else 0

    def forget_session(self, node_id: str) -> None:
        """Drop the session of a node that now reports to another conductor."""
        self._sessions.pop(node_id, None)

    # ------------------------------------------------------------ misses

    def record_miss(
        self, node_id: str, namespace_id: bytes, block_hash: bytes, until: float
    ) -> None:
        self._misses.add(node_id, namespace_id, block_hash, until)

    def expire_misses(self, now: float) -> int:
        return self._misses.expire(now)

    # ------------------------------------------------------------ look-ups

    async def holders(self, namespace_id: bytes, hashes: Sequence[bytes]) -> list[Holders]:
        found = await self._look(namespace_id, hashes, beyond_gaps=False)
        return found[: found.index(())] if () in found else found

    async def resident_holders(self, namespace_id: bytes, hashes: Sequence[bytes]) -> list[Holders]:
        return await self._look(namespace_id, hashes, beyond_gaps=True)

    def blocks(self) -> int:
        """The number of entries in the namespaces used here, as Redis last counted them."""
        return self._spaces.entries()

    # ------------------------------------------------------------ inside

    async def _look(
        self, namespace_id: bytes, hashes: Sequence[bytes], *, beyond_gaps: bool
    ) -> list[Holders]:
        """The holders of these blocks, without copies that have recorded misses."""
        if not hashes:
            return []
        runs, holdings = await self._spaces.look_up(
            namespace_id, pack_hashes(hashes), beyond_gaps=beyond_gaps
        )
        live = {holdings[i]: holdings[i + 1] for i in range(0, len(holdings), 2)}
        found: list[Holders] = []
        for i in range(0, len(runs), 2):
            ids = runs[i]
            values = tuple(
                live[x] for x in (ids[j : j + 4] for j in range(0, len(ids), 4)) if x in live
            )
            found += [self._copies(values)] * runs[i + 1]
        suspects = self._misses.of(namespace_id) or {}
        for at, block_hash in enumerate(hashes[: len(found)] if suspects else ()):
            doubted = suspects.get(block_hash)
            if doubted:
                found[at] = tuple(copy for copy in found[at] if copy.node_id not in doubted)
        return found

    def _copies(self, values: tuple[bytes, ...]) -> Holders:
        copies = self._holders.get(values)
        if copies is None:
            named = {Holder(v[1:].decode(), Tier(v[0] - 48)) for v in values}
            if len(self._holders) >= MAX_HOLDERS:
                self._holders.clear()
            copies = tuple(sorted(named, key=lambda copy: (copy.tier, copy.node_id)))
            self._holders[values] = copies
        return copies

    async def _session(self, node_id: str, epoch: int) -> _NodeSession:
        """The node's session at this epoch. One that began at another conductor is taken over."""
        session = self._sessions.get(node_id)
        if session is not None and session.epoch == epoch:
            return session
        return await self._open(node_id, epoch, is_new=False, is_reporting=False)

    async def _open(
        self, node_id: str, epoch: int, *, is_new: bool, is_reporting: bool
    ) -> _NodeSession:
        keys = self._member_keys(node_id)
        number, fence, spaces = await self._redis.run(
            lua.JOIN, keys, (epoch, int(is_new), self._ttl_s)
        )
        if not number:
            raise StaleEpoch(f"node {node_id} is at epoch {int(fence)}, message is of {epoch}")
        session = _NodeSession(epoch, number, set(spaces), is_reporting)
        args = (node_id, epoch, number, int(is_reporting), self._ttl_s)
        known = sorted(session.spaces)
        if not all(await self._spaces.run_in_each(lua.BEGIN, known, args)):
            raise self._superseded(node_id, session)
        self._spaces.retired(*known)  # blocks of an earlier epoch or of an unfinished report
        self._sessions[node_id] = session
        return session

    async def _enter(self, node_id: str, session: _NodeSession, namespace_id: bytes) -> None:
        """Record in Redis that the node has blocks in this namespace, before it stores any."""
        if namespace_id in session.spaces:
            return
        keys = self._member_keys(node_id)
        args = (session.epoch, session.number, self._ttl_s, namespace_id)
        if not await self._redis.run(lua.ENTER, keys, args):
            raise self._superseded(node_id, session)
        session.spaces.add(namespace_id)

    async def _apply(
        self, node_id: str, session: _NodeSession, namespace_id: bytes, batch: Sequence[BlockEvent]
    ) -> None:
        args: list[Any] = [node_id, session.epoch, session.number, int(session.is_reporting)]
        args += [self._ttl_s, self.max_blocks]
        for event in batch:
            tiers = "".join(
                f"{tier:d}" for tier in ((event.tier,) if event.tier is not None else Tier)
            )
            args += [event.kind, tiers, event.hashes]
            if event.kind == "cleared":
                self._spaces.retired(namespace_id)
        done, entries, dropped = await self._spaces.run(lua.APPLY, namespace_id, *args)
        if not done:
            raise self._superseded(node_id, session)
        self._spaces.counted(namespace_id, entries)
        self.dropped += dropped

    def _superseded(self, node_id: str, session: _NodeSession) -> StaleEpoch:
        if self._sessions.get(node_id) is session:
            del self._sessions[node_id]
        return StaleEpoch(
            f"node {node_id} has joined again since", hint="it reports to another conductor"
        )

    def _end_misses(self, node_id: str, namespace_id: bytes, events: Sequence[BlockEvent]) -> None:
        suspects = self._misses.of(namespace_id)
        if suspects:
            named = {h for e in events if e.kind == "stored" for h in checked_hashes(e)}
            for block_hash in named & suspects.keys():
                self._misses.clear(namespace_id, block_hash, node_id)

    def _member_keys(self, node_id: str) -> list[bytes]:
        return [b"kvpool:{%b}:node:%b" % (self._pool, node_id.encode()), self._spaces_key(node_id)]

    def _spaces_key(self, node_id: str) -> bytes:
        return b"kvpool:{%b}:spaces:%b" % (self._pool, node_id.encode())


def _slices(events: Sequence[BlockEvent]) -> list[list[BlockEvent]]:
    """Cut events, in order, into batches of at most `SLICE_BLOCKS` hashes."""
    batches: list[list[BlockEvent]] = [[]]
    room = size = SLICE_BLOCKS * HASH_BYTES
    for event in events:
        # An event without hashes ("cleared") is applied too.
        for at in range(0, max(1, len(event.hashes)), size):
            part = event.hashes[at : at + size]
            if len(part) > room or len(batches[-1]) >= SLICE_BLOCKS:
                batches.append([])
                room = size
            batches[-1].append(BlockEvent(event.kind, event.namespace_id, part, event.tier))
            room -= len(part)
    return batches
