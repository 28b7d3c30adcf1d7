"""`round-robin`: each in turn, whatever it holds and whatever it has to do."""

from __future__ import annotations

from collections.abc import Sequence

from conductor.strategies.choices import Choices
from conductor.strategies.ranked import Ranked, Stage
from conductor.view import WorkerView


class RoundRobin(Ranked):
    """Whoever was given a request longest ago; those that never were come first, by id."""

    def order(
        self, choices: Choices, workers: Sequence[WorkerView], stage: Stage
    ) -> list[WorkerView]:
        return sorted(workers, key=choices.rested)
