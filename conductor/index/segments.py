"""Operations on segments, the runs of a chain that one node holds. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvpool.blocks.records import Segment
from kvpool.blocks.tier import Tier


def cut(segments: Sequence[Segment], limit: int) -> list[Segment]:
    """The segments up to block `limit`."""
    kept = []
    for segment in segments:
        count = min(segment.count, limit - segment.start)
        if count > 0:
            ready = min(segment.ready, count)
            kept.append(Segment(segment.node_id, segment.start, count, segment.tier, ready))
    return kept


def extend(segments: Sequence[Segment], covered: Mapping[int, str], blocks: int) -> list[Segment]:
    """`segments` followed by the covered blocks (index -> node) up to the first gap."""
    out = list(segments)
    at = sum(segment.count for segment in out)
    while at < blocks and at in covered:
        start = at
        while at < blocks and covered.get(at) == covered[start]:
            at += 1
        out.append(Segment(covered[start], start, at - start, Tier.DRAM))
    return out
