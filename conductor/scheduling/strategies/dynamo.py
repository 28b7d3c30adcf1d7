"""`dynamo`: a cost in blocks, after NVIDIA Dynamo's KV router.

    cost = prefill_scale * (blocks to prefill there - credit for blocks found there)
           + blocks in use by decodes

The credit of a block depends on where it is: in the engine, in memory of the host, in memory of
another host, or on a disk. Costs are normalised to [0, 1] over the workers. A temperature above 0
draws the order by softmax of -cost / temperature, seeded by the request. Prefill workers are
ordered by the first term and decode workers by the second, as Dynamo does when it serves
disaggregated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from conductor.members.membership import State
from conductor.scheduling.inputs import WorkerStatus
from conductor.scheduling.strategies.baselines import draw
from conductor.scheduling.strategies.candidates import Choices
from conductor.scheduling.strategies.ranked import Ranked, Stage
from kvpool.blocks.tier import Tier


class Dynamo(Ranked):
    """Workers in ascending order of cost, or drawn by softmax of their costs."""

    def order(
        self, choices: Choices, workers: Sequence[WorkerStatus], stage: Stage
    ) -> list[WorkerStatus]:
        costs = {w.worker_id: round(_cost(choices, w, stage), 6) for w in workers}
        least, most = min(costs.values(), default=0.0), max(costs.values(), default=0.0)
        config, request_id = choices.inputs.config, choices.request.request_id
        temperature = config.dynamo.temperature
        if temperature <= 0 or most <= least:
            return sorted(workers, key=lambda w: (costs[w.worker_id], *choices.rested(w)))

        def drawn(worker: WorkerStatus) -> tuple[float, str]:
            # Gumbel's trick: sorting by cost / temperature + noise draws by softmax without
            # replacement.
            normal = (costs[worker.worker_id] - least) / (most - least)
            noise = math.log(-math.log(draw(config.seed, request_id, stage, worker.worker_id)))
            return normal / temperature + noise, worker.worker_id

        return sorted(workers, key=drawn)


def _cost(choices: Choices, worker: WorkerStatus, stage: Stage) -> float:
    cost = 0.0
    if stage != "decode":
        scale = choices.inputs.config.dynamo.prefill_scale
        cost += scale * (_prefill_blocks(choices, worker) - _credit(choices, worker))
    if stage != "prefill":
        context = choices.estimate.decode_load(worker, 0.0)[1] + choices.request.prompt_tokens
        cost += context / choices.request.block_tokens
    return cost


def _prefill_blocks(choices: Choices, worker: WorkerStatus) -> float:
    """All blocks that the worker has to prefill with this request, reused ones included."""
    queued = max(
        worker.load.queued_prefill_tokens,
        choices.inputs.in_flight.prefill_tokens(worker.worker_id),
    )
    return (queued + choices.request.prompt_tokens) / choices.request.block_tokens


def _credit(choices: Choices, worker: WorkerStatus) -> float:
    request, options = choices.request, choices.inputs.config.dynamo
    own = min(request.engine_blocks.get(worker.worker_id, 0), request.full_blocks)
    credit = options.engine_credit * own
    for segment in request.segments_at(worker.host):
        node = choices.inputs.nodes.get(segment.node_id)
        if node is None or node.state is State.SUSPECT:
            break  # later blocks lack their prefix
        end = min(segment.start + segment.count, request.full_blocks)
        ready = end  # end of the part that is in memory
        if segment.tier == Tier.NVME:
            ready = min(end, segment.start + segment.ready)
        memory = options.host_credit if node.host == worker.host else options.remote_credit
        start = max(own, segment.start)
        credit += memory * max(0, ready - start)
        credit += options.disk_credit * max(0, end - max(start, ready))
    return credit
