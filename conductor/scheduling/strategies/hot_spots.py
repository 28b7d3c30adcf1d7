"""Proposes copies of hot prefixes toward idle workers: Mooncake's hot-spot migration.

Mooncake's Algorithm 1 moves the best-matching prefix to the chosen instance if that instance's own
prefix is shorter by more than a balancing threshold. Here the request itself reads the blocks from
where they are, and the copy serves later requests. The gateway decides which of the proposed copies
it makes.
"""

from __future__ import annotations

from conductor.members.membership import State
from conductor.scheduling.decision import Candidate, PrefixReplication
from conductor.scheduling.inputs import NodeStatus
from conductor.scheduling.strategies.candidates import Choices

MAX_RUNS = 4  # copies per chain, each from another source


def prefix_replications(choices: Choices, best: Candidate) -> tuple[PrefixReplication, ...]:
    """Copies toward the host of the worker that prefills; none if they would not pay.

    They pay if three conditions hold: the pool has more than `balancing_threshold` times the blocks
    near that worker; the blocks are reused in spite of the distance; and fetching them is predicted
    to take less time than the queue avoided at the workers near the prefix.
    """
    threshold = choices.inputs.config.balancing_threshold
    worker = choices.inputs.workers[best.prefill or best.decode]
    near = choices.near_blocks(worker)
    if threshold <= 0 or best.rejected or best.reuse_blocks <= max(near, 1) * threshold:
        return ()
    rivals = choices.prefillers if best.mode == "disaggregated" else choices.decoders
    queues = [
        choices.estimate.queue_s(rival)
        for rival in rivals
        if rival.host != worker.host and choices.near_blocks(rival) >= best.reuse_blocks / threshold
    ]
    avoided_s = min(queues, default=float("inf")) - choices.estimate.queue_s(worker)
    if best.fetch_s >= avoided_s:
        return ()
    return _runs(choices, worker.host, best.reuse_blocks)


def _runs(choices: Choices, host: str, end: int) -> tuple[PrefixReplication, ...]:
    """The blocks before `end` on other hosts, as far as a node on `host` has space for them."""
    request, nodes = choices.request, choices.inputs.nodes
    here = [n for n in nodes.values() if n.host == host and n.state is State.LIVE]
    target: NodeStatus | None = min(
        here, key=lambda n: (-n.available_bytes, n.node_id), default=None
    )
    if target is None:
        return ()
    room = target.available_bytes // request.block_bytes
    runs: list[PrefixReplication] = []
    for segment in request.segments_at(host):
        count = min(segment.count, end - segment.start)
        source = nodes.get(segment.node_id)
        if count <= 0 or source is None or source.state is State.SUSPECT:
            break
        if source.host == host:
            continue
        if count > room or len(runs) == MAX_RUNS:
            break
        room -= count
        runs.append(PrefixReplication(segment.node_id, target.node_id, segment.start, count))
    return tuple(runs)
