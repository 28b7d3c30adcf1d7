"""`least-loaded`: who has the least to do, whatever it holds."""

from __future__ import annotations

from collections.abc import Sequence

from conductor.scheduling.inputs import WorkerView
from conductor.scheduling.strategies.candidates import Choices
from conductor.scheduling.strategies.ranked import Ranked, Stage


def load(choices: Choices, worker: WorkerView, stage: Stage) -> tuple[float, float, int, str]:
    """Seconds of prefill queued, then requests outstanding; for decode: sequences, then tokens of KV.

    Queues within a tenth of a millisecond are equal. Ties go to whoever has rested longest.
    """
    if stage == "decode":
        sequences, context = choices.estimate.decode_load(worker, 0.0)
        return (sequences, context, *choices.rested(worker))
    queue_s = round(choices.estimate.queue_s(worker), 4)
    return (queue_s, choices.outstanding(worker), *choices.rested(worker))


class LeastLoaded(Ranked):
    """The shortest prefill queue, the fewest decoding sequences."""

    def order(
        self, choices: Choices, workers: Sequence[WorkerView], stage: Stage
    ) -> list[WorkerView]:
        return sorted(workers, key=lambda worker: load(choices, worker, stage))
