"""Belady's optimum: the hits of a cache that knows the future, the upper bound for every policy.

It evicts the block whose next use is farthest ahead. The blocks of one prompt are next used
together, head first, so it evicts tails before heads, which suits prefix hits.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from planner.replay.compact_trace import NEVER, CompactTrace


def belady_hits(trace: CompactTrace, capacity_blocks: int) -> list[int]:
    """The leading blocks that each request finds. Its blocks are added afterwards.

    Memory: the cache, and one entry for each use of its blocks that is not cleared away yet.
    """
    next_uses = trace.next_uses()
    resident: dict[int, int] = {}  # id -> position of its next use
    queue: list[tuple[int, int]] = []  # (minus the next use, id); also of uses that are over
    hits: list[int] = []
    for span in trace.spans():
        base = span.first_block
        ids = trace.ids[base : span.ends[-1]].tolist()
        following = next_uses[base : span.ends[-1]].tolist()
        start = 0
        for end in span.ends:
            end -= base
            found = start
            while found < end and ids[found] in resident:
                found += 1
            hits.append(found - start)
            for at in range(start, end):
                ident, use = ids[at], following[at]
                if use == NEVER:  # keeping it gains nothing
                    resident.pop(ident, None)
                    continue
                resident[ident] = use
                heappush(queue, (-use, ident))
                while len(resident) > capacity_blocks:
                    farthest, victim = heappop(queue)
                    if resident.get(victim) == -farthest:
                        del resident[victim]
            start = end
            if len(queue) > 4 * len(resident) + 4096:
                queue = [(-use, ident) for ident, use in resident.items()]
                heapify(queue)
    return hits
