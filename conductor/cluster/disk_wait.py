"""How long reads from the nodes' disks take, and how long they may take to be worthwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from conductor.cluster.members import Nodes
from conductor.members.membership import Member
from conductor.scheduling.cost_model import CostModel
from kvpool.blocks.layout import Namespace
from kvpool.blocks.tier import Tier
from kvpool.wire import messages as m


def tiers(report: m.NodeStatsReply | None) -> Sequence[m.TierUsage]:
    """The tiers of a node; none before its first report."""
    return report.tiers if report is not None else ()


def wait_s(nodes: Nodes, namespace: Namespace, segments: Sequence[m.Segment]) -> float:
    """Seconds to read the blocks on disks into memory; -1 if a node does not know its rate."""
    slow_bytes: Counter[str] = Counter()
    for segment in segments:
        if segment.tier == Tier.NVME:
            slow = segment.count - segment.ready
            slow_bytes[segment.node_id] += slow * namespace.layout.block_bytes
    longest_s = 0.0
    for node_id, size_bytes in slow_bytes.items():
        node = nodes.get(node_id)
        for tier in tiers(node.report if node else None):
            if tier.tier == Tier.NVME and tier.read_bytes_per_s:
                queued = tier.queued_read_bytes
                longest_s = max(longest_s, (size_bytes + queued) / tier.read_bytes_per_s)
                break
        else:
            return -1.0
    return longest_s


def worthwhile_s(
    cost: CostModel,
    nodes: Nodes,
    worker: Member[m.WorkerDescriptor, Any],
    namespace: Namespace,
    tokens: int,
    segments: Sequence[m.Segment],
) -> float:
    """How long this worker should wait for a disk before computing is faster; 0: unknown."""
    layout = namespace.layout
    link_s = 0.0
    for segment in segments:
        node = nodes.get(segment.node_id)
        link_s += cost.transfer_s(
            segment.count * layout.block_bytes,
            same_host=node is not None and node.descriptor.host == worker.descriptor.host,
        )
    reused = sum(segment.count for segment in segments) * layout.block_tokens
    return cost.worthwhile_s(worker.member_id, tokens, reused, link_s)
