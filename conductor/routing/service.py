"""Wire handlers for the routing rules, and the load facts that the rules depend on."""

from __future__ import annotations

from dataclasses import replace

from conductor.members.membership import State
from conductor.routing.rules import Facts
from conductor.routing.rules_file import RulesFile
from conductor.scheduling.inputs import SchedulingInputs, WorkerStatus
from kvpool.errors import InvalidArgument
from kvpool.wire import messages as m


class RulesService:
    """Handles the messages about the routing rules."""

    def __init__(self, rules: RulesFile) -> None:
        self.rules = rules

    def change(self, request: m.RulesChange) -> m.RulesReply:
        """Replace the rules, roll back, resume, or only return what is in force.

        Raises:
            ConfigError: the new rules are not valid.
            InvalidArgument: unknown action.
        """
        if request.action == "replace":
            self.rules.replace(request.text)
        elif request.action == "rollback":
            self.rules.rollback()
        elif request.action == "resume":
            self.rules.resume()
        elif request.action:
            raise InvalidArgument(
                f"unknown action {request.action!r}", hint="replace, rollback or resume"
            )
        return m.RulesReply(self.rules.text, self.rules.is_rolled_back, self.rules.error)

    def explain(self, request: m.RulesExplain, inputs: SchedulingInputs) -> m.RulesExplanation:
        """What the rules choose for such a request now. Counts nothing."""
        facts = pool_facts(
            inputs,
            Facts(
                model=request.model,
                tenant=request.tenant,
                endpoint=request.endpoint,
                key=request.key,
                prompt_tokens=request.prompt_tokens,
                found_tokens=request.found_tokens,
                output_tokens=request.output_tokens,
            ),
        )
        choice = self.rules.preview(facts)
        return m.RulesExplanation(
            choice.mode,
            choice.rule,
            choice.reason,
            [m.RulesCheck(c.what, c.value, c.threshold, c.holds) for c in choice.checks],
        )


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
