"""Base of the strategies that order workers by a rule of their own and not by predicted time.

The rule orders prefill workers and decode workers. The first pair that capacity and objectives
allow is taken. Predictions serve only admission and the record.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Literal

from conductor.scheduling.decision import Candidate, Decision
from conductor.scheduling.inputs import ScheduleRequest, SchedulingInputs, WorkerStatus
from conductor.scheduling.strategies.candidates import Choices

Stage = Literal["prefill", "decode", "whole"]  # whole: prefill and decode on one worker

MAX_TRIED = 256  # pairs predicted before a request is refused
SHOWN = 8  # candidates always predicted, so that `kvpool explain` can show alternatives


class Ranked(ABC):
    """A strategy that only orders workers.

    A request is prefilled remotely if there are workers for prefill only and the rest to compute is
    not short. Otherwise one worker does all of it. If no pair of one kind is allowed, the other
    kind is tried, unless the request forbids it.
    """

    @abstractmethod
    def order(
        self, choices: Choices, workers: Sequence[WorkerStatus], stage: Stage
    ) -> list[WorkerStatus]:
        """The workers, best first. Equal inputs must give equal orders."""

    def decide(self, request: ScheduleRequest, inputs: SchedulingInputs, now: float) -> Decision:
        choices = Choices(request, inputs, now)
        if choices.refusal is not None:
            return choices.refusal
        rejected: list[Candidate] = []
        allowed: list[Candidate] = []
        for candidate in islice(self._in_order(choices), MAX_TRIED):
            (rejected if candidate.rejected else allowed).append(candidate)
            if allowed and len(allowed) + len(rejected) >= SHOWN:
                break
        if not allowed:
            rejected.sort(key=choices.estimate.rank)
        reason = "rule"
        if allowed and allowed[0].mode == "local" and choices.is_short(allowed[0]):
            reason = "short"
        return choices.settle([*allowed, *rejected], reason)

    def _in_order(self, choices: Choices) -> Iterator[Candidate]:
        """Every candidate in order of preference.

        Each is predicted only when the caller asks for it.
        """
        whole: list[WorkerStatus] = []
        if choices.may_be_local:
            whole = self.order(choices, choices.decoders, "whole")
        prefers_remote = any(worker.role == "prefill" for worker in choices.prefillers) and not (
            whole and choices.is_short(choices.estimate.local(whole[0]))
        )
        is_any = False
        if not prefers_remote:
            for worker in whole:
                is_any = True
                yield choices.estimate.local(worker)
        if choices.may_be_remote:
            decoders = self.order(choices, choices.decoders, "decode")
            prefillers = self.order(choices, choices.prefillers, "prefill")
            for decoder in decoders:
                for prefiller in prefillers:
                    candidate = choices.estimate.remote(prefiller, decoder)
                    if candidate is not None:
                        is_any = True
                        yield candidate
        if prefers_remote:
            for worker in whole:
                is_any = True
                yield choices.estimate.local(worker)
        if not is_any:
            by_id = {c.decode: c for c in choices.when_nothing_is_remote()}
            if by_id:
                for worker in self.order(choices, choices.decoders, "whole"):
                    yield by_id[worker.worker_id]
