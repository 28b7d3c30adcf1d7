"""Predicts TTFT, TPOT and side effects of every way to serve one request.

Strategies choose by these predictions.

TTFT = queue + fetch of the blocks that the pool has and the worker lacks + prefill of the rest. For
a prefill on another worker it also includes the exposed transfer, the decode worker's read, and its
tail. Blocks are not reused if fetching them costs more than computing them (Mooncake's Algorithm 1,
by cost instead of by a threshold). TPOT is predicted for the moment at which the prefill ends.
"""

from __future__ import annotations

from dataclasses import replace

from conductor.members.membership import State
from conductor.scheduling.cost_model import MEASURED, exposed_s
from conductor.scheduling.decision import Candidate
from conductor.scheduling.inputs import NodeStatus, ScheduleRequest, SchedulingInputs, WorkerStatus


class Estimator:
    """Predictions for one request at one moment. Parts that candidates share are computed once."""

    def __init__(self, request: ScheduleRequest, inputs: SchedulingInputs, now: float) -> None:
        self.request = request
        self.inputs = inputs
        self.now = now
        self._queues: dict[str, float] = {}
        self._prefills: dict[tuple[str, int], tuple[int, float, float]] = {}
        self._targets: dict[tuple[str, int], NodeStatus | None] = {}
        # Parts that many candidates share.
        self._transfers: dict[tuple[float, bool], float] = {}
        self._tails: dict[str, float] = {}
        self._fetches: dict[tuple[str, int, int], float] = {}
        self._loads: dict[str, tuple[int, float]] = {}

    # ------------------------------------------------------------ candidates

    def local(self, worker: WorkerStatus) -> Candidate:
        """Prefill and decode on one worker: fetch the blocks that pay, and compute the rest."""
        request = self.request
        queue_s = self.queue_s(worker)
        reuse, fetch_s, prefill_s = self._best_reuse(worker, request.prompt_tokens)
        ttft_s = queue_s + fetch_s + prefill_s
        sequences, tpot_s = self.tpot_s(worker, ttft_s)
        # Sequences end and begin during the prefill; take the mean of its start and its end.
        others = (self.decode_load(worker, queue_s + fetch_s)[0] + sequences - 1) / 2
        candidate = Candidate(
            mode="local",
            prefill=None,
            decode=worker.worker_id,
            reuse_blocks=reuse,
            ttft_s=ttft_s,
            tpot_s=tpot_s,
            queue_s=queue_s,
            fetch_s=fetch_s,
            prefill_s=prefill_s,
            stalls_s=others * prefill_s,
        )
        return self._checked(candidate, worker, True, prefill_s if others else 0.0)

    def remote(self, prefiller: WorkerStatus, decoder: WorkerStatus) -> Candidate | None:
        """Compute full blocks at `prefiller`, the tail at `decoder`.

        None if there is nothing to compute remotely.
        """
        request = self.request
        full_tokens = request.full_blocks * request.block_tokens
        if prefiller.worker_id == decoder.worker_id or full_tokens == 0:
            return None
        queue_s = self.queue_s(prefiller)
        reuse, fetch_s, prefill_s = self._best_reuse(prefiller, full_tokens)
        new_blocks = request.full_blocks - reuse
        if new_blocks == 0:
            return None  # nothing left to compute there
        target = self.target_node(decoder.host, new_blocks)
        target_host = target.host if target else decoder.host
        new_bytes = new_blocks * request.block_bytes
        is_near = prefiller.host == target_host
        # Sends overlap with the prefill. Over a slow link more than the last layer is exposed.
        send_s = max(
            self._transfer_s(new_bytes / request.layers, is_near),
            exposed_s(prefill_s, self._transfer_s(new_bytes, is_near), request.layers),
        )
        arrives_s = queue_s + fetch_s + prefill_s + send_s
        load_s = max(0.0, self.queue_s(decoder) - arrives_s)
        load_s += self._load_fetch_s(decoder, reuse)
        load_s += self._transfer_s(new_bytes, decoder.host == target_host)
        tail_s = self._tail_s(decoder, full_tokens)
        ttft_s = arrives_s + load_s + tail_s
        others = self.decode_load(decoder, ttft_s - tail_s)[0]
        at_prefiller = 0
        if prefiller.role != "prefill":
            at_prefiller = self.decode_load(prefiller, queue_s + fetch_s)[0]
        candidate = Candidate(
            mode="disaggregated",
            prefill=prefiller.worker_id,
            decode=decoder.worker_id,
            reuse_blocks=reuse,
            ttft_s=ttft_s,
            tpot_s=self.tpot_s(decoder, ttft_s)[1],
            queue_s=queue_s,
            fetch_s=fetch_s,
            prefill_s=prefill_s,
            send_s=send_s,
            load_s=load_s,
            tail_s=tail_s,
            stalls_s=others * tail_s + at_prefiller * prefill_s,
        )
        has_space = target is not None and target.available_bytes >= new_bytes
        return self._checked(candidate, decoder, has_space, tail_s if others else 0.0)

    def _checked(
        self, candidate: Candidate, decoder: WorkerStatus, has_space: bool, stall_s: float
    ) -> Candidate:
        """The candidate with the reason, if any, why it may not be chosen.

        The sequences that decode on the worker stand still for `stall_s`. Spread over the tokens of
        a response, this must not raise their TPOT above the objective either; their objective is
        assumed to equal this request's.

        Objectives do not reject an idle worker that was hardly measured. Its predictions come from
        the profile, which may be far off, and only work can correct them.
        """
        request, cost = self.request, self.inputs.cost
        admission = self.inputs.config.admission
        prefills_on = candidate.prefill or candidate.decode
        waits = candidate.queue_s > 0 or self.queue_s(decoder) > 0
        knows_prefill = waits or cost.prefill_samples(prefills_on) >= MEASURED
        has_work = self.inputs.in_flight.outstanding(decoder.worker_id) > 0
        is_idle = decoder.load.decode_sequences == 0 and not has_work
        knows_tpot = not is_idle or cost.tpot_samples(decoder.worker_id) >= MEASURED
        tpot_s = candidate.tpot_s + stall_s / max(1, request.output_tokens)
        after_s = candidate.ttft_s
        if admission == "arrival":
            tpot_s, after_s = self.tpot_s(decoder, 0.0)[1], 0.0
        rejected = ""
        if not has_space:
            rejected = "no_room"
        elif not self._has_kv_room(decoder, after_s):
            rejected = "no_kv_room"
        elif admission == "none":
            pass
        elif knows_prefill and 0 < request.ttft_s < candidate.ttft_s:
            rejected = "ttft_slo"
        elif knows_tpot and 0 < request.tpot_s < tpot_s:
            rejected = "tpot_slo"
        return replace(candidate, rejected=rejected) if rejected else candidate

    # ------------------------------------------------------------ order

    def rank(self, candidate: Candidate) -> tuple[float, int, int, str, str]:
        """Sort key: predicted time to the whole response, and the delay of others.

        Ties go to the longest-rested worker.

        Times within a tenth of a millisecond are equal, because predictions are no better than
        that.
        """
        total_s = candidate.ttft_s + self.request.output_tokens * candidate.tpot_s
        total_s += self.inputs.config.stall_weight * candidate.stalls_s
        last = self.inputs.in_flight.last_assigned
        prefill = candidate.prefill or candidate.decode
        return (
            round(total_s, 4),
            last(candidate.decode),
            last(prefill),
            candidate.decode,
            prefill,
        )

    def decode_rank(self, worker: WorkerStatus) -> tuple[float, int, str]:
        """Sort key of decode workers: predicted TPOT; ties go to the longest-rested worker."""
        tpot_s = self.tpot_s(worker, 0.0)[1]
        rested = self.inputs.in_flight.last_assigned(worker.worker_id)
        return (round(tpot_s, 6), rested, worker.worker_id)

    # ------------------------------------------------------------ parts

    def target_node(self, host: str, blocks: int) -> NodeStatus | None:
        """The node on which to reserve `blocks`: the one with the most space on `host`.

        If that one lacks space, it is the live node with the most space, which may lack space too.
        """
        key = (host, blocks)
        if key not in self._targets:
            live = [node for node in self.inputs.nodes.values() if node.state is State.LIVE]
            needed = blocks * self.request.block_bytes
            self._targets[key] = min(
                live,
                key=lambda n: (
                    n.available_bytes < needed,
                    n.host != host,
                    -n.available_bytes,
                    n.node_id,
                ),
                default=None,
            )
        return self._targets[key]

    def queue_s(self, worker: WorkerStatus) -> float:
        """Seconds of prefill ahead of this request.

        They are the worker's report less the time since, and the requests that we sent. A request
        that we sent before the report may not have arrived by then, hence the maximum of both sums.
        """
        known = self._queues.get(worker.worker_id)
        if known is not None:
            return known
        load, in_flight = worker.load, self.inputs.in_flight
        reported_s = self.inputs.cost.queue_s(
            worker.worker_id, load.queued_prefill_tokens, load.prefill_tokens_per_s
        )
        reported_s = max(0.0, reported_s - max(0.0, self.now - worker.reported_at))
        unreported_s = in_flight.backlog_s(worker.worker_id, self.now, worker.reported_at)
        sent_s = in_flight.backlog_s(worker.worker_id, self.now)
        queue_s = max(reported_s + unreported_s, sent_s)
        self._queues[worker.worker_id] = queue_s
        return queue_s

    def fetch_s(self, worker: WorkerStatus, start: int, end: int) -> float:
        """Time to read blocks [start, end) of the chain from the pool to `worker`."""
        total_s = 0.0
        waited_for: set[str] = set()  # nodes whose disk queue is counted already
        for segment in self.request.segments_at(worker.host):
            count = min(end, segment.start + segment.count) - max(start, segment.start)
            node = self.inputs.nodes.get(segment.node_id)
            if count <= 0 or node is None:
                continue
            size = self.request.block_bytes
            cost = self.inputs.cost
            total_s += cost.transfer_s(count * size, same_host=node.host == worker.host)
            slow = min(end, segment.start + segment.count) - max(
                start, segment.start + segment.ready
            )
            rate = node.read_bytes_per_s.get(segment.tier, 0.0)
            if slow > 0 and cost.tier_s(1.0, segment.tier, rate):
                queued = node.queued_read_bytes if segment.node_id not in waited_for else 0
                waited_for.add(segment.node_id)
                total_s += cost.tier_s(slow * size + queued, segment.tier, rate)
        return total_s

    def _load_fetch_s(self, decoder: WorkerStatus, reuse: int) -> float:
        own = self.request.engine_blocks.get(decoder.worker_id, 0)
        key = (decoder.worker_id, own, reuse)
        known = self._fetches.get(key)
        if known is None:
            known = self._fetches[key] = self.fetch_s(decoder, own, reuse)
        return known

    def _transfer_s(self, size_bytes: float, same_host: bool) -> float:
        key = (size_bytes, same_host)
        known = self._transfers.get(key)
        if known is None:
            known = self.inputs.cost.transfer_s(size_bytes, same_host=same_host)
            self._transfers[key] = known
        return known

    def _tail_s(self, decoder: WorkerStatus, full_tokens: int) -> float:
        """Time to compute the tail.

        The last token is always computed, because its logits are needed.
        """
        known = self._tails.get(decoder.worker_id)
        if known is None:
            tokens = self.request.prompt_tokens
            tail = max(1, tokens - full_tokens)
            known = self.inputs.cost.prefill_s(decoder.worker_id, tail, tokens - tail)
            self._tails[decoder.worker_id] = known
        return known

    def tpot_s(self, worker: WorkerStatus, after_s: float) -> tuple[int, float]:
        """Sequences and TPOT at `worker`, `after_s` from now, with this request among them."""
        sequences, context = self.decode_load(worker, after_s)
        context += self.request.prompt_tokens + self.request.output_tokens / 2
        tpot_s = self.inputs.cost.tpot_s(worker.worker_id, context, sequences + 1)
        return sequences + 1, tpot_s

    def decode_load(self, worker: WorkerStatus, after_s: float) -> tuple[int, float]:
        """Sequences and tokens of KV after `after_s`: others' as reported, ours as predicted."""
        others, others_context = self._of_others(worker)
        in_flight = self.inputs.in_flight
        then, context = in_flight.decoding(worker.worker_id, self.now + after_s, self.now)
        return others + then, others_context + context

    def _of_others(self, worker: WorkerStatus) -> tuple[int, float]:
        """Reported sequences and tokens of KV that this conductor did not send."""
        known = self._loads.get(worker.worker_id)
        if known is None:
            load = worker.load
            ours, context = self.inputs.in_flight.decoding(worker.worker_id, self.now, self.now)
            others = max(0, load.decode_sequences - ours)
            known = (others, max(0.0, load.decode_context_tokens - context) if others else 0.0)
            self._loads[worker.worker_id] = known
        return known

    def _has_kv_room(self, worker: WorkerStatus, after_s: float) -> bool:
        if worker.kv_capacity_tokens == 0:
            return True
        context = self.decode_load(worker, after_s)[1]
        needed = self.request.prompt_tokens + self.request.output_tokens
        return context + needed <= worker.kv_capacity_tokens

    def _best_reuse(self, worker: WorkerStatus, tokens: int) -> tuple[int, float, float]:
        """How many blocks to reuse for the first `tokens`, with the seconds of fetch and prefill.

        Each further block saves more prefill time, and the cost of fetching is linear within a
        segment's part in one tier. So the sum is concave within such a part and lowest at one of
        its ends; only the ends are tried.
        """
        key = (worker.worker_id, tokens)
        known = self._prefills.get(key)
        if known is not None:
            return known
        request, cost = self.request, self.inputs.cost
        most = tokens // request.block_tokens
        if tokens == request.prompt_tokens:
            most = (tokens - 1) // request.block_tokens  # at least one token must be computed
        own = min(most, request.engine_blocks.get(worker.worker_id, 0))
        cuts = {own}
        for segment in request.segments_at(worker.host):
            node = self.inputs.nodes.get(segment.node_id)
            if node is None or node.state is State.SUSPECT:
                # the node fell silent or left since the lookup: later blocks lack their prefix
                break
            cuts.add(min(most, max(own, segment.start + segment.ready)))
            cuts.add(min(most, max(own, segment.start + segment.count)))
        best: tuple[int, float, float] | None = None
        for cut in [max(cuts)] if self.inputs.config.always_reuse else sorted(cuts):
            reused = cut * request.block_tokens
            fetch_s = self.fetch_s(worker, own, cut)
            prefill_s = cost.prefill_s(worker.worker_id, tokens - reused, reused)
            if best is None or fetch_s + prefill_s < best[1] + best[2]:
                best = (cut, fetch_s, prefill_s)
        result = best if best is not None else (0, 0.0, 0.0)
        self._prefills[key] = result
        return result
