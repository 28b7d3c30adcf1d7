"""`sglang`: the shortest queue if queues are out of balance, else the longest prefix match.

It follows the cache-aware routing of SGLang's router: queues are out of balance if max - min
exceeds an absolute bound and max exceeds min times a relative one, over outstanding requests per
worker. SGLang's router guesses matches from past prompts; this strategy uses the pool's index and
the engines' own reports.
"""

from __future__ import annotations

from collections.abc import Sequence

from conductor.scheduling.inputs import WorkerStatus
from conductor.scheduling.strategies.candidates import Choices
from conductor.scheduling.strategies.ranked import Ranked, Stage


class Sglang(Ranked):
    """The shortest queue or the longest match.

    Workers that only decode are chosen by their queues.
    """

    def order(
        self, choices: Choices, workers: Sequence[WorkerStatus], stage: Stage
    ) -> list[WorkerStatus]:
        queues = {worker.worker_id: choices.outstanding(worker) for worker in workers}
        if stage == "decode" or _is_imbalanced(choices, list(queues.values())):
            return sorted(workers, key=lambda w: (queues[w.worker_id], *choices.rested(w)))
        return sorted(
            workers,
            key=lambda w: (
                -choices.near_blocks(w),
                queues[w.worker_id],
                *choices.rested(w),
            ),
        )


def _is_imbalanced(choices: Choices, queues: Sequence[int]) -> bool:
    options = choices.inputs.config.sglang
    longest, shortest = max(queues, default=0), min(queues, default=0)
    return (
        longest - shortest > options.imbalance_requests
        and longest > shortest * options.imbalance_ratio
    )
