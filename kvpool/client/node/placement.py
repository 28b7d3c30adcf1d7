"""Where a client puts blocks: which node, and which others shall hold copies. Pure; age and room are given.

Weighted rendezvous hashing: each node draws a number from the key and its own id, scaled by its weight. Equal
keys go to the same node while weights stay, so that two writers of one prompt meet there; over many keys a node
gets its weight's share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import xxhash

from kvpool.wire.messages import NodeInfo

RAMP_S = (
    60.0  # a node younger than this gets a growing share only: empty, it would draw every write
)
MIN_RAMP = 0.02  # of its full weight, from its first second
EVICTABLE_SHARE = 0.2  # a full node can still make room: this much of its size counts as free
_SCALE = float(1 << 52)


def weight(node: NodeInfo) -> float:
    """How large a share of the writes a node should get, in bytes that it can take."""
    room = node.free_bytes + EVICTABLE_SHARE * node.capacity_bytes
    ramp = min(1.0, max(MIN_RAMP, node.age_s / RAMP_S))
    return max(1.0, room) * ramp


def rank_nodes(nodes: Sequence[NodeInfo], key: bytes) -> list[NodeInfo]:
    """Live nodes, the best for `key` first; the same for equal arguments.

    Args:
        key: what is placed, e.g. the first block's hash.
    """
    live = [node for node in nodes if node.state == "live"]
    return sorted(live, key=lambda n: (-_score(n, key), n.descriptor.node_id))


def open_to(nodes: Sequence[NodeInfo], tenant: str) -> list[NodeInfo]:
    """The nodes that may hold blocks of a tenant: its own where it has any, else those of everybody."""
    own = [node for node in nodes if tenant and node.descriptor.tenant == tenant]
    return own or [node for node in nodes if not node.descriptor.tenant]


def choose_nodes(nodes: Sequence[NodeInfo], key: bytes, *, prefer_host: str = "") -> list[NodeInfo]:
    """Live nodes in the order in which to try them for a write: those on `prefer_host` first."""
    ranked = rank_nodes(nodes, key)
    return sorted(ranked, key=lambda node: node.descriptor.host != prefer_host)


def replica_targets(nodes: Sequence[NodeInfo], key: bytes, *, holder_id: str) -> list[NodeInfo]:
    """Live nodes in the order in which to try them for copies: hosts that hold none yet first.

    Args:
        holder_id: the node that holds the blocks already.
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
    """Rendezvous score: among nodes with scores from one key, the largest wins with P = its weight's share."""
    drawn = xxhash.xxh3_64_intdigest(key + b"\0" + node.descriptor.node_id.encode())
    return weight(node) / -math.log(((drawn >> 12) + 0.5) / _SCALE)
