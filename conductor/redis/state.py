"""The state of a pool with several conductors, shared through Redis or Valkey.

Every look-up goes to Redis while it is up. This conductor also keeps what it receives itself: the
blocks of the nodes that report to it, in an index in memory, and a mirror of all members. It
continues with these while Redis is down.

If Redis missed a report of a node, the node joins again with a full report as soon as Redis is up.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import structlog

from conductor.cluster.members import Members
from conductor.cluster.pool_state import (
    RECLAIM_BLOCKS,
    Kind,
    LocalState,
    StateStatus,
    apply_batch,
)
from conductor.index.contract import BlockIndex, Holders
from conductor.members.membership import BatchAction, Member
from conductor.redis.client import RedisClient
from conductor.redis.index import TTL_S, RedisIndex
from conductor.redis.lookup_cache import LookupCache
from conductor.redis.members import ExchangeResult, SharedMembers
from conductor.redis.spaces import SLICE_BLOCKS
from conductor.redis.unshared import Unshared
from kvpool.blocks.layout import Namespace
from kvpool.blocks.records import BlockEvent
from kvpool.errors import KvpoolError, LayoutMismatch, StaleEpoch, Unavailable

log = structlog.get_logger(__name__)

TOUCH_S = 60.0  # interval at which the keys of namespaces with blocks are renewed
TOUCH_A_TICK = 4  # namespaces
IDENTIFY_S = 5.0


class RedisState:
    """Implements `conductor.cluster.pool_state.PoolState`. Call `tend` every tick.

    Args:
        conductor_id: of this conductor.
        members: mirrors the members of the other conductors.
        own_blocks: gets the blocks of the nodes that report to this conductor.
        pool: name of the pool. Conductors with the same pool and Redis share their state.
        address: this conductor's address, for display.
        max_blocks: maximum number of index entries per namespace.
        ttl_s: time after which keys expire that nobody touches.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        redis: RedisClient,
        conductor_id: str,
        members: Members,
        own_blocks: BlockIndex,
        counters: Counter[str],
        *,
        pool: str,
        address: str = "",
        max_blocks: int = 16_000_000,
        ttl_s: int = TTL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.redis = redis
        self.index = RedisIndex(redis, pool, max_blocks=max_blocks, ttl_s=ttl_s)
        self.shared = SharedMembers(
            redis, pool, conductor_id, address, members.nodes, members.workers, ttl_s=ttl_s
        )
        self._members = members
        self._own_blocks = own_blocks
        self.own = LocalState(own_blocks)
        self._counters = counters
        self._clock = clock
        self._lookup_cache = LookupCache()
        self._unshared = Unshared()
        self._leaving: dict[tuple[Kind, str], int] = {}  # sessions of members to remove in Redis
        self._unregistered: dict[bytes, Namespace] = {}  # namespaces that Redis missed
        self._touched_at = clock()
        self._to_touch: list[bytes] = []
        self._identity = ""
        self._identified_at = float("-inf")

    # ------------------------------------------------------------ namespaces

    async def register(self, namespace: Namespace) -> None:
        namespace_id = namespace.namespace_id
        if namespace_id in self._members.namespaces and namespace_id not in self._unregistered:
            return
        try:
            await self.shared.register(namespace)
        except Unavailable:
            self._unregistered[namespace_id] = namespace
            return
        except LayoutMismatch:
            self._unregistered.pop(namespace_id, None)
            raise
        self._unregistered.pop(namespace_id, None)

    async def namespace(self, namespace_id: bytes) -> Namespace | None:
        try:
            return await self.shared.namespace(namespace_id)
        except Unavailable:
            return None

    # ------------------------------------------------------------ members

    async def node_joined(self, node_id: str, epoch: int) -> None:
        await self.own.node_joined(node_id, epoch)
        self._leaving.pop(("node", node_id), None)
        try:
            with self._unshared.sharing("node", node_id):
                await self.index.begin_snapshot(node_id, epoch)
                self._reports_here("node", node_id, epoch, self.index.session_number(node_id))
                self._unshared.discard(("node", node_id))
        except StaleEpoch:
            await self._own_blocks.remove_node(node_id, 0)
            raise

    async def worker_joined(self, worker_id: str, epoch: int) -> None:
        self._leaving.pop(("worker", worker_id), None)
        with self._unshared.sharing("worker", worker_id):
            session = await self.shared.join("worker", worker_id, epoch)
            self._reports_here("worker", worker_id, epoch, session)
            self._unshared.discard(("worker", worker_id))

    async def take(
        self, node_id: str, epoch: int, action: BatchAction, events: Sequence[BlockEvent]
    ) -> None:
        await self.own.take(node_id, epoch, action, events)
        if ("node", node_id) in self._unshared:
            return
        with self._unshared.sharing("node", node_id):
            await apply_batch(self.index, node_id, epoch, action, events)
            if action.begin_snapshot:
                self._reports_here("node", node_id, epoch, self.index.session_number(node_id))

    async def node_draining(self, node_id: str, epoch: int) -> None:
        try:
            await self.shared.drain(node_id, epoch)
        except Unavailable as error:
            log.warning("other conductors missed that a node is draining", error=str(error))

    async def left(self, kind: Kind, member: Member[Any, Any]) -> None:
        await self.own.left(kind, member)
        self._unshared.discard((kind, member.member_id))
        self._leaving[kind, member.member_id] = member.session

    def must_rejoin(self, kind: Kind, member_id: str) -> bool:
        return self.redis.is_up and (kind, member_id) in self._unshared

    # ------------------------------------------------------------ look-ups

    async def holders(self, namespace_id: bytes, hashes: Sequence[bytes]) -> list[Holders]:
        try:
            found = await self.index.holders(namespace_id, hashes)
        except Unavailable:
            self._counters["lookups_without_redis"] += 1
            return await self._known_here(namespace_id, hashes)
        self._lookup_cache.note(namespace_id, hashes, found)
        return found

    async def resident_holders(self, namespace_id: bytes, hashes: Sequence[bytes]) -> list[Holders]:
        try:
            return await self.index.resident_holders(namespace_id, hashes)
        except Unavailable:
            return await self.own.resident_holders(namespace_id, hashes)

    def record_misses(
        self, node_id: str, namespace_id: bytes, hashes: Sequence[bytes], until: float
    ) -> None:
        self.own.record_misses(node_id, namespace_id, hashes, until)
        for block_hash in hashes:
            self.index.record_miss(node_id, namespace_id, block_hash, until)
            self._lookup_cache.drop(namespace_id, block_hash)

    async def _known_here(self, namespace_id: bytes, hashes: Sequence[bytes]) -> list[Holders]:
        """The leading run by this conductor's own nodes and its lookup cache."""
        found: list[Holders] = []
        own = await self.own.resident_holders(namespace_id, hashes)
        for block_hash, copies_here in zip(hashes, own, strict=True):
            copies = {*self._lookup_cache.get(namespace_id, block_hash), *copies_here}
            if not copies:
                break
            ordered = sorted(copies, key=lambda copy: (copy.tier, copy.node_id))
            found.append(tuple(ordered))
        return found

    # ------------------------------------------------------------ keeping in step

    async def sweep(self, now: float) -> None:
        if not self.redis.is_up:
            self._members.nodes.keep_mirrored(now)
            self._members.workers.keep_mirrored(now)
        await self.own.sweep(now)
        self.index.expire_misses(now)

    async def tend(self) -> None:
        """Exchange members with other conductors, remove those that left, reclaim some blocks.

        Never raises.
        """
        try:
            if await self.redis.probe():
                self.shared.send_all_again()
                self._identified_at = float("-inf")
            if not self.redis.is_up:
                return
            await self._identify()
            nodes = self._members.nodes
            await self._follow(await self.shared.exchange(self._clock(), nodes.config.dead_after_s))
            await self._remove_leaving()
            for namespace in list(self._unregistered.values()):
                await self._register_late(namespace)
            for _ in range(RECLAIM_BLOCKS // SLICE_BLOCKS):
                if await self.index.reclaim(SLICE_BLOCKS):
                    break
            await self._touch()
        except Unavailable:
            return  # the client has logged it
        except KvpoolError:
            log.exception("updating the shared state failed")

    def status(self) -> StateStatus:
        counters = {
            "redis_up": float(self.redis.is_up),
            "redis_failures": float(self.redis.failures),
            "redis_unshared_members": float(len(self._unshared)),
        }
        notice = ""
        if self.redis.down_since is not None:
            down_s = time.monotonic() - self.redis.down_since
            notice = (
                f"Redis is down (for {down_s:.0f} s); this conductor continues with local state: "
                f"{self.redis.why_down}"
            )
        index = self.index if self.redis.is_up else self._own_blocks
        return StateStatus("redis", index.blocks(), notice, counters, self.shared.conductors)

    # ------------------------------------------------------------ inside

    def _reports_here(self, kind: Kind, member_id: str, epoch: int, session: int) -> None:
        members = self._members
        member = (members.nodes if kind == "node" else members.workers).get(member_id)
        if member is not None and member.epoch == epoch:
            member.session, member.via = session, ""

    async def _follow(self, exchanged: ExchangeResult) -> None:
        for namespace in exchanged.namespaces:
            with _logging_contradictions():
                self._members.namespaces.add(namespace)
        for kind, member_id in exchanged.moved:
            log.info("member now reports to another conductor", kind=kind, member=member_id)
            self._unshared.discard((kind, member_id))
            if kind == "node":
                self.index.forget_session(member_id)
                await self._own_blocks.remove_node(member_id, RECLAIM_BLOCKS)
        for kind, member_id in exchanged.gone:
            log.info("another conductor removed a member", kind=kind, member=member_id)
        self._unshared.update(exchanged.lost)
        if exchanged.has_lost_content:
            self._report_again("Redis has lost its data: all members report again")

    async def _register_late(self, namespace: Namespace) -> None:
        with _logging_contradictions():
            await self.register(namespace)

    async def _identify(self) -> None:
        """Detect a restart or failover of Redis, which may have lost the last writes."""
        now = self._clock()
        if now - self._identified_at < IDENTIFY_S:
            return
        identity = await self.redis.identity()
        self._identified_at = now
        if self._identity not in ("", identity):
            self._report_again("Redis was restarted or failed over: all nodes report again")
        self._identity = identity

    def _report_again(self, why: str) -> None:
        log.error(why)
        members = self._members
        self._unshared.update(("node", node.member_id) for node in members.nodes if not node.via)
        # A worker without a session is an engine server, which each conductor finds by itself.
        self._unshared.update(
            ("worker", w.member_id) for w in members.workers if w.session and not w.via
        )

    async def _remove_leaving(self) -> None:
        for (kind, member_id), session in list(self._leaving.items()):
            if session:  # otherwise Redis missed the join
                await self.shared.leave(kind, member_id, session)
                if kind == "node":
                    await self.index.remove_node(member_id, 0, session)
            if self._leaving.get((kind, member_id)) == session:
                del self._leaving[kind, member_id]

    async def _touch(self) -> None:
        now, namespaces = self._clock(), self._members.namespaces
        if not self._to_touch and now - self._touched_at >= TOUCH_S:
            self._touched_at = now
            self._to_touch = list(namespaces)
        for namespace_id in self._to_touch[:TOUCH_A_TICK]:
            if await self.index.touch(namespace_id) and namespace_id in namespaces:
                await self.shared.register(namespaces[namespace_id])
        del self._to_touch[:TOUCH_A_TICK]


@contextlib.contextmanager
def _logging_contradictions() -> Iterator[None]:
    try:
        yield
    except LayoutMismatch as error:
        log.error("another conductor knows another layout", error=str(error))
