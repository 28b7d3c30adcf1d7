"""Takes what members report: joins, heartbeats, block events, and that they stop."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import structlog

from conductor.cluster.members import Nodes, Workers
from conductor.cluster.namespaces import NamespaceRegistry
from conductor.cluster.pool_state import PoolState
from conductor.index.block_history import BlockHistory
from conductor.members.membership import Membership
from conductor.scheduling.cost_model import CostModel
from kvpool.blocks.hash_check import check_proof
from kvpool.errors import StaleEpoch
from kvpool.wire import messages as m

log = structlog.get_logger(__name__)


class NodeReports:
    """Reports of nodes.

    Args:
        history: gets every event, for the reasons of misses.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        nodes: Nodes,
        namespaces: NamespaceRegistry,
        state: PoolState,
        history: BlockHistory,
        counters: Counter[str],
        clock: Callable[[], float],
    ) -> None:
        self._nodes = nodes
        self._namespaces = namespaces
        self._state = state
        self._history = history
        self._counters = counters
        self._clock = clock

    async def join(self, request: m.NodeJoin) -> m.MemberReply:
        """Add a node. Its full report follows, in slices of a snapshot."""
        node = request.descriptor
        for namespace in request.namespaces:
            await self._namespaces.learn(node.node_id, namespace)
        try:
            joined = self._nodes.join(node.node_id, node.epoch, node, self._clock())
        except StaleEpoch:
            return self._reply(resync=True)
        try:
            await self._state.node_joined(node.node_id, node.epoch)
        except StaleEpoch:  # a newer epoch of it reports to another conductor
            _withdraw(self._nodes, node.node_id, node.epoch)
            return self._reply(resync=True)
        log.info(
            "node joined",
            node=node.node_id,
            epoch=node.epoch,
            host=node.host,
            restarted=joined.voided_epoch is not None,
        )
        return self._reply()

    async def events(self, request: m.NodeEvents) -> m.MemberReply:
        """Apply a numbered batch of events, or a slice of the full report."""
        node_id, epoch = request.node_id, request.epoch
        try:
            action = self._nodes.receive_events(
                node_id,
                epoch,
                request.sequence,
                self._clock(),
                snapshot=request.snapshot,
                snapshot_end=request.snapshot_end,
            )
            if action.resync:
                self._counters["event_gaps"] += 1
                return self._reply(resync=True)
            await self._state.take(node_id, epoch, action, request.events)
        except StaleEpoch:
            return self._reply(resync=True)
        if action.apply:
            self._history.record(node_id, request.events)
        return self._reply()

    def heartbeat(self, request: m.NodeHeartbeat) -> m.MemberReply:
        """Record that a node is alive, with its accounting."""
        try:
            resync = self._nodes.heartbeat(
                request.node_id, request.epoch, self._clock(), request.stats, request.sequence
            )
        except StaleEpoch:
            resync = True
        return self._reply(resync=resync or self._state.must_rejoin("node", request.node_id))

    async def leave(self, request: m.NodeLeave) -> m.Ok:
        """Remove a node that stops, and its blocks at once."""
        member = self._nodes.leave(request.node_id, request.epoch)
        if member is not None:
            await self._state.left("node", member)
            log.info("node left", node=request.node_id)
        return m.Ok()

    async def draining(self, request: m.NodeDraining) -> m.Ok:
        """Mark a node that will stop: it gets no new blocks, and is read until it leaves."""
        member = self._nodes.get(request.node_id)
        if member is not None and member.epoch == request.epoch:
            self._nodes.drain(request.node_id)
            log.info("node is draining", node=request.node_id)
        await self._state.node_draining(request.node_id, request.epoch)
        return m.Ok()

    def _reply(self, *, resync: bool = False) -> m.MemberReply:
        return m.MemberReply(resync, self._nodes.config.heartbeat_s)


class WorkerReports:
    """Reports of workers.

    Args:
        cost: learns from their measurements.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        workers: Workers,
        namespaces: NamespaceRegistry,
        state: PoolState,
        cost: CostModel,
        clock: Callable[[], float],
    ) -> None:
        self._workers = workers
        self._namespaces = namespaces
        self._state = state
        self._cost = cost
        self._clock = clock

    async def join(self, request: m.WorkerJoin) -> m.MemberReply:
        """Add a worker and its namespace.

        Raises:
            LayoutMismatch: its model, revision, tenant and salt are known with another layout.
            HashMismatch: the worker's hashes differ from this conductor's.
        """
        worker = request.descriptor
        check_proof(worker.namespace, request.proof)
        await self._namespaces.add(worker.namespace)
        try:
            self._workers.join(worker.worker_id, worker.epoch, worker, self._clock())
        except StaleEpoch:
            return self._reply(resync=True)
        try:
            await self._state.worker_joined(worker.worker_id, worker.epoch)
        except StaleEpoch:  # a newer epoch of it reports to another conductor
            _withdraw(self._workers, worker.worker_id, worker.epoch)
            return self._reply(resync=True)
        log.info("worker joined", worker=worker.worker_id, role=worker.role, host=worker.host)
        return self._reply()

    def heartbeat(self, request: m.WorkerHeartbeat) -> m.MemberReply:
        """Record that a worker is alive, with its load, and learn from its measurements."""
        worker_id, load = request.worker_id, request.load
        try:
            resync = self._workers.heartbeat(worker_id, request.epoch, self._clock(), load)
        except StaleEpoch:
            resync = True
        if load.tpot_s and load.decode_sequences:
            self._cost.observe_tpot(
                worker_id, load.decode_context_tokens, load.decode_sequences, load.tpot_s
            )
        return self._reply(resync=resync or self._state.must_rejoin("worker", worker_id))

    async def leave(self, request: m.WorkerLeave) -> m.Ok:
        """Remove a worker that stops."""
        member = self._workers.leave(request.worker_id, request.epoch)
        if member is not None:
            await self._state.left("worker", member)
            log.info("worker left", worker=request.worker_id)
        return m.Ok()

    def _reply(self, *, resync: bool = False) -> m.MemberReply:
        return m.MemberReply(resync, self._workers.config.heartbeat_s)


def _withdraw(members: Membership[Any, Any], member_id: str, epoch: int) -> None:
    """Remove a member that joined here, although a newer epoch of it reports elsewhere."""
    with contextlib.suppress(StaleEpoch):  # the newer one has joined here meanwhile
        members.leave(member_id, epoch)
