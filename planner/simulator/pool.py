"""Pool nodes as caches of blocks, and the real block index, which gets their events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from conductor.index.contract import Found
from conductor.index.memory import MemoryIndex, complete
from kvpool.blocks.hashing import pack_hashes
from kvpool.blocks.records import BlockEvent
from kvpool.blocks.tier import Tier
from planner.simulator.setup import Cache, CacheFactory, NodeSpec

EPOCH = 1


class Pool:
    """Nodes, their blocks, and the index of these blocks.

    Args:
        namespace_id: of the one model that is served.
        make_cache: makes a cache under the nodes' eviction policy.
    """

    def __init__(
        self, nodes: Sequence[NodeSpec], namespace_id: bytes, make_cache: CacheFactory
    ) -> None:
        self.index = MemoryIndex()
        self.nodes = {node.node_id: node for node in nodes}
        self.hosts: Mapping[str, str] = {node.node_id: node.host for node in nodes}
        self.evicted_blocks = 0
        self._namespace_id = namespace_id
        self._tiers: dict[str, list[tuple[Tier, Cache]]] = {}
        for node in nodes:
            tiers = [(Tier.DRAM, make_cache(node.dram_blocks))] if node.dram_blocks else []
            if node.nvme_blocks:
                tiers.append((Tier.NVME, make_cache(node.nvme_blocks)))
            self._tiers[node.node_id] = tiers

    def find(self, hashes: Sequence[bytes]) -> Found:
        """The chain's leading blocks that the pool has, with their holders."""
        if not hashes:
            return Found((), self.hosts)
        return Found(complete(self.index.holders(self._namespace_id, hashes)), self.hosts)

    def store(self, node_id: str, chain: Sequence[bytes]) -> None:
        """Write the chain's blocks to a node. All its tiers take them (write-through)."""
        self._use(node_id, chain)

    def read(self, node_id: str, chain: Sequence[bytes]) -> None:
        """Use the chain's blocks on a node. Blocks on disk come into memory again."""
        self._use(node_id, chain)

    def _use(self, node_id: str, chain: Sequence[bytes]) -> None:
        for tier, cache in self._tiers[node_id]:
            fresh = [block for block in chain if block not in cache]
            gone = cache.use(chain)
            events = []
            if fresh:
                stored = [block for block in fresh if block in cache]
                events.append(self._event("stored", stored, tier))
            if gone:
                self.evicted_blocks += len(gone)
                events.append(self._event("removed", gone, tier))
            if events:
                complete(self.index.apply(node_id, EPOCH, events))
        complete(self.index.reclaim(1_000))

    def _event(self, kind: str, blocks: Sequence[bytes], tier: Tier) -> BlockEvent:
        return BlockEvent(kind, self._namespace_id, pack_hashes(blocks), tier)
