"""The nodes of one client: their list, a link to each, and what is known of their blocks.

Reading, writing, pinning and administration take a `NodeDirectory`; `AsyncPool` builds it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from kvpool.blocks.hash_check import proof_of
from kvpool.blocks.hashing import pack_hashes
from kvpool.blocks.layout import Namespace
from kvpool.client.node.deadlines import time_left
from kvpool.client.node.negative_cache import NegativeCache
from kvpool.client.node.node_link import NodeLink
from kvpool.client.node.placement import choose_nodes, nodes_for_tenant
from kvpool.client.node.recent_writes import RecentWrites
from kvpool.client.node.transfer_threads import close_in_thread
from kvpool.errors import (
    ConfigError,
    DeadlineExceeded,
    Draining,
    KvpoolError,
    NotFound,
    NoTransport,
    StaleEpoch,
    Unavailable,
)
from kvpool.transports import Transports
from kvpool.wire import FailoverClient, WireClient
from kvpool.wire import messages as m
from kvpool.wire.credentials import Credentials

T = TypeVar("T")

NODES_TTL_S = 1.0  # how long a list of nodes is used


class NodeDirectory:
    """Finds nodes and keeps one link to each.

    Args:
        conductor, node: wire address of a conductor or of a single node; exactly one is given.
        transports: the transports of this process.
        host_label: label of this machine.
        client_id: names this client to nodes and conductor.
        credentials: shown to the conductor and to every node.
    """

    def __init__(
        self,
        *,
        conductor: str | None,
        node: str | None,
        transports: Transports,
        host_label: str,
        client_id: str,
        credentials: Credentials,
    ) -> None:
        self.negative_cache = NegativeCache()
        self.recent_writes = RecentWrites()
        self.transports = transports
        self.host_label = host_label
        self._client_id = client_id
        self._credentials = credentials
        self._conductor: FailoverClient | None = None
        self._only_node: WireClient | None = None
        if conductor is not None:
            self._conductor = FailoverClient(conductor, client_id, credentials=credentials)
        if node is not None:
            self._only_node = WireClient(node, client_id, credentials=credentials)
        self._links: dict[str, NodeLink] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._nodes: list[m.NodeInfo] = []
        self._nodes_at = float("-inf")
        self._registered: set[bytes] = set()

    async def close(self) -> None:
        """Close every connection, and wait for links that are closing already."""
        for link in self.links():
            await link.close()
        if self._closing:
            await asyncio.gather(*self._closing, return_exceptions=True)
        for client in (self._conductor, self._only_node):
            if client is not None:
                await client.close()

    # ------------------------------------------------------------ conductor

    @property
    def has_conductor(self) -> bool:
        """Whether this client speaks to a whole pool, not to a single node."""
        return self._conductor is not None

    async def ask_conductor(self, request: m.Message, timeout_s: float) -> Any:
        """Send a message to the conductor and return its reply.

        Raises:
            ConfigError: this client speaks to a single node.
            DeadlineExceeded, Unavailable: no conductor answered.
        """
        if self._conductor is None:
            raise ConfigError(f"{type(request).__name__} needs a conductor", hint="use conductor=")
        return await self._conductor.call(request, timeout_s)

    async def register(self, namespace: Namespace, timeout_s: float) -> bytes:
        """Register a namespace with the pool.

        Returns its id there. Raises as `AsyncPool.register`.
        """
        peer = self._conductor or self._only_node
        assert peer is not None
        reply: m.NamespaceReply = await peer.call(
            m.RegisterNamespace(namespace, proof_of(namespace)), timeout_s
        )
        # The two differ if the caller left out its tenant.
        self._registered |= {namespace.namespace_id, reply.namespace_id}
        return reply.namespace_id

    async def ensure_registered(self, namespace: Namespace, deadline: float) -> None:
        """Register a namespace unless this client already did; `deadline` in monotonic seconds."""
        if namespace.namespace_id not in self._registered:
            await self.register(namespace, time_left(deadline))

    # ------------------------------------------------------------ nodes and links

    async def nodes(self, deadline: float) -> list[m.NodeInfo]:
        """The pool's nodes, from a list at most a second old."""
        if self._conductor is None:
            link = await self.only_link(deadline)
            return [m.NodeInfo(link.node, "live", 0, 0)]
        if time.monotonic() - self._nodes_at > NODES_TTL_S:
            reply: m.NodesReply = await self._conductor.call(m.Nodes(), time_left(deadline))
            self._nodes = reply.nodes
            self._nodes_at = time.monotonic()
        return self._nodes

    async def _descriptor(self, node_id: str, deadline: float) -> m.NodeDescriptor | None:
        for info in await self.nodes(deadline):
            if info.descriptor.node_id == node_id:
                return info.descriptor
        return None

    async def link(self, node_id: str, deadline: float) -> NodeLink:
        """The link to a node. The first use opens it.

        Raises:
            Unavailable: the pool has no such node now.
        """
        existing = self._links.get(node_id)
        if existing is not None:
            return existing
        descriptor = await self._descriptor(node_id, deadline)
        if descriptor is None:
            raise Unavailable(f"the pool has no node {node_id!r} now")
        return self.link_to(descriptor)

    def link_to(self, node: m.NodeDescriptor) -> NodeLink:
        """The link to the node described. Replaces a link to an earlier epoch of the node."""
        existing = self._links.get(node.node_id)
        if existing is not None and existing.node.epoch == node.epoch:
            return existing
        if existing is not None:
            self._drop_link(node.node_id)
            self._forget_blocks(node.node_id)
        link = NodeLink(node, self.transports, self.host_label, self._client_id, self._credentials)
        self._links[node.node_id] = link
        return link

    async def only_link(self, deadline: float) -> NodeLink:
        """The link to the single node of a client without a conductor."""
        for link in self._links.values():
            if link.wire.is_connected:
                return link
        assert self._only_node is not None
        return self.link_to(await self._only_node.call(m.Describe(), time_left(deadline)))

    def links(self) -> list[NodeLink]:
        """All links that are open now."""
        return list(self._links.values())

    async def write_targets(
        self, namespace: Namespace, node_id: str | None, key: bytes, deadline: float
    ) -> AsyncIterator[NodeLink]:
        """The nodes to try for a write, in order: `node_id` if given, else by placement."""
        if node_id is not None:
            yield await self.link(node_id, deadline)
        elif self._conductor is None:
            yield await self.only_link(deadline)
        else:
            nodes = nodes_for_tenant(await self.nodes(deadline), namespace.tenant)
            for info in choose_nodes(nodes, key, prefer_host=self.host_label):
                yield self.link_to(info.descriptor)

    async def call_node(
        self, node_id: str, deadline: float, call: Callable[[NodeLink], Awaitable[T]]
    ) -> tuple[NodeLink, T]:
        """Run `call` on a node's link.

        If the node restarted, look it up again and run `call` once more.

        Returns:
            The link used last, and the result of `call`.

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
                new_link = await self.link(node_id, deadline)
            except KvpoolError:
                raise error from None
            if new_link.node.epoch == link.node.epoch:
                raise
            self._forget_blocks(node_id)
        return new_link, await call(new_link)

    async def call_apart(self, node_id: str, request: m.Message, timeout_s: float) -> Any:
        """Send a long call to a node over its own connection, so that no other failure ends it.

        Raises:
            NotFound: the pool has no such node.
        """
        deadline = time.monotonic() + timeout_s
        descriptor = await self._descriptor(node_id, deadline)
        if descriptor is None:
            raise NotFound(f"the pool has no node {node_id!r}", hint="see `kvpool stats`")
        wire = WireClient(descriptor.address, self._client_id, credentials=self._credentials)
        try:
            return await wire.call(request, time_left(deadline))
        finally:
            await wire.close()

    async def connect(self, deadline: float) -> int:
        """Connect to all live nodes. Returns how many could be reached."""
        reached = 0
        for info in await self.nodes(deadline):
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

    # ------------------------------------------------------------ failures

    def forget_node(self, node_id: str, error: KvpoolError) -> None:
        """Drop the node's link and the node list if a call failed because the node is gone."""
        if isinstance(error, (Unavailable, StaleEpoch)):
            if not isinstance(error, Draining):  # a draining node can still be read
                self._drop_link(node_id)
            self._nodes_at = float("-inf")

    def report_failure(
        self,
        node_id: str,
        namespace: Namespace,
        hashes: Sequence[bytes],
        error: KvpoolError,
        waited_s: float,
    ) -> None:
        """Remember that a pin or read of these blocks failed with `error` after `waited_s`."""
        self.forget_node(node_id, error)
        if isinstance(error, StaleEpoch):
            return  # this client's knowledge was old; the node did nothing wrong
        is_silent = isinstance(error, DeadlineExceeded) and self.negative_cache.add_silence(
            node_id, waited_s
        )
        if isinstance(error, NoTransport):  # this client's own problem: do not tell the conductor
            if self._conductor is not None:
                self.negative_cache.remember(
                    node_id, namespace.namespace_id, hashes, time.monotonic()
                )
        elif is_silent or isinstance(error, Unavailable):
            self.report_misses(node_id, namespace, hashes)

    def count_unfailed(self, node_id: str, namespace: Namespace, hashes: Sequence[bytes]) -> int:
        """How many leading blocks this node has not recently failed to give."""
        return self.negative_cache.count_leading(
            node_id, namespace.namespace_id, hashes, time.monotonic()
        )

    def report_misses(self, node_id: str, namespace: Namespace, hashes: Sequence[bytes]) -> None:
        """Remember that a node failed to give blocks, and tell the conductor at once."""
        if self._conductor is None:
            return  # there is no other node to ask
        self.negative_cache.remember(node_id, namespace.namespace_id, hashes, time.monotonic())
        self.recent_writes.forget(node_id, namespace.namespace_id, hashes)
        report = m.ReportMiss(node_id, namespace.namespace_id, pack_hashes(hashes))
        self._conductor.send_nowait(report)

    def _forget_blocks(self, node_id: str) -> None:
        """The node restarted, so what its earlier epoch had or lacked no longer holds."""
        self.negative_cache.forget_node(node_id)
        self.recent_writes.forget_node(node_id)

    def _drop_link(self, node_id: str) -> None:
        link = self._links.pop(node_id, None)
        if link is not None:
            task = asyncio.ensure_future(self._close_link(link))
            self._closing.add(task)  # the loop itself keeps only a weak reference
            task.add_done_callback(self._closing.discard)

    async def _close_link(self, link: NodeLink) -> None:
        await link.close()
        with contextlib.suppress(KvpoolError):
            await close_in_thread(lambda: self.transports.forget(link.node.node_id))
