"""Hot replication: has nodes copy the hot prefixes that decisions name.

Copies run in the background, a few at a time. No request waits for a copy. A copy that fails is
counted and forgotten.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import structlog

from conductor.cluster.connections import Connections
from conductor.cluster.members import Nodes
from conductor.gateway.request import GenerationRequest
from conductor.scheduling.decision import Decision, PrefixReplication
from conductor.scheduling.hot_blocks import HotBlocks
from kvpool.blocks.hash_check import proof_of
from kvpool.blocks.hashing import pack_hashes
from kvpool.errors import KvpoolError
from kvpool.wire import messages as m

log = structlog.get_logger(__name__)

COPY_TIMEOUT_S = 30.0
REPLY_MARGIN_S = 2.0


class HotReplication:
    """Carries out `Decision.replicate`.

    Args:
        at_once: maximum number of concurrent copies; 0 turns replication off. Further copies are
            declined, because the next request asks again.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        nodes: Nodes,
        connections: Connections,
        counters: Counter[str],
        clock: Callable[[], float],
        at_once: int,
    ) -> None:
        self._nodes = nodes
        self._connections = connections
        self._counters = counters
        self._clock = clock
        self._at_once = at_once
        self._hot = HotBlocks()
        self._tasks: set[asyncio.Task[None]] = set()

    def offer(self, request: GenerationRequest, decision: Decision) -> None:
        """Start the copies of this decision whose blocks are hot."""
        for copy in decision.replicate if self._at_once else ():
            run = request.hashes[copy.start : copy.start + copy.count]
            now = self._clock()
            start, count = self._hot.requested(copy.target, run, now)
            if not count:
                continue
            if len(self._tasks) >= self._at_once:
                self._counters["replications:declined"] += 1
                continue
            self._hot.copying(copy.target, run[start : start + count], now)
            hot = PrefixReplication(copy.source, copy.target, copy.start + start, count)
            task = asyncio.create_task(self._copy(request, hot), name="replication")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancel the copies under way."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _copy(self, request: GenerationRequest, copy: PrefixReplication) -> None:
        counters = self._counters
        source = self._nodes.get(copy.source)
        target = self._nodes.get(copy.target)
        if source is None or target is None:
            counters["replications:failed"] += 1
            return
        message = m.Replicate(
            request.namespace.namespace_id,
            pack_hashes(request.hashes[copy.start : copy.start + copy.count]),
            request.hashes[copy.start - 1] if copy.start else b"",
            source.descriptor,
            COPY_TIMEOUT_S,
        )
        counters["replications:asked"] += 1
        try:
            await self._connections.call_node(
                target,
                m.RegisterNamespace(request.namespace, proof_of(request.namespace)),
                REPLY_MARGIN_S,
            )
            reply: m.ReplicateReply = await self._connections.call_node(
                target, message, COPY_TIMEOUT_S + REPLY_MARGIN_S
            )
        except KvpoolError as error:
            counters["replications:failed"] += 1
            log.warning("a hot prefix was not copied", target=copy.target, error=str(error))
            return
        counters["replicated_blocks"] += reply.stored
        log.info(
            "hot prefix copied",
            source=copy.source,
            target=copy.target,
            blocks=reply.stored,
            of=copy.count,
            reason=reply.reason,
        )
