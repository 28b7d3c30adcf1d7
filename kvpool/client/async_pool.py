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
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Literal, Self, TypeVar, get_args

from kvpool.blocks.hash_check import proof_of
from kvpool.blocks.hashing import pack_hashes
from kvpool.blocks.layout import Layout, Namespace
from kvpool.blocks.resharding import Plan, TensorParallelRank, plan_part, plan_read, plan_write
from kvpool.client.admin import discovery, listing
from kvpool.client.admin import replication as copies
from kvpool.client.admin import retention as protection
from kvpool.client.admin.listing import NodeListing
from kvpool.client.admin.replication import PrefetchResult, ReplicateResult
from kvpool.client.data import pinning
from kvpool.client.data.buffers import placed, span
from kvpool.client.data.pinning import PinnedBlocks
from kvpool.client.data.reading import ChainReader, GetResult
from kvpool.client.data.writing import ChainWriter, PutResult
from kvpool.client.node.deadlines import time_left
from kvpool.client.node.negative_cache import NegativeCache
from kvpool.client.node.node_link import NodeLink
from kvpool.client.node.placement import choose_nodes, open_to
from kvpool.client.node.recent_writes import RecentWrites
from kvpool.errors import (
    ConfigError,
    DeadlineExceeded,
    Draining,
    InvalidArgument,
    KvpoolError,
    NotFound,
    NoTransport,
    StaleEpoch,
    Unavailable,
    UnknownNamespace,
)
from kvpool.security.credentials import NO_CREDENTIALS, Credentials
from kvpool.transports import TransportName, Transports
from kvpool.wire import FailoverClient, WireClient, split_addresses
from kvpool.wire import messages as m

T = TypeVar("T")

MemoryTier = Literal["", "dram", "hbm"]  # where a caller wants to read or write; "" is dram
NODES_TTL_S = 1.0  # how long a list of nodes is trusted
_pool_numbers = itertools.count(1)


class AsyncPool:
    """Client of a pool. Use as `async with AsyncPool(conductor="127.0.0.1:7800") as pool:`.

    Args:
        conductor: wire address of a conductor; of several that share their state, with commas. The first
            that answers is used, and the next one when it does not.
        node: wire address of one node, instead of a conductor.
        host_label: label of this machine; equal to a node's, shared memory is used.
        transport: "auto", or "shm" or "nixl" to allow that one alone.
        timeout_s: default deadline of every call.
        verify_checksums: compare the checksum of every block read (invariant 5).
        credentials: token and TLS, shown to the conductor and to every node.
        require_rdma: a node on another host that RDMA does not reach is an error: never TCP.

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
        credentials: Credentials = NO_CREDENTIALS,
        require_rdma: bool = False,
    ) -> None:
        if (conductor is None) == (node is None):
            raise ConfigError("give exactly one of conductor= and node=")
        self.client_id = client_id or str(uuid.uuid4())
        self.host_label = host_label or socket.gethostname()
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
        self._credentials = credentials
        self._conductor = (
            FailoverClient(conductor, self.client_id, credentials=credentials)
            if conductor
            else None
        )
        self._only_node = (
            WireClient(node, self.client_id, credentials=credentials) if node else None
        )
        self._links: dict[str, NodeLink] = {}
        self._nodes: list[m.NodeInfo] = []
        self._nodes_at = float("-inf")
        self._known: set[bytes] = set()
        self.negative_cache = NegativeCache()
        self.recent_writes = RecentWrites()

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

    @property
    def has_conductor(self) -> bool:
        """Whether this client speaks to a whole pool, and not to one node alone."""
        return self._conductor is not None

    # ------------------------------------------------------------ finding

    async def register(self, namespace: Namespace, *, timeout_s: float | None = None) -> bytes:
        """Make a namespace known to the pool; returns its 16-byte id. `put` and `get` do it themselves.

        Raises:
            LayoutMismatch: model, revision, tenant and salt are known under another layout.
            HashMismatch: this process hashes otherwise than the pool; says in what they differ.
        """
        peer = self._conductor or self._only_node
        assert peer is not None
        reply: m.NamespaceReply = await peer.call(
            m.RegisterNamespace(namespace, proof_of(namespace)), timeout_s or self.timeout_s
        )
        self._known |= {
            namespace.namespace_id,
            reply.namespace_id,
        }  # unequal where the tenant is left out
        return reply.namespace_id

    async def namespaces(self, *, timeout_s: float | None = None) -> list[Namespace]:
        """The namespaces that the pool knows, oldest first. Needs a conductor, as `stats` does."""
        conductor = self._the_conductor("finding namespaces")
        deadline = time.monotonic() + (timeout_s or self.timeout_s)
        return await discovery.known_namespaces(conductor, deadline)

    async def compatible_namespaces(
        self, namespace: Namespace, *, timeout_s: float | None = None
    ) -> list[Namespace]:
        """The namespaces known to the pool whose blocks an engine of `namespace` can read, cheapest first.

        They differ from it in `tp_size` and `order` at most; read them with `get(..., as_rank=...)`.

        Raises:
            ConfigError: this client speaks to one node alone.
        """
        return discovery.readable(await self.namespaces(timeout_s=timeout_s), namespace)

    async def tokenize(
        self, text: str, *, is_system_prompt: bool = False, timeout_s: float | None = None
    ) -> list[int]:
        """Token ids of a prompt as the conductor's model reads it.

        Args:
            is_system_prompt: those with which every conversation under this system prompt begins.

        Raises:
            Unavailable: the conductor has no tokenizer.
            ConfigError: this client speaks to one node alone.
        """
        conductor = self._the_conductor("tokenizing")
        reply: m.TokenizeReply = await conductor.call(
            m.Tokenize(text, is_system_prompt), timeout_s or self.timeout_s
        )
        return array("I", reply.token_ids).tolist()

    async def lookup(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes],
        *,
        exclude: Sequence[str] = (),
        timeout_s: float | None = None,
    ) -> m.LookupReply:
        """How many leading blocks of a chain the pool has, where, and what they cost. Takes no lease.

        `wait_s` of the reply: seconds until all of them could be read; 0 when they stand in memory, -1 while
        a node does not know its disk.

        Args:
            hashes: from `hash_chain`, in order.
            exclude: ids of nodes that count as if they held nothing. Needs a conductor.

        Raises:
            UnknownNamespace: nobody registered it.
        """
        deadline = time.monotonic() + (timeout_s or self.timeout_s)
        await self.ensure_registered(namespace, deadline)
        if self._conductor is not None:
            request = m.Lookup(
                namespace.namespace_id, pack_hashes(hashes), self.host_label, list(exclude)
            )
            try:
                found: m.LookupReply = await self._conductor.call(request, time_left(deadline))
            except UnknownNamespace:  # it has restarted, or is another one
                await self.register(namespace, timeout_s=time_left(deadline))
                found = await self._conductor.call(request, time_left(deadline))
            return found
        link = await self._the_node(deadline)
        reply: m.NodeLookupReply = await link.call(
            m.NodeLookup(namespace.namespace_id, pack_hashes(hashes)),
            namespace,
            time_left(deadline),
        )
        if not reply.found:
            return m.LookupReply(0, [])
        tier = m.TIERS[max(reply.tiers)]
        segment = m.Segment(link.node.node_id, 0, reply.found, tier)
        return m.LookupReply(reply.found, [segment], reply.wait_s)

    async def locate(
        self, namespace: Namespace, hashes: Sequence[bytes], deadline: float
    ) -> m.LookupReply:
        """Where to read a chain: `lookup`, and behind it what this client has written itself a moment ago."""
        found = await self.lookup(namespace, hashes, timeout_s=time_left(deadline))
        if self._conductor is None:
            return found
        return self.recent_writes.extend(found, namespace.namespace_id, hashes, time.monotonic())

    async def standing(
        self, namespace: Namespace, hashes: Sequence[bytes], *, timeout_s: float | None = None
    ) -> list[bool]:
        """Which of these blocks the pool has; unlike `lookup`, it does not end at the first gap.

        Takes no lease. With a conductor that is one call; one node alone is asked for each block, several at
        a time.

        Raises:
            UnknownNamespace: nobody registered it.
        """
        deadline = time.monotonic() + (timeout_s or self.timeout_s)
        return await discovery.standing(self, namespace, hashes, deadline)

    def register_memory(self, data: Any) -> None:
        """Tell of memory that will be read into or written from again and again: NIXL pins it once, then.

        Args:
            data: one contiguous piece of host memory; kept alive until `deregister_memory` or `close`.

        Raises:
            InvalidArgument: see `kvpool.client.data.buffers.span`.
            TransferFailed, DeadlineExceeded: NIXL does not take it.
        """
        self.transports.register(*span(data, writable=False))

    def deregister_memory(self, data: Any) -> None:
        """Undo `register_memory` of the same piece; nothing may be under way there."""
        address, _, _ = span(data, writable=False)
        self.transports.deregister(address)

    async def nodes(self, *, timeout_s: float | None = None) -> list[m.NodeInfo]:
        """The pool's nodes, at most a second old."""
        deadline = time.monotonic() + (timeout_s or self.timeout_s)
        if self._conductor is None:
            link = await self._the_node(deadline)
            return [m.NodeInfo(link.node, "live", 0, 0)]
        if time.monotonic() - self._nodes_at > NODES_TTL_S:
            reply: m.NodesReply = await self._conductor.call(m.Nodes(), time_left(deadline))
            self._nodes = reply.nodes
            self._nodes_at = time.monotonic()
        return self._nodes

    def peers(self) -> list[m.PeerRate]:
        """By which transport each node was reached so far, and how fast, as measured by this client."""
        return [link.peer_rate for link in self._links.values()]

    async def stats(self, *, timeout_s: float | None = None) -> m.PoolStatsReply:
        """Accounting of the whole pool. Needs a conductor.

        Raises:
            ConfigError: this client speaks to one node alone.
        """
        conductor = self._the_conductor("stats of the pool")
        reply: m.PoolStatsReply = await conductor.call(m.PoolStats(), timeout_s or self.timeout_s)
        return reply

    async def ask_conductor(self, request: m.Message, *, timeout_s: float | None = None) -> Any:
        """Send any message to the conductor; returns its reply (see `kvpool.wire.messages.REPLIES`).

        Raises:
            ConfigError: this client speaks to one node alone.
        """
        conductor = self._the_conductor(type(request).__name__)
        return await conductor.call(request, timeout_s or self.timeout_s)

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
        tier: MemoryTier = "",
        timeout_s: float | None = None,
    ) -> GetResult:
        """Read the longest leading run of a chain into the caller's memory.

        Args:
            hashes: n block hashes, in order.
            out: room for n block parts: one contiguous buffer (numpy, torch, bytearray) of
                n x `layout.part_bytes` bytes, a sequence of n buffers, or `BlockSpans` of n blocks. Memory
                past the blocks found is undefined afterwards.
            part: which tensor-parallel part to read.
            as_rank: instead of `part`, the rank of an engine whose tensor-parallel size or order is not the
                namespace's; `out` is laid out as its part (see `kvpool.blocks.resharding`).
            verify: compare checksums (invariant 5); default: as the client was told. They cover whole parts:
                over shared memory the parts are summed where they stand when `as_rank` reads only pieces of them.
            segments: where the blocks stand, if the caller knows; saves the look-up.
            is_disposable: the caller never uses `out` again if fewer blocks are found than asked. NIXL then
                reads straight into it; else through memory of our own, since a transfer that was given up
                may still arrive.
            max_wait_s: what a hit may take to come from a node's disk, because computing it again takes no
                longer; dearer blocks are declined at once (`miss_reason` "declined_cost"). 0: no limit
                but `timeout_s`: what cannot come within that is "declined_deadline".
            tier: "hbm" reads from nodes' device memory what stands there, over NIXL whatever the host;
                by default, and where NIXL does not reach, the node first copies that down to dram.

        Returns:
            How many blocks were read. Where a node died, lacked a block or sent wrong bytes, other replicas
            were tried within the deadline. Fewer than asked is never an error; the reason says why.

        Raises:
            WrongByteCount, InvalidArgument: `out` does not fit, or there is no such tier.
            CannotReshard: the stored bytes are not laid out so that the rank's can be read in few pieces.
            UnverifiableRead: checksums shall be compared, only pieces of parts are read, and not over shared
                memory.
            DeadlineExceeded, Unavailable: the conductor (or the one node) did not answer.
        """
        count = len(hashes)
        _check_tier(tier)
        plan = _plan(plan_read, namespace, part, as_rank)
        addresses, owner, plan = placed(out, count, plan, writable=True)
        if not count:
            return GetResult(0, (), {}, 0, "")
        deadline = time.monotonic() + (timeout_s or self.timeout_s)
        if segments is None:
            segments = await self._where(namespace, hashes, deadline)
        reader = ChainReader(
            self,
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
        tier: MemoryTier = "",
        segments: Sequence[m.Segment] | None = None,
        is_guess: bool = False,
        timeout_s: float | None = None,
    ) -> PinnedBlocks:
        """Hold the longest leading run of a chain in place. Give it back with `release`.

        With a conductor that is a look-up there and one call to each node concerned; at one node alone, or with
        `segments`, the call to the node is both.

        Args:
            ttl_s: how long at most; nodes may grant less.
            part: one tensor-parallel part, or None for all.
            segments: as for `get`.
            is_guess: nobody said that the nodes of `segments` have the blocks: what they lack is no failure,
                which would be remembered, and told to the conductor.
            max_wait_s: see `get`; over all nodes together.
            tier: as for `get`.
        """
        _check_tier(tier)
        deadline = time.monotonic() + (timeout_s or self.timeout_s)
        if segments is None:
            segments = await self._where(namespace, hashes, deadline)
        return await pinning.pin(
            self,
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
        deadline = time.monotonic() + (timeout_s or self.timeout_s)
        return await pinning.read(self, pinned, out, deadline)

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
        as_rank: TensorParallelRank | None = None,
        node_id: str | None = None,
        replicas: int = 1,
        tier: MemoryTier = "",
        timeout_s: float | None = None,
    ) -> PutResult:
        """Write a run of a chain from the caller's memory: two round trips, however many blocks.

        Args:
            hashes: n block hashes, in order; `parent` names the block before the first ("" at the start).
            data: n block parts: one contiguous buffer of n x `layout.part_bytes`, n buffers, or `BlockSpans`.
            part: which tensor-parallel part they are.
            as_rank: instead of `part`, the rank of an engine whose tensor-parallel size or order is not the
                namespace's; `data` is laid out as its part. It writes the parts that it wholly holds.
            node_id: where to; default: this host's node, else by room (see `kvpool.client.node.placement`).
            replicas: nodes that shall hold the blocks when this returns, on different hosts where there are
                some. One that cannot be had is no error; `PutResult.replicas` says how many stand. With
                several parts the put of the last one copies.
            tier: "hbm" writes to the node's device memory, over NIXL; what finds no room there, and all of
                it where NIXL does not reach, goes to dram. Replicas stand in dram.

        Raises:
            WrongByteCount, InvalidArgument: `data` does not fit.
            ConfigError: replicas without a conductor.
            CannotReshard: the rank holds no stored part wholly, or see `get`.
            NoRoom: not one block could be stored, existed or was in progress.
            TransferFailed, DeadlineExceeded, Unavailable: nothing of this call became visible.
        """
        _check_tier(tier)
        plan = _plan(plan_write, namespace, part, as_rank)
        addresses, owner, plan = placed(data, len(hashes), plan, writable=False)
        if not hashes:
            return PutResult(0, 0, 0, 0, {})
        deadline = time.monotonic() + (timeout_s or self.timeout_s)
        if replicas < 1 or (replicas > 1 and self._conductor is None):
            raise ConfigError(f"replicas={replicas}", hint="1 or more; several need a conductor")
        writer = ChainWriter(
            self,
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

    # ------------------------------------------------------------ copies

    async def replicate(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes],
        *,
        to: str,
        parent: bytes = b"",
        timeout_s: float | None = None,
    ) -> ReplicateResult:
        """Have a node hold copies of a run of a chain; it pulls them from whoever has them, verified.

        Args:
            to: id of the node; `parent` names the block before the first.

        Returns:
            How many stand there now and why the rest does not: blocks are copied in order, and the first
            that cannot be ends it.

        Raises:
            Unavailable: the pool has no such node, or it went away before anything was copied.
            DeadlineExceeded: the time was over before anything was copied.
            ConfigError: this client speaks to one node alone.
        """
        if self._conductor is None:
            raise ConfigError("replicate needs a conductor", hint="use conductor=")
        deadline = time.monotonic() + (timeout_s or self.timeout_s)
        return await copies.replicate(self, namespace, hashes, to, parent, deadline)

    async def protect(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes],
        *,
        ttl_s: float | None = None,
        timeout_s: float | None = None,
    ) -> dict[str, int]:
        """Keep blocks, such as a system prompt's, wherever they stand now; returns how many, by node.

        Args:
            hashes: a chain from its start; nodes pass over those that they have not got.
            ttl_s: for so long they are evicted only when nothing else can be; None: never, until
                `unprotect`. Protecting again may prolong, never shortens.

        Raises:
            NoRoom: a node has promised all that it may; others may have done as asked.
            InvalidArgument: the time is not positive, or the chain lacks its head.
            DeadlineExceeded, Unavailable: a node did not answer.
        """
        deadline = time.monotonic() + (timeout_s or self.timeout_s)
        return await protection.protect(self, namespace, hashes, ttl_s, deadline)

    async def unprotect(
        self, namespace: Namespace, hashes: Sequence[bytes], *, timeout_s: float | None = None
    ) -> dict[str, int]:
        """End the protection of a chain, on every node, for all who asked for it.

        Returns how many blocks lost it, by node. What another protected chain builds on stays protected.
        """
        deadline = time.monotonic() + (timeout_s or self.timeout_s)
        return await protection.unprotect(self, namespace, hashes, deadline)

    async def drop(
        self, namespace: Namespace, hashes: Sequence[bytes], *, timeout_s: float | None = None
    ) -> dict[str, int]:
        """Remove blocks for good, protected ones too; returns how many each node had.

        Nobody can pin them any more when this returns; what is leased goes when it is released.

        Raises:
            InvalidArgument: more than `MAX_HASHES` of them.
            DeadlineExceeded, Unavailable: a node did not answer; others may have done as asked.
        """
        deadline = time.monotonic() + (timeout_s or self.timeout_s)
        self.recent_writes.forget(None, namespace.namespace_id, hashes)
        return await protection.drop(self, namespace, hashes, deadline)

    async def list_blocks(
        self,
        *,
        node_id: str = "",
        model: str = "",
        limit: int = 100,
        timeout_s: float | None = None,
    ) -> list[NodeListing]:
        """What stands on each node (or on one), as far as this client may know of it: for people, not for programs.

        Args:
            model: a namespace's model, name or id in hex; default: all.
            limit: blocks of each namespace of each node; the totals are right anyway.

        Raises:
            DeadlineExceeded, Unavailable: there is no such node, or one did not answer.
        """
        deadline = time.monotonic() + (timeout_s or self.timeout_s)
        return await listing.list_blocks(self, node_id, model, limit, deadline)

    async def prefetch(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes],
        *,
        tier: MemoryTier = "",
        timeout_s: float | None = None,
    ) -> PrefetchResult:
        """Have the leading run of a chain brought into dram ahead of a read, or into "hbm".

        Returns before it is there. What a node declines comes back with its reason, and may be asked again.
        """
        _check_tier(tier)
        deadline = time.monotonic() + (timeout_s or self.timeout_s)
        return await copies.prefetch(self, namespace, hashes, deadline, tier)

    async def drain(
        self, node_id: str, *, drop: bool = False, timeout_s: float = 60.0
    ) -> m.DrainReply:
        """Empty a node and let it end: its blocks move to other nodes, unless `drop`.

        Args:
            timeout_s: the node ends after it in any case; the call may take a little longer.

        Raises:
            NotFound: the pool has no such node.
        """
        reply: m.DrainReply = await self._ask_node(node_id, m.Drain(timeout_s, drop), timeout_s + 5)
        return reply

    async def resize(
        self, node_id: str, dram_bytes: int, *, timeout_s: float = 120.0
    ) -> m.ResizeDramReply:
        """Give a node more or less DRAM while it serves; returns when what is new can be used.

        What has to go is emptied in the background, and stays for as long as somebody reads or writes there.

        Raises:
            NotFound: the pool has no such node. InvalidArgument: less than one slab.
            NoSharedMemory: the machine has not got that much; nothing was changed.
            NoRoom: another resize is under way.
        """
        reply: m.ResizeDramReply = await self._ask_node(
            node_id, m.ResizeDram(dram_bytes), timeout_s
        )
        return reply

    async def _ask_node(self, node_id: str, request: m.Message, timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        for info in await self.nodes(timeout_s=timeout_s):
            if info.descriptor.node_id == node_id:
                # A connection of its own: what fails meanwhile on the other must not end this call.
                wire = WireClient(
                    info.descriptor.address, self.client_id, credentials=self._credentials
                )
                try:
                    return await wire.call(request, time_left(deadline))
                finally:
                    await wire.close()
        raise NotFound(f"the pool has no node {node_id!r}", hint="see `kvpool stats`")

    # ------------------------------------------------------------ nodes

    async def link(self, node_id: str, deadline: float) -> NodeLink:
        """The connection to a node, made on first use and again when the node restarted.

        Raises:
            Unavailable: the pool has no such node now.
        """
        existing = self._links.get(node_id)
        if existing is not None:
            return existing
        for info in await self.nodes(timeout_s=time_left(deadline)):
            if info.descriptor.node_id == node_id:
                return self.link_to(info.descriptor)
        raise Unavailable(f"the pool has no node {node_id!r} now")

    async def at_node(
        self, node_id: str, deadline: float, call: Callable[[NodeLink], Awaitable[T]]
    ) -> tuple[NodeLink, T]:
        """Call a node: once more where it proves to have restarted since it was met, and is met afresh.

        Returns:
            The connection that was used in the end, and what `call` gave.

        Raises: as `link` and `call`.
        """
        link = await self.link(node_id, deadline)
        try:
            return link, await call(link)
        except (Draining, NoTransport):
            raise
        except Unavailable as error:  # StaleEpoch is one
            if self._conductor is None:
                raise
            self.forget_node(node_id, error)
            try:
                fresh = await self.link(node_id, deadline)
            except KvpoolError:
                raise error from None
            if fresh.node.epoch == link.node.epoch:
                raise
            self._forget_life(node_id)
        return fresh, await call(fresh)

    def link_to(self, node: m.NodeDescriptor) -> NodeLink:
        """The connection to the node described (same id and epoch: the standing one)."""
        existing = self._links.get(node.node_id)
        if existing is not None and existing.node.epoch == node.epoch:
            return existing
        if existing is not None:
            self._drop_link(node.node_id)
            self._forget_life(node.node_id)
        link = NodeLink(node, self.transports, self.host_label, self.client_id, self._credentials)
        self._links[node.node_id] = link
        return link

    async def connect(self, *, timeout_s: float | None = None) -> int:
        """Meet all live nodes now, so that the first read or write pays for nothing but its bytes.

        Returns:
            How many nodes can be reached. One that cannot is no error here; a transfer will say why.
        """
        deadline = time.monotonic() + (timeout_s or self.timeout_s)
        reached = 0
        for info in await self.nodes(timeout_s=time_left(deadline)):
            if info.state != "live":
                continue
            link = self.link_to(info.descriptor)
            if not link.wire.is_connected:
                try:
                    await link.connect(time_left(deadline))
                except KvpoolError as error:
                    self.forget_node(info.descriptor.node_id, error)
                    continue
            reached += 1
        return reached

    def forget_node(self, node_id: str, error: KvpoolError) -> None:
        """After a failed call: meet the node afresh next time, unless the failure says nothing of it."""
        if isinstance(error, (Unavailable, StaleEpoch)):
            if not isinstance(error, Draining):  # what drains can be read for a while
                self._drop_link(node_id)
            self._nodes_at = float("-inf")

    def note_failure(
        self,
        node_id: str,
        namespace: Namespace,
        hashes: Sequence[bytes],
        error: KvpoolError,
        waited_s: float,
    ) -> None:
        """A pin or read of these blocks ended in `error` after `waited_s`: nobody need run into it again."""
        self.forget_node(node_id, error)
        if isinstance(error, StaleEpoch):
            return  # our own knowledge was old
        is_silence = isinstance(error, DeadlineExceeded) and self.negative_cache.is_silent(
            node_id, waited_s
        )
        if isinstance(error, NoTransport):  # ours to mend: others are not to hear of it
            if self._conductor is not None:
                self.negative_cache.remember(
                    node_id, namespace.namespace_id, hashes, time.monotonic()
                )
        elif is_silence or isinstance(error, Unavailable):
            self.note_misses(node_id, namespace, hashes)

    def note_misses(self, node_id: str, namespace: Namespace, hashes: Sequence[bytes]) -> None:
        """Remember for a while that a node failed to give blocks, and tell the conductor at once."""
        if self._conductor is None:
            return  # there is nobody else to ask
        self.negative_cache.remember(node_id, namespace.namespace_id, hashes, time.monotonic())
        self.recent_writes.forget(node_id, namespace.namespace_id, hashes)
        report = m.ReportMiss(node_id, namespace.namespace_id, pack_hashes(hashes))
        self._conductor.send_nowait(report)

    def _forget_life(self, node_id: str) -> None:
        """The node restarted: what its earlier life had or lacked says nothing."""
        self.negative_cache.forget_node(node_id)
        self.recent_writes.forget_node(node_id)

    def _drop_link(self, node_id: str) -> None:
        link = self._links.pop(node_id, None)
        if link is not None:
            self._closing = asyncio.ensure_future(self._close_link(link))

    async def _close_link(self, link: NodeLink) -> None:
        await link.close()
        with contextlib.suppress(KvpoolError):
            await asyncio.to_thread(self.transports.forget, link.node.node_id)

    async def _where(
        self, namespace: Namespace, hashes: Sequence[bytes], deadline: float
    ) -> Sequence[m.Segment]:
        """Where to ask for the blocks of a chain. One node alone is simply asked for all of them."""
        if self._conductor is not None:
            return (await self.locate(namespace, hashes, deadline)).segments
        link = await self._the_node(deadline)
        return [m.Segment(link.node.node_id, 0, len(hashes), "dram")] if hashes else []

    async def _the_node(self, deadline: float) -> NodeLink:
        for link in self._links.values():
            if link.wire.is_connected:
                return link
        assert self._only_node is not None
        return self.link_to(await self._only_node.call(m.Describe(), time_left(deadline)))

    async def places(
        self, namespace: Namespace, node_id: str | None, key: bytes, deadline: float
    ) -> AsyncIterator[NodeLink]:
        """The nodes to try for a write, in order."""
        if node_id is not None:
            yield await self.link(node_id, deadline)
        elif self._conductor is None:
            yield await self._the_node(deadline)
        else:
            known = await self.nodes(timeout_s=time_left(deadline))
            nodes = open_to(known, namespace.tenant)
            for info in choose_nodes(nodes, key, prefer_host=self.host_label):
                yield self.link_to(info.descriptor)

    def _the_conductor(self, what: str) -> FailoverClient:
        if self._conductor is None:
            raise ConfigError(f"{what}: a conductor is needed", hint="use conductor=")
        return self._conductor

    async def ensure_registered(self, namespace: Namespace, deadline: float) -> None:
        """`register`, unless this client has done so; `deadline` in monotonic seconds."""
        if namespace.namespace_id not in self._known:
            await self.register(namespace, timeout_s=time_left(deadline))


def _plan(
    make: Callable[[Layout, Layout, int], Plan],
    namespace: Namespace,
    part: int,
    as_rank: TensorParallelRank | None,
) -> Plan:
    stored = namespace.layout
    if as_rank is None:
        return plan_part(stored, part)
    if part:
        raise InvalidArgument(f"part={part} and as_rank={as_rank}", hint="give one of the two")
    return make(stored, as_rank.layout(stored), as_rank.rank)


def _check_tier(tier: str) -> None:
    if tier not in get_args(MemoryTier):
        raise InvalidArgument(f"no memory tier is called {tier!r}", hint="dram or hbm")
