"""Scheduling strategies: one contract, one file for each, by name."""

from conductor.strategies.base import Strategy
from conductor.strategies.choices import Choices, refuse
from conductor.strategies.registry import (
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
