"""A conductor among several: what `Cluster` knows, shared through Redis.

All that this conductor is told it keeps itself as well, as one that is alone does: the blocks of
the nodes that report here in an index in memory, and a mirror of all members. That is what it goes
on from while Redis is away. Redis is asked for every look-up while it answers.

Whatever Redis has missed ends in the node joining again with a full report, as soon as Redis is
back.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import structlog

from conductor.cluster.cluster import MAX_COUNTED, Cluster
from conductor.index.contract import Found, Holders, Index, cover_run
from conductor.members.membership import MembershipConfig
from conductor.redis.client import RedisClient
from conductor.redis.index import TTL_S, RedisIndex
from conductor.redis.lookup_cache import LookupCache
from conductor.redis.members import ExchangeResult, Kind, SharedMembers
from conductor.scheduling.scheduler import SchedulerConfig
from kvpool.blocks.hash_check import check_proof
from kvpool.blocks.hashing import unpack_hashes
from kvpool.blocks.layout import Namespace
from kvpool.errors import KvpoolError, LayoutMismatch, StaleEpoch, Unavailable
from kvpool.wire import Session, WireServer
from kvpool.wire import messages as m

log = structlog.get_logger(__name__)

RECLAIM_A_TICK = 8_000  # blocks, in slices between which Redis serves others
TOUCH_S = 60.0  # how often namespaces with blocks are kept from expiring
TOUCH_A_TICK = 4  # namespaces
IDENTIFY_S = 5.0


class SharedCluster(Cluster):
    """See `Cluster`. Call `tend` every tick, beside `sweep`.

    Args:
        pool: name of the pool; conductors of the same name and Redis share it.
        address: of this conductor, for people.
        max_blocks: entries kept of a namespace.
    """

    def __init__(
        self,
        conductor_id: str,
        epoch: int,
        index: Index,
        config: MembershipConfig,
        scheduler_config: SchedulerConfig,
        redis: RedisClient,
        *,
        pool: str,
        address: str = "",
        max_blocks: int = 16_000_000,
        ttl_s: int = TTL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(conductor_id, epoch, index, config, scheduler_config, clock=clock)
        self.redis = redis
        self.shared_index = RedisIndex(redis, pool, max_blocks=max_blocks, ttl_s=ttl_s)
        self.shared_members = SharedMembers(
            redis, pool, conductor_id, address, self.nodes, self.workers, ttl_s=ttl_s
        )
        self._lookup_cache = LookupCache()
        self._unshared: dict[tuple[Kind, str], None] = {}  # Redis missed something of theirs
        self._leaving: dict[tuple[Kind, str], int] = {}  # to be removed there, with their sessions
        self._unregistered: dict[bytes, Namespace] = {}  # namespaces that Redis was not told of
        self._sessions: dict[tuple[Kind, str], int] = {}
        self._touched_at = clock()
        self._to_touch: list[bytes] = []
        self._identity = ""
        self._identified_at = float("-inf")

    def expose(self, server: WireServer) -> None:
        super().expose(server)
        handlers: dict[type[m.Message], Callable[[Any, Session], Any]] = {
            m.NodeJoin: lambda r, _s: self.join_node(r),
            m.NodeEvents: lambda r, _s: self.take_events(r),
            m.NodeDraining: lambda r, _s: self.drain_node(r),
            m.WorkerJoin: lambda r, _s: self.join_worker(r),
            m.RegisterNamespace: lambda r, _s: self.answer_registration(r),
            m.Lookup: lambda r, _s: self.answer_lookup(r),
            m.CountCopies: lambda r, _s: self.answer_copy_counts(r),
        }
        for message, handler in handlers.items():
            server.handle(message, handler)

    def notice(self) -> str:
        """What an operator should know: "" when all is well."""
        if self.redis.down_since is None:
            return ""
        away_s = time.monotonic() - self.redis.down_since
        return f"Redis is down since {away_s:.0f} s, going on from what is held here: {self.redis.why_down}"

    def index_blocks(self) -> int:
        return self.shared_index.blocks() if self.redis.is_up else self.index.blocks()

    def stats(self) -> m.PoolStatsReply:
        stats = super().stats()
        counters = {
            "redis_up": float(self.redis.is_up),
            "redis_failures": float(self.redis.failures),
            "redis_unshared_members": float(len(self._unshared)),
        }
        return msgspec.structs.replace(
            stats,
            counters=stats.counters | counters,
            index="redis",
            notice=self.notice(),
            conductors=list(self.shared_members.conductors),
        )

    # ------------------------------------------------------------ nodes

    async def join_node(self, request: m.NodeJoin) -> m.MemberReply:
        """As `node_join`, known to all conductors afterwards."""
        for namespace in request.namespaces:
            await self._share_namespace(namespace)
        reply = self.node_join(request)
        if reply.resync:
            return reply
        node = request.descriptor
        self._leaving.pop(("node", node.node_id), None)
        try:
            with self._sharing("node", node.node_id):
                await self._begin(node.node_id, node.epoch)
                self._unshared.pop(("node", node.node_id), None)
        except StaleEpoch:  # a later life of it reports to another conductor
            if self.nodes.leave(node.node_id, node.epoch):
                self.index.remove_node(node.node_id, 0)
            return self._reply(resync=True)
        return reply

    async def take_events(self, request: m.NodeEvents) -> m.MemberReply:
        """As `node_events`, known to all conductors afterwards."""
        action = self._take_events(request)
        node_id, epoch = request.node_id, request.epoch
        if action.resync or ("node", node_id) in self._unshared:
            return self._reply(resync=action.resync)
        try:
            with self._sharing("node", node_id):
                if action.begin_snapshot:
                    await self._begin(node_id, epoch)
                if action.apply and request.events:
                    await self.shared_index.apply(node_id, epoch, request.events)
                if action.end_snapshot:
                    await self.shared_index.end_snapshot(node_id)
        except StaleEpoch:
            return self._reply(resync=True)
        return self._reply()

    def node_heartbeat(self, request: m.NodeHeartbeat) -> m.MemberReply:
        reply = super().node_heartbeat(request)
        return self._reply(resync=reply.resync or self._must_share("node", request.node_id))

    def node_leave(self, request: m.NodeLeave) -> m.Ok:
        self._note_sessions()
        return super().node_leave(request)

    async def drain_node(self, request: m.NodeDraining) -> m.Ok:
        """As `node_draining`, also of a node that reports to another conductor."""
        self.node_draining(request)
        try:
            await self.shared_members.drain(request.node_id, request.epoch)
        except Unavailable as error:
            log.warning("other conductors do not know that the node drains", error=str(error))
        return m.Ok()

    # ------------------------------------------------------------ workers

    async def join_worker(self, request: m.WorkerJoin) -> m.MemberReply:
        """As `worker_join`, known to all conductors afterwards. Raises: `LayoutMismatch`."""
        worker = request.descriptor
        check_proof(worker.namespace, request.proof)
        await self._share_namespace(worker.namespace, must_agree=True)
        reply = self.worker_join(request)
        if reply.resync:
            return reply
        key: tuple[Kind, str] = ("worker", worker.worker_id)
        self._leaving.pop(key, None)
        try:
            with self._sharing(*key):
                session = await self.shared_members.join("worker", worker.worker_id, worker.epoch)
                member = self.workers.get(worker.worker_id)
                if member is not None and member.epoch == worker.epoch:
                    member.session, member.via = session, ""
                self._unshared.pop(key, None)
        except StaleEpoch:
            self.workers.leave(worker.worker_id, worker.epoch)
            return self._reply(resync=True)
        return reply

    def worker_leave(self, request: m.WorkerLeave) -> m.Ok:
        self._note_sessions()
        return super().worker_leave(request)

    def worker_heartbeat(self, request: m.WorkerHeartbeat) -> m.MemberReply:
        reply = super().worker_heartbeat(request)
        return self._reply(resync=reply.resync or self._must_share("worker", request.worker_id))

    # ------------------------------------------------------------ clients

    async def answer_registration(self, request: m.RegisterNamespace) -> m.NamespaceReply:
        """Raises: `LayoutMismatch`, `HashMismatch`."""
        check_proof(request.namespace, request.proof)
        await self._share_namespace(request.namespace, must_agree=True)
        return self.register_namespace(request)

    async def answer_lookup(self, request: m.Lookup) -> m.LookupReply:
        """As `lookup`, of what all conductors know. Raises: `UnknownNamespace`."""
        if request.namespace_id not in self.namespaces:
            await self._learn_namespace(request.namespace_id)
            if request.namespace_id not in self.namespaces:
                return self.lookup(request)  # which says what is wrong
        hashes = unpack_hashes(request.hashes)
        holders = await self._holders(request.namespace_id, hashes)
        hosts = self._readable_hosts(request.exclude)
        return self._lookup_reply(request, cover_run(holders, hosts, request.host))

    async def find(self, namespace_id: bytes, hashes: Sequence[bytes]) -> Found:
        holders = await self._holders(namespace_id, hashes)
        return Found(holders, self._readable_hosts())

    async def answer_copy_counts(self, request: m.CountCopies) -> m.CopyCounts:
        """As `count_copies`; while Redis is away, of what is known here."""
        hashes = unpack_hashes(request.hashes, MAX_COUNTED)
        try:
            found = await self.shared_index.resident_holders(request.namespace_id, hashes)
        except Unavailable:
            return self.count_copies(request)
        live = {node.member_id for node in self.nodes.choosable()} - set(request.exclude)
        counts = (len({copy.node_id for copy in copies} & live) for copies in found)
        return m.CopyCounts(bytes(min(255, count) for count in counts))

    def record_misses(self, node_id: str, namespace_id: bytes, hashes: Sequence[bytes]) -> None:
        super().record_misses(node_id, namespace_id, hashes)
        until = self.clock() + self._config.suspect_after_s
        for block_hash in hashes:
            self.shared_index.record_miss(node_id, namespace_id, block_hash, until)
            self._lookup_cache.drop(namespace_id, block_hash)

    async def _holders(self, namespace_id: bytes, hashes: Sequence[bytes]) -> list[Holders]:
        try:
            found = await self.shared_index.holders(namespace_id, hashes)
        except Unavailable:
            self.counters["lookups_without_redis"] += 1
            return self._held_here(namespace_id, hashes)
        self._lookup_cache.note(namespace_id, hashes, found)
        return found

    def _held_here(self, namespace_id: bytes, hashes: Sequence[bytes]) -> list[Holders]:
        """The leading run by what this conductor holds: its own nodes' blocks, and recent answers."""
        found: list[Holders] = []
        for block_hash in hashes:
            own = self.index.holders(namespace_id, [block_hash])
            copies = {*self._lookup_cache.get(namespace_id, block_hash), *(own[0] if own else ())}
            if not copies:
                break
            ordered = sorted(copies, key=lambda copy: (copy.tier, copy.node_id))
            found.append(tuple(ordered))
        return found

    # ------------------------------------------------------------ keeping in step

    def sweep(self) -> None:
        if not self.redis.is_up:
            now = self.clock()
            self.nodes.keep_mirrored(now)
            self.workers.keep_mirrored(now)
        self._note_sessions()
        super().sweep()
        self.shared_index.expire_misses(self.clock())

    async def tend(self) -> None:
        """Exchange members with the other conductors, remove the dead, tidy a little.

        Never raises.
        """
        try:
            if await self.redis.probe():
                self.shared_members.tell_all_again()
                self._identified_at = float("-inf")
            if not self.redis.is_up:
                return
            await self._identify()
            self._take(await self.shared_members.exchange(self.clock(), self._config.dead_after_s))
            await self._remove_those_that_left()
            for namespace in list(self._unregistered.values()):
                await self._share_namespace(namespace)
            for _ in range(RECLAIM_A_TICK // 2_000):
                if await self.shared_index.reclaim(2_000):
                    break
            await self._touch()
        except Unavailable:
            return  # the link has said so in the log
        except KvpoolError:
            log.exception("tending the shared state failed")

    def _take(self, news: ExchangeResult) -> None:
        for namespace in news.namespaces:
            self._add(namespace)
        for kind, member_id in news.moved:
            log.info("member reports to another conductor now", kind=kind, member=member_id)
            self._unshared.pop((kind, member_id), None)
            if kind == "node":
                self.shared_index.forget_session(member_id)
                super()._forget_node(member_id)
        for kind, member_id in news.gone:
            log.info("member is gone, says another conductor", kind=kind, member=member_id)
            if kind == "worker":
                super()._forget_worker(member_id)
        for kind, member_id in news.lost:
            self._unshared[kind, member_id] = None
        if news.has_lost_content:
            self._report_again("Redis has lost its content: all members report again")

    async def _identify(self) -> None:
        """Notice a Redis that was restarted or replaced by its replica: it may have lost the last writes."""
        now = self.clock()
        if now - self._identified_at < IDENTIFY_S:
            return
        identity = await self.redis.identity()
        self._identified_at = now
        if self._identity not in ("", identity):
            self._report_again("Redis was restarted or failed over: all nodes report again")
        self._identity = identity

    def _report_again(self, why: str) -> None:
        log.error(why)
        self._unshared |= {("node", node.member_id): None for node in self.nodes if not node.via}
        self._unshared |= {("worker", w.member_id): None for w in self.workers if not w.via}

    async def _remove_those_that_left(self) -> None:
        for (kind, member_id), session in list(self._leaving.items()):
            if session:  # else Redis never heard of this joining
                await self.shared_members.leave(kind, member_id, session)
                if kind == "node":
                    await self.shared_index.remove_node(member_id, 0, session)
            if self._leaving.get((kind, member_id)) == session:
                del self._leaving[kind, member_id]

    async def _touch(self) -> None:
        now = self.clock()
        if not self._to_touch and now - self._touched_at >= TOUCH_S:
            self._touched_at = now
            self._to_touch = list(self.namespaces)
        for namespace_id in self._to_touch[:TOUCH_A_TICK]:
            if await self.shared_index.touch(namespace_id) and namespace_id in self.namespaces:
                await self.shared_members.register(self.namespaces[namespace_id])
        del self._to_touch[:TOUCH_A_TICK]

    # ------------------------------------------------------------ inside

    async def _begin(self, node_id: str, epoch: int) -> None:
        await self.shared_index.begin_snapshot(node_id, epoch)
        member = self.nodes.get(node_id)
        if member is not None and member.epoch == epoch:
            member.session, member.via = self.shared_index.session_number(node_id), ""

    @contextlib.contextmanager
    def _sharing(self, kind: Kind, member_id: str) -> Iterator[None]:
        """Remember that Redis may have missed what the body told it: only a full report is right
        again.

        Raises:
            StaleEpoch: Redis has it, and refuses.
        """
        try:
            yield
        except StaleEpoch:
            raise
        except Unavailable:
            self._unshared[kind, member_id] = None
        except asyncio.CancelledError:  # the member gave up waiting
            self._unshared[kind, member_id] = None
            raise

    async def _share_namespace(self, namespace: Namespace, *, must_agree: bool = False) -> None:
        namespace_id = namespace.namespace_id
        if namespace_id in self.namespaces and namespace_id not in self._unregistered:
            return
        try:
            await self.shared_members.register(namespace)
            self._unregistered.pop(namespace_id, None)
        except LayoutMismatch as error:
            self._unregistered.pop(namespace_id, None)
            if must_agree:
                raise
            log.error("another conductor knows another layout", error=str(error))
        except Unavailable:
            self._unregistered[namespace_id] = namespace

    async def _learn_namespace(self, namespace_id: bytes) -> None:
        with contextlib.suppress(Unavailable):
            namespace = await self.shared_members.namespace(namespace_id)
            if namespace is not None:
                self._add(namespace)

    def _add(self, namespace: Namespace) -> None:
        try:
            self.namespaces.add(namespace)
        except LayoutMismatch as error:
            log.error("another conductor knows another layout", error=str(error))

    def _must_share(self, kind: Kind, member_id: str) -> bool:
        """Whether the member has to join again so that Redis learns all of it."""
        return self.redis.is_up and (kind, member_id) in self._unshared

    def _note_sessions(self) -> None:
        """Remember the sessions of all members: once one is gone, its session says what may be removed."""
        self._sessions = {("node", node.member_id): node.session for node in self.nodes}
        self._sessions |= {("worker", w.member_id): w.session for w in self.workers}

    def _forget_node(self, node_id: str) -> None:
        super()._forget_node(node_id)
        self._left("node", node_id)

    def _forget_worker(self, worker_id: str) -> None:
        super()._forget_worker(worker_id)
        self._left("worker", worker_id)

    def _left(self, kind: Kind, member_id: str) -> None:
        self._unshared.pop((kind, member_id), None)
        self._leaving[kind, member_id] = self._sessions.get((kind, member_id), 0)
