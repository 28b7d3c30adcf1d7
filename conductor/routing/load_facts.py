"""The load facts that the routing rules depend on. Pure."""

from __future__ import annotations

from dataclasses import replace

from conductor.members.membership import State
from conductor.routing.rules import Facts
from conductor.scheduling.inputs import SchedulingInputs, WorkerStatus


def pool_facts(inputs: SchedulingInputs, facts: Facts) -> Facts:
    """`facts` with the load that the workers last reported."""
    live = [worker for worker in inputs.workers.values() if worker.state is State.LIVE]
    prefillers = [worker for worker in live if worker.role in ("prefill", "both")]
    decoders = [worker for worker in live if worker.role in ("decode", "both")]
    waits = [_queue_wait_s(inputs, worker) for worker in prefillers]
    queues = [worker.load.queued_prefill_tokens for worker in prefillers]
    places = sum(max(worker.load.places, worker.load.running, 1) for worker in decoders)
    taken = sum(worker.load.running for worker in decoders)
    return replace(
        facts,
        queue_wait_s=min(waits, default=0.0),
        queue_tokens=min(queues, default=0),
        decode_pressure=taken / places if places else 0.0,
    )


def _queue_wait_s(inputs: SchedulingInputs, worker: WorkerStatus) -> float:
    load = worker.load
    return inputs.cost.queue_s(
        worker.worker_id, load.queued_prefill_tokens, load.prefill_tokens_per_s
    )
