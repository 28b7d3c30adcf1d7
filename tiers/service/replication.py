"""Copies blocks from another node: pins there, reads into slots reserved here, verifies, commits.

The copying node is a client of the source and uses a client's transports. It reads straight into
its own arenas. Blocks that cannot be copied are counted with a reason. Clients and draining nodes
decide which blocks to copy.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import structlog

from kvpool.blocks.hashing import unpack_hashes
from kvpool.blocks.layout import Namespace
from kvpool.client.node.grants import ReadLease
from kvpool.client.node.node_link import LEASE_MARGIN_S, NodeLink
from kvpool.errors import (
    DeadlineExceeded,
    InvalidArgument,
    KvpoolError,
    LeaseExpired,
    StaleEpoch,
    Unavailable,
)
from kvpool.transports import Pieces, Transports
from kvpool.transports.copy import Sums
from kvpool.transports.nixl import NixlTransport
from kvpool.wire import messages as m
from kvpool.wire.credentials import NO_CREDENTIALS, Credentials
from tiers.memory.arena import Arena
from tiers.memory.arena_set import ArenaSet
from tiers.store.store import Reservation, Store

log = structlog.get_logger(__name__)

WRITER = "\x01replication"  # no tenant's name contains this character (`kvpool.security.tokens`)
BATCH_BYTES = 16 << 20  # copied per reservation: the most that a dying source costs
MAX_AT_ONCE = 2  # more would share the same wire and hold more slots
# A source that stops in mid-transfer holds a thread until the read's deadline, even if the caller
# has left. A batch takes a fraction of a second. The threads are separate, so nothing else in the
# node waits.
BATCH_S = 15.0
THREADS = 2 * MAX_AT_ONCE
MAX_LINKS = 64

Fetch = Callable[[NodeLink, Pieces, float], Awaitable[Sums]]
"""Reads leased bytes into our memory and returns the checksum of each piece."""


@dataclass(slots=True)
class _Tally:
    stored: int = 0
    existing: int = 0
    in_progress: int = 0
    reason: str = ""
    bytes_moved: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _CopyRun:
    """Blocks being copied: the slots granted for each part, and where the copied run ends."""

    namespace: Namespace
    names: Sequence[bytes]
    grants: list[Reservation]  # one per part
    end: int  # blocks [0, end) are copied or exist
    reason: str  # why the run ends there
    statuses: list[int]  # one per block, over all its parts
    sums: dict[tuple[int, int], int] = field(default_factory=dict)  # (block, part) copied
    is_late_write_possible: bool = False

    def granted(self, part: int) -> list[int]:
        """Block indices granted for a part, in the order of its places."""
        statuses = self.grants[part].statuses
        return [i for i, status in enumerate(statuses) if status == m.BlockStatus.GRANTED]

    def cut(self, end: int, reason: str) -> None:
        """End the run at block `end`, if it does not end earlier."""
        if end < self.end:
            self.end, self.reason = end, reason


class Replicator:
    """Pulls runs of blocks from other nodes into this one.

    Args:
        node_id, host: of this node.
        transports: to the others; closed by `close`.
        wake: called after a commit (there may be something to demote).
        fetch: how the bytes are read; None: by a one-sided read.
        credentials: shown to the other nodes.
    """

    def __init__(
        self,
        node_id: str,
        host: str,
        store: Store,
        arenas: ArenaSet | Sequence[Arena],
        transports: Transports,
        wake: Callable[[], None],
        *,
        fetch: Fetch | None = None,
        credentials: Credentials = NO_CREDENTIALS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._node_id = node_id
        self._host = host
        self._store = store
        self._arenas = ArenaSet.of(arenas)
        self._transports = transports
        self._wake = wake
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="kvpool-replicate")
        self._fetch = fetch or self._pull
        self._credentials = credentials
        self._clock = clock
        self._client_id = str(uuid.uuid4())
        self._links: dict[str, NodeLink] = {}
        self._slots = asyncio.Semaphore(MAX_AT_ONCE)
        self._nixl: NixlTransport | None = None  # once it was used
        self._registered: dict[int, Arena] = {}  # with it, by arena id

    async def replicate(self, request: m.Replicate) -> m.ReplicateReply:
        """Copy a run of blocks.

        Raises:
            UnknownNamespace: the namespace is not registered here.
            InvalidArgument: the source is this node, or the deadline is not within an hour.
        """
        if not 0 < request.deadline_s <= 3600:
            raise InvalidArgument(f"deadline_s must lie in (0, 3600], got {request.deadline_s}")
        if request.source.node_id == self._node_id:
            raise InvalidArgument("a node does not copy from itself", hint="name another source")
        hashes = unpack_hashes(request.hashes)
        namespace = self._store.namespaces[request.namespace_id]
        deadline = self._clock() + request.deadline_s
        tally = _Tally()
        try:
            async with asyncio.timeout(request.deadline_s):
                await self._slots.acquire()
        except TimeoutError:
            tally.reason = DeadlineExceeded.code
        else:
            try:
                await self._copy(namespace, hashes, request, deadline, tally)
            finally:
                self._slots.release()
        left = len(hashes) - tally.stored - tally.existing - tally.in_progress
        self.counters["replicated"] += tally.stored
        if left:
            self.counters[f"not_replicated:{tally.reason}"] += left
        return m.ReplicateReply(
            tally.stored, tally.existing, tally.in_progress, tally.reason, tally.bytes_moved
        )

    async def close(self) -> None:
        """Close the connections to other nodes and release the transports."""
        for link in self._links.values():
            await link.close()
        self._links.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._transports.close)

    async def _pull(self, link: NodeLink, pieces: Pieces, timeout_s: float) -> Sums:
        """A one-sided read by this node."""
        until = self._clock() + timeout_s

        def read() -> Sums:
            left_s = max(0.001, until - self._clock())  # less the wait for a thread
            return link.transports.dram.read_and_sum(link.node, pieces, left_s)

        return await asyncio.get_running_loop().run_in_executor(self._threads, read)

    # ------------------------------------------------------------ one run after the other

    async def _copy(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes],
        request: m.Replicate,
        deadline: float,
        tally: _Tally,
    ) -> None:
        layout = namespace.layout
        size = max(1, BATCH_BYTES // (layout.part_bytes * layout.tp_size))
        parent = request.parent
        for start in range(0, len(hashes), size):
            names = hashes[start : start + size]
            if self._clock() >= deadline:
                tally.reason = DeadlineExceeded.code
            else:
                await self._copy_run(namespace, names, parent, request.source, deadline, tally)
            if tally.reason:
                return
            parent = names[-1]

    async def _copy_run(
        self,
        namespace: Namespace,
        names: Sequence[bytes],
        parent: bytes,
        source: m.NodeDescriptor,
        deadline: float,
        tally: _Tally,
    ) -> None:
        run = self._reserve(namespace, names, parent, deadline)
        try:
            wanted = [i for i in range(run.end) if run.statuses[i] == m.BlockStatus.GRANTED]
            if wanted:
                link = await self._link_to(source)
                await self._read(run, link, wanted[0], wanted[-1] + 1, deadline)
                moved = len(run.sums) * namespace.layout.part_bytes
                if moved:
                    name = link.transports.dram.name
                    tally.bytes_moved[name] = tally.bytes_moved.get(name, 0) + moved
        except KvpoolError as error:
            first = next(i for i in range(run.end) if run.statuses[i] == m.BlockStatus.GRANTED)
            run.cut(first, error.code)
            run.sums.clear()
            if isinstance(error, Unavailable):
                await self._drop_link(source.node_id)
            log.warning("copying from a node failed", source=source.node_id, error=str(error))
        except asyncio.CancelledError:
            run.cut(0, "cancelled")
            run.sums.clear()
            run.is_late_write_possible = True  # the reading thread goes on
            raise
        finally:
            self._settle(run, tally)

    def _reserve(
        self, namespace: Namespace, names: Sequence[bytes], parent: bytes, deadline: float
    ) -> _CopyRun:
        """Reserve all parts of the missing blocks; a block without room for a part ends the run."""
        now = self._clock()
        grants = [
            self._store.reserve(
                namespace.namespace_id, names, parent, part, WRITER, deadline - now + 1.0, now
            )
            for part in range(namespace.layout.tp_size)
        ]
        run = _CopyRun(namespace, names, grants, len(names), "", [])
        for i, parts in enumerate(zip(*(grant.statuses for grant in grants), strict=True)):
            if m.BlockStatus.NO_ROOM in parts:
                run.cut(i, "no_room")
                break
            run.statuses.append(
                next(
                    status
                    for status in (
                        m.BlockStatus.GRANTED,
                        m.BlockStatus.IN_PROGRESS,
                        m.BlockStatus.EXISTS,
                    )
                    if status in parts
                )
            )
        return run

    async def _read(
        self, run: _CopyRun, link: NodeLink, first: int, last: int, deadline: float
    ) -> None:
        """Read the granted parts of blocks [first, last) into `run.sums`; cut the run at a miss."""
        left = deadline - self._clock()
        lease = await link.pin(
            run.namespace, run.names[first:last], ttl_s=left + 1.0, timeout_s=left
        )
        keeper = link.keep_alive(lease, deadline)
        try:
            _check_epoch(link)
            if lease.found < last - first:
                run.cut(first + lease.found, f"source:{lease.miss_reason or 'miss'}")
            await link.learn_arenas(lease.places, left)
            rows = self._rows(run, lease, first)
            if not rows:
                return
            await self._register_arenas(link)
            local = np.array([row[2] for row in rows], dtype=np.int64)
            remote = np.array([row[3] for row in rows], dtype=np.int64)
            size = run.namespace.layout.part_bytes
            pieces = Pieces(
                local,
                lease.places[remote],
                np.full(len(rows), size, dtype=np.int64),
                tuple(self._arenas.values()),
            )
            run.is_late_write_possible = link.transports.dram.may_write_late
            started = self._clock()
            left = min(max(0.001, deadline - started), BATCH_S)
            sums = await self._fetch(link, pieces, left)
            link.transports.read_rate.record(pieces.total_bytes, self._clock() - started)
            run.is_late_write_possible = False
            await keeper.end()
            if self._clock() > lease.deadline - LEASE_MARGIN_S:
                raise LeaseExpired(f"a copy from {link.node.node_id} took longer than its lease")
        finally:
            await keeper.end()
            link.release(lease)
        self._verify(run, link, lease, rows, sums)

    def _rows(self, run: _CopyRun, lease: ReadLease, first: int) -> list[tuple[int, int, int, int]]:
        """(block, part, our address, row of the lease) of each part to read."""
        tp_size = run.namespace.layout.tp_size
        rows = []
        for part in range(tp_size):
            granted = zip(run.granted(part), run.grants[part].places, strict=True)
            for block, (arena_id, offset) in granted:
                if first <= block < run.end:
                    address = self._arenas[arena_id].base + offset
                    rows.append((block, part, address, (block - first) * tp_size + part))
        return sorted(rows)

    def _verify(
        self,
        run: _CopyRun,
        link: NodeLink,
        lease: ReadLease,
        rows: Sequence[tuple[int, int, int, int]],
        sums: Sums,
    ) -> None:
        """Keep parts whose checksum is right (invariant 5); report the others to the source."""
        for (block, part, _, row), found in zip(rows, sums, strict=True):
            if found == lease.checksums[row]:
                run.sums[block, part] = int(found)
                continue
            if block < run.end:
                self.counters["corrupt_replicas"] += 1
                report = m.ReportCorrupt(run.namespace.namespace_id, run.names[block])
                link.wire.send_nowait(report)
                log.error("a node sent wrong bytes", source=link.node.node_id, block=block)
            run.cut(block, "checksum")

    def _settle(self, run: _CopyRun, tally: _Tally) -> None:
        """Commit the copied blocks, free the other slots, and count both."""
        now = self._clock()
        for part, grant in enumerate(run.grants):
            if not grant.reservation_id:
                continue
            chosen = [
                (index, run.sums[block, part])
                for index, block in enumerate(run.granted(part))
                if block < run.end and (block, part) in run.sums
            ]
            try:
                if chosen:
                    indices = [index for index, _ in chosen]
                    sums = [checksum for _, checksum in chosen]
                    self._store.commit(grant.reservation_id, sums, now, indices)
            except KvpoolError as error:  # the reservation expired; its slots are quarantined
                run.cut(0, error.code)
            stopped = not run.is_late_write_possible
            self._store.reservations.abort(grant.reservation_id, stopped, now)
        done = run.statuses[: run.end]
        tally.stored += done.count(m.BlockStatus.GRANTED)
        tally.existing += done.count(m.BlockStatus.EXISTS)
        tally.in_progress += done.count(m.BlockStatus.IN_PROGRESS)
        tally.reason = run.reason
        self._wake()

    # ------------------------------------------------------------ links

    def peers(self) -> list[m.PeerRate]:
        """Bytes and speed of the copies from each node, with the transport."""
        return [link.transports.peer_rate for link in self._links.values()]

    async def _link_to(self, source: m.NodeDescriptor) -> NodeLink:
        link = self._links.get(source.node_id)
        if link is not None and link.node.epoch == source.epoch:
            return link
        await self._drop_link(source.node_id)
        if len(self._links) >= MAX_LINKS:
            await self._drop_link(next(iter(self._links)))
        link = NodeLink(source, self._transports, self._host, self._client_id, self._credentials)
        self._links[source.node_id] = link
        return link

    async def _drop_link(self, node_id: str) -> None:
        link = self._links.pop(node_id, None)
        if link is not None:
            await link.close()
            await asyncio.to_thread(self._transports.forget, node_id)

    async def forget_gone_arenas(self) -> None:
        """Deregister removed arenas before they are closed."""
        for arena_id in self._registered.keys() - self._arenas.keys():
            gone = self._registered.pop(arena_id)
            if self._nixl is not None:
                await asyncio.to_thread(self._nixl.deregister, gone.base)

    async def _register_arenas(self, link: NodeLink) -> None:
        """Register new arenas with NIXL, once for all transfers."""
        transport = await asyncio.to_thread(lambda: link.transports.dram)
        if not isinstance(transport, NixlTransport):
            return
        self._nixl = transport
        for arena_id, arena in self._arenas.items():
            if arena_id not in self._registered:
                self._registered[arena_id] = arena
                await asyncio.to_thread(transport.register, arena.base, arena.size_bytes, arena)


def _check_epoch(link: NodeLink) -> None:
    """Raise StaleEpoch if the node has restarted: its memory is elsewhere now."""
    server = link.wire.server
    if server is not None and (server.server_id, server.epoch) != (
        link.node.node_id,
        link.node.epoch,
    ):
        raise StaleEpoch(f"node {link.node.node_id} has restarted since it was looked up")
