"""Which node a client writes blocks to, and which nodes hold replicas.

Pure: callers pass ages and sizes.

Weighted rendezvous hashing: each node draws a number from the key and its own id, scaled by its
weight. While weights stay the same, equal keys go to the same node, so two writers of one prompt
meet there. Over many keys a node gets the share of its weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import xxhash

from kvpool.wire.messages import NodeInfo

# A younger node gets only a growing share of its weight: being empty, it would otherwise draw every
# write.
RAMP_S = 60.0
MIN_RAMP = 0.02  # of its full weight, from its first second
EVICTABLE_SHARE = 0.2  # of a node's size: counts as free, because a full node can evict
_SCALE = float(1 << 52)


def weight(node: NodeInfo) -> float:
    """How large a share of the writes a node should get: the bytes that it can take."""
    available = node.free_bytes + EVICTABLE_SHARE * node.capacity_bytes
    ramp = min(1.0, max(MIN_RAMP, node.age_s / RAMP_S))
    return max(1.0, available) * ramp


def rank_nodes(nodes: Sequence[NodeInfo], key: bytes) -> list[NodeInfo]:
    """Live nodes, the best for `key` first. Equal arguments give equal results.

    Args:
        key: names what is placed, e.g. the first block's hash.
    """
    live = [node for node in nodes if node.state == "live"]
    return sorted(live, key=lambda n: (-_score(n, key), n.descriptor.node_id))


def nodes_for_tenant(nodes: Sequence[NodeInfo], tenant: str) -> list[NodeInfo]:
    """The nodes that may hold a tenant's blocks: its own if it has any, else the shared ones."""
    own = [node for node in nodes if tenant and node.descriptor.tenant == tenant]
    return own or [node for node in nodes if not node.descriptor.tenant]


def choose_nodes(nodes: Sequence[NodeInfo], key: bytes, *, prefer_host: str = "") -> list[NodeInfo]:
    """Live nodes in the order to try them for a write: those on `prefer_host` first."""
    ranked = rank_nodes(nodes, key)
    return sorted(ranked, key=lambda node: node.descriptor.host != prefer_host)


def replica_targets(nodes: Sequence[NodeInfo], key: bytes, *, holder_id: str) -> list[NodeInfo]:
    """Live nodes in the order to try them for replicas: those on hosts without a copy first.

    Args:
        holder_id: the node that already holds the blocks.
    """
    hosts = {n.descriptor.host for n in nodes if n.descriptor.node_id == holder_id}
    first: list[NodeInfo] = []
    second: list[NodeInfo] = []
    for node in rank_nodes(nodes, key):
        if node.descriptor.node_id == holder_id:
            continue
        side = second if node.descriptor.host in hosts else first
        hosts.add(node.descriptor.host)
        side.append(node)
    return first + second


def _score(node: NodeInfo, key: bytes) -> float:
    """Rendezvous score.

    Among the scores from one key, a node's is the largest with P = its share of weight.
    """
    drawn = xxhash.xxh3_64_intdigest(key + b"\0" + node.descriptor.node_id.encode())
    return weight(node) / -math.log(((drawn >> 12) + 0.5) / _SCALE)
