"""The pool as an asyncio client sees it.

Through a conductor, blocks are found and placed anywhere in the pool; with `node=` the client speaks to
that one node alone and saves the look-up.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from kvpool.client.buffers import block_spans
from kvpool.client.node_link import Lease, Moved, NodeLink
from kvpool.errors import (
    BlockMiss,
    ConfigError,
    DeadlineExceeded,
    InvalidArgument,
    KvpoolError,
    LeaseExpired,
    NoRoom,
    StaleEpoch,
    TransferFailed,
    Unavailable,
)
from kvpool.hashing import pack_hashes
from kvpool.layout import Namespace
from kvpool.transports import Pieces, TransportName, Transports
from kvpool.wire import WireClient
from kvpool.wire import messages as m

NODES_TTL_S = 1.0  # how long a list of nodes is trusted
_pool_numbers = itertools.count(1)


@dataclass(slots=True, frozen=True)
class GetResult:
    """What `get` read: blocks [0, found) of the chain."""

    found: int
    tiers: tuple[str, ...]
    bytes_moved: dict[str, int]  # by transport
    verified: int  # blocks whose checksum was compared
    miss_reason: str  # why block number `found` was not read; "" when all were


@dataclass(slots=True, frozen=True)
class PutResult:
    """What became of each block of a `put`."""

    stored: int
    existing: int
    in_progress: int  # another writer has them; nothing to do
    rejected: int  # no room; may be tried again
    bytes_moved: dict[str, int]


@dataclass(slots=True)
class PinnedBlocks:
    """Blocks [0, found) of a chain, held in place until released or `deadline` (monotonic seconds)."""

    namespace: Namespace
    hashes: tuple[bytes, ...]
    held: list[tuple[NodeLink, Lease, int]]  # with the index of its first block
    deadline: float
    miss_reason: str
    is_released: bool = field(default=False)

    @property
    def found(self) -> int:
        """How many leading blocks are held."""
        return sum(lease.found for _, lease, _ in self.held)

    def release(self) -> None:
        """Let them go; a second call does nothing."""
        if not self.is_released:
            self.is_released = True
            for link, lease, _ in self.held:
                link.release(lease)


class AsyncPool:
    """Client of a pool. Use as `async with AsyncPool(conductor="127.0.0.1:7800") as pool:`.

    Args:
        conductor: wire address of a conductor.
        node: wire address of one node, instead of a conductor.
        host_label: label of this machine; equal to a node's, shared memory is used.
        transport: "auto", or "shm" or "nixl" to allow that one alone.
        timeout_s: default deadline of every call.
        verify_checksums: compare the checksum of every block read (invariant 5).

    Raises:
        ConfigError: not exactly one of `conductor` and `node` is given.
    """

    def __init__(
        self,
        *,
        conductor: str | None = None,
        node: str | None = None,
        host_label: str | None = None,
        transport: TransportName = "auto",
        timeout_s: float = 10.0,
        verify_checksums: bool = True,
        client_id: str | None = None,
    ) -> None:
        if (conductor is None) == (node is None):
            raise ConfigError("give exactly one of conductor= and node=")
        self.client_id = client_id or str(uuid.uuid4())
        self.host_label = host_label or socket.gethostname()
        self.timeout_s = timeout_s
        self.verify_checksums = verify_checksums
        loopback = (conductor or node or "").startswith(("127.", "localhost", "unix:", "[::1]"))
        self.transports = Transports(
            f"client-{self.client_id}-{next(_pool_numbers)}",
            forced=transport,
            loopback_only=loopback,
        )
        self._conductor = WireClient(conductor, self.client_id) if conductor else None
        self._only_node = WireClient(node, self.client_id) if node else None
        self._links: dict[str, NodeLink] = {}
        self._nodes: list[m.NodeInfo] = []
        self._nodes_at = float("-inf")
        self._known: set[bytes] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection; nodes end the leases and reservations of this client."""
        for link in self._links.values():
            await link.close()
        for client in (self._conductor, self._only_node):
            if client is not None:
                await client.close()
        await asyncio.to_thread(self.transports.close)

    # ------------------------------------------------------------ finding

    async def register(self, namespace: Namespace, *, timeout_s: float | None = None) -> bytes:
        """Make a namespace known to the pool; returns its 16-byte id. `put` and `get` do it themselves.

        Raises:
            LayoutMismatch: model, revision, tenant and salt are known under another layout.
        """
        peer = self._conductor or self._only_node
        assert peer is not None
        reply: m.NamespaceReply = await peer.call(
            m.RegisterNamespace(namespace), timeout_s or self.timeout_s
        )
        self._known.add(reply.namespace_id)
        return reply.namespace_id

    async def lookup(
        self, namespace: Namespace, hashes: Sequence[bytes], *, timeout_s: float | None = None
    ) -> m.LookupReply:
        """How many leading blocks of a chain the pool has, and where. Takes no lease.

        Args:
            hashes: from `hash_chain`, in order.

        Raises:
            UnknownNamespace: nobody registered it.
        """
        deadline = time.monotonic() + (timeout_s or self.timeout_s)
        await self._ensure_registered(namespace, deadline)
        if self._conductor is not None:
            request = m.Lookup(namespace.namespace_id, pack_hashes(hashes), self.host_label)
            found: m.LookupReply = await self._conductor.call(request, _left(deadline))
            return found
        link = await self._the_node(deadline)
        reply: m.NodeLookupReply = await link.call(
            m.NodeLookup(namespace.namespace_id, pack_hashes(hashes)), namespace, _left(deadline)
        )
        if not reply.found:
            return m.LookupReply(0, [])
        tier = m.TIERS[max(reply.tiers)]
        return m.LookupReply(reply.found, [m.Segment(link.node.node_id, 0, reply.found, tier)])

    async def nodes(self, *, timeout_s: float | None = None) -> list[m.NodeInfo]:
        """The pool's nodes, at most a second old."""
        deadline = time.monotonic() + (timeout_s or self.timeout_s)
        if self._conductor is None:
            link = await self._the_node(deadline)
            return [m.NodeInfo(link.node, "live", 0, 0)]
        if time.monotonic() - self._nodes_at > NODES_TTL_S:
            reply: m.NodesReply = await self._conductor.call(m.Nodes(), _left(deadline))
            self._nodes = reply.nodes
            self._nodes_at = time.monotonic()
        return self._nodes

    async def stats(self, *, timeout_s: float | None = None) -> m.PoolStatsReply:
        """Accounting of the whole pool. Needs a conductor.

        Raises:
            ConfigError: this client speaks to one node alone.
        """
        if self._conductor is None:
            raise ConfigError("stats of the pool need a conductor", hint="use conductor=")
        reply: m.PoolStatsReply = await self._conductor.call(
            m.PoolStats(), timeout_s or self.timeout_s
        )
        return reply

    # ------------------------------------------------------------ reading

    async def get(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes],
        out: Any,
        *,
        part: int = 0,
        segments: Sequence[m.Segment] | None = None,
        is_disposable: bool = False,
        timeout_s: float | None = None,
    ) -> GetResult:
        """Read the longest leading run of a chain into the caller's memory.

        Args:
            hashes: n block hashes, in order.
            out: room for n block parts: one contiguous buffer (numpy, torch, bytearray) of
                n x `layout.part_bytes` bytes, or a sequence of n buffers. Memory past the blocks found
                is undefined afterwards.
            segments: where the blocks stand, if the caller knows; saves the look-up.
            is_disposable: the caller never uses `out` again if fewer blocks are found than asked. NIXL then
                reads straight into it; else through memory of our own, since a transfer that was given up
                may still arrive.

        Returns:
            How many blocks were read. Fewer than were found is never an error: a node that died, a lease
            that ran out or a checksum that failed cut the run there, with the reason.

        Raises:
            WrongByteCount, InvalidArgument: `out` does not fit.
            DeadlineExceeded, Unavailable: the conductor (or the one node) did not answer.
        """
        count = len(hashes)
        addresses, owner = block_spans(out, count, namespace.layout.part_bytes, writable=True)
        if not count:
            return GetResult(0, (), {}, 0, "")
        deadline = time.monotonic() + (timeout_s or self.timeout_s)
        if segments is None:
            if self._conductor is not None:
                segments = (
                    await self.lookup(namespace, hashes, timeout_s=_left(deadline))
                ).segments
            else:
                link = await self._the_node(deadline)
                segments = [m.Segment(link.node.node_id, 0, count, "dram")]
        jobs = [
            self._read_segment(
                namespace, hashes, addresses, owner, segment, part, deadline, is_disposable
            )
            for segment in segments
        ]
        return _joined(await asyncio.gather(*jobs), segments, count, self.verify_checksums)

    async def _read_segment(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes],
        addresses: Any,
        owner: Any,
        segment: m.Segment,
        part: int,
        deadline: float,
        is_disposable: bool,
    ) -> tuple[int, tuple[str, ...], Moved, str]:
        moved = Moved()
        rows = slice(segment.start, segment.start + segment.count)
        try:
            link = await self.link(segment.node_id, deadline)
            lease = await link.pin(
                namespace,
                hashes[rows],
                ttl_s=max(1.0, _left(deadline) + 1.0),
                timeout_s=_left(deadline),
                parts=(part,),
            )
        except KvpoolError as error:
            self.forget_node(segment.node_id, error)
            return 0, (), moved, error.code
        if not lease.found:
            return 0, (), moved, lease.miss_reason or "miss"
        try:
            targets = addresses[segment.start : segment.start + lease.found]
            await link.read(
                namespace,
                lease,
                hashes[rows],
                targets,
                owner,
                verify=self.verify_checksums,
                timeout_s=_left(deadline),
                is_disposable=is_disposable,
            )
        except (TransferFailed, DeadlineExceeded, LeaseExpired, BlockMiss, StaleEpoch) as error:
            self.forget_node(segment.node_id, error)
            return 0, (), moved, error.code
        finally:
            link.release(lease)
        moved.add(link.transport.name, lease.found * namespace.layout.part_bytes)
        return lease.found, lease.tiers, moved, lease.miss_reason

    async def pin(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes],
        *,
        ttl_s: float = 10.0,
        part: int | None = None,
        timeout_s: float | None = None,
    ) -> PinnedBlocks:
        """Hold the longest leading run of a chain in place. Give it back with `release`.

        Args:
            ttl_s: how long at most; nodes may grant less.
            part: one tensor-parallel part, or None for all.
        """
        deadline = time.monotonic() + (timeout_s or self.timeout_s)
        found = await self.lookup(namespace, hashes, timeout_s=_left(deadline))
        parts = () if part is None else (part,)
        pinned = PinnedBlocks(namespace, tuple(hashes), [], float("inf"), "")
        try:
            for segment in found.segments:
                link = await self.link(segment.node_id, deadline)
                lease = await link.pin(
                    namespace,
                    hashes[segment.start : segment.start + segment.count],
                    ttl_s=ttl_s,
                    timeout_s=_left(deadline),
                    parts=parts,
                )
                pinned.held.append((link, lease, segment.start))
                pinned.deadline = min(pinned.deadline, lease.deadline)
                if lease.found < segment.count:
                    pinned.miss_reason = lease.miss_reason
                    break
        except BaseException:
            pinned.release()
            raise
        return pinned

    @contextlib.asynccontextmanager
    async def pinned(
        self, namespace: Namespace, hashes: Sequence[bytes], **options: Any
    ) -> AsyncIterator[PinnedBlocks]:
        """`pin` for the length of a `with` block."""
        pinned = await self.pin(namespace, hashes, **options)
        try:
            yield pinned
        finally:
            pinned.release()

    async def read_pinned(
        self, pinned: PinnedBlocks, out: Any, *, timeout_s: float | None = None
    ) -> int:
        """Read all blocks held by a `pin` of one part; returns how many.

        Raises:
            LeaseExpired, ChecksumMismatch, TransferFailed, DeadlineExceeded: the bytes must not be used.
        """
        if pinned.is_released:
            raise LeaseExpired("these blocks were released already")
        deadline = time.monotonic() + (timeout_s or self.timeout_s)
        size = pinned.namespace.layout.part_bytes
        addresses, owner = block_spans(out, pinned.found, size, writable=True)
        for link, lease, start in pinned.held:
            if not lease.found:
                continue
            if len(lease.places) != lease.found:
                raise InvalidArgument("read_pinned reads one part", hint="pin with part=")
            rows = slice(start, start + lease.found)
            await link.read(
                pinned.namespace,
                lease,
                pinned.hashes[rows],
                addresses[rows],
                owner,
                verify=self.verify_checksums,
                timeout_s=_left(deadline),
            )
        return pinned.found

    def release(self, pinned: PinnedBlocks) -> None:
        """Give pinned blocks back; the same as `pinned.release()`."""
        pinned.release()

    # ------------------------------------------------------------ writing

    async def put(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes],
        data: Any,
        *,
        parent: bytes = b"",
        part: int = 0,
        node_id: str | None = None,
        timeout_s: float | None = None,
    ) -> PutResult:
        """Write a run of a chain from the caller's memory: two round trips, however many blocks.

        Args:
            hashes: n block hashes, in order; `parent` names the block before the first ("" at the start).
            data: n block parts: one contiguous buffer of n x `layout.part_bytes`, or n buffers.
            node_id: where to; default: this host's node, else the one with most room.

        Raises:
            WrongByteCount, InvalidArgument: `data` does not fit.
            NoRoom: not one block could be stored, existed or was in progress.
            TransferFailed, DeadlineExceeded, Unavailable: nothing of this call became visible.
        """
        count = len(hashes)
        addresses, owner = block_spans(data, count, namespace.layout.part_bytes, writable=False)
        if not count:
            return PutResult(0, 0, 0, 0, {})
        deadline = time.monotonic() + (timeout_s or self.timeout_s)
        link = await self._place(node_id, deadline)
        reservation = await link.reserve(
            namespace,
            hashes,
            parent=parent,
            part=part,
            ttl_s=_left(deadline) + 1.0,
            timeout_s=_left(deadline),
        )
        counts = [reservation.statuses.count(status) for status in range(4)]
        if counts[m.BlockStatus.NO_ROOM] == count:
            raise NoRoom(
                f"node {link.node.node_id} has no slot to give", hint="all is pinned; try again"
            )
        size = namespace.layout.part_bytes
        if reservation.granted:
            rows = np.array(reservation.granted)
            lengths = np.full(len(rows), size, dtype=np.int64)
            pieces = Pieces(addresses[rows], reservation.places, lengths, owner)
            has_stopped = True
            try:
                sums = await link.write(
                    pieces, timeout_s=_left(deadline), deadline=reservation.deadline
                )
                await link.commit(reservation.reservation_id, sums, timeout_s=_left(deadline))
            except BaseException as error:
                # A write past its deadline may still arrive: the slots must be quarantined.
                has_stopped = not isinstance(error, (DeadlineExceeded, asyncio.CancelledError))
                with contextlib.suppress(KvpoolError):
                    await link.abort(
                        reservation.reservation_id, writer_stopped=has_stopped, timeout_s=1.0
                    )
                raise
        moved = {link.transport.name: counts[m.BlockStatus.GRANTED] * size}
        return PutResult(
            stored=counts[m.BlockStatus.GRANTED],
            existing=counts[m.BlockStatus.EXISTS],
            in_progress=counts[m.BlockStatus.IN_PROGRESS],
            rejected=counts[m.BlockStatus.NO_ROOM],
            bytes_moved=moved if reservation.granted else {},
        )

    # ------------------------------------------------------------ nodes

    async def link(self, node_id: str, deadline: float) -> NodeLink:
        """The connection to a node, made on first use and again when the node restarted.

        Raises:
            Unavailable: the pool has no such node now.
        """
        existing = self._links.get(node_id)
        if existing is not None:
            return existing
        for info in await self.nodes(timeout_s=_left(deadline)):
            if info.descriptor.node_id == node_id:
                return self.link_to(info.descriptor)
        raise Unavailable(f"the pool has no node {node_id!r} now")

    def link_to(self, node: m.NodeDescriptor) -> NodeLink:
        """The connection to the node described (same id and epoch: the standing one)."""
        existing = self._links.get(node.node_id)
        if existing is not None and existing.node.epoch == node.epoch:
            return existing
        if existing is not None:
            self._drop_link(node.node_id)
        link = NodeLink(node, self.transports, self.host_label, self.client_id)
        self._links[node.node_id] = link
        return link

    async def connect(self, *, timeout_s: float | None = None) -> int:
        """Meet all live nodes now, so that the first read or write pays for nothing but its bytes.

        Returns:
            How many nodes can be reached. One that cannot is no error here; a transfer will say why.
        """
        deadline = time.monotonic() + (timeout_s or self.timeout_s)
        reached = 0
        for info in await self.nodes(timeout_s=_left(deadline)):
            if info.state != "live":
                continue
            link = self.link_to(info.descriptor)
            if not link.wire.is_connected:
                try:
                    await link.connect(_left(deadline))
                except KvpoolError as error:
                    self.forget_node(info.descriptor.node_id, error)
                    continue
            reached += 1
        return reached

    def forget_node(self, node_id: str, error: KvpoolError) -> None:
        """After a failed call: meet the node afresh next time, unless the failure says nothing of it."""
        if isinstance(error, (Unavailable, StaleEpoch)):
            self._drop_link(node_id)
            self._nodes_at = float("-inf")

    def _drop_link(self, node_id: str) -> None:
        link = self._links.pop(node_id, None)
        if link is not None:
            self._closing = asyncio.ensure_future(self._close_link(link))

    async def _close_link(self, link: NodeLink) -> None:
        await link.close()
        with contextlib.suppress(KvpoolError):
            await asyncio.to_thread(self.transports.forget, link.node.node_id)

    async def _the_node(self, deadline: float) -> NodeLink:
        for link in self._links.values():
            if link.wire.is_connected:
                return link
        assert self._only_node is not None
        return self.link_to(await self._only_node.call(m.Describe(), _left(deadline)))

    async def _place(self, node_id: str | None, deadline: float) -> NodeLink:
        if node_id is not None:
            return await self.link(node_id, deadline)
        if self._conductor is None:
            return await self._the_node(deadline)
        live = [n for n in await self.nodes(timeout_s=_left(deadline)) if n.state == "live"]
        if not live:
            raise Unavailable("the pool has no live node", hint="start one: kvpool node")
        here = [n for n in live if n.descriptor.host == self.host_label]
        best = max(here or live, key=lambda n: (n.free_bytes, n.descriptor.node_id))
        return self.link_to(best.descriptor)

    async def _ensure_registered(self, namespace: Namespace, deadline: float) -> None:
        if namespace.namespace_id not in self._known:
            await self.register(namespace, timeout_s=_left(deadline))


def _joined(
    results: Sequence[tuple[int, tuple[str, ...], Moved, str]],
    segments: Sequence[m.Segment],
    count: int,
    verify: bool,
) -> GetResult:
    """Results of the segments, cut where the chain first breaks."""
    found, moved, reason = 0, Moved(), ""
    tiers: list[str] = []
    for (read, where, bytes_moved, why), segment in zip(results, segments, strict=True):
        if segment.start != found:
            break
        found += read
        tiers += where
        for name, size in bytes_moved.by_transport.items():
            moved.add(name, size)
        if read < segment.count:
            reason = why or "miss"
            break
    if found < count and not reason:
        reason = "not_in_index"
    return GetResult(found, tuple(tiers), moved.by_transport, found if verify else 0, reason)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineExceeded("the call's deadline has passed")
    return left
