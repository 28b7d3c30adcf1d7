"""Baselines that ignore what workers hold: `least-loaded`, `round-robin` and `random`."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from conductor.scheduling.inputs import WorkerStatus
from conductor.scheduling.strategies.candidates import Choices
from conductor.scheduling.strategies.ranked import Ranked, Stage


def load(choices: Choices, worker: WorkerStatus, stage: Stage) -> tuple[float, float, int, str]:
    """Sort key by load.

    For prefill: seconds of queued prefill, then outstanding requests. For decode: sequences, then
    tokens of KV.

    Queues within a tenth of a millisecond are equal. Ties go to the longest-rested worker.
    """
    if stage == "decode":
        sequences, context = choices.estimate.decode_load(worker, 0.0)
        return (sequences, context, *choices.rested(worker))
    queue_s = round(choices.estimate.queue_s(worker), 4)
    return (queue_s, choices.outstanding(worker), *choices.rested(worker))


class LeastLoaded(Ranked):
    """The worker with the shortest prefill queue, and the one with the fewest sequences."""

    def order(
        self, choices: Choices, workers: Sequence[WorkerStatus], stage: Stage
    ) -> list[WorkerStatus]:
        return sorted(workers, key=lambda worker: load(choices, worker, stage))


class RoundRobin(Ranked):
    """The worker that got a request longest ago; workers that never got one come first, by id."""

    def order(
        self, choices: Choices, workers: Sequence[WorkerStatus], stage: Stage
    ) -> list[WorkerStatus]:
        return sorted(workers, key=choices.rested)


class RandomChoice(Ranked):
    """A uniformly random worker.

    The seed and the request's id determine it, so that a run can be repeated.
    """

    def order(
        self, choices: Choices, workers: Sequence[WorkerStatus], stage: Stage
    ) -> list[WorkerStatus]:
        seed, request_id = choices.inputs.config.seed, choices.request.request_id
        return sorted(
            workers, key=lambda w: (draw(seed, request_id, stage, w.worker_id), w.worker_id)
        )


def draw(seed: int, *names: str) -> float:
    """A number in (0, 1), uniform over the names, and the same on every machine."""
    text = "\x1f".join((str(seed), *names)).encode("utf-8", "surrogatepass")
    return ((xxhash.xxh3_64_intdigest(text) >> 11) + 0.5) / (1 << 53)
