"""The strategies by name."""

from __future__ import annotations

from conductor.scheduling.strategies.base import Strategy
from conductor.scheduling.strategies.baselines import LeastLoaded, RandomChoice, RoundRobin
from conductor.scheduling.strategies.cache_aware import CacheAware
from conductor.scheduling.strategies.dynamo import Dynamo
from conductor.scheduling.strategies.kv_centric import KvCentric
from conductor.scheduling.strategies.sglang import Sglang
from kvpool.errors import ConfigError, did_you_mean

DEFAULT = "kv-centric"
_STRATEGIES: dict[str, Strategy] = {
    "kv-centric": KvCentric(),
    "cache-aware": CacheAware(),
    "least-loaded": LeastLoaded(),
    "round-robin": RoundRobin(),
    "random": RandomChoice(),
    "dynamo": Dynamo(),
    "sglang": Sglang(),
}


def register_strategy(name: str, strategy: Strategy) -> None:
    """Make a strategy available to `SchedulerConfig.strategy`.

    Raises:
        ConfigError: the name is taken.
    """
    if name in _STRATEGIES:
        raise ConfigError(f"scheduling strategy {name!r} is already registered")
    _STRATEGIES[name] = strategy


def strategies() -> list[str]:
    """Names that `SchedulerConfig.strategy` may have."""
    return sorted(_STRATEGIES)


def strategy_named(name: str) -> Strategy:
    """The strategy of that name.

    Raises:
        ConfigError: no such strategy; the text suggests the nearest name.
    """
    found = _STRATEGIES.get(name)
    if found is None:
        raise ConfigError(
            f"unknown scheduling strategy {name!r}",
            hint=did_you_mean(name, strategies()),
        )
    return found
