"""The administrative calls of `AsyncPool`: nodes, namespaces, copies, retention, resizing."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from typing import Any

from kvpool.blocks.layout import Namespace
from kvpool.blocks.tier import Tier
from kvpool.client.admin import discovery, listing, replication, retention
from kvpool.client.admin.listing import NodeListing
from kvpool.client.admin.replication import PrefetchResult, ReplicateResult
from kvpool.client.node.directory import NodeDirectory
from kvpool.errors import ConfigError, InvalidArgument
from kvpool.wire import messages as m


def check_memory_tier(tier: Tier) -> None:
    """Check that clients read and write `tier`.

    Raises:
        InvalidArgument: it is not.
    """
    if tier not in (Tier.HBM, Tier.DRAM):
        raise InvalidArgument(
            f"clients read and write memory, not {tier!s}", hint="Tier.DRAM or Tier.HBM"
        )


class PoolAdmin:
    """Calls that manage a pool rather than read or write blocks. `AsyncPool` inherits them."""

    directory: NodeDirectory
    timeout_s: float

    def _deadline(self, timeout_s: float | None) -> float:
        return time.monotonic() + (timeout_s or self.timeout_s)

    @property
    def has_conductor(self) -> bool:
        """Whether this client speaks to a whole pool, not to a single node."""
        return self.directory.has_conductor

    # ------------------------------------------------------------ namespaces

    async def namespaces(self, *, timeout_s: float | None = None) -> list[Namespace]:
        """All namespaces that the pool knows, oldest first.

        Raises:
            ConfigError: this client speaks to a single node.
        """
        return await discovery.known_namespaces(self.directory, self._deadline(timeout_s))

    async def compatible_namespaces(
        self, namespace: Namespace, *, timeout_s: float | None = None
    ) -> list[Namespace]:
        """The known namespaces whose blocks an engine of `namespace` can read, cheapest first.

        They differ from `namespace` at most in `tp_size` and `order`. Read them with `get(...,
        as_rank=...)`.

        Raises:
            ConfigError: this client speaks to a single node.
        """
        return discovery.readable(await self.namespaces(timeout_s=timeout_s), namespace)

    async def tokenize(
        self, text: str, *, is_system_prompt: bool = False, timeout_s: float | None = None
    ) -> list[int]:
        """The token ids of a prompt, by the conductor's tokenizer.

        Args:
            is_system_prompt: return the tokens with which every conversation under this system
                prompt begins.

        Raises:
            Unavailable: the conductor has no tokenizer.
            ConfigError: this client speaks to a single node.
        """
        reply: m.TokenizeReply = await self.ask_conductor(
            m.Tokenize(text, is_system_prompt), timeout_s=timeout_s
        )
        return array("I", reply.token_ids).tolist()

    # ------------------------------------------------------------ nodes

    async def nodes(self, *, timeout_s: float | None = None) -> list[m.NodeInfo]:
        """The pool's nodes, from a list at most one second old."""
        return await self.directory.nodes(self._deadline(timeout_s))

    async def connect(self, *, timeout_s: float | None = None) -> int:
        """Connect to all live nodes now, so that the first read or write is as fast as later ones.

        Returns:
            How many nodes could be reached. An unreachable node is no error here; a later transfer
            reports it.
        """
        return await self.directory.connect(self._deadline(timeout_s))

    def peers(self) -> list[m.PeerRate]:
        """For each node used so far: the transport, the bytes moved and the measured speed."""
        return [link.transports.peer_rate for link in self.directory.links()]

    async def stats(self, *, timeout_s: float | None = None) -> m.PoolStatsReply:
        """Blocks and bytes of the whole pool, by tier and state.

        Raises:
            ConfigError: this client speaks to a single node.
        """
        reply: m.PoolStatsReply = await self.ask_conductor(m.PoolStats(), timeout_s=timeout_s)
        return reply

    async def ask_conductor(self, request: m.Message, *, timeout_s: float | None = None) -> Any:
        """Send any message to the conductor and return its reply (`kvpool.wire.messages.REPLIES`).

        Raises:
            ConfigError: this client speaks to a single node.
            DeadlineExceeded, Unavailable: no conductor answered.
        """
        return await self.directory.ask_conductor(request, timeout_s or self.timeout_s)

    async def list_blocks(
        self,
        *,
        node_id: str = "",
        model: str = "",
        limit: int = 100,
        timeout_s: float | None = None,
    ) -> list[NodeListing]:
        """List the blocks of each node that this client may see. Made for people, not for programs.

        Args:
            node_id: list this node only; default: all nodes.
            model: a namespace's model, name or id in hex; default: all.
            limit: the most blocks listed for each namespace of each node; totals always count all.

        Raises:
            InvalidArgument: `limit` is negative.
            DeadlineExceeded, Unavailable: there is no such node, or a node did not answer.
        """
        deadline = self._deadline(timeout_s)
        return await listing.list_blocks(self.directory, node_id, model, limit, deadline)

    async def drain(
        self, node_id: str, *, drop: bool = False, timeout_s: float = 60.0
    ) -> m.DrainReply:
        """Empty a node and stop it. Its blocks move to other nodes first.

        Args:
            drop: discard the blocks instead of moving them.
            timeout_s: the node stops after this time at the latest; the call may take 5 s longer.

        Raises:
            NotFound: the pool has no such node.
        """
        request = m.Drain(timeout_s, drop)
        reply: m.DrainReply = await self.directory.call_apart(node_id, request, timeout_s + 5)
        return reply

    async def resize(
        self, node_id: str, dram_bytes: int, *, timeout_s: float = 120.0
    ) -> m.ResizeDramReply:
        """Change how much DRAM a node serves while it runs. Returns when new memory can be used.

        Memory to be removed is emptied in the background; it stays while somebody reads or writes
        there.

        Args:
            dram_bytes: the new size of the node's DRAM tier.

        Raises:
            NotFound: the pool has no such node.
            InvalidArgument: `dram_bytes` is less than one slab.
            NoSharedMemory: the machine has less memory than that; nothing changed.
            NoRoom: another resize is running.
        """
        request = m.ResizeDram(dram_bytes)
        reply: m.ResizeDramReply = await self.directory.call_apart(node_id, request, timeout_s)
        return reply

    # ------------------------------------------------------------ copies and retention

    async def replicate(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes],
        *,
        to: str,
        parent: bytes = b"",
        timeout_s: float | None = None,
    ) -> ReplicateResult:
        """Copy a run of a chain to a node.

        The node pulls the blocks from their holders and verifies them.

        Args:
            hashes: n block hashes, in order.
            to: id of the node.
            parent: hash of the block before the first; b"" at the start of a chain.

        Returns:
            How many blocks the node has now, and why it lacks the rest. Blocks are copied in order;
            the first failure ends the copy.

        Raises:
            Unavailable: the pool has no such node, or the node left before the first block was
                copied.
            DeadlineExceeded: time ran out before the first block was copied.
            ConfigError: this client speaks to a single node.
        """
        if not self.has_conductor:
            raise ConfigError("replicate needs a conductor", hint="use conductor=")
        deadline = self._deadline(timeout_s)
        return await replication.replicate(self.directory, namespace, hashes, to, parent, deadline)

    async def prefetch(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes],
        *,
        tier: Tier = Tier.DRAM,
        timeout_s: float | None = None,
    ) -> PrefetchResult:
        """Have nodes bring the leading run of a chain into memory before a read.

        Returns before it is there.

        Args:
            tier: HBM brings the blocks into device memory; default: DRAM.

        Returns:
            How many blocks the nodes accepted, had already, or declined and why. Declined blocks
            may be asked for again.

        Raises:
            InvalidArgument: `tier` is NVME.
            DeadlineExceeded, Unavailable: the conductor (or the single node) did not answer the
                look-up.
        """
        check_memory_tier(tier)
        deadline = self._deadline(timeout_s)
        return await replication.prefetch(self.directory, namespace, hashes, deadline, tier)

    async def protect(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes],
        *,
        ttl_s: float | None = None,
        timeout_s: float | None = None,
    ) -> dict[str, int]:
        """Retain blocks, such as a system prompt's, on every node that has them.

        Args:
            hashes: a chain from its first block. A node skips the blocks that it does not have.
            ttl_s: soft pin: for this long, nodes evict the blocks only if nothing else can be
                evicted. None: hard pin: nodes never evict them until `unprotect`. Another call may
                extend the retention, but never shorten it.

        Returns:
            How many blocks each node retains, by node id.

        Raises:
            NoRoom: a node has reached its limit of retained blocks. Other nodes may have done as
                asked.
            InvalidArgument: `ttl_s` is not positive, or the chain lacks its first block.
            DeadlineExceeded, Unavailable: a node did not answer.
        """
        deadline = self._deadline(timeout_s)
        return await retention.protect(self.directory, namespace, hashes, ttl_s, deadline)

    async def unprotect(
        self, namespace: Namespace, hashes: Sequence[bytes], *, timeout_s: float | None = None
    ) -> dict[str, int]:
        """End the retention of a chain on every node, for all clients that asked for it.

        Returns:
            How many blocks lost their retention, by node id. Blocks that another retained chain
            needs keep it.

        Raises:
            DeadlineExceeded, Unavailable: a node did not answer; others may have done as asked.
        """
        return await retention.unprotect(
            self.directory, namespace, hashes, self._deadline(timeout_s)
        )

    async def drop(
        self, namespace: Namespace, hashes: Sequence[bytes], *, timeout_s: float | None = None
    ) -> dict[str, int]:
        """Remove blocks from every node, including retained ones.

        When this returns nobody can pin the blocks any more. A leased block is removed when its
        lease ends.

        Returns:
            How many of the blocks each node had, by node id.

        Raises:
            InvalidArgument: there are more than `MAX_HASHES` hashes.
            DeadlineExceeded, Unavailable: a node did not answer; others may have done as asked.
        """
        deadline = self._deadline(timeout_s)
        self.directory.recent_writes.forget(None, namespace.namespace_id, hashes)
        return await retention.drop(self.directory, namespace, hashes, deadline)
