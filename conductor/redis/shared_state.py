"""One of several conductors: a `Cluster` whose state is shared through Redis.

Every look-up goes to Redis while it is up. This conductor also keeps what it receives itself: the
blocks of the nodes that report to it, in an index in memory, and a mirror of all members. It
continues with these while Redis is down.

If Redis missed a report of a node, the node joins again with a full report as soon as Redis is up.
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

RECLAIM_A_TICK = 8_000  # blocks, in slices between which Redis serves other clients
TOUCH_S = 60.0  # interval at which the keys of namespaces with blocks are renewed
TOUCH_A_TICK = 4  # namespaces
IDENTIFY_S = 5.0


class SharedCluster(Cluster):
    """A `Cluster` that shares its state. Call `tend` every tick, in addition to `sweep`.

    Args:
        pool: name of the pool. Conductors with the same pool and Redis share their state.
        address: this conductor's address, for display.
        max_blocks: maximum number of index entries per namespace.
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
        self._unshared: dict[tuple[Kind, str], None] = {}  # members of whom Redis missed a report
        self._leaving: dict[tuple[Kind, str], int] = {}  # sessions of members to remove in Redis
        self._unregistered: dict[bytes, Namespace] = {}  # namespaces that Redis missed
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
        if self.redis.down_since is None:
            return ""
        down_s = time.monotonic() - self.redis.down_since
        return (
            f"Redis is down (for {down_s:.0f} s); this conductor continues with local state: "
            f"{self.redis.why_down}"
        )

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
        """`node_join`, shared with all conductors."""
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
        except StaleEpoch:  # a newer epoch of it reports to another conductor
            if self.nodes.leave(node.node_id, node.epoch):
                self.index.remove_node(node.node_id, 0)
            return self._reply(resync=True)
        return reply

    async def take_events(self, request: m.NodeEvents) -> m.MemberReply:
        """`node_events`, shared with all conductors."""
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
        """`node_draining`, also for a node that reports to another conductor."""
        self.node_draining(request)
        try:
            await self.shared_members.drain(request.node_id, request.epoch)
        except Unavailable as error:
            log.warning("other conductors missed that a node is draining", error=str(error))
        return m.Ok()

    # ------------------------------------------------------------ workers

    async def join_worker(self, request: m.WorkerJoin) -> m.MemberReply:
        """`worker_join`, shared with all conductors. Raises `LayoutMismatch`."""
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
        """`register_namespace`, shared with all conductors.

        Raises `LayoutMismatch`, `HashMismatch`.
        """
        check_proof(request.namespace, request.proof)
        await self._share_namespace(request.namespace, must_agree=True)
        return self.register_namespace(request)

    async def answer_lookup(self, request: m.Lookup) -> m.LookupReply:
        """`lookup` in the shared index. Raises `UnknownNamespace`."""
        if request.namespace_id not in self.namespaces:
            await self._learn_namespace(request.namespace_id)
            if request.namespace_id not in self.namespaces:
                return self.lookup(request)  # raises UnknownNamespace
        hashes = unpack_hashes(request.hashes)
        holders = await self._holders(request.namespace_id, hashes)
        hosts = self._readable_hosts(request.exclude)
        return self._lookup_reply(request, cover_run(holders, hosts, request.host))

    async def find(self, namespace_id: bytes, hashes: Sequence[bytes]) -> Found:
        holders = await self._holders(namespace_id, hashes)
        return Found(holders, self._readable_hosts())

    async def answer_copy_counts(self, request: m.CountCopies) -> m.CopyCounts:
        """`count_copies` in the shared index; in the local one while Redis is down."""
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
            return self._local_holders(namespace_id, hashes)
        self._lookup_cache.note(namespace_id, hashes, found)
        return found

    def _local_holders(self, namespace_id: bytes, hashes: Sequence[bytes]) -> list[Holders]:
        """The leading run by this conductor's own nodes and its lookup cache."""
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
        """Exchange members with other conductors, remove those that left, reclaim some blocks.

        Never raises.
        """
        try:
            if await self.redis.probe():
                self.shared_members.send_all_again()
                self._identified_at = float("-inf")
            if not self.redis.is_up:
                return
            await self._identify()
            self._take(await self.shared_members.exchange(self.clock(), self._config.dead_after_s))
            await self._remove_leaving()
            for namespace in list(self._unregistered.values()):
                await self._share_namespace(namespace)
            for _ in range(RECLAIM_A_TICK // 2_000):
                if await self.shared_index.reclaim(2_000):
                    break
            await self._touch()
        except Unavailable:
            return  # the client has logged it
        except KvpoolError:
            log.exception("updating the shared state failed")

    def _take(self, exchanged: ExchangeResult) -> None:
        for namespace in exchanged.namespaces:
            self._add(namespace)
        for kind, member_id in exchanged.moved:
            log.info("member now reports to another conductor", kind=kind, member=member_id)
            self._unshared.pop((kind, member_id), None)
            if kind == "node":
                self.shared_index.forget_session(member_id)
                super()._forget_node(member_id)
        for kind, member_id in exchanged.gone:
            log.info("another conductor removed a member", kind=kind, member=member_id)
            if kind == "worker":
                super()._forget_worker(member_id)
        for kind, member_id in exchanged.lost:
            self._unshared[kind, member_id] = None
        if exchanged.has_lost_content:
            self._report_again("Redis has lost its data: all members report again")

    async def _identify(self) -> None:
        """Detect a restart or failover of Redis, which may have lost the last writes."""
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

    async def _remove_leaving(self) -> None:
        for (kind, member_id), session in list(self._leaving.items()):
            if session:  # otherwise Redis missed the join
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
        """If the body fails, note that Redis may have missed its changes: a full report repairs it.

        Raises:
            StaleEpoch: Redis knows a newer epoch or session.
        """
        try:
            yield
        except StaleEpoch:
            raise
        except Unavailable:
            self._unshared[kind, member_id] = None
        except asyncio.CancelledError:  # the member does not wait any longer
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
        """Whether the member must join again, so that Redis gets a full report."""
        return self.redis.is_up and (kind, member_id) in self._unshared

    def _note_sessions(self) -> None:
        """Remember the sessions of all members. What is removed in Redis later depends on them."""
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
