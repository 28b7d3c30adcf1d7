"""One pool node as a client uses it: control calls over the wire, bytes over the best transport.

This module holds the guarantees of a read or write: it checks the lease after the read (invariant
3), compares checksums, and registers a namespace again at a node that forgot it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Sequence
from typing import Any

import numpy as np

from kvpool.blocks.hash_check import proof_of
from kvpool.blocks.hashing import pack_hashes
from kvpool.blocks.layout import Namespace
from kvpool.blocks.resharding import TransferPlan, plan_part
from kvpool.blocks.tier import Tier, unpack_tiers
from kvpool.client.node.deadlines import time_left
from kvpool.client.node.grants import (
    ReadLease,
    WriteReservation,
    reservation_from_reply,
    undo_pin,
    undo_reserve,
)
from kvpool.client.node.lease_keepalive import LeaseKeepalive
from kvpool.client.node.node_transports import NodeTransports
from kvpool.client.node.transfer_threads import run_transfer
from kvpool.errors import (
    ChecksumMismatch,
    LeaseExpired,
    StaleEpoch,
    TransferFailed,
    Unavailable,
    UnknownNamespace,
)
from kvpool.transports import Pieces, Transport, Transports
from kvpool.transports.copy import Int64Array, Sums
from kvpool.wire import WireClient
from kvpool.wire import messages as m
from kvpool.wire.client import Undo
from kvpool.wire.credentials import NO_CREDENTIALS, Credentials

MAX_TTL_S = 3600.0  # the longest that nodes accept
NODE_TIME_SHARE = 0.9  # of a call's time-out: the node's reply must arrive within it, too
LEASE_MARGIN_S = 0.05  # bytes read this close to the deadline are discarded


class BlockChecksumMismatch(ChecksumMismatch):
    """The bytes of block number `index` of a read differ from the committed ones."""

    def __init__(self, message: str, index: int) -> None:
        super().__init__(message)
        self.index = index


class NodeLink:
    """Control connection and transports to one epoch of one node.

    Args:
        node: the node's descriptor.
        transports: the transports of this process.
        host: label of this machine.
        client_id: names this client to the node.
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
        self.transports = NodeTransports(node, transports, host)
        self.wire = WireClient(
            node.address, client_id, expected_epoch=node.epoch, credentials=credentials
        )
        self._arena_ids = frozenset(arena.arena_id for arena in node.arenas)

    @property
    def node(self) -> m.NodeDescriptor:
        """The node's descriptor, as this link learned it last."""
        return self.transports.node

    # ------------------------------------------------------------ control calls

    async def connect(self, timeout_s: float) -> None:
        """Load the transport, connect it to the node, and open the wire.

        Raises:
            StaleEpoch: the node restarted.
            NoTransport, Unavailable, DeadlineExceeded, TransferFailed: the node cannot be reached.
        """
        deadline = time.monotonic() + timeout_s
        await self._describe(timeout_s)  # the descriptor may be older than an arena
        await asyncio.to_thread(
            lambda: self.transports.dram.connect(self.node, time_left(deadline))
        )

    async def learn_arenas(self, places: Int64Array, timeout_s: float) -> None:
        """Ask the node for its arenas if some place lies in an arena that this link does not know.

        Raises:
            StaleEpoch: the node restarted.
            TransferFailed: the node has no such arena.
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
            raise StaleEpoch(f"node {self.node.node_id} restarted after it was looked up")
        self.transports.node = node
        self._arena_ids = frozenset(arena.arena_id for arena in node.arenas)

    async def call(
        self, request: Any, namespace: Namespace, timeout_s: float, undo: Undo | None = None
    ) -> Any:
        """Send a request that names `namespace`.

        Registers the namespace first if the node does not know it.
        """
        deadline = time.monotonic() + timeout_s
        try:
            return await self.wire.call(request, timeout_s, undo)
        except UnknownNamespace:
            await self.wire.call(
                m.RegisterNamespace(namespace, proof_of(namespace)), time_left(deadline)
            )
            return await self.wire.call(request, time_left(deadline), undo)

    async def _granted(self, call: Coroutine[Any, Any, Any], undo: Undo) -> Any:
        """The reply of a call that grants something.

        If the caller is cancelled, a late grant is undone.
        """
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

    async def close(self) -> None:
        """Close the control connection.

        The node ends the leases and reservations of this client.
        """
        await self.wire.close()

    # ------------------------------------------------------------ reading

    async def pin(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes],
        *,
        ttl_s: float,
        timeout_s: float,
        parts: Sequence[int] = (),
        max_wait_s: float = 0.0,
        tier: Tier = Tier.DRAM,
    ) -> ReadLease:
        """Look up and lease the longest leading run of a chain, in one call.

        Args:
            ttl_s: how long the lease shall last at most; the node may grant less.
            parts: tensor-parallel parts; empty: all.
            max_wait_s: the node declines blocks on a slow tier that it predicts to take longer. 0:
                no limit but `timeout_s`, of which the node waits at most nine tenths.
            tier: HBM also accepts places in the node's device memory, if this process can reach it.

        Returns:
            The lease. `found` is 0 if it covers nothing.
        """
        asked = time.monotonic()
        request = m.Pin(
            namespace.namespace_id,
            pack_hashes(hashes),
            min(ttl_s, MAX_TTL_S),
            list(parts),
            await self.transports.usable_tier(tier),
            max_wait_s=max_wait_s,
            timeout_s=NODE_TIME_SHARE * timeout_s,
            is_mapped=self.transports.is_mapped(tier),
        )
        reply: m.PinReply = await self._granted(
            self.call(request, namespace, timeout_s, undo_pin), undo_pin
        )
        return ReadLease(
            reply.lease_id,
            reply.found,
            np.frombuffer(reply.places, dtype="<i8").reshape(-1, 2),
            np.frombuffer(reply.checksums, dtype="<u8"),
            unpack_tiers(reply.tiers),
            # Counted from before the call, plus the wait that the node measured: never later than
            # the node's own deadline.
            asked + reply.waited_s + reply.ttl_s,
            reply.miss_reason,
            reply.wait_s,
            reply.waited_s,
        )

    async def renew(self, lease: ReadLease, ttl_s: float, timeout_s: float) -> None:
        """Extend a lease. The new deadline is the node's, counted from before the call.

        Raises:
            LeaseExpired: the lease had ended.
        """
        asked = time.monotonic()
        request = m.Renew(lease.lease_id, min(ttl_s, MAX_TTL_S))
        reply: m.RenewReply = await self.wire.call(request, timeout_s)
        lease.deadline = max(lease.deadline, asked + reply.ttl_s)

    def keep_alive(self, lease: ReadLease, deadline: float) -> LeaseKeepalive:
        """Renew a lease in the background until `deadline` (monotonic) or the keepalive's `end`."""
        return LeaseKeepalive(lease, deadline, LEASE_MARGIN_S, self.renew)

    def release(self, lease: ReadLease) -> None:
        """Give a lease back without a round trip.

        If the message is lost, the lease ends by its deadline.
        """
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
        plan: TransferPlan | None = None,
    ) -> None:
        """Read the blocks of `lease` to `addresses`, and renew the lease as long as the read takes.

        Args:
            owner: keeps the memory at `addresses` alive.
            plan: which bytes of the leased parts go where; default: the one part, whole.
            is_disposable: the caller discards the memory if this raises. Otherwise a transport that
                may write late reads into memory of its own first.

        Raises:
            LeaseExpired: the read ended after the lease, which could not be renewed. Discard the
                bytes.
            BlockChecksumMismatch: bytes differ from the committed ones. The node gets a report; discard
                the bytes.
            UnverifiableRead: the checksums of pieces cannot be compared, as in
                `NodeTransports.check_verifiable`.
            TransferFailed: the node is gone or its memory cannot be reached.
            DeadlineExceeded: the read did not end within `timeout_s`.
        """
        self._check_lease(
            lease
        )  # otherwise the error would name a deadline that the caller did not set
        plan = plan or plan_part(namespace.layout, 0)
        deadline = time.monotonic() + timeout_s
        keepalive = self.keep_alive(lease, deadline)
        try:
            await self.learn_arenas(lease.places, time_left(deadline))
            transport = await self.transports.load(lease.places, time_left(deadline))
            bad = await run_transfer(
                transport,
                self.node,
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
            self.wire.send_nowait(m.ReportCorrupt(namespace.namespace_id, hashes[bad]))
            raise BlockChecksumMismatch(
                f"block {hashes[bad].hex()} read from {self.node.node_id} has wrong bytes", bad
            )

    def _check_lease(self, lease: ReadLease) -> None:
        if time.monotonic() > lease.deadline - LEASE_MARGIN_S:
            message = f"the lease of a read from {self.node.node_id} has ended"
            raise LeaseExpired(message, hint="ask for a longer ttl")

    def _read_blocking(
        self,
        transport: Transport,
        part_bytes: int,
        plan: TransferPlan,
        lease: ReadLease,
        addresses: Int64Array,
        owner: Any,
        verify: bool,
        deadline: float,
        is_disposable: bool,
    ) -> int:
        """Read and verify. Returns the index of the first block with wrong bytes, or -1."""
        runs = plan.runs(addresses, lease.places)
        pieces = Pieces(*runs, owner, plan.pieces_per_part, is_kept=not is_disposable)
        sums = lease.checksums
        started = time.monotonic()
        if verify and plan.is_whole:
            sums = transport.read_and_sum(self.node, pieces, time_left(deadline))
        else:
            transport.read(self.node, pieces, time_left(deadline))
        self.transports.read_rate.record(pieces.total_bytes, time.monotonic() - started)
        if verify and not plan.is_whole:
            sizes = np.full(len(lease.places), part_bytes, dtype=np.int64)
            # Checksums cover whole parts; this read copied pieces. Sum the whole parts at the node.
            sums = transport.sum_in_place(self.node, lease.places, sizes, time_left(deadline))
        wrong = np.flatnonzero(sums != lease.checksums)
        return int(wrong[0]) // len(plan.parts) if len(wrong) else -1

    # ------------------------------------------------------------ writing

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
        tier: Tier = Tier.DRAM,
    ) -> WriteReservation:
        """Reserve slots for a run of a chain.

        Blocks that exist or are being written are not granted.

        Args:
            parent: hash of the block before the first; b"" at the start of a chain.
            tier: HBM asks for slots in device memory. The places are in DRAM if the node has no
                such slot, or if this process cannot reach them.
        """
        asked = time.monotonic()
        request = m.Reserve(
            namespace.namespace_id,
            pack_hashes(hashes),
            parent,
            part,
            min(ttl_s, MAX_TTL_S),
            writer_id,
            await self.transports.usable_tier(tier),
            self.transports.is_mapped(tier),
        )
        reply: m.ReserveReply = await self._granted(
            self.call(request, namespace, timeout_s, undo_reserve), undo_reserve
        )
        return reservation_from_reply(reply, asked)

    async def write(self, pieces: Pieces, *, timeout_s: float, deadline: float) -> Sums:
        """Write pieces into reserved slots.

        Args:
            deadline: of the reservation (monotonic seconds); nothing is written past it.

        Returns:
            The xxh3-64 of each group of `pieces.per_sum` pieces.
        """
        until = min(time.monotonic() + timeout_s, deadline)
        await self.learn_arenas(pieces.places, time_left(until))
        transport = await self.transports.load(pieces.places, time_left(until))

        def work() -> Sums:
            # Measured in the writing thread, without loading a transport or waiting for a thread.
            started = time.monotonic()
            sums = transport.write_and_sum(self.node, pieces, time_left(until))
            self.transports.write_rate.record(pieces.total_bytes, time.monotonic() - started)
            return sums

        return await run_transfer(transport, self.node, pieces.total_bytes, work)

    async def commit(
        self,
        reservation_id: int,
        checksums: Sequence[int] | np.ndarray,
        *,
        timeout_s: float,
        indices: Sequence[int] = (),
    ) -> int:
        """Make written blocks visible. Returns how many became visible.

        Args:
            checksums: xxh3-64 of each block part.
            indices: which granted blocks to commit; empty: all.
        """
        request = m.Commit(
            reservation_id,
            np.asarray(checksums, dtype="<u8").tobytes(),
            np.asarray(indices, dtype="<u4").tobytes(),
        )
        reply: m.CommitReply = await self.wire.call(request, timeout_s)
        return reply.visible

    async def abort(self, reservation_id: int, *, writer_stopped: bool, timeout_s: float) -> None:
        """Give a reservation back.

        Unless `writer_stopped`, the node quarantines the slots (invariant 2).
        """
        await self.wire.call(m.Abort(reservation_id, writer_stopped), timeout_s)
