"""Describes a trace: lengths, turns, sessions, and the distances between uses of a block.

A request is the next turn of a session if it begins with all full blocks of the session's last
request. Prompts that only share a shorter prefix are sessions of their own.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.replay.compact_trace import NEVER, CompactTrace

PERCENTILES = (50, 90, 99, 100)
DISTANCES_OF = 4_000_000  # reuse distances are computed for at most the first so many block uses

Summary = dict[str, float]


@dataclass(slots=True, frozen=True)
class TraceStats:
    """Figures of a trace. Distributions have the keys "mean", "p50", "p90", "p99" and "max"."""

    requests: int
    span_s: float
    blocks: int
    unique_blocks: int
    block_tokens: int
    unbounded_hit_ratio: float  # of an unbounded cache
    input_tokens: Summary
    output_tokens: Summary
    chain_blocks: Summary
    sessions: int
    turns: Summary  # by session
    turn_gap_s: Summary  # from one turn of a session to the next
    reuse_gap_s: Summary  # from one use of a block to the next
    reuse_distance_blocks: (
        Summary  # different blocks used in between: the size of LRU that would hit
    )
    uses: int  # block uses in the last distribution


def trace_stats(trace: CompactTrace) -> TraceStats:
    """Describe a trace. Memory: one entry per distinct block, and arrays of `DISTANCES_OF` numbers."""
    turns, gaps, endless, unique = _walk(trace)
    next_uses = trace.next_uses()[:DISTANCES_OF]
    owner = np.repeat(np.arange(trace.requests), trace.lengths)[: len(next_uses)]
    again = np.flatnonzero(next_uses < len(next_uses))
    reuse_gap = trace.times_s[owner[next_uses[again]]] - trace.times_s[owner[again]]
    first, last = trace.span_s
    return TraceStats(
        trace.requests,
        last - first,
        trace.blocks,
        unique,
        trace.block_tokens,
        endless / trace.blocks if trace.blocks else 0.0,
        summary(trace.input_tokens),
        summary(trace.output_tokens),
        summary(trace.lengths),
        len(turns),
        summary(np.array(turns)),
        summary(np.array(gaps)),
        summary(reuse_gap),
        summary(reuse_distances(next_uses)),
        len(next_uses),
    )


def summary(values: npt.NDArray[Any]) -> Summary:
    """Mean, percentiles and maximum; empty if there are no values."""
    if not len(values):
        return {}
    names = ("p50", "p90", "p99", "max")
    percentiles = np.percentile(values, PERCENTILES).tolist()
    return {"mean": float(np.mean(values)), **dict(zip(names, percentiles, strict=True))}


def reuse_distances(next_uses: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """For each use that is not a block's first, the number of distinct blocks used since its last use."""
    count = len(next_uses)
    previous = np.full(count, -1, np.int64)
    again = np.flatnonzero(next_uses < min(count, NEVER))
    previous[next_uses[again]] = again
    # The distinct blocks between p and i are the uses there whose own previous use is not after p.
    # All uses up to p have this property as well, so they are subtracted.
    return (_earlier_not_larger(previous) - previous - 1)[previous >= 0]


def _earlier_not_larger(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """For each position, how many earlier values are not larger: a merge sort by levels that counts."""
    count = len(values)
    found = np.zeros(count, np.int64)
    positions = np.arange(count)
    by_value = np.argsort(values, kind="stable")
    width = 1
    while width < count:
        order = by_value[np.argsort(by_value // (2 * width), kind="stable")]
        is_left = positions[order] // width % 2 == 0
        lefts = np.cumsum(is_left)
        group_start = positions[order] // (2 * width) * 2 * width
        before = np.where(group_start > 0, lefts[group_start - 1], 0)
        found[order] += np.where(is_left, 0, lefts - before)
        width *= 2
    return found


def _walk(trace: CompactTrace) -> tuple[list[int], list[float], int, int]:
    """Turns of each session, gaps between turns, hits of an unbounded cache, and distinct blocks."""
    seen: set[int] = set()
    ends: dict[int, tuple[int, int, float]] = {}  # last full block -> session, blocks, time
    turns: Counter[int] = Counter()
    gaps: list[float] = []
    endless = 0
    chains = trace.chains()
    for number, (chain, tokens) in enumerate(zip(chains, trace.input_tokens, strict=True)):
        found = 0
        for ident in chain:
            if ident not in seen:
                break
            found += 1
        endless += found
        seen.update(chain)
        now = float(trace.times_s[number])
        session = number
        for ident in reversed(chain[:found]):
            if ident in ends:
                session, _, before = ends.pop(ident)
                gaps.append(now - before)
                break
        turns[session] += 1
        full = min(len(chain), int(tokens) // trace.block_tokens)
        if full > 1:  # many sessions share the first block
            ends[chain[full - 1]] = (session, full, now)
    return list(turns.values()), gaps, endless, len(seen)
