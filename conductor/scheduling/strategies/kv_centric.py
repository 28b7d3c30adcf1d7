"""`kv-centric`, the default: Mooncake's Algorithm 1 (FAST'25) with choices by predicted cost.

For every prefill worker, TTFT = queue + fetch of the blocks that the pool has and the worker lacks
+ prefill of the rest. Blocks are not reused if fetching them costs more than computing them. Local
prefill on each decode worker is compared with these. Decode workers are ranked by the TPOT
predicted for the end of the prefill.
"""

from __future__ import annotations

from conductor.scheduling.decision import Candidate, Decision
from conductor.scheduling.inputs import ScheduleRequest, SchedulingInputs
from conductor.scheduling.strategies.candidates import Choices
from conductor.scheduling.strategies.hot_spots import prefix_replications


class KvCentric:
    """The candidate with the least predicted time to the whole response, remote or local."""

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
    """Remote candidates: every prefill worker with the best decode workers.

    If all of these are rejected, it is every prefill worker with every decode worker.
    """
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
