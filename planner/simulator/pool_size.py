"""Finds the size of the pool that pays: the hit ratio by capacity, and the bends of that curve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.simulator.setup import CacheFactory
from planner.simulator.workload import Arrival

ENOUGH = 0.95  # of the hits of an unbounded pool, from either tier
NEAR = 0.7  # of them, from DRAM


@dataclass(slots=True, frozen=True)
class Hits:
    """The share of prompt blocks found in a pool of `blocks` blocks."""

    blocks: int
    hit_ratio: float


def curve(arrivals: Sequence[Arrival], make_cache: CacheFactory, points: int = 8) -> list[Hits]:
    """Hit ratios at capacities that double, up to one that holds everything."""
    distinct = len({block for arrival in arrivals for block in arrival.hashes})
    if not distinct:
        return []
    capacities = sorted({max(1, distinct >> shift) for shift in range(points)})
    return [Hits(blocks, _hit_ratio(arrivals, make_cache, blocks)) for blocks in capacities]


def recommended(hits: Sequence[Hits]) -> tuple[int, int]:
    """Blocks for DRAM and for NVMe: 70 % of an unbounded pool's hits from DRAM, 95 % from either."""
    if not hits or not hits[-1].hit_ratio:
        return 0, 0
    most = hits[-1].hit_ratio
    dram = next(h.blocks for h in hits if h.hit_ratio >= NEAR * most)
    both = next(h.blocks for h in hits if h.hit_ratio >= ENOUGH * most)
    return dram, both if both > dram else 0


def _hit_ratio(arrivals: Sequence[Arrival], make_cache: CacheFactory, blocks: int) -> float:
    cache = make_cache(blocks)
    found = total = 0
    for arrival in arrivals:
        for block in arrival.hashes:
            if block not in cache:
                break
            found += 1
        total += len(arrival.hashes)
        cache.use(arrival.hashes)
    return round(found / max(1, total), 4)
