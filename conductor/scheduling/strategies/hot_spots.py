"""When a prefix should be copied toward the worker that has time for it: Mooncake's hot-spot migration.

Mooncake's Algorithm 1 moves the best-matching prefix to the chosen instance when what stands there is
shorter by more than a balancing threshold. Here the request itself reads the blocks from where they
stand; the copy is for those that follow. Pure: it proposes, the gateway decides how much of it is done.
"""

from __future__ import annotations

from conductor.members.membership import State
from conductor.scheduling.decision import Candidate, PrefixReplication
from conductor.scheduling.inputs import NodeStatus
from conductor.scheduling.strategies.candidates import Choices

MAX_RUNS = 4  # of one chain, each with a source of its own


def prefix_replications(choices: Choices, best: Candidate) -> tuple[PrefixReplication, ...]:
    """Copies toward the host of the worker that `best` prefills on; none when they would not pay.

    They pay when the pool has more than `balancing_threshold` times what stands near that worker, reuse
    was chosen in spite of the distance, and fetching is predicted to take less than the queue that is
    avoided at the workers near the prefix.
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
    """The blocks before `end` that stand on other hosts, as far as a node on `host` has room for them."""
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
