"""The node's eviction policies, as caches for a simulated cluster: the one place where the two meet.

The conductor may not import the node's code; whoever runs a simulation hands it in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from planner.replay.policy_cache import BlockCache, CachedBlock
from tiers.policies.registry import policy_class


class PolicyCache:
    """Blocks under one eviction policy; parents stay while children do, as in a node.

    Raises:
        ConfigError: no policy has that name.
    """

    def __init__(self, policy: str, blocks: int) -> None:
        evicted: list[bytes] = []
        self._evicted = evicted
        base: Any = policy_class(policy)

        class Recorded(base):  # type: ignore[misc]
            def evicted(self, key: CachedBlock[bytes]) -> None:
                evicted.append(key.ident)
                super().evicted(key)

        self._cache: BlockCache[bytes] = BlockCache(
            policy, blocks, is_leaves_only=True, make=Recorded
        )

    def use(self, chain: Sequence[bytes]) -> list[bytes]:
        """Use a chain's blocks, taking in those that are missing; returns what was evicted for them."""
        self._evicted.clear()
        self._cache.access_chain(chain)
        return list(self._evicted)

    def __contains__(self, block_hash: bytes, /) -> bool:
        return block_hash in self._cache

    def __len__(self) -> int:
        return len(self._cache)


def cache_factory(policy: str) -> Callable[[int], PolicyCache]:
    """Makes caches under that policy.

    Raises:
        ConfigError: no policy has that name.
    """
    policy_class(policy)
    return lambda blocks: PolicyCache(policy, blocks)
