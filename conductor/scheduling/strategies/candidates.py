"""Who may serve a request at all, and how a decision is made of what a strategy found: shared by all.

Eligibility (live, of this namespace, long enough, not excluded, as pinned), capacity and early rejection
by objectives are the same whatever the strategy; a strategy only orders what is left. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from conductor.members.membership import State
from conductor.scheduling.decision import Candidate, Decision, PrefixReplication
from conductor.scheduling.estimator import Estimator
from conductor.scheduling.inputs import ScheduleRequest, SchedulingInputs, WorkerStatus

PREFILLS = ("prefill", "both")
DECODES = ("decode", "both")
NO_PLACE = "no_place"  # every decode worker has as many requests as it takes


class Choices:
    """The eligible workers for one request at one moment, with predictions and figures of load.

    Both lists are in order of worker ids.
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
        self._none = ""
        if not self.decoders:
            self._none = NO_PLACE if fit else "prompt_too_long" if able else "no_decode_worker"

    @property
    def refusal(self) -> Decision | None:
        """The answer when nobody may decode this request, whatever the strategy."""
        if not self._none:
            return None
        is_for_good = self._none == "prompt_too_long"
        return refuse(
            self.request, self._none, 0.0 if is_for_good else self.inputs.config.retry_after_s
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
        """So little is left to compute that it is not worth sending elsewhere."""
        reused = candidate.reuse_blocks * self.request.block_tokens
        rest = self.request.prompt_tokens - reused
        return not candidate.rejected and rest < self.inputs.config.min_remote_prefill_tokens

    def when_nothing_is_remote(self) -> list[Candidate]:
        """Local candidates for a forced remote prefill that has nothing to compute or nobody to do it."""
        if self.request.mode != "disaggregated" or self.request.pin_prefill is not None:
            return []
        return [self.estimate.local(worker) for worker in self.decoders]

    # ------------------------------------------------------------ load and locality

    def outstanding(self, worker: WorkerStatus) -> int:
        """Requests that the worker has in work or waiting: by its report, or ours if that is behind."""
        return max(worker.load.running, self.inputs.in_flight.outstanding(worker.worker_id))

    def rested(self, worker: WorkerStatus) -> tuple[int, str]:
        """Breaks ties: who was given something longest ago, then the smaller id."""
        return self.inputs.in_flight.last_assigned(worker.worker_id), worker.worker_id

    def near_blocks(self, worker: WorkerStatus) -> int:
        """Of those, the ones that stand in its engine or on a node of its host."""
        own = min(self.request.engine_blocks.get(worker.worker_id, 0), self.request.full_blocks)
        near = own
        for segment in self.request.segments_at(worker.host):
            node = self.inputs.nodes.get(segment.node_id)
            if node is not None and node.host == worker.host and self._is_readable(node.node_id):
                end = min(segment.start + segment.count, self.request.full_blocks)
                near += max(0, end - max(own, segment.start))
        return near

    def _has_place(self, worker: WorkerStatus) -> bool:
        """It would not refuse one more, as far as we know: what others sent it, its report has too late."""
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
        """Serve as the first of `found` says, or refuse for the reason for which it was rejected.

        Args:
            found: best first; none: there is no way at all to prefill.
            reason: why this one, unless the request left no choice.
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
    """A refusal. Predicted times are those of the best candidate there was; 0 when there was none."""
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
    """Workers that may be given this request, in order of their ids."""
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
