"""`random`: any worker. The seed and the request's id decide, so that a run can be repeated."""

from __future__ import annotations

from collections.abc import Sequence

from conductor.scheduling.inputs import WorkerView
from conductor.scheduling.strategies.candidates import Choices
from conductor.scheduling.strategies.lots import lot
from conductor.scheduling.strategies.ranked import Ranked, Stage


class RandomChoice(Ranked):
    """Every worker draws a lot for the request; the smallest wins."""

    def order(
        self, choices: Choices, workers: Sequence[WorkerView], stage: Stage
    ) -> list[WorkerView]:
        seed, request_id = choices.state.policy.seed, choices.request.request_id
        return sorted(
            workers, key=lambda w: (lot(seed, request_id, stage, w.worker_id), w.worker_id)
        )
