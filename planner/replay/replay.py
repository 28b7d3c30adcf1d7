"""Replays a trace against one policy: how many blocks of each prompt a cache of a given size would have found.

A request finds the leading blocks that are in the cache; then its blocks are added, head first.
Sizes are in blocks. The policies are the node's own (`tiers.policies`), in a `BlockCache`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
import numpy.typing as npt

from kvpool.errors import ConfigError
from planner.replay.compact_trace import CompactTrace
from planner.replay.fast_policies import PLAIN, PlainCache
from planner.replay.guarded_hazard import GuardedCache
from planner.replay.hazard import HazardCache
from planner.replay.policy_cache import BlockCache
from tiers.policies import POLICIES, policy_class

# These need facts about requests that a node's store does not give to its policies.
OF_REQUESTS: dict[str, type[HazardCache] | type[GuardedCache]] = {
    HazardCache.name: HazardCache,
    GuardedCache.name: GuardedCache,
}
REPLAYABLE = (*POLICIES, *OF_REQUESTS)


@dataclass(slots=True, frozen=True)
class TierSize:
    """One level of a cache, the fastest first."""

    name: str
    capacity_blocks: int


@dataclass(slots=True)
class Replay:
    """The result: in total, and the blocks found by each request (`found`)."""

    policy: str
    capacity_blocks: int
    hit_blocks: int = 0
    hit_tokens: int = 0
    blocks: int = 0
    tokens: int = 0
    seconds: float = 0.0
    tier_hits: dict[str, int] = field(default_factory=dict)  # blocks found, by tier
    found: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def hit_ratio(self) -> float:
        """Leading blocks found, divided by all blocks."""
        return self.hit_blocks / self.blocks if self.blocks else 0.0

    @property
    def token_hit_ratio(self) -> float:
        """Tokens of the leading blocks found, divided by all input tokens."""
        return self.hit_tokens / self.tokens if self.tokens else 0.0

    @property
    def ops_per_s(self) -> float:
        """Block uses replayed per second of wall time."""
        return self.blocks / self.seconds if self.seconds > 0 else 0.0


def replay(
    trace: CompactTrace,
    policy: str,
    capacity_blocks: int,
    *,
    is_as_node: bool = False,
    tiers: Sequence[TierSize] = (),
) -> Replay:
    """Replay a trace against one policy.

    Args:
        policy: one of `REPLAYABLE`.
        capacity_blocks: of the cache; with tiers, their sum.
        is_as_node: evict no parent before its child, and no block of a prompt for another block of
            it, as a node does under every policy; False: each policy as in its textbook.
        tiers: levels of the cache, each under the policy. A block that one level evicts falls to
            the next, and a hit there brings it back up.

    Raises:
        ConfigError: no policy has that name, a capacity is not positive, or the policy does not
            support tiers.
    """
    for size in [capacity_blocks, *(tier.capacity_blocks for tier in tiers)]:
        if size < 1:
            raise ConfigError(f"a cache of {size} blocks is too small", hint="give 1 or more")
    is_of_requests = policy in OF_REQUESTS
    if is_of_requests and (tiers or is_as_node):
        raise ConfigError(
            f"{policy} supports neither tiers nor --as-node",
            hint="leave it out, or leave those out",
        )
    is_leaves_only = is_as_node or (not is_of_requests and policy_class(policy).is_leaves_only)
    result = Replay(policy, capacity_blocks)
    started = perf_counter()
    if tiers:
        found = _through_tiers(trace, policy, is_leaves_only, tiers, result.tier_hits)
    elif is_of_requests:
        found = _by_requests(trace, OF_REQUESTS[policy](capacity_blocks, trace.block_tokens))
    elif policy in PLAIN and not is_leaves_only:
        found = _plainly(trace, PLAIN[policy](capacity_blocks))
    else:
        found = _alone(trace, policy, capacity_blocks, is_leaves_only)
    result.found = np.fromiter(found, np.int64, trace.requests)
    result.seconds = perf_counter() - started
    result.blocks = trace.blocks
    result.tokens = int(trace.input_tokens.sum())
    result.hit_blocks = int(result.found.sum())
    result.hit_tokens = int(hit_tokens(trace, result.found).sum())
    return result


def hit_tokens(trace: CompactTrace, found: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Tokens of the leading blocks found, by request. A partly filled tail counts with its own tokens."""
    return np.minimum(found * trace.block_tokens, trace.input_tokens)


@dataclass(slots=True, frozen=True)
class Window:
    """An interval of the trace's time."""

    from_s: float  # since its first request
    blocks: int
    hit_ratio: float
    token_hit_ratio: float


def over_time(trace: CompactTrace, found: npt.NDArray[np.int64], window_s: float) -> list[Window]:
    """Hit ratios by windows of time. Windows without a block are left out."""
    number = ((trace.times_s - trace.times_s[0]) // window_s).astype(np.int64)
    _, first = np.unique(number, return_index=True)
    sums = [
        np.add.reduceat(values, first)
        for values in (trace.lengths, found, trace.input_tokens, hit_tokens(trace, found))
    ]
    return [
        Window(float(number[at] * window_s), int(b), float(h / b), float(ht / max(1, t)))
        for at, b, h, t, ht in zip(first, *sums, strict=True)
        if b
    ]


def _alone(
    trace: CompactTrace, policy: str, capacity_blocks: int, is_leaves_only: bool
) -> Iterator[int]:
    cache: BlockCache[int] = BlockCache(policy, capacity_blocks, is_leaves_only=is_leaves_only)
    use = cache.access_chain if is_leaves_only else cache.touch_chain
    block_tokens = trace.block_tokens
    for chain in trace.chains():
        yield use(chain, 1, block_tokens)


def _plainly(trace: CompactTrace, cache: PlainCache) -> Iterator[int]:
    return map(cache.access, trace.chains())


def _by_requests(trace: CompactTrace, cache: HazardCache | GuardedCache) -> Iterator[int]:
    chains = trace.chains()
    for span in trace.spans():
        facts = zip(span.times_s, span.input_tokens, span.output_tokens, strict=True)
        for time_s, input_tokens, output_tokens in facts:
            yield cache.access(next(chains), time_s, input_tokens, output_tokens)


def _through_tiers(
    trace: CompactTrace,
    policy: str,
    is_leaves_only: bool,
    tiers: Sequence[TierSize],
    hits: dict[str, int],
) -> Iterator[int]:
    caches: list[BlockCache[int]] = []
    for tier in reversed(tiers):
        below = caches[0].insert if caches else None
        cache: BlockCache[int] = BlockCache(
            policy, tier.capacity_blocks, is_leaves_only=is_leaves_only, on_evicted=below
        )
        caches.insert(0, cache)
    for tier in tiers:
        hits[tier.name] = 0
    names = [tier.name for tier in tiers]
    top, lower = caches[0], caches[1:]
    for chain in trace.chains():
        found = 0
        for ident in chain:
            at = next((i for i, cache in enumerate(caches) if ident in cache), None)
            if at is None:
                break
            hits[names[at]] += 1
            found += 1
        for cache in lower:
            for ident in chain:
                cache.remove(ident)
        if is_leaves_only:
            top.access_chain(chain, 1, trace.block_tokens)
        else:
            top.touch_chain(chain, 1, trace.block_tokens)
        yield found
