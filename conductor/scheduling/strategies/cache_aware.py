"""`cache-aware`: prefill where most of the prefix is near, regardless of the queue."""

from __future__ import annotations

from collections.abc import Sequence

from conductor.scheduling.inputs import WorkerStatus
from conductor.scheduling.strategies.baselines import load
from conductor.scheduling.strategies.candidates import Choices
from conductor.scheduling.strategies.ranked import Ranked, Stage


class CacheAware(Ranked):
    """Order by the longest prefix near the worker, then by blocks in its engine, then by load.

    Near means in the engine or on a node of its host. Workers that only decode are chosen by load:
    they read blocks that were just written near them.
    """

    def order(
        self, choices: Choices, workers: Sequence[WorkerStatus], stage: Stage
    ) -> list[WorkerStatus]:
        if stage == "decode":
            return sorted(workers, key=lambda worker: load(choices, worker, stage))
        own = choices.request.engine_blocks
        return sorted(
            workers,
            key=lambda worker: (
                -choices.near_blocks(worker),
                -own.get(worker.worker_id, 0),
                load(choices, worker, stage),
            ),
        )
