"""The calls of a request's lifecycle, carried out over connections: reserve, prefill, decode.

Each returns the event that answers its action, or raises a `KvpoolError`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from conductor.cluster.connections import Connections
from conductor.cluster.members import Members
from conductor.cluster.scheduler_view import SchedulerView
from conductor.engine_servers.discovery import is_engine_server
from conductor.gateway.body_fields import OF_THE_PREFILL
from conductor.gateway.request import GenerationRequest
from conductor.gateway.runner import RequestRun
from conductor.members.membership import Member
from conductor.requests import events as e
from conductor.requests.reports import DecodeReport, PrefillReport
from kvpool.blocks.hash_check import proof_of
from kvpool.blocks.hashing import pack_hashes, token_bytes
from kvpool.client.node.grants import undo_reserve
from kvpool.errors import KvpoolError, Unavailable
from kvpool.wire import messages as m

RESERVE_TIMEOUT_S = 1.0
RESERVATION_MARGIN_S = 15.0
LONGEST_RESERVATION_S = 45.0  # before the margin

Node = Member[m.NodeDescriptor, m.NodeStatsReply]
Worker = Member[m.WorkerDescriptor, m.WorkerLoad]


@dataclass(slots=True, frozen=True)
class HeldGrant:
    """A grant, and when it was asked for: its time runs from there."""

    grant: m.Grant
    asked_at: float

    def aged(self, now: float) -> m.Grant:
        """The grant with its age, as it is sent now."""
        return msgspec.structs.replace(self.grant, age_s=now - self.asked_at)


class WorkerCalls:
    """The calls of all requests to workers and nodes.

    Args:
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        members: Members,
        view: SchedulerView,
        connections: Connections,
        clock: Callable[[], float],
    ) -> None:
        self._nodes = members.nodes
        self._workers = members.workers
        self._view = view
        self._connections = connections
        self._clock = clock

    async def reserve(self, request: GenerationRequest, action: e.Reserve) -> e.Reserved:
        """Reserve slots for the blocks from `action.start` on.

        Raises:
            Unavailable: the node has left or has no room.
            KvpoolError: what the node raised.
        """
        node = self._nodes.get(action.node_id)
        if node is None:
            raise Unavailable(f"node {action.node_id} has left")
        hashes, start = request.hashes, action.start
        asked_at = self._clock()
        message = m.Reserve(
            request.namespace.namespace_id,
            pack_hashes(hashes[start:]),
            hashes[start - 1] if start else b"",
            0,
            min(action.within_s, LONGEST_RESERVATION_S) + RESERVATION_MARGIN_S,
            action.writer_id,
        )
        timeout_s = min(RESERVE_TIMEOUT_S, action.within_s)
        registration = m.RegisterNamespace(request.namespace, proof_of(request.namespace))
        await self._connections.call_node(node, registration, timeout_s)
        reply: m.ReserveReply = await self._connections.call_node(
            node, message, timeout_s, undo_reserve
        )
        statuses = reply.statuses
        if m.BlockStatus.NO_ROOM in statuses:
            if reply.reservation_id:
                await self._send(node, m.Abort(reply.reservation_id, True))
            raise Unavailable(f"node {node.member_id} has no room for {len(hashes) - start} blocks")
        granted = [start + i for i, s in enumerate(statuses) if s == m.BlockStatus.GRANTED]
        existing = [start + i for i, s in enumerate(statuses) if s == m.BlockStatus.EXISTS]
        if not granted:
            return e.Reserved(None, (), existing)
        indices = np.array(granted, dtype="<u4").tobytes()
        held = HeldGrant(m.Grant(node.descriptor, reply, indices), asked_at)
        return e.Reserved(held, granted, existing)

    async def abort(self, action: e.AbortReservation) -> None:
        """Give a reservation back. A node that cannot be reached gives it up by itself."""
        node = self._nodes.get(action.node_id)
        if node is not None:
            held: HeldGrant = action.grant
            reservation_id = held.grant.reservation.reservation_id
            await self._send(node, m.Abort(reservation_id, action.has_stopped))

    async def prefill(self, request: GenerationRequest, action: e.SendPrefill) -> e.Prefilled:
        """Have a worker compute the prompt.

        Raises:
            Unavailable: the worker has left.
            KvpoolError: what the worker raised.
        """
        worker = self._worker(action.worker_id)
        namespace = request.namespace
        held: HeldGrant | None = action.grant
        grant = held.aged(self._clock()) if held is not None else None
        reuse = list(action.reuse)
        message = m.Prefill(
            request.request_id,
            namespace.namespace_id,
            bytes(token_bytes(request.prompt)),
            pack_hashes(request.hashes),
            reuse,
            self._view.live_nodes(namespace.tenant),
            grant,
            action.within_s,
            self._view.worthwhile_s(worker, namespace, len(request.prompt), reuse),
            {name: v for name, v in request.engine_fields.items() if name in OF_THE_PREFILL},
        )
        reply: m.PrefillReply = await self._connections.call_worker(
            worker, message, action.within_s
        )
        return e.Prefilled(PrefillReport(**msgspec.structs.asdict(reply)))

    async def generate(self, run: RequestRun, action: e.SendGenerate) -> e.Decoded:
        """Stream the tokens after the prompt and after those that the client has, into `run`.

        Raises:
            Unavailable: the worker has left.
            KvpoolError: what the worker raised.
        """
        worker = self._worker(action.worker_id)
        request = run.request
        facts, namespace = request.facts, request.namespace
        tokens = request.prompt + run.lifecycle.token_ids
        segments = list(action.segments)
        message = m.Generate(
            request.request_id,
            namespace.namespace_id,
            bytes(token_bytes(tokens)),
            pack_hashes(request.hashes),
            segments,
            self._view.live_nodes(namespace.tenant),
            msgspec.structs.replace(request.sampling, max_tokens=action.max_tokens),
            max(0.0, facts.deadline - self._clock()),
            use_pool=facts.pool == "on",
            local_prefix=facts.pool == "local",
            local_prefix_tokens=request.local_prefix_tokens,
            max_wait_s=self._view.worthwhile_s(worker, namespace, len(tokens), segments),
            engine_fields=dict(request.engine_fields)
            if is_engine_server(worker.descriptor)
            else {},
        )
        reply: m.GenerateReply | None = None

        def take(item: m.GenerateChunk | m.GenerateReply) -> None:
            nonlocal reply
            if isinstance(item, m.GenerateChunk):
                run.feed(e.Tokens(item.token_ids, item, _report(item.so_far)))
            else:
                reply = item

        await self._connections.stream(worker, message, facts.deadline, action.first_within_s, take)
        return e.Decoded(_report(reply))

    def _worker(self, worker_id: str) -> Worker:
        worker = self._workers.get(worker_id)
        if worker is None:
            raise Unavailable(f"worker {worker_id} has left")
        return worker

    async def _send(self, node: Node, message: Any) -> None:
        with contextlib.suppress(KvpoolError):
            await self._connections.to(node.descriptor.address).send(message)


def _report(reply: m.GenerateReply | None) -> DecodeReport | None:
    return DecodeReport(**msgspec.structs.asdict(reply)) if reply is not None else None
