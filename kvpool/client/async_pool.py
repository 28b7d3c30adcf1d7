"""`AsyncPool`: the client of a pool for asyncio callers.

With a conductor, the client finds and places blocks anywhere in the pool. With `node=` it speaks to
that node only and needs no look-up.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Self

from kvpool.blocks.layout import Layout, Namespace
from kvpool.blocks.resharding import (
    TensorParallelRank,
    TransferPlan,
    plan_part,
    plan_read,
    plan_write,
)
from kvpool.blocks.tier import Tier
from kvpool.client.admin.pool_admin import PoolAdmin, check_memory_tier
from kvpool.client.data import pinning
from kvpool.client.data.buffers import block_addresses, memory_span
from kvpool.client.data.pinning import PinnedBlocks
from kvpool.client.data.reading import ChainReader, GetResult
from kvpool.client.data.writing import ChainWriter, PutResult
from kvpool.client.node import lookup as lookups
from kvpool.client.node.directory import NodeDirectory
from kvpool.client.node.transfer_threads import close_in_thread
from kvpool.errors import ConfigError, InvalidArgument
from kvpool.transports import TransportName, Transports
from kvpool.wire import messages as m
from kvpool.wire import split_addresses
from kvpool.wire.credentials import NO_CREDENTIALS, Credentials

_pool_numbers = itertools.count(1)


class AsyncPool(PoolAdmin):
    """Client of a pool. Use as `async with AsyncPool(conductor="127.0.0.1:7800") as pool:`.

    Args:
        conductor: wire address of a conductor ("host:port"). Several conductors that share their
            state are separated by commas; the client uses the first that answers.
        node: wire address of a single node, instead of a conductor.
        host_label: label of this machine; default: its host name. The client uses shared memory
            with nodes of the same label.
        transport: "auto", or "shm" or "nixl" to allow only that one.
        timeout_s: default time limit of every call.
        verify_checksums: compare the checksum of every block read (invariant 5).
        client_id: names this client to nodes and conductor; default: a random id.
        credentials: token and TLS, shown to the conductor and to every node.
        require_rdma: never use TCP. A node on another host that RDMA does not reach is an error.

    Raises:
        ConfigError: both or neither of `conductor` and `node` are given.
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
        credentials: Credentials = NO_CREDENTIALS,
        require_rdma: bool = False,
    ) -> None:
        if (conductor is None) == (node is None):
            raise ConfigError("give exactly one of conductor= and node=")
        self.client_id = client_id or str(uuid.uuid4())
        self.timeout_s = timeout_s
        self.verify_checksums = verify_checksums
        loopback = all(
            address.startswith(("127.", "localhost", "unix:", "[::1]"))
            for address in split_addresses(conductor or node or "")
        )
        self.transports = Transports(
            f"client-{self.client_id}-{next(_pool_numbers)}",
            forced=transport,
            loopback_only=loopback,
            token=credentials.token,
            is_rdma_required=require_rdma,
        )
        self.directory = NodeDirectory(
            conductor=conductor,
            node=node,
            transports=self.transports,
            host_label=host_label or socket.gethostname(),
            client_id=self.client_id,
            credentials=credentials,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection. Nodes then end the leases and reservations of this client."""
        await self.directory.close()
        await close_in_thread(self.transports.close)

    # ------------------------------------------------------------ finding

    async def register(self, namespace: Namespace, *, timeout_s: float | None = None) -> bytes:
        """Register a namespace with the pool. `put` and `get` do this themselves.

        Returns:
            The namespace's 16-byte id.

        Raises:
            LayoutMismatch: the pool knows this model, revision, tenant and salt under another
                layout.
            HashMismatch: this process computes other hashes than the pool; the error names the
                difference.
        """
        return await self.directory.register(namespace, timeout_s or self.timeout_s)

    async def lookup(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes],
        *,
        exclude: Sequence[str] = (),
        timeout_s: float | None = None,
    ) -> m.LookupReply:
        """Find the longest leading run of a chain in the pool. Takes no lease.

        Args:
            hashes: from `hash_chain`, in order; 16 bytes each.
            exclude: ids of nodes to ignore. Needs a conductor.

        Returns:
            How many leading blocks the pool has (`found`), on which nodes (`segments`), and in how
            many seconds all of them could be read (`wait_s`: 0 if all are in memory, -1 if a node
            cannot predict its disk).

        Raises:
            DeadlineExceeded, Unavailable: the conductor (or the single node) did not answer.
        """
        deadline = self._deadline(timeout_s)
        return await lookups.lookup(self.directory, namespace, hashes, deadline, exclude=exclude)

    async def exists(
        self, namespace: Namespace, hashes: Sequence[bytes], *, timeout_s: float | None = None
    ) -> list[bool]:
        """For each block, whether the pool has it.

        Unlike `lookup`, it continues after a gap. Takes no lease.

        With a conductor this is one call; a single node is asked for each block, several at a time.

        Raises:
            UnknownNamespace: nobody registered the namespace.
            DeadlineExceeded, Unavailable: the conductor (or the single node) did not answer.
        """
        return await lookups.exists(self.directory, namespace, hashes, self._deadline(timeout_s))

    # ------------------------------------------------------------ memory

    def register_memory(self, data: Any) -> None:
        """Register memory that many calls will use. NIXL then pins it once, not for every transfer.

        Args:
            data: one contiguous buffer of host memory. The client keeps it alive until
                `deregister_memory` or `close`.

        Raises:
            InvalidArgument: `data` is not contiguous, not in host memory, or no buffer.
            TransferFailed, DeadlineExceeded: NIXL rejected it.
        """
        self.transports.register(*memory_span(data, writable=False))

    def deregister_memory(self, data: Any) -> None:
        """Undo `register_memory` of the same buffer. No call may be using the buffer."""
        address, _, _ = memory_span(data, writable=False)
        self.transports.deregister(address)

    # ------------------------------------------------------------ reading

    async def get(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes],
        out: Any,
        *,
        part: int = 0,
        as_rank: TensorParallelRank | None = None,
        verify: bool | None = None,
        segments: Sequence[m.Segment] | None = None,
        is_disposable: bool = False,
        max_wait_s: float = 0.0,
        tier: Tier = Tier.DRAM,
        timeout_s: float | None = None,
    ) -> GetResult:
        """Read the longest leading run of a chain into the caller's memory.

        If a node left, lacks a block or sends wrong bytes, the client tries other replicas within
        the deadline.

        Args:
            hashes: n block hashes, in order.
            out: memory for n block parts: one contiguous buffer (numpy, torch, bytearray) of n x
                `layout.part_bytes` bytes, a sequence of n buffers, or `BlockSpans` of n blocks.
                Memory after the blocks found is undefined afterwards.
            part: which tensor-parallel part to read.
            as_rank: instead of `part`: the rank of an engine whose tensor-parallel size or order
                differs from the namespace's. `out` has the layout of that rank's part (see
                `kvpool.blocks.resharding`).
            verify: compare checksums (invariant 5); default: the client's `verify_checksums`.
                Checksums cover whole parts. If `as_rank` reads only pieces of parts, shared memory
                sums the whole parts at the node.
            segments: where the blocks are, if the caller knows; saves the look-up.
            is_disposable: the caller never uses `out` again if fewer blocks are found than asked
                for. NIXL then reads straight into it. Otherwise NIXL reads into memory of the
                client first, because a transfer that was given up may still arrive.
            max_wait_s: the longest wait for a node's disk that is still cheaper than computing the
                blocks. A node declines slower blocks at once (`miss_reason` "declined_cost"). 0: no
                limit but `timeout_s`; blocks that cannot arrive within it are "declined_deadline".
            tier: HBM reads blocks from nodes' device memory over NIXL, if they are there.
                Otherwise, and if NIXL does not reach the node, the node copies them to DRAM first.

        Returns:
            How many blocks were read, and why no more. Fewer than asked for is never an error.

        Raises:
            WrongByteCount: `out` has the wrong size.
            InvalidArgument: `out` cannot be written, or `tier` is NVME.
            CannotReshard: the rank's bytes are spread over too many pieces of the stored blocks.
            UnverifiableRead: checksums are required, the read covers pieces of parts, and the
                transport is not shared memory.
            DeadlineExceeded, Unavailable: the conductor (or the single node) did not answer.
        """
        check_memory_tier(tier)
        plan = _plan(plan_read, namespace, part, as_rank)
        addresses, owner, plan = block_addresses(out, len(hashes), plan, writable=True)
        if not hashes:
            return GetResult(0, (), {}, 0, "")
        deadline = self._deadline(timeout_s)
        if segments is None:
            segments = await lookups.locate(self.directory, namespace, hashes, deadline)
        reader = ChainReader(
            self.directory,
            namespace,
            hashes,
            addresses,
            owner,
            plan=plan,
            verify=self.verify_checksums if verify is None else verify,
            deadline=deadline,
            is_disposable=is_disposable,
            max_wait_s=max_wait_s,
            tier=tier,
        )
        return await reader.read(segments)

    async def pin(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes],
        *,
        ttl_s: float = 10.0,
        part: int | None = None,
        max_wait_s: float = 0.0,
        tier: Tier = Tier.DRAM,
        segments: Sequence[m.Segment] | None = None,
        is_guess: bool = False,
        timeout_s: float | None = None,
    ) -> PinnedBlocks:
        """Lease the longest leading run of a chain, so that its blocks keep their place.

        End it with `release`.

        With a conductor this takes one look-up and one call to each node concerned. A single node,
        or a call with `segments`, needs no look-up.

        Args:
            hashes: n block hashes, in order.
            ttl_s: how long the leases shall last; nodes may grant less.
            part: one tensor-parallel part, or None for all.
            max_wait_s: as for `get`; over all nodes together.
            tier: as for `get`.
            segments: where the blocks are, if the caller knows.
            is_guess: `segments` is only a guess. A block that such a node lacks is then no failure:
                it enters no negative cache and is not reported to the conductor.

        Returns:
            The leased blocks; `found` may be 0.

        Raises:
            InvalidArgument: `tier` is NVME.
            DeadlineExceeded, Unavailable: the conductor or a node did not answer.
        """
        check_memory_tier(tier)
        deadline = self._deadline(timeout_s)
        if segments is None:
            segments = await lookups.locate(self.directory, namespace, hashes, deadline)
        return await pinning.pin(
            self.directory,
            namespace,
            hashes,
            segments,
            deadline,
            ttl_s=ttl_s,
            part=part,
            max_wait_s=max_wait_s,
            tier=tier,
            is_guess=is_guess,
        )

    @contextlib.asynccontextmanager
    async def pinned(
        self, namespace: Namespace, hashes: Sequence[bytes], **options: Any
    ) -> AsyncIterator[PinnedBlocks]:
        """`pin` for the length of a `with` block; takes the options of `pin`."""
        pinned = await self.pin(namespace, hashes, **options)
        try:
            yield pinned
        finally:
            pinned.release()

    async def read_pinned(
        self, pinned: PinnedBlocks, out: Any, *, timeout_s: float | None = None
    ) -> int:
        """Read all blocks of a `pin` of one part. Returns how many.

        Args:
            out: memory for `pinned.found` block parts, as for `get`.

        Raises:
            LeaseExpired, ChecksumMismatch, TransferFailed, DeadlineExceeded: discard the bytes.
            InvalidArgument: more than one part is pinned.
        """
        deadline = self._deadline(timeout_s)
        return await pinning.read(
            self.directory, pinned, out, deadline, verify=self.verify_checksums
        )

    # ------------------------------------------------------------ writing

    async def put(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes],
        data: Any,
        *,
        parent: bytes = b"",
        part: int = 0,
        as_rank: TensorParallelRank | None = None,
        node_id: str | None = None,
        replicas: int = 1,
        tier: Tier = Tier.DRAM,
        timeout_s: float | None = None,
    ) -> PutResult:
        """Write a run of a chain from the caller's memory. Takes two round trips.

        Args:
            hashes: n block hashes, in order.
            data: n block parts: one contiguous buffer of n x `layout.part_bytes` bytes, a sequence
                of n buffers, or `BlockSpans` of n blocks.
            parent: hash of the block before the first; b"" at the start of a chain.
            part: which tensor-parallel part `data` holds.
            as_rank: instead of `part`: the rank of an engine whose tensor-parallel size or order
                differs from the namespace's. `data` has the layout of that rank's part. The call
                writes the stored parts that the rank holds completely.
            node_id: the node to write to; default: this host's node, else by placement (see
                `kvpool.client.node.placement`).
            replicas: how many nodes shall hold the blocks when this returns, on different hosts if
                possible. Too few nodes is no error; `PutResult.replicas` says how many hold them.
                With several parts, the put of the last part makes the copies.
            tier: HBM writes to the node's device memory over NIXL. Blocks that find no room there,
                and all blocks if NIXL does not reach the node, go to DRAM. Replicas are in DRAM.

        Returns:
            How many blocks were stored, existed, are being written by others, or found no room.

        Raises:
            WrongByteCount, InvalidArgument: `data` has the wrong size, or `tier` is NVME.
            ConfigError: several replicas without a conductor.
            CannotReshard: the rank holds no stored part completely, or in too many pieces.
            NoRoom: no block could be stored, existed, or was in progress.
            TransferFailed, DeadlineExceeded, Unavailable: no block of this call became visible.
        """
        check_memory_tier(tier)
        plan = _plan(plan_write, namespace, part, as_rank)
        addresses, owner, plan = block_addresses(data, len(hashes), plan, writable=False)
        if not hashes:
            return PutResult(0, 0, 0, 0, {})
        deadline = self._deadline(timeout_s)
        if replicas < 1 or (replicas > 1 and not self.has_conductor):
            raise ConfigError(f"replicas={replicas}", hint="1 or more; several need a conductor")
        writer = ChainWriter(
            self.directory,
            namespace,
            hashes,
            addresses,
            owner,
            parent=parent,
            plan=plan,
            deadline=deadline,
            tier=tier,
        )
        return await writer.write(node_id, replicas)


def _plan(
    make: Callable[[Layout, Layout, int], TransferPlan],
    namespace: Namespace,
    part: int,
    as_rank: TensorParallelRank | None,
) -> TransferPlan:
    stored = namespace.layout
    if as_rank is None:
        return plan_part(stored, part)
    if part:
        raise InvalidArgument(f"part={part} and as_rank={as_rank}", hint="give one of the two")
    return make(stored, as_rank.layout(stored), as_rank.rank)
