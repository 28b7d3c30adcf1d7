"""`kv-centric`: Mooncake's Algorithm 1 (FAST'25) with its choices made by predicted cost. The default.

For every prefill worker TTFT = queue + fetch of what the pool has and it lacks + prefill of the rest, where
reuse is declined as far as fetching costs more than computing; beside these stands local prefill on each
decode worker. Decode workers are judged by the TPOT predicted for when the prefill ends.
"""

from __future__ import annotations

from conductor.scheduling.decision import Candidate, Decision
from conductor.scheduling.inputs import ScheduleRequest, SchedulingInputs
from conductor.scheduling.strategies.candidates import Choices
from conductor.scheduling.strategies.hot_spots import prefix_replications


class KvCentric:
    """See the module's docstring."""

    def decide(self, request: ScheduleRequest, inputs: SchedulingInputs, now: float) -> Decision:
        choices = Choices(request, inputs, now)
        if choices.refusal is not None:
            return choices.refusal
        found: list[Candidate] = []
        if choices.may_be_local:
            found += [choices.estimate.local(worker) for worker in choices.decoders]
        short = {c.decode for c in found if choices.is_short(c)}
        if choices.may_be_remote and not short:
            found += _remote(choices)
        if not found:
            found = choices.when_nothing_is_remote()
        rank = choices.estimate.rank
        found.sort(key=lambda c: (bool(c.rejected), c.decode not in short, *rank(c)))
        copies = prefix_replications(choices, found[0]) if found else ()
        return choices.settle(found, "short" if short else "cost", copies)


def _remote(choices: Choices) -> list[Candidate]:
    """Prefill elsewhere: every prefill worker with the best decode workers, or with all if need be."""
    ranked = sorted(choices.decoders, key=choices.estimate.decode_rank)
    cut = choices.inputs.config.decode_shortlist
    found: list[Candidate] = []
    for group in (ranked[:cut], ranked[cut:]):
        for decoder in group:
            for prefiller in choices.prefillers:
                candidate = choices.estimate.remote(prefiller, decoder)
                if candidate is not None:
                    found.append(candidate)
        if any(not c.rejected for c in found):
            break
    return found
