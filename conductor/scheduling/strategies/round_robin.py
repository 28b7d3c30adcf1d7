"""`round-robin`: each in turn, whatever it holds and whatever it has to do."""

from __future__ import annotations

from collections.abc import Sequence

from conductor.scheduling.inputs import WorkerView
from conductor.scheduling.strategies.candidates import Choices
from conductor.scheduling.strategies.ranked import Ranked, Stage


class RoundRobin(Ranked):
    """Whoever was given a request longest ago; those that never were come first, by id."""

    def order(
        self, choices: Choices, workers: Sequence[WorkerView], stage: Stage
    ) -> list[WorkerView]:
        return sorted(workers, key=choices.rested)
