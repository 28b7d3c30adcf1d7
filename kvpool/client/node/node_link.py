"""One pool node as a client sees it: control calls over the wire, bytes over the best transport.

Everything that must be true of a read or write is here: the lease is checked after the read (invariant
3), checksums are compared, a namespace that the node forgot is registered again.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from kvpool.blocks.hash_check import proof_of
from kvpool.blocks.hashing import pack_hashes
from kvpool.blocks.layout import Namespace
from kvpool.blocks.resharding import Plan, plan_part
from kvpool.client.node.deadlines import time_left
from kvpool.client.node.lease_keepalive import LeaseKeepalive
from kvpool.client.node.rates import TransferRate
from kvpool.errors import (
    ChecksumMismatch,
    DeadlineExceeded,
    LeaseExpired,
    StaleEpoch,
    TransferFailed,
    Unavailable,
    UnknownNamespace,
    UnverifiableRead,
)
from kvpool.security.credentials import NO_CREDENTIALS, Credentials
from kvpool.transports import Pieces, Transport, Transports
from kvpool.transports.copy import Int64Array, Sums
from kvpool.wire import WireClient
from kvpool.wire import messages as m
from kvpool.wire.client import Undo

T = TypeVar("T")

MAX_TTL_S = 3600.0  # what nodes accept
PATIENCE = 0.9  # of a call's time-out: the node's answer must arrive within it, too
LEASE_MARGIN_S = 0.05  # what was read this close to the deadline is discarded


class BlockChecksumMismatch(ChecksumMismatch):
    """Block number `index` of those read has not the bytes that were committed."""

    def __init__(self, message: str, index: int) -> None:
        super().__init__(message)
        self.index = index


@dataclass(slots=True, eq=False)
class ReadLease:
    """A promise of a node that some blocks stay where they are until `deadline`, which renewing moves on.

    The holder discards whatever it finished reading after `deadline`.
    """

    lease_id: int
    found: int
    places: Int64Array  # [found * parts, 2]: arena id, byte offset
    checksums: np.ndarray  # uint64 [found * parts]
    tiers: tuple[str, ...]
    deadline: float  # monotonic seconds of this process
    miss_reason: str
    wait_s: float = 0.0  # predicted for the whole run that is there; -1: unknown
    waited_s: float = 0.0  # for what had to come from a slow tier


@dataclass(slots=True, frozen=True)
class WriteReservation:
    """A promise of a node of empty slots; `granted` are the indices that this caller may write."""

    reservation_id: int
    granted: tuple[int, ...]
    statuses: bytes
    places: Int64Array  # [len(granted), 2]
    deadline: float


@dataclass(slots=True)
class BytesMoved:
    """Bytes moved, by transport."""

    by_transport: dict[str, int] = field(default_factory=dict)

    def add(self, transport: str, count: int) -> None:
        """Count `count` bytes moved by `transport`."""
        self.by_transport[transport] = self.by_transport.get(transport, 0) + count


class NodeLink:
    """Control connection and transport to one node (one epoch of it).

    Args:
        node: its descriptor.
        transports: where the bytes may go.
        host: label of this machine.
        credentials: shown to the node.
    """

    def __init__(
        self,
        node: m.NodeDescriptor,
        transports: Transports,
        host: str,
        client_id: str,
        credentials: Credentials = NO_CREDENTIALS,
    ) -> None:
        self.node = node
        self.wire = WireClient(
            node.address, client_id, expected_epoch=node.epoch, credentials=credentials
        )
        self._arena_ids = frozenset(arena.arena_id for arena in node.arenas)
        self._transports = transports
        self._host = host
        self.read_rate, self.write_rate = TransferRate(), TransferRate()
        self._hbm_arenas = [a.arena_id for a in node.arenas if a.tier == "hbm"]

    @functools.cached_property
    def transport(self) -> Transport:
        """The transport to this node; chosen on first use, which may load NIXL: call it from a thread."""
        return self._transports.choose(self.node, self._host)

    @functools.cached_property
    def hbm_transport(self) -> Transport | None:
        """The transport to places in the node's hbm, None where there is none; as `transport` otherwise."""
        return self._transports.choose_for_hbm(self.node)

    def _is_mapped(self, tier: str) -> bool:
        """Whether what is granted will be copied through shared memory; False while that is not known."""
        chosen: Transport | None = self.__dict__.get("transport")
        return not tier and chosen is not None and chosen.name == "shm"

    @property
    def peer_rate(self) -> m.PeerRate:
        """What moved between this process and the node, and how; no transport where nothing did yet."""
        chosen: Transport | None = self.__dict__.get("transport")
        return m.PeerRate(
            self.node.node_id,
            chosen.name if chosen is not None else "",
            chosen.fabric(self.node, self._host) if chosen is not None else "",
            self.read_rate.total_bytes,
            self.write_rate.total_bytes,
            self.read_rate.bytes_per_s,
            self.write_rate.bytes_per_s,
        )

    def transport_to(self, places: Int64Array) -> Transport:
        """The transport that moves bytes to and from these places; as `transport` otherwise.

        Raises:
            TransferFailed: some lie in hbm, and this process cannot reach that.
        """
        if not self._is_in_hbm(places):
            return self.transport
        if self.hbm_transport is None:
            raise TransferFailed(
                f"hbm of node {self.node.node_id} cannot be reached", hint="it takes NIXL"
            )
        return self.hbm_transport

    def _is_in_hbm(self, places: Int64Array) -> bool:
        return bool(self._hbm_arenas) and bool(np.isin(places[:, 0], self._hbm_arenas).any())

    async def _usable_tier(self, tier: str) -> str:
        """The tier to ask for when the caller wants `tier`: what it cannot reach it must not get."""
        if tier != "hbm" or not self._hbm_arenas:
            return ""
        if "hbm_transport" not in self.__dict__:
            await asyncio.to_thread(lambda: self.hbm_transport)
        return tier if self.hbm_transport is not None else ""

    async def connect(self, timeout_s: float) -> None:
        """Do now what the first transfer would do: load the transport, meet the node, open the wire."""
        deadline = time.monotonic() + timeout_s
        await self._describe(timeout_s)  # what was looked up may be older than an arena
        await asyncio.to_thread(lambda: self.transport.connect(self.node, time_left(deadline)))

    async def know(self, places: Int64Array, timeout_s: float) -> None:
        """Have the node described again where some place lies in an arena that it got since then.

        Raises:
            StaleEpoch: it has restarted. TransferFailed: it has no such arena.
        """
        if self._arena_ids.issuperset(places[:, 0].tolist()):
            return
        await self._describe(timeout_s)
        missing = set(places[:, 0].tolist()) - self._arena_ids
        if missing:
            raise TransferFailed(f"node {self.node.node_id} has no arena {min(missing)}")

    async def _describe(self, timeout_s: float) -> None:
        node: m.NodeDescriptor = await self.wire.call(m.Describe(), timeout_s)
        if (node.node_id, node.epoch) != (self.node.node_id, self.node.epoch):
            raise StaleEpoch(f"node {self.node.node_id} has restarted since it was looked up")
        self.node = node
        self._arena_ids = frozenset(arena.arena_id for arena in node.arenas)

    async def call(
        self, request: Any, namespace: Namespace, timeout_s: float, undo: Undo | None = None
    ) -> Any:
        """A call that names `namespace`; registers it first where the node does not know it."""
        deadline = time.monotonic() + timeout_s
        try:
            return await self.wire.call(request, timeout_s, undo)
        except UnknownNamespace:
            await self.wire.call(
                m.RegisterNamespace(namespace, proof_of(namespace)), time_left(deadline)
            )
            return await self.wire.call(request, time_left(deadline), undo)

    async def pin(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes],
        *,
        ttl_s: float,
        timeout_s: float,
        parts: Sequence[int] = (),
        max_wait_s: float = 0.0,
        tier: str = "",
    ) -> ReadLease:
        """Lookup and lease in one step; a lease over nothing has `found == 0`.

        Args:
            max_wait_s: blocks on a slow tier that are predicted to take longer are declined; 0: no limit
                but `timeout_s`, of which the node waits nine tenths at most.
            tier: "hbm" takes places in the node's device memory, too, where this process can reach it.
        """
        asked = time.monotonic()
        ttl_s = min(ttl_s, MAX_TTL_S)
        request = m.Pin(
            namespace.namespace_id,
            pack_hashes(hashes),
            ttl_s,
            list(parts),
            await self._usable_tier(tier),
            max_wait_s=max_wait_s,
            timeout_s=PATIENCE * timeout_s,
            is_mapped=self._is_mapped(tier),
        )
        reply: m.PinReply = await self._kept(
            self.call(request, namespace, timeout_s, undo_pin), undo_pin
        )
        return ReadLease(
            reply.lease_id,
            reply.found,
            np.frombuffer(reply.places, dtype="<i8").reshape(-1, 2),
            np.frombuffer(reply.checksums, dtype="<u8"),
            tuple(m.TIERS[code] for code in reply.tiers),
            # From before the call, but for the wait that the node measured: never later than its own.
            asked + reply.waited_s + reply.ttl_s,
            reply.miss_reason,
            reply.wait_s,
            reply.waited_s,
        )

    async def _kept(self, call: Coroutine[Any, Any, Any], undo: Undo) -> Any:
        """The reply of a call that grants something; if the caller is cancelled meanwhile, undone later."""
        task = asyncio.ensure_future(call)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:

            def give_back(done: asyncio.Task[Any]) -> None:
                if not done.cancelled() and done.exception() is None:
                    message = undo(done.result())
                    if message is not None:
                        with contextlib.suppress(Unavailable):
                            self.wire.send_nowait(message)

            task.add_done_callback(give_back)
            raise

    async def renew(self, lease: ReadLease, ttl_s: float, timeout_s: float) -> None:
        """Prolong a lease; its deadline is the node's, counted from before it was asked.

        Raises:
            LeaseExpired: it was over.
        """
        asked = time.monotonic()
        request = m.Renew(lease.lease_id, min(ttl_s, MAX_TTL_S))
        reply: m.RenewReply = await self.wire.call(request, timeout_s)
        lease.deadline = max(lease.deadline, asked + reply.ttl_s)

    def keep(self, lease: ReadLease, deadline: float) -> LeaseKeepalive:
        """Renew a lease until `deadline` (monotonic seconds) or the keepalive's end; see `LeaseKeepalive`."""
        return LeaseKeepalive(lease, deadline, LEASE_MARGIN_S, self.renew)

    def release(self, lease: ReadLease) -> None:
        """Give a lease back; costs no round trip. Lost with the connection, it ends by itself."""
        if lease.lease_id:
            self.wire.send_nowait(m.Release([lease.lease_id]))

    async def read(
        self,
        namespace: Namespace,
        lease: ReadLease,
        hashes: Sequence[bytes],
        addresses: Int64Array,
        owner: Any,
        *,
        verify: bool,
        timeout_s: float,
        is_disposable: bool = False,
        plan: Plan | None = None,
    ) -> None:
        """Read the blocks of `lease` to `addresses`, and renew it as long as that takes.

        Args:
            plan: which bytes of the parts of `lease` go where; default: its one part, whole.
            is_disposable: the caller throws the memory away if this raises. Without that promise, a
                transport that may write late reads into memory of our own first.

        Raises:
            LeaseExpired: the read ended after the lease, which could not be renewed; the bytes must not
                be used.
            ChecksumMismatch: bytes are not those committed; reported to the node, must not be used.
            UnverifiableRead: see `check_verifiable`.
            TransferFailed, DeadlineExceeded: see `Transport.read`.
        """
        self._check_lease(lease)  # else the reason would be a deadline that the caller has not set
        plan = plan or plan_part(namespace.layout, 0)
        deadline = time.monotonic() + timeout_s
        keepalive = self.keep(lease, deadline)
        try:
            await self.know(lease.places, time_left(deadline))
            transport = await self._loaded_transport(lease.places, time_left(deadline))
            bad = await self._off_loop(
                transport,
                plan.effort_bytes(len(addresses)),
                self._read_blocking,
                transport,
                namespace.layout.part_bytes,
                plan,
                lease,
                addresses,
                owner,
                verify,
                deadline,
                is_disposable,
            )
        finally:
            await keepalive.end()
        self._check_lease(lease)
        if bad >= 0:
            report = m.ReportCorrupt(namespace.namespace_id, hashes[bad])
            self.wire.send_nowait(report)
            raise BlockChecksumMismatch(
                f"block {hashes[bad].hex()} read from {self.node.node_id} has wrong bytes", bad
            )

    async def check_verifiable(self, plan: Plan, timeout_s: float) -> None:
        """Whether what is read by `plan` can be compared with its checksums.

        Raises:
            DeadlineExceeded: the transport was not loaded in time.
            UnverifiableRead: only pieces of parts are read, and their transport cannot look at the rest.
            Unavailable: no transport reaches the node.
        """
        if not plan.is_whole and not (await self._chosen(timeout_s)).can_sum_in_place:
            raise UnverifiableRead(
                f"{self.transport.name} reads pieces of parts from {self.node.node_id}, checksums cover"
                " whole parts",
                hint="pass verify=False, or store with a tp_size that the reader's divides",
            )

    async def _chosen(self, timeout_s: float) -> Transport:
        chosen: Transport | None = self.__dict__.get("transport")
        return chosen or await self._in_time(lambda: self.transport, timeout_s)

    def _check_lease(self, lease: ReadLease) -> None:
        if time.monotonic() > lease.deadline - LEASE_MARGIN_S:
            raise LeaseExpired(
                f"the lease of a read from {self.node.node_id} is over", hint="ask for a longer ttl"
            )

    async def _loaded_transport(self, places: Int64Array, timeout_s: float) -> Transport:
        needed = "hbm_transport" if self._is_in_hbm(places) else "transport"
        if needed in self.__dict__:
            return self.transport_to(places)
        return await self._in_time(lambda: self.transport_to(places), timeout_s)

    async def _in_time(self, load: Callable[[], Transport], timeout_s: float) -> Transport:
        """What `load` gives, in a thread: NIXL brings torch with it, and the thread goes on after `timeout_s`.

        Raises:
            DeadlineExceeded: it is not there yet. A later call may find it.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.to_thread(load)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the transport to {self.node.node_id} is still being loaded",
                hint="call connect() first",
            ) from None

    async def _off_loop(
        self, transport: Transport, size: int, work: Callable[..., T], *args: Any
    ) -> T:
        """Run a transfer of `size` bytes in a thread, unless it is over sooner than a thread would begin.

        When the caller is cancelled, this waits for the thread all the same: until that has ended, it may
        touch the caller's memory and the node's slots. It ends by its own deadline; if that passed with a
        transfer still under way, the cancellation carries the `DeadlineExceeded` as its cause.
        """
        if size <= transport.quick_bytes and transport.is_connected(self.node):
            return work(*args)
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(transport.threads, functools.partial(work, *args))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError as cancelled:
            await _ended(future)
            error = None if future.cancelled() else future.exception()
            raise cancelled from error

    def _read_blocking(
        self,
        transport: Transport,
        part_bytes: int,
        plan: Plan,
        lease: ReadLease,
        addresses: Int64Array,
        owner: Any,
        verify: bool,
        deadline: float,
        is_disposable: bool,
    ) -> int:
        """Read, verify, and hand over; returns the index of the first bad block, or -1."""
        runs = plan.runs(addresses, lease.places)
        pieces = Pieces(*runs, owner, plan.pieces_per_part, is_kept=not is_disposable)
        sums = lease.checksums
        started = time.monotonic()
        if verify and plan.is_whole:
            sums = transport.read_and_sum(self.node, pieces, time_left(deadline))
        else:
            transport.read(self.node, pieces, time_left(deadline))
        self.read_rate.note(pieces.total_bytes, time.monotonic() - started)
        if verify and not plan.is_whole:
            sizes = np.full(len(lease.places), part_bytes, dtype=np.int64)
            # Of whole parts of which pieces were read, summed where the parts stand.
            sums = transport.sum_in_place(self.node, lease.places, sizes, time_left(deadline))
        wrong = np.flatnonzero(sums != lease.checksums)
        if len(wrong):
            return int(wrong[0]) // len(plan.parts)
        return -1

    async def reserve(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes],
        *,
        parent: bytes,
        part: int,
        ttl_s: float,
        timeout_s: float,
        writer_id: str = "",
        tier: str = "",
    ) -> WriteReservation:
        """Ask for slots for a run of a chain; what is there or being written is not granted.

        Args:
            tier: "hbm" asks for slots in device memory; where there are none, or this process cannot reach
                them, the places lie in dram.
        """
        asked = time.monotonic()
        ttl_s = min(ttl_s, MAX_TTL_S)
        request = m.Reserve(
            namespace.namespace_id,
            pack_hashes(hashes),
            parent,
            part,
            ttl_s,
            writer_id,
            await self._usable_tier(tier),
            self._is_mapped(tier),
        )
        reply: m.ReserveReply = await self._kept(
            self.call(request, namespace, timeout_s, undo_reserve), undo_reserve
        )
        return reservation_from_reply(reply, asked)

    async def write(self, pieces: Pieces, *, timeout_s: float, deadline: float) -> Sums:
        """Write runs into reserved slots; returns the xxh3-64 of each.

        Args:
            deadline: of the reservation (monotonic seconds); nothing is written past it.
        """
        until = min(time.monotonic() + timeout_s, deadline)
        await self.know(pieces.places, time_left(until))

        transport = await self._loaded_transport(pieces.places, time_left(until))

        def work() -> Sums:
            # Seen from the thread that writes: loading a transport or waiting for a turn takes time too.
            started = time.monotonic()
            sums = transport.write_and_sum(self.node, pieces, time_left(until))
            self.write_rate.note(pieces.total_bytes, time.monotonic() - started)
            return sums

        return await self._off_loop(transport, pieces.total_bytes, work)

    async def commit(
        self,
        reservation_id: int,
        checksums: Sequence[int] | np.ndarray,
        *,
        timeout_s: float,
        indices: Sequence[int] = (),
    ) -> int:
        """Make written blocks visible; returns how many became so."""
        packed = np.asarray(checksums, dtype="<u8").tobytes()
        chosen = np.asarray(indices, dtype="<u4").tobytes()
        reply: m.CommitReply = await self.wire.call(
            m.Commit(reservation_id, packed, chosen), timeout_s
        )
        return reply.visible

    async def abort(self, reservation_id: int, *, writer_stopped: bool, timeout_s: float) -> None:
        """Give a reservation back."""
        await self.wire.call(m.Abort(reservation_id, writer_stopped), timeout_s)

    async def close(self) -> None:
        """Close the control connection; the node ends what this client held."""
        await self.wire.close()


def undo_pin(late: m.PinReply) -> m.Message | None:
    """What undoes a pin of whose lease nobody was told."""
    return m.Release([late.lease_id]) if late.lease_id else None


def undo_reserve(late: m.ReserveReply) -> m.Message | None:
    """What undoes a reservation of which nobody was told: nobody writes there."""
    return m.Abort(late.reservation_id, True) if late.reservation_id else None


def reservation_from_reply(reply: m.ReserveReply, asked: float) -> WriteReservation:
    """A `WriteReservation` from the node's reply to a call made at `asked` (monotonic seconds)."""
    granted = tuple(i for i, status in enumerate(reply.statuses) if status == m.BlockStatus.GRANTED)
    places = np.frombuffer(reply.places, dtype="<i8").reshape(-1, 2)
    if len(places) != len(granted):
        raise TransferFailed("the node granted blocks without saying where")
    return WriteReservation(
        reply.reservation_id, granted, reply.statuses, places, asked + reply.ttl_s
    )


async def _ended(future: asyncio.Future[Any]) -> None:
    """Wait until `future` is done, however often the waiter is cancelled."""
    while not future.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([future])
