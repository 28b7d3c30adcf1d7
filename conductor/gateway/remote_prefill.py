"""Remote prefill: reserve slots near the decode worker, then compute into them elsewhere.

It returns the blocks that the decode worker should read, or raises. The gateway handles the
fallback.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import msgspec
import numpy as np

from conductor.cluster.cluster import Cluster
from conductor.cluster.connections import Connections
from conductor.engine_servers.discovery import is_engine_server
from conductor.gateway.request import GenerationRequest, GenerationResult
from conductor.index.segments import cut, extend
from conductor.members.membership import Member
from conductor.scheduling.decision import Decision
from kvpool.blocks.hash_check import proof_of
from kvpool.blocks.hashing import pack_hashes, token_bytes
from kvpool.client.node.grants import undo_reserve
from kvpool.errors import KvpoolError, Unavailable
from kvpool.wire import messages as m

RESERVE_TIMEOUT_S = 1.0
RESERVATION_MARGIN_S = 15.0
LONGEST_RESERVATION_S = 45.0  # before the margin
STORED_WITHIN_S = 0.5  # longest wait until an engine server's connector commits
STORED_POLL_S = 0.01

Prefiller = Member[m.WorkerDescriptor, m.WorkerLoad]
Node = Member[m.NodeDescriptor, m.NodeStatsReply]


class RemotePrefill:
    """Runs the prefill on the worker that the decision names.

    Args:
        timeout_s: longest wait for a prefill. Half of the request's time is always kept for the
            fallback.
    """

    def __init__(self, cluster: Cluster, connections: Connections, timeout_s: float) -> None:
        self._cluster = cluster
        self._connections = connections
        self._timeout_s = timeout_s

    async def run(
        self,
        request: GenerationRequest,
        decision: Decision,
        decode_host: str,
        result: GenerationResult,
    ) -> tuple[list[m.Segment], m.PrefillReply]:
        """Reserve first, prefill second: without a reservation there is no remote prefill.

        Returns:
            The blocks that the decode worker should read, and the prefill worker's report.

        Raises:
            DeadlineExceeded, Unavailable: the prefill is not done in time; the reservation is
                aborted.
            KvpoolError: the node or the worker failed.
        """
        if decision.target_node is None or decision.prefill is None:
            raise Unavailable("no node can take the blocks")
        prefiller = self._cluster.workers.get(decision.prefill)
        if prefiller is not None and is_engine_server(prefiller.descriptor):
            return await self._by_engine_server(request, prefiller, decode_host, result)
        target = self._cluster.nodes.get(decision.target_node)
        if prefiller is None or target is None:
            raise Unavailable("the prefill worker or the node has left")
        namespace_id = request.namespace.namespace_id
        found = await self._cluster.find(namespace_id, request.hashes)
        reuse = cut(found.segments(prefiller.descriptor.host), decision.reuse_blocks)
        have = sum(segment.count for segment in reuse)
        within_s = min(
            self._timeout_s, request.left_s() / 2, request.transfer_timeout_s or self._timeout_s
        )
        deadline = time.monotonic() + within_s
        asked = time.monotonic()
        grant, existing = await self._reserve(request, prefiller.member_id, target, have, within_s)
        granted = set(np.frombuffer(grant.indices, dtype="<u4").tolist()) if grant else set()
        within_s = max(0.0, deadline - time.monotonic())
        if grant is not None:
            grant = msgspec.structs.replace(grant, age_s=time.monotonic() - asked)
        message = m.Prefill(
            request.request_id,
            namespace_id,
            bytes(token_bytes(request.prompt)),
            pack_hashes(request.hashes),
            reuse,
            self._cluster.live_nodes(request.namespace.tenant),
            grant,
            within_s,
            self._cluster.worthwhile_s(prefiller, request.namespace, len(request.prompt), reuse),
        )
        started = time.monotonic()
        try:
            reply: m.PrefillReply = await self._connections.call_worker(
                prefiller, message, within_s
            )
        except (KvpoolError, asyncio.CancelledError):
            if grant is not None:
                # The worker may still write, so the slots are quarantined (invariant 2).
                abort = m.Abort(grant.reservation.reservation_id, False)
                with contextlib.suppress(KvpoolError):
                    await self._connections.to(target.descriptor.address).send(abort)
            raise
        result.add_prefill(reply)
        result.phases["remote_prefill_time"] = time.monotonic() - started
        covered = dict.fromkeys(existing, target.member_id)
        if reply.committed_blocks:
            covered |= dict.fromkeys(granted, target.member_id)
        # If another request writes part of this chain now, plan only with the blocks before that
        # part.
        near = (await self._cluster.find(namespace_id, request.hashes)).segments(decode_host)
        return extend(cut(near, have) if have else [], covered, len(request.hashes)), reply

    async def _by_engine_server(
        self,
        request: GenerationRequest,
        prefiller: Prefiller,
        decode_host: str,
        result: GenerationResult,
    ) -> tuple[list[m.Segment], m.PrefillReply]:
        """Prefill on an engine server, whose connector reserves, writes and commits.

        Wait for the blocks in the index.
        """
        namespace_id = request.namespace.namespace_id
        within_s = min(
            self._timeout_s, request.left_s() / 2, request.transfer_timeout_s or self._timeout_s
        )
        started = time.monotonic()
        message = m.Prefill(
            request.request_id,
            namespace_id,
            bytes(token_bytes(request.prompt)),
            b"",
            [],
            [],
            None,
            within_s,
        )
        reply: m.PrefillReply = await self._connections.call_worker(prefiller, message, within_s)
        result.add_prefill(reply)
        result.phases["remote_prefill_time"] = time.monotonic() - started
        until = time.monotonic() + STORED_WITHIN_S
        while True:
            found = await self._cluster.find(namespace_id, request.hashes)
            segments = cut(found.segments(decode_host), len(request.hashes))
            if sum(segment.count for segment in segments) == len(request.hashes):
                return segments, reply
            if time.monotonic() >= until:
                self._cluster.counters["engine_servers:not_stored"] += 1
                return segments, reply
            await asyncio.sleep(STORED_POLL_S)

    async def _reserve(
        self, request: GenerationRequest, writer_id: str, node: Node, have: int, within_s: float
    ) -> tuple[m.Grant | None, list[int]]:
        """Reserve slots for the blocks from `have` on; return the grant and the blocks that exist.

        Raises:
            NoRoom, Unavailable, DeadlineExceeded: the node granted no reservation.
        """
        wanted = request.hashes[have:]
        if not wanted:
            return None, []
        message = m.Reserve(
            request.namespace.namespace_id,
            pack_hashes(wanted),
            request.hashes[have - 1] if have else b"",
            0,
            min(within_s, LONGEST_RESERVATION_S) + RESERVATION_MARGIN_S,
            writer_id,
        )
        timeout_s = min(RESERVE_TIMEOUT_S, within_s)
        await self._call(
            node, m.RegisterNamespace(request.namespace, proof_of(request.namespace)), timeout_s
        )
        reply: m.ReserveReply = await self._connections.call_node(
            node, message, timeout_s, undo_reserve
        )
        statuses = reply.statuses
        if m.BlockStatus.NO_ROOM in statuses:
            if reply.reservation_id:
                abort = m.Abort(reply.reservation_id, True)
                await self._connections.to(node.descriptor.address).send(abort)
            raise Unavailable(f"node {node.member_id} has no room for {len(wanted)} blocks")
        granted = [have + i for i, s in enumerate(statuses) if s == m.BlockStatus.GRANTED]
        existing = [have + i for i, s in enumerate(statuses) if s == m.BlockStatus.EXISTS]
        if not granted:
            return None, existing
        return m.Grant(node.descriptor, reply, np.array(granted, dtype="<u4").tobytes()), existing

    async def _call(self, node: Node, message: m.Message, timeout_s: float) -> Any:
        return await self._connections.call_node(node, message, timeout_s)
