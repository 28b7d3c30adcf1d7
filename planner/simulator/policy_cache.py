"""The node's eviction policies, as caches for a simulated cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from planner.replay.policy_cache import BlockCache, CachedBlock
from tiers.policies.registry import policy_class


class PolicyCache:
    """Blocks under one eviction policy. As in a node, a parent is not evicted before its children.

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
        """Use a chain's blocks, and add those that are missing. Returns the blocks evicted for them."""
        self._evicted.clear()
        self._cache.access_chain(chain)
        return list(self._evicted)

    def __contains__(self, block_hash: bytes, /) -> bool:
        return block_hash in self._cache

    def __len__(self) -> int:
        return len(self._cache)


def cache_factory(policy: str) -> Callable[[int], PolicyCache]:
    """A function that makes caches of a given size under a policy.

    Raises:
        ConfigError: no policy has that name.
    """
    policy_class(policy)
    return lambda blocks: PolicyCache(policy, blocks)
