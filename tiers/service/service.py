"""The pool node's service: the store behind handlers, on one event loop.

Handlers are plain methods with typed request and reply; wire, gRPC and HTTP adapters expose the same ones.
All decisions are the store's; here are only clocks, threads for disk I/O, and who is connected.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import structlog

from kvpool.blocks.hash_check import check_proof
from kvpool.blocks.hashing import HASH_BYTES, checksum, pack_hashes, unpack_hashes
from kvpool.blocks.layout import Namespace
from kvpool.blocks.tier import Tier
from kvpool.errors import BlockMiss, InvalidArgument, KvpoolError, NoRoom, WrongByteCount
from kvpool.wire import Session, WireServer
from kvpool.wire import messages as m
from kvpool.wire.principal import ANYBODY, Principal
from tiers.memory.arena import Arena
from tiers.memory.arena_set import ArenaSet
from tiers.memory.hbm_arena import DeviceArena
from tiers.service.migrator import Migrator
from tiers.service.pending_pins import PROMOTING, PendingPins, TimedPin
from tiers.store.inspection import MAX_PAGE
from tiers.store.leases import lease_over
from tiers.store.reservation_cursors import CommitCursor, ReserveCursor
from tiers.store.reservations import reservation_over
from tiers.store.slab_allocator import Place
from tiers.store.store import Store

log = structlog.get_logger(__name__)

SLICE = 128  # blocks reserved, committed or dropped per turn of the loop: ~5 ms where others are evicted for each
OURSELVES = "\x01node"  # holds what no tenant does: none has a name with such a character
MAX_PROTECTION_S = 31_536_000  # a year; longer is for ever


@dataclass(slots=True, frozen=True)
class NodeIdentity:
    """Who a node is: a lasting id, and an epoch that changes with each start."""

    node_id: str
    epoch: int
    host: str


Resize = Callable[[m.ResizeDram], Awaitable[m.ResizeDramReply]]


class NodeService:
    """Answers everything that a node is asked.

    Args:
        identity: node id, epoch, host label.
        store: the block state machine.
        arenas: by arena id, the memory that the store's DRAM places point into.
        migrator: carries out demotions and promotions.
        describe: current descriptor, for clients that connect to the node directly.
        hbm: the memory that the store's HBM places point into; None where the node has none.
    """

    def __init__(
        self,
        identity: NodeIdentity,
        store: Store,
        arenas: ArenaSet | Sequence[Arena],
        migrator: Migrator,
        describe: Callable[[], m.NodeDescriptor],
        *,
        hbm: DeviceArena | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.identity = identity
        self.store = store
        self.migrator = migrator
        self.counters: Counter[str] = Counter()
        self.on_namespace: list[Callable[[Namespace], None]] = []
        self.more_counters: list[Counter[str]] = []  # of parts that work beside this service
        self.refuse_writers: Callable[[], None] = lambda: None  # raises while the node drains
        self.refuses_readers: Callable[[], bool] = lambda: False
        self.resize: Resize = _cannot_resize
        self.ucx: Sequence[str] = ()  # see `kvpool.transports.ucx`
        self.peers: Callable[[], list[m.PeerRate]] = list
        self.on_grant: Callable[[], None] = lambda: None  # a lease or reservation was just given
        self._arenas = ArenaSet.of(arenas)
        self._hbm = hbm
        self._describe = describe
        self._clock = clock
        self._started = clock()
        self._sessions: Counter[tuple[str, str]] = Counter()  # by tenant and client
        self._committing: set[asyncio.Task[m.CommitReply]] = set()
        self._pending_pins = PendingPins(store, migrator, self.counters, clock=clock)

    def expose(self, server: WireServer) -> None:
        """Register every handler with a wire server."""
        server.on_hello = self.client_connected
        handlers: dict[type[m.Message], Callable[[Any, Session], Any]] = {
            m.Describe: lambda _r, _s: self._describe(),
            m.RegisterNamespace: lambda r, _s: self.register_namespace(r),
            m.Reserve: lambda r, s: self.reserve(r, s.client_id),
            m.RenewReservation: lambda r, s: self.renew_reservation(r, s.principal),
            m.Commit: lambda r, s: self.commit(r, s.principal),
            m.Abort: lambda r, s: self.abort(r, s.principal),
            m.Pin: lambda r, s: self.pin(r, s.client_id),
            m.Renew: lambda r, s: self.renew(r, s.principal),
            m.Release: lambda r, s: self.release(r, s.principal),
            m.ReportCorrupt: lambda r, _s: self.report_corrupt(r),
            m.NodeLookup: lambda r, _s: self.lookup(r),
            m.Protect: lambda r, _s: self.protect(r),
            m.DropBlocks: lambda r, _s: self.drop_blocks(r),
            m.ListNamespaces: lambda r, s: self.list_namespaces(r, s.principal),
            m.ListBlocks: lambda r, _s: self.list_blocks(r),
            m.PutInline: lambda r, s: self.put_inline(r, s.client_id),
            m.GetInline: lambda r, s: self.get_inline(r, s.client_id),
            m.NodeStats: lambda _r, s: self.stats(s.principal),
        }
        for message, handler in handlers.items():
            server.handle(message, handler)

    # ------------------------------------------------------------ clients

    def client_connected(self, session: Session) -> None:
        """A client said hello; when its last connection ends, its leases and reservations do."""
        who = (session.principal.tenant, session.client_id)
        self._sessions[who] += 1
        session.closing.append(lambda: self._client_disconnected(who, session.principal))

    def _client_disconnected(self, who: tuple[str, str], principal: Principal) -> None:
        self._sessions[who] -= 1
        if self._sessions[who] <= 0:
            del self._sessions[who]
            tenants = {principal.tenant}
            if principal.sees_all:
                tenants = {namespace.tenant for namespace in self.store.namespaces}
            for tenant in tenants:
                self.store.client_gone(_holder(tenant, who[1]), self._clock())

    def _holder(self, namespace_id: bytes, client_id: str) -> str:
        """Whose a lease or reservation is: clients of two tenants are two, whatever they call themselves.

        Raises:
            UnknownNamespace.
        """
        return _holder(self.store.namespaces[namespace_id].tenant, client_id)

    def is_busy(self) -> bool:
        """Whether anybody may be moving bytes with one-sided operations now."""
        return bool(self.store.leases or self.store.reservations)

    # ------------------------------------------------------------ handlers

    def register_namespace(self, request: m.RegisterNamespace) -> m.NamespaceReply:
        """Raises LayoutMismatch, HashMismatch, BlockTooLarge."""
        check_proof(request.namespace, request.proof)
        try:
            namespace_id = self.store.namespaces.register(request.namespace)
        except NoRoom:
            if not self.store.namespaces.forget_idle(request.namespace.tenant):
                raise
            namespace_id = self.store.namespaces.register(request.namespace)
        for listener in self.on_namespace:
            listener(request.namespace)
        return m.NamespaceReply(namespace_id)

    def reserve(
        self, request: m.Reserve, client_id: str
    ) -> m.ReserveReply | Awaitable[m.ReserveReply]:
        """Raises UnknownNamespace, InvalidArgument, BlockTooLarge, Draining."""
        _check_ttl(request.ttl_s)
        self.refuse_writers()
        hashes = unpack_hashes(request.hashes)
        run = self.store.reservations.begin_reserve(
            request.namespace_id,
            hashes,
            request.parent,
            request.part,
            self._holder(request.namespace_id, request.writer_id or client_id),
            request.ttl_s,
            self._clock(),
            request.tier,
        )
        if len(hashes) > SLICE:
            return self._reserve_slices(run, request)
        self.store.reserve_some(run, SLICE, self._clock())
        return self._reserved(run, request)

    async def _reserve_slices(self, run: ReserveCursor, request: m.Reserve) -> m.ReserveReply:
        try:
            while not run.is_done:
                self.store.reserve_some(run, SLICE, self._clock())
                await asyncio.sleep(0)
        except BaseException:  # nobody was told where to write
            self.store.reservations.cancel(run, self._clock())
            raise
        return self._reserved(run, request)

    def _reserved(self, run: ReserveCursor, request: m.Reserve) -> m.ReserveReply:
        granted = run.result()
        if not request.is_mapped:
            self.on_grant()
        return m.ReserveReply(
            granted.reservation_id,
            bytes(granted.statuses),
            _pack_places(granted.places),
            granted.slot_bytes,
            granted.ttl_s,
        )

    def renew_reservation(
        self, request: m.RenewReservation, principal: Principal = ANYBODY
    ) -> m.RenewReply:
        """Raises ReservationGone."""
        _check_ttl(request.ttl_s)
        if not _is_of(self.store.reservations.writer_of(request.reservation_id), principal):
            raise reservation_over(request.reservation_id)
        return m.RenewReply(
            self.store.reservations.renew(request.reservation_id, request.ttl_s, self._clock())
        )

    def commit(
        self, request: m.Commit, principal: Principal = ANYBODY
    ) -> m.CommitReply | Awaitable[m.CommitReply]:
        """Raises ReservationGone, InvalidArgument."""
        if not _is_of(self.store.reservations.writer_of(request.reservation_id), principal):
            raise reservation_over(request.reservation_id)
        checksums = _unpack("<u8", request.checksums)
        run = self.store.reservations.begin_commit(
            request.reservation_id,
            checksums,
            self._clock(),
            _unpack("<u4", request.indices) if request.indices else None,
        )
        if len(checksums) > SLICE:
            # Goes on when the caller leaves: what was begun cannot be taken back.
            task = asyncio.create_task(self._commit_slices(run), name="commit")
            self._committing.add(task)
            task.add_done_callback(self._committing.discard)
            return asyncio.shield(task)
        self.store.reservations.commit_some(run, SLICE)
        self.migrator.wake()
        return m.CommitReply(len(run.visible))

    async def _commit_slices(self, run: CommitCursor) -> m.CommitReply:
        while not run.is_done:
            self.store.reservations.commit_some(run, SLICE)
            await asyncio.sleep(0)
        self.migrator.wake()
        return m.CommitReply(len(run.visible))

    def abort(self, request: m.Abort, principal: Principal = ANYBODY) -> m.Ok:
        """Gives the slots back, at once or after quarantine; an ended reservation is ignored."""
        if not _is_of(self.store.reservations.writer_of(request.reservation_id), principal):
            return m.Ok()
        self.store.reservations.abort(request.reservation_id, request.writer_stopped, self._clock())
        return m.Ok()

    def pin(self, request: m.Pin, client_id: str) -> m.PinReply | Awaitable[m.PinReply]:
        """Lookup and lease in one step; answers at once unless blocks must be moved first."""
        _check_ttl(request.ttl_s)
        if self.refuses_readers():
            return m.PinReply(0, 0, b"", b"", b"", 0.0, "draining")
        hashes = unpack_hashes(request.hashes)
        holder = self._holder(request.namespace_id, client_id)
        result = self.store.pin(
            request.namespace_id,
            hashes,
            holder,
            request.ttl_s,
            self._clock(),
            request.parts or None,
            request.tier_preference,
            cold="tell",
        )
        if result.miss_reason != PROMOTING:
            return self._pinned(TimedPin(result, 0.0, 0.0), request)
        answer = self._pending_pins.pin(request, hashes, holder)
        if isinstance(answer, TimedPin):
            return self._pinned(answer, request)
        return self._later(answer, request)

    async def _later(self, wait: Callable[[], Awaitable[TimedPin]], request: m.Pin) -> m.PinReply:
        return self._pinned(await wait(), request)

    def _pinned(self, answer: TimedPin, request: m.Pin) -> m.PinReply:
        if not request.is_mapped:
            self.on_grant()
        result = answer.result
        return m.PinReply(
            result.lease_id,
            result.found,
            _pack_places(result.places),
            np.array(result.checksums, dtype="<u8").tobytes(),
            bytes(result.tiers),
            result.ttl_s,
            result.miss_reason,
            answer.wait_s,
            answer.waited_s,
        )

    def renew(self, request: m.Renew, principal: Principal = ANYBODY) -> m.RenewReply:
        """Raises LeaseExpired."""
        _check_ttl(request.ttl_s)
        if not _is_of(self.store.leases.holder_of(request.lease_id), principal):
            raise lease_over(request.lease_id)
        return m.RenewReply(self.store.leases.renew(request.lease_id, request.ttl_s, self._clock()))

    def release(self, request: m.Release, principal: Principal = ANYBODY) -> m.Ok:
        """Ends leases; ended or unknown ones are ignored."""
        for lease_id in request.lease_ids:
            if _is_of(self.store.leases.holder_of(lease_id), principal):
                self.store.leases.release(lease_id)
        return m.Ok()

    async def report_corrupt(self, request: m.ReportCorrupt) -> m.Ok:
        """A reader saw wrong bytes. Verified here before anything is dropped: a claim is no proof.

        Raises:
            UnknownNamespace, InvalidArgument: not one hash.
        """
        _check_one_hash(request.block_hash)
        # What is gone, or on NVMe alone, is left alone: that copy is verified whenever it is read.
        for tier in (Tier.HBM, Tier.DRAM):
            if tier in self.store.resident_tiers(request.namespace_id, request.block_hash):
                await self._verify(request.namespace_id, request.block_hash, tier)
        return m.Ok()

    async def _verify(self, namespace_id: bytes, block_hash: bytes, tier: Tier) -> None:
        """Drop the block if its copy in a memory tier, where it stands now, has wrong bytes."""
        now = self._clock()
        result = self.store.pin(namespace_id, [block_hash], OURSELVES, 5.0, now, None, tier)
        length = self.store.namespaces[namespace_id].layout.part_bytes
        try:
            sums = await asyncio.to_thread(
                lambda: [checksum(self._bytes_at(place, length)) for place in result.places]
            )
            if sums != list(result.checksums):
                self.counters["corrupt_blocks"] += 1
                log.error("dropping a corrupt block", block=block_hash.hex(), tier=tier)
                self.store.drop(namespace_id, block_hash, "checksum", self._clock())
        finally:
            self.store.leases.release(result.lease_id)

    def lookup(self, request: m.NodeLookup) -> m.NodeLookupReply:
        """Raises UnknownNamespace. Takes no lease and leaves the order of eviction alone."""
        hashes = unpack_hashes(request.hashes)
        tiers = self.store.lookup(request.namespace_id, hashes)
        wait_s = self._pending_pins.disk_wait_s(request.namespace_id, hashes, tiers)
        return m.NodeLookupReply(len(tiers), bytes(tiers), wait_s)

    def protect(self, request: m.Protect) -> m.ProtectReply:
        """Raises UnknownNamespace, InvalidArgument, NoRoom."""
        hashes, now = unpack_hashes(request.hashes), self._clock()
        if request.release:
            return m.ProtectReply(self.store.retention.end(request.namespace_id, hashes, now))
        if not 0 <= request.ttl_s <= MAX_PROTECTION_S:
            raise InvalidArgument(
                f"ttl_s must lie in [0, {MAX_PROTECTION_S}], got {request.ttl_s}",
                hint="0 protects for ever",
            )
        until = now + request.ttl_s if request.ttl_s else None
        return m.ProtectReply(self.store.retention.retain(request.namespace_id, hashes, until, now))

    async def drop_blocks(self, request: m.DropBlocks) -> m.DropBlocksReply:
        """Raises UnknownNamespace, InvalidArgument: hashes that cannot be."""
        hashes, count = unpack_hashes(request.hashes), 0
        for start in range(0, len(hashes), SLICE):
            if start:
                await asyncio.sleep(0)
            for block_hash in hashes[start : start + SLICE]:
                count += self.store.drop(request.namespace_id, block_hash, "dropped", self._clock())
        return m.DropBlocksReply(count)

    def list_namespaces(
        self, request: m.ListNamespaces, principal: Principal = ANYBODY
    ) -> m.ListNamespacesReply:
        """Those of the caller's tenant. Raises InvalidArgument: a page that cannot be."""
        if request.offset < 0 or not 1 <= request.limit <= MAX_PAGE:
            raise InvalidArgument(
                f"offset {request.offset}, limit {request.limit}", hint=f"at most {MAX_PAGE}"
            )
        known = [
            usage
            for usage in self.store.inspection.namespaces()
            if principal.sees_all
            or self.store.namespaces[usage.namespace_id].tenant == principal.tenant
        ]
        return m.ListNamespacesReply(known[request.offset :][: request.limit])

    def list_blocks(self, request: m.ListBlocks) -> m.ListBlocksReply:
        """Raises UnknownNamespace, which another tenant's is, and InvalidArgument."""
        blocks = self.store.inspection.blocks(
            request.namespace_id, request.offset, request.limit, self._clock()
        )
        return m.ListBlocksReply(blocks)

    async def put_inline(self, request: m.PutInline, client_id: str) -> m.PutInlineReply:
        """Store one block part whose bytes came in the frame.

        Raises:
            WrongByteCount: the data is not exactly one part of the namespace's layout.
            NoRoom: no slot can be freed now.
            Draining: the node is about to stop.
        """
        self.refuse_writers()
        length = self.store.namespaces[request.namespace_id].layout.part_bytes
        if len(request.data) != length:
            raise WrongByteCount(
                f"a block part of this namespace has {length} bytes, got {len(request.data)}"
            )
        granted = self.store.reserve(
            request.namespace_id,
            [request.block_hash],
            request.parent,
            request.part,
            self._holder(request.namespace_id, client_id),
            30.0,
            self._clock(),
        )
        status = granted.statuses[0]
        if status == m.BlockStatus.NO_ROOM:
            raise NoRoom("no slot can be freed now", hint="all blocks are pinned; try again")
        if status == m.BlockStatus.GRANTED:
            try:
                target = self._view(granted.places[0], length)
                target[:] = np.frombuffer(request.data, dtype=np.uint8)
                self.store.commit(granted.reservation_id, [checksum(request.data)], self._clock())
            except KvpoolError:
                self.store.reservations.abort(granted.reservation_id, True, self._clock())
                raise
            self.migrator.wake()
        return m.PutInlineReply(status)

    async def get_inline(self, request: m.GetInline, client_id: str) -> m.GetInlineReply:
        """Bytes of one block part, verified.

        Raises:
            BlockMiss: it is not here (any more); the reason is in the text.
            UnknownNamespace, InvalidArgument: not one hash, or no such part.
        """
        _check_one_hash(request.block_hash)
        pin = m.Pin(request.namespace_id, request.block_hash, 10.0, [request.part], Tier.HBM)
        answer = self.pin(pin, client_id)
        reply = answer if isinstance(answer, m.PinReply) else await answer
        if not reply.found:
            raise BlockMiss(f"block {request.block_hash.hex()} is not here: {reply.miss_reason}")
        try:
            arena_id, offset = np.frombuffer(reply.places, dtype="<i8")[:2]
            length = self.store.namespaces[request.namespace_id].layout.part_bytes
            place = Place(int(arena_id), int(offset))
            if self._is_in_hbm(place):
                data = (await asyncio.to_thread(self._bytes_at, place, length)).tobytes()
            else:
                data = self._bytes_at(place, length).tobytes()
        finally:
            self.store.leases.release(reply.lease_id)
        expected = int(np.frombuffer(reply.checksums, dtype="<u8")[0])
        if checksum(data) != expected:
            self.counters["corrupt_blocks"] += 1
            self.store.drop(request.namespace_id, request.block_hash, "checksum", self._clock())
            raise BlockMiss(f"block {request.block_hash.hex()} failed its checksum and was dropped")
        return m.GetInlineReply(data, expected, Tier(reply.tiers[0]))

    def stats(self, principal: Principal = ANYBODY) -> m.NodeStatsReply:
        """Accounting and counters; of what others do, a tenant sees no more than the room they take."""
        counters = Counter(self.store.counters)
        counters.update(self.counters)
        for more in (self.migrator.counters, *self.more_counters):
            counters.update(more)
        stats = m.NodeStatsReply(
            self.identity.node_id,
            self.identity.epoch,
            self.identity.host,
            self._clock() - self._started,
            [self._with_facts(usage) for usage in self.store.inspection.tiers()],
            len(self.store.leases),
            len(self.store.reservations),
            len(self.store.namespaces),
            {name: float(value) for name, value in counters.items()},
            self._arena_usage(),
            list(self.ucx),
            self.peers(),
        )
        return m.visible_stats(stats, principal.sees_all)

    def _arena_usage(self) -> list[m.ArenaUsage]:
        used_bytes = self.store.inspection.arena_bytes()
        evacuating = self.store.evacuations.bytes_left()
        return [
            m.ArenaUsage(
                arena_id,
                arena.size_bytes,
                used_bytes.get(arena_id, 0),
                arena_id in evacuating,
                arena.obtained.page_bytes,
                arena.obtained.huge_bytes,
                -1 if arena.numa_node is None else arena.numa_node,
            )
            for arena_id, arena in self._arenas.items()
        ]

    def _with_facts(self, usage: m.TierUsage) -> m.TierUsage:
        if usage.tier == Tier.HBM and self._hbm is not None:
            return msgspec.structs.replace(usage, note=self._hbm.note)
        if usage.tier != Tier.NVME:
            return usage
        return msgspec.structs.replace(
            usage,
            read_bytes_per_s=self.migrator.read_speed.bytes_per_s,
            write_bytes_per_s=self.migrator.write_speed.bytes_per_s,
            queued_read_bytes=self.migrator.queued_read_bytes,
        )

    def snapshot(self) -> dict[tuple[bytes, Tier], bytes]:
        """Every visible block, packed by (namespace id, tier): the full report."""
        runs: dict[tuple[bytes, Tier], list[bytes]] = {}
        for namespace_id, tier, block_hash in self.store.inspection.snapshot():
            runs.setdefault((namespace_id, tier), []).append(block_hash)
        return {key: pack_hashes(hashes) for key, hashes in runs.items()}

    def _view(self, place: Place, length: int) -> Any:
        return self._arenas[place.arena_id].view(place.offset, length)

    def _is_in_hbm(self, place: Place) -> bool:
        return self._hbm is not None and place.arena_id == self._hbm.arena_id

    def _bytes_at(self, place: Place, length: int) -> Any:
        """The bytes at a place of either memory tier; from a device a copy, which blocks the thread."""
        if self._hbm is None or not self._is_in_hbm(place):
            return self._view(place, length)
        out = np.empty(length, dtype=np.uint8)
        self._hbm.read_into(place.offset, out)
        return out


async def _cannot_resize(_request: m.ResizeDram) -> m.ResizeDramReply:
    raise InvalidArgument("this node cannot be resized")


def _check_one_hash(block_hash: bytes) -> None:
    if len(block_hash) != HASH_BYTES:
        raise InvalidArgument(f"a block hash has {HASH_BYTES} bytes, got {len(block_hash)}")


def _holder(tenant: str, client_id: str) -> str:
    return f"{tenant}\0{client_id}"


def _is_of(holder: str | None, principal: Principal) -> bool:
    """Whether what `holder` was given is the principal's tenant's; what nobody has is not."""
    if principal.sees_all:
        return True
    return holder is not None and holder.partition("\0")[0] == principal.tenant


def _check_ttl(ttl_s: float) -> None:
    if not 0 < ttl_s <= 3600:
        raise InvalidArgument(f"ttl_s must lie in (0, 3600], got {ttl_s}")


def _pack_places(places: Sequence[Place]) -> bytes:
    # A fifth of what numpy needs for a list of tuples: 10 us for 256 places.
    return struct.pack(f"<{2 * len(places)}q", *chain.from_iterable(places))


def _unpack(dtype: str, packed: bytes) -> list[int]:
    if len(packed) % np.dtype(dtype).itemsize:
        raise InvalidArgument(f"{len(packed)} bytes are no whole number of {dtype} values")
    values: list[int] = np.frombuffer(packed, dtype=dtype).tolist()
    return values
