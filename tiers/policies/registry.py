"""The eviction policies by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvpool.errors import ConfigError, did_you_mean
from tiers.policies.arc import Arc
from tiers.policies.base import EvictionPolicy, K, always
from tiers.policies.fifo import Fifo
from tiers.policies.gdsf import Gdsf
from tiers.policies.lfu import Lfu
from tiers.policies.lru import Lru
from tiers.policies.prefix_lru import PrefixLru
from tiers.policies.s3fifo import S3Fifo

DEFAULT = "prefix-lru"
POLICIES: dict[str, type[EvictionPolicy[Any]]] = {
    "prefix-lru": PrefixLru,
    "lru": Lru,
    "lfu": Lfu,
    "fifo": Fifo,
    "s3fifo": S3Fifo,
    "gdsf": Gdsf,
    "arc": Arc,
}


def policy_class(name: str) -> type[EvictionPolicy[Any]]:
    """The policy of that name.

    Raises:
        ConfigError: there is none; the hint names the most similar.
    """
    found = POLICIES.get(name)
    if found is None:
        raise ConfigError(
            f"unknown eviction policy {name!r}",
            hint=did_you_mean(name, POLICIES),
        )
    return found


def create(name: str, may_go: Callable[[K], bool] = always) -> EvictionPolicy[K]:
    """A new policy without blocks.

    Raises:
        ConfigError: no policy has that name.
    """
    return policy_class(name)(may_go)
