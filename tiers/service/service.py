"""The requests that a node serves: clients, namespaces, reservations, leases, look-ups.

The handlers take and return wire messages. The wire, gRPC and HTTP interfaces call the same
handlers. The store decides. This module adds the clock, cuts long work into slices, and ends the
leases and reservations of clients that left.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from itertools import chain

import numpy as np

from kvpool.blocks.hash_check import check_proof
from kvpool.blocks.hashing import unpack_hashes
from kvpool.blocks.layout import Namespace
from kvpool.errors import InvalidArgument, NoRoom
from kvpool.wire import Session
from kvpool.wire import messages as m
from kvpool.wire.principal import ANYBODY, Principal
from kvpool.wire.server import Handler
from tiers.memory.arena import Arena
from tiers.memory.arena_set import ArenaSet
from tiers.memory.hbm_arena import DeviceArena
from tiers.service.inline_blocks import InlineBlocks
from tiers.service.migrator import Migrator
from tiers.service.pending_pins import PendingPins, TimedPin
from tiers.store.inspection import MAX_PAGE
from tiers.store.leases import lease_over
from tiers.store.reservation_cursors import CommitCursor, ReserveCursor
from tiers.store.reservations import reservation_over
from tiers.store.slab_allocator import Place
from tiers.store.store import PROMOTING, Store

# Blocks reserved, committed or dropped in one turn of the loop: ~5 ms if each needs an eviction.
SLICE = 128
MAX_PROTECTION_S = 31_536_000  # a year; 0 protects for ever


class NodeService:
    """Serves the requests for a node's blocks.

    Args:
        arenas: by arena id, the memory that the store's DRAM places point into.
        migrator: carries out demotions and promotions.
        hbm: the memory that the store's HBM places point into; None if the node has none.
        refuse_writers: raises Draining while the node takes no new blocks.
        refuses_readers: whether the node gives no new leases.
        on_namespace: called after a namespace was registered.
        on_grant: called after a client got places that it may reach with one-sided operations.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        store: Store,
        arenas: ArenaSet | Sequence[Arena],
        migrator: Migrator,
        *,
        hbm: DeviceArena | None = None,
        refuse_writers: Callable[[], None] = lambda: None,
        refuses_readers: Callable[[], bool] = lambda: False,
        on_namespace: Callable[[Namespace], None] = lambda _namespace: None,
        on_grant: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self.counters: Counter[str] = Counter()
        self._migrator = migrator
        self._refuse_writers = refuse_writers
        self._refuses_readers = refuses_readers
        self._on_namespace = on_namespace
        self._on_grant = on_grant
        self._clock = clock
        self._sessions: Counter[tuple[str, str]] = Counter()  # by tenant and client
        self._committing: set[asyncio.Task[m.CommitReply]] = set()
        self._pending_pins = PendingPins(store, migrator, self.counters, clock=clock)
        self.inline = InlineBlocks(
            store, ArenaSet.of(arenas), hbm, self.pin, migrator.wake, self.counters, clock
        )

    def handlers(self) -> dict[type[m.Message], Handler]:
        """What serves each message."""
        return {
            m.RegisterNamespace: lambda r, _s: self.register_namespace(r),
            m.Reserve: lambda r, s: self.reserve(r, s.client_id),
            m.RenewReservation: lambda r, s: self.renew_reservation(r, s.principal),
            m.Commit: lambda r, s: self.commit(r, s.principal),
            m.Abort: lambda r, s: self.abort(r, s.principal),
            m.Pin: lambda r, s: self.pin(r, s.client_id),
            m.Renew: lambda r, s: self.renew(r, s.principal),
            m.Release: lambda r, s: self.release(r, s.principal),
            m.ReportCorrupt: lambda r, _s: self.inline.verify(r),
            m.NodeLookup: lambda r, _s: self.lookup(r),
            m.Protect: lambda r, _s: self.protect(r),
            m.DropBlocks: lambda r, _s: self.drop_blocks(r),
            m.ListNamespaces: lambda r, s: self.list_namespaces(r, s.principal),
            m.ListBlocks: lambda r, _s: self.list_blocks(r),
            m.PutInline: lambda r, s: self.put_inline(r, s.client_id),
            m.GetInline: lambda r, s: self.inline.get(r, s.client_id),
        }

    # ------------------------------------------------------------ clients

    def client_connected(self, session: Session) -> None:
        """Count a client's connections; its leases and reservations end with the last one."""
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
        """The holder of a client's leases and reservations; unique across tenants.

        Raises:
            UnknownNamespace.
        """
        return _holder(self.store.namespaces[namespace_id].tenant, client_id)

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
        self._migrator.record_namespace(request.namespace)
        self._on_namespace(request.namespace)
        return m.NamespaceReply(namespace_id)

    def reserve(
        self, request: m.Reserve, client_id: str
    ) -> m.ReserveReply | Awaitable[m.ReserveReply]:
        """Raises UnknownNamespace, InvalidArgument, BlockTooLarge, Draining."""
        _check_ttl(request.ttl_s)
        self._refuse_writers()
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
        except BaseException:  # no client learnt where to write
            self.store.reservations.cancel(run, self._clock())
            raise
        return self._reserved(run, request)

    def _reserved(self, run: ReserveCursor, request: m.Reserve) -> m.ReserveReply:
        granted = run.result()
        if not request.is_mapped:
            self._on_grant()
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
            # Goes on if the caller leaves: a part of the blocks is committed already.
            task = asyncio.create_task(self._commit_slices(run), name="commit")
            self._committing.add(task)
            task.add_done_callback(self._committing.discard)
            return asyncio.shield(task)
        self.store.reservations.commit_some(run, SLICE)
        self._migrator.wake()
        return m.CommitReply(len(run.visible))

    async def _commit_slices(self, run: CommitCursor) -> m.CommitReply:
        while not run.is_done:
            self.store.reservations.commit_some(run, SLICE)
            await asyncio.sleep(0)
        self._migrator.wake()
        return m.CommitReply(len(run.visible))

    def abort(self, request: m.Abort, principal: Principal = ANYBODY) -> m.Ok:
        """Free the slots, at once or after quarantine. An ended reservation is ignored."""
        if not _is_of(self.store.reservations.writer_of(request.reservation_id), principal):
            return m.Ok()
        self.store.reservations.abort(request.reservation_id, request.writer_stopped, self._clock())
        return m.Ok()

    def pin(self, request: m.Pin, client_id: str) -> m.PinReply | Awaitable[m.PinReply]:
        """Look up and lease in one step. Returns at once unless blocks must be moved first."""
        _check_ttl(request.ttl_s)
        if self._refuses_readers():
            return m.PinReply(0, 0, b"", b"", b"", 0.0, "draining")
        hashes = unpack_hashes(request.hashes)
        holder = self._holder(request.namespace_id, client_id)
        result = self.store.pin_unless_cold(
            request.namespace_id,
            hashes,
            holder,
            request.ttl_s,
            self._clock(),
            request.parts or None,
            request.tier_preference,
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
            self._on_grant()
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
        """End leases. Ended and unknown ones are ignored."""
        for lease_id in request.lease_ids:
            if _is_of(self.store.leases.holder_of(lease_id), principal):
                self.store.leases.release(lease_id)
        return m.Ok()

    def lookup(self, request: m.NodeLookup) -> m.NodeLookupReply:
        """Where the leading blocks are. Takes no lease and does not count as use.

        Raises:
            UnknownNamespace.
        """
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
        """Raises UnknownNamespace, InvalidArgument: malformed hashes."""
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
        """The namespaces of the caller's tenant. Raises InvalidArgument: an impossible page."""
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
        """Raises UnknownNamespace (another tenant's is unknown too) and InvalidArgument."""
        blocks = self.store.inspection.blocks(
            request.namespace_id, request.offset, request.limit, self._clock()
        )
        return m.ListBlocksReply(blocks)

    def put_inline(self, request: m.PutInline, client_id: str) -> m.PutInlineReply:
        """Store one block part from the request. Raises Draining; others as `InlineBlocks.put`."""
        self._refuse_writers()
        return self.inline.put(request, self._holder(request.namespace_id, client_id))


def _holder(tenant: str, client_id: str) -> str:
    return f"{tenant}\0{client_id}"


def _is_of(holder: str | None, principal: Principal) -> bool:
    """Whether the holder of a lease or reservation is of the principal's tenant."""
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
        raise InvalidArgument(f"{len(packed)} bytes are not a whole number of {dtype} values")
    values: list[int] = np.frombuffer(packed, dtype=dtype).tolist()
    return values
