"""What all strategies share: which workers are eligible, and how candidates become a decision.

Eligibility (live, right namespace, long enough context, not excluded, as pinned), capacity and
early rejection by objectives are the same under every strategy. A strategy only orders the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

from conductor.members.membership import State
from conductor.scheduling.decision import Candidate, Decision, PrefixReplication
from conductor.scheduling.estimator import Estimator
from conductor.scheduling.inputs import ScheduleRequest, SchedulingInputs, WorkerStatus

PREFILLS = ("prefill", "both")
DECODES = ("decode", "both")
NO_PLACE = "no_place"  # every decode worker runs as many requests as it accepts


class Choices:
    """The workers eligible for one request at one moment, with predictions and loads.

    Both lists are ordered by worker id.
    """

    def __init__(self, request: ScheduleRequest, inputs: SchedulingInputs, now: float) -> None:
        self.request = request
        self.inputs = inputs
        self.estimate = Estimator(request, inputs, now)
        able = _eligible(request, inputs, DECODES, request.pin_decode)
        fit = [w for w in able if _fits(w, request.prompt_tokens + 1)]
        self.decoders = [w for w in fit if self._has_place(w)]
        self.prefillers = [
            worker
            for worker in _eligible(request, inputs, PREFILLS, request.pin_prefill)
            if _fits(worker, request.prompt_tokens)
        ]
        self._no_worker = ""  # why no worker can decode the request
        if not self.decoders:
            self._no_worker = NO_PLACE if fit else "prompt_too_long" if able else "no_decode_worker"

    @property
    def refusal(self) -> Decision | None:
        """The refusal if no worker can decode this request; None otherwise."""
        if not self._no_worker:
            return None
        is_permanent = self._no_worker == "prompt_too_long"
        return refuse(
            self.request, self._no_worker, 0.0 if is_permanent else self.inputs.config.retry_after_s
        )

    @property
    def may_be_local(self) -> bool:
        request = self.request
        is_free = request.pin_prefill in (None, request.pin_decode)
        return request.mode != "disaggregated" and is_free

    @property
    def may_be_remote(self) -> bool:
        return self.request.mode != "local"

    def is_short(self, candidate: Candidate) -> bool:
        """Whether so few tokens are left to compute that a remote prefill does not pay."""
        reused = candidate.reuse_blocks * self.request.block_tokens
        rest = self.request.prompt_tokens - reused
        return not candidate.rejected and rest < self.inputs.config.min_remote_prefill_tokens

    def when_nothing_is_remote(self) -> list[Candidate]:
        """Local candidates for a forced remote prefill without work or without a worker."""
        if self.request.mode != "disaggregated" or self.request.pin_prefill is not None:
            return []
        return [self.estimate.local(worker) for worker in self.decoders]

    # ------------------------------------------------------------ load and locality

    def outstanding(self, worker: WorkerStatus) -> int:
        """Requests that the worker runs or queues: the larger of its report and our own count."""
        return max(worker.load.running, self.inputs.in_flight.outstanding(worker.worker_id))

    def rested(self, worker: WorkerStatus) -> tuple[int, str]:
        """Tie breaker: the worker that got a request longest ago, then the smaller id."""
        return self.inputs.in_flight.last_assigned(worker.worker_id), worker.worker_id

    def near_blocks(self, worker: WorkerStatus) -> int:
        """Leading blocks of the prompt that are in the worker's engine or on a node of its host."""
        own = min(self.request.engine_blocks.get(worker.worker_id, 0), self.request.full_blocks)
        near = own
        for segment in self.request.segments_at(worker.host):
            node = self.inputs.nodes.get(segment.node_id)
            if node is not None and node.host == worker.host and self._is_readable(node.node_id):
                end = min(segment.start + segment.count, self.request.full_blocks)
                near += max(0, end - max(own, segment.start))
        return near

    def _has_place(self, worker: WorkerStatus) -> bool:
        """Whether the worker would accept one more request, by our own count."""
        places = worker.load.places
        return not places or self.inputs.in_flight.outstanding(worker.worker_id) < places

    def _is_readable(self, node_id: str) -> bool:
        node = self.inputs.nodes.get(node_id)
        return node is not None and node.state is not State.SUSPECT

    # ------------------------------------------------------------ the decision

    def settle(
        self,
        found: Sequence[Candidate],
        reason: str,
        replicate: tuple[PrefixReplication, ...] = (),
    ) -> Decision:
        """Serve as the first candidate says, or refuse for the reason for which it was rejected.

        Args:
            found: candidates, best first. Empty if the request cannot be prefilled at all.
            reason: why the first one was chosen, unless the request left no choice.
        """
        request, config = self.request, self.inputs.config
        if not found:
            return refuse(request, "no_prefill_choice", config.retry_after_s)
        best, shown = found[0], tuple(found[: config.max_candidates])
        if best.rejected:
            excess_s = best.ttft_s - request.ttft_s if best.rejected == "ttft_slo" else 0.0
            retry_s = min(config.max_retry_after_s, max(config.retry_after_s, excess_s))
            return refuse(request, best.rejected, retry_s, shown)
        if request.mode:
            reason = "forced" if request.mode == best.mode else "nothing_remote"
        target = None
        if best.mode == "disaggregated":
            new_blocks = request.full_blocks - best.reuse_blocks
            host = self.inputs.workers[best.decode].host
            target = self.estimate.target_node(host, new_blocks)
        return Decision(
            request_id=request.request_id,
            mode=best.mode,
            prefill=best.prefill,
            decode=best.decode,
            reuse_blocks=best.reuse_blocks,
            target_node=target.node_id if target else None,
            ttft_s=best.ttft_s,
            tpot_s=best.tpot_s,
            reason=reason,
            candidates=shown,
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens,
            work_s=best.work_s,
            replicate=replicate,
        )


def refuse(
    request: ScheduleRequest,
    reason: str,
    retry_after_s: float,
    candidates: Sequence[Candidate] = (),
) -> Decision:
    """A refusal. Its predicted times are those of the best candidate, or 0 if there was none."""
    best = candidates[0] if candidates else None
    return Decision(
        request_id=request.request_id,
        mode="refused",
        prefill=None,
        decode=None,
        reuse_blocks=0,
        target_node=None,
        ttft_s=best.ttft_s if best else 0.0,
        tpot_s=best.tpot_s if best else 0.0,
        reason=reason,
        candidates=tuple(candidates),
        retry_after_s=retry_after_s,
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens,
    )


def _eligible(
    request: ScheduleRequest, inputs: SchedulingInputs, roles: tuple[str, ...], pinned: str | None
) -> list[WorkerStatus]:
    """Workers that may get this request, ordered by id."""
    return [
        worker
        for _, worker in sorted(inputs.workers.items())
        if worker.state is State.LIVE
        and worker.role in roles
        and worker.namespace_id == request.namespace_id
        and worker.worker_id not in request.excluded
        and pinned in (None, worker.worker_id)
    ]


def _fits(worker: WorkerStatus, tokens: int) -> bool:
    return worker.max_model_tokens == 0 or worker.max_model_tokens >= tokens
