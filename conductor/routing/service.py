"""The routing policy over the wire, and the facts about a request and the pool that it is asked with."""

from __future__ import annotations

from dataclasses import replace

from conductor.members.membership import State
from conductor.routing.policy import Facts
from conductor.routing.policy_file import PolicyHolder
from conductor.scheduling.inputs import ClusterView, WorkerView
from kvpool.errors import InvalidArgument
from kvpool.wire import messages as m


class PolicyService:
    """Answers the messages about the policy.

    Args:
        holder: the policy in force.
    """

    def __init__(self, holder: PolicyHolder) -> None:
        self.holder = holder

    def change(self, request: m.PolicyChange) -> m.PolicyReply:
        """Replace, roll back, resume, or only tell what is in force.

        Raises:
            ConfigError: the new policy is not valid. InvalidArgument: no such action.
        """
        if request.action == "replace":
            self.holder.replace(request.text)
        elif request.action == "rollback":
            self.holder.rollback()
        elif request.action == "resume":
            self.holder.resume()
        elif request.action:
            raise InvalidArgument(
                f"unknown action {request.action!r}", hint="replace, rollback or resume"
            )
        return m.PolicyReply(self.holder.text, self.holder.is_rolled_back, self.holder.error)

    def explain(self, request: m.PolicyExplain, view: ClusterView) -> m.PolicyVerdict:
        """What the policy says of such a request now; counts nothing."""
        facts = pool_facts(
            view,
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
        verdict = self.holder.say(facts)
        return m.PolicyVerdict(
            verdict.mode,
            verdict.rule,
            verdict.reason,
            [m.PolicyCheck(c.what, c.value, c.threshold, c.holds) for c in verdict.checks],
        )


def pool_facts(view: ClusterView, facts: Facts) -> Facts:
    """`facts` with what the workers last reported: queues and how full the decode workers are."""
    live = [worker for worker in view.workers.values() if worker.state is State.LIVE]
    prefillers = [worker for worker in live if worker.role in ("prefill", "both")]
    decoders = [worker for worker in live if worker.role in ("decode", "both")]
    waits = [_queue_wait_s(view, worker) for worker in prefillers]
    queues = [worker.load.queued_prefill_tokens for worker in prefillers]
    places = sum(max(worker.load.places, worker.load.running, 1) for worker in decoders)
    taken = sum(worker.load.running for worker in decoders)
    return replace(
        facts,
        queue_wait_s=min(waits, default=0.0),
        queue_tokens=min(queues, default=0),
        decode_pressure=taken / places if places else 0.0,
    )


def _queue_wait_s(view: ClusterView, worker: WorkerView) -> float:
    load = worker.load
    return view.cost.queue_s(
        worker.worker_id, load.queued_prefill_tokens, load.prefill_tokens_per_s
    )
