"""Scheduling strategies: one contract, and a registry by name."""

from conductor.scheduling.strategies.base import Strategy
from conductor.scheduling.strategies.candidates import Choices, refuse
from conductor.scheduling.strategies.registry import (
    DEFAULT,
    register_strategy,
    strategies,
    strategy_named,
)

__all__ = [
    "DEFAULT",
    "Choices",
    "Strategy",
    "refuse",
    "register_strategy",
    "strategies",
    "strategy_named",
]
