"""Look-ups: which readable nodes hold which blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from conductor.cluster import disk_wait
from conductor.cluster.members import Nodes
from conductor.cluster.namespaces import NamespaceRegistry
from conductor.cluster.pool_state import PoolState
from conductor.index.contract import Found
from kvpool.blocks.hashing import HASH_BYTES, unpack_hashes
from kvpool.wire import messages as m

MAX_COUNTED = 8_192  # hashes in one CountCopies, 3 µs each
MAX_MISSES = 8_192  # hashes used of one ReportMiss


class Lookups:
    """Answers look-ups, and learns which of the copies that it named could not be read.

    Args:
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        nodes: Nodes,
        namespaces: NamespaceRegistry,
        state: PoolState,
        counters: Counter[str],
        clock: Callable[[], float],
    ) -> None:
        self._nodes = nodes
        self._namespaces = namespaces
        self._state = state
        self._counters = counters
        self._clock = clock

    async def find(self, namespace_id: bytes, hashes: Sequence[bytes]) -> Found:
        """Look up the leading blocks of a chain, once for any number of hosts."""
        holders = await self._state.holders(namespace_id, hashes)
        return Found(holders, self._readable_hosts())

    async def lookup(self, request: m.Lookup) -> m.LookupReply:
        """The leading blocks that live nodes hold, and where.

        Raises:
            UnknownNamespace: the namespace was not registered since the conductors started.
        """
        namespace = await self._namespaces.get(request.namespace_id)
        holders = await self._state.holders(request.namespace_id, unpack_hashes(request.hashes))
        hosts = self._readable_hosts(request.exclude)
        segments = Found(holders, hosts).segments(request.host)
        found = sum(segment.count for segment in segments)
        wait_s = disk_wait.wait_s(self._nodes, namespace, segments)
        self._counters["lookups"] += 1
        self._counters["lookup_hits" if found else "lookup_misses"] += 1
        return m.LookupReply(found, segments, wait_s)

    async def count_copies(self, request: m.CountCopies) -> m.CopyCounts:
        """Count the live nodes that hold each block. Draining and excluded nodes do not count.

        Raises:
            InvalidArgument: more than `MAX_COUNTED` hashes.
        """
        hashes = unpack_hashes(request.hashes, MAX_COUNTED)
        found = await self._state.resident_holders(request.namespace_id, hashes)
        live = {node.member_id for node in self._nodes.choosable()} - set(request.exclude)
        counts = (len({copy.node_id for copy in copies} & live) for copies in found)
        return m.CopyCounts(bytes(min(255, count) for count in counts))

    def report_miss(self, request: m.ReportMiss) -> m.Ok:
        """Record that a client's pin or read failed.

        The record expires soon, because the report may be wrong.
        Of a long run only the head is recorded: no plan reads past a missing block.
        """
        hashes = unpack_hashes(request.hashes[: MAX_MISSES * HASH_BYTES])
        self._counters["reported_misses"] += len(hashes)
        self.record_misses(request.node_id, request.namespace_id, hashes)
        return m.Ok()

    def record_misses(self, node_id: str, namespace_id: bytes, hashes: Sequence[bytes]) -> None:
        """Do not plan reads of these blocks from this node for a while: one has failed."""
        until = self._clock() + self._nodes.config.suspect_after_s
        self._state.record_misses(node_id, namespace_id, hashes, until)

    def _readable_hosts(self, exclude: Sequence[str] = ()) -> Mapping[str, str]:
        return {
            node.member_id: node.descriptor.host
            for node in self._nodes.readable()
            if node.member_id not in exclude
        }
