"""The conductor's connections to workers and nodes, and how long each call may wait."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any, Protocol

from conductor.cluster.members import Members
from conductor.cluster.peer_guard import PeerGuard
from conductor.members.membership import Member, State
from kvpool.wire import WireClient
from kvpool.wire import messages as m
from kvpool.wire.client import Undo
from kvpool.wire.credentials import NO_CREDENTIALS, Credentials


class MemberConnection(Protocol):
    """A connection to a node or worker: a `WireClient`, or an `EngineClient` over HTTP."""

    async def call(self, request: m.Message, timeout_s: float, undo: Undo | None = None) -> Any: ...

    async def send(self, request: m.Message) -> None: ...

    def stream(self, request: m.Generate, timeout_s: float) -> AsyncGenerator[Any, None]: ...

    async def close(self) -> None: ...


class Connections:
    """One pipelined connection per address. A call ends as soon as its member is lost.

    Args:
        conductor_id, epoch: identity of this conductor.
        clock: returns monotonic seconds.
        credentials: presented to workers and nodes.
    """

    def __init__(
        self,
        conductor_id: str,
        epoch: int,
        members: Members,
        guard: PeerGuard,
        clock: Callable[[], float],
        credentials: Credentials = NO_CREDENTIALS,
    ) -> None:
        self._conductor_id = conductor_id
        self._epoch = epoch
        self._nodes = members.nodes
        self._workers = members.workers
        self._guard = guard
        self._clock = clock
        self._credentials = credentials
        self._clients: dict[str, MemberConnection] = {}

    async def close(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            await client.close()

    def add(self, address: str, connection: MemberConnection) -> None:
        """Use this connection for `address`, and own it: `close` closes it."""
        self._clients[address] = connection

    def to(self, address: str) -> MemberConnection:
        """The connection to `address`, opened at the first use."""
        client = self._clients.get(address)
        if client is None:
            client = self._clients[address] = WireClient(
                address,
                self._conductor_id,
                kind="conductor",
                epoch=self._epoch,
                credentials=self._credentials,
            )
        return client

    async def call_node(
        self,
        node: Member[m.NodeDescriptor, Any],
        request: m.Message,
        within_s: float,
        undo: Undo | None = None,
    ) -> Any:
        """Send a request to a node and return the reply.

        Args:
            undo: as of `WireClient.call`.

        Raises:
            DeadlineExceeded: no reply within `within_s`.
            Unavailable: the node is silent, gone or restarted.
        """
        nodes = self._nodes
        async with self._guard.waiting(
            f"node {node.member_id}", lambda: nodes.why_lost(node.member_id, node.epoch), within_s
        ):
            return await self.to(node.descriptor.address).call(request, within_s, undo)

    async def call_worker(
        self, worker: Member[m.WorkerDescriptor, Any], request: m.Message, within_s: float
    ) -> Any:
        """Send a request to a worker and return the reply. Raises as `call_node`."""
        workers = self._workers
        async with self._guard.waiting(
            f"worker {worker.member_id}",
            lambda: workers.why_lost(worker.member_id, worker.epoch),
            within_s,
        ):
            return await self.to(worker.descriptor.address).call(request, within_s)

    async def stream(
        self,
        worker: Member[m.WorkerDescriptor, Any],
        request: m.Generate,
        deadline: float,
        first_within_s: float,
        on_item: Callable[[Any], None],
    ) -> None:
        """Stream a worker's tokens, then its report.

        Tokens are signs of life: while they arrive, missing heartbeats do not matter. A silent
        worker is not given up while no other worker could take over.

        Args:
            deadline: of the whole stream, in monotonic seconds.
            first_within_s: longest wait for the first item.
            on_item: called with each item.

        Raises:
            DeadlineExceeded, Unavailable: as `call_node`.
            KvpoolError: what the worker raised.
        """
        patience_s = self._workers.config.suspect_after_s
        clock = self._clock
        heard_at = float("-inf")

        def why_lost() -> str:
            member = self._workers.get(worker.member_id)
            reason = self._workers.why_lost(worker.member_id, worker.epoch)
            is_speaking = clock() - heard_at < patience_s
            if is_speaking and (member is None or member.epoch == worker.epoch):
                return ""
            if member is not None and member.epoch == worker.epoch and not self.has_other(worker):
                return ""
            return reason

        name = f"worker {worker.member_id}"
        guard = self._guard
        within_s = min(first_within_s, deadline - clock())
        items = self.to(worker.descriptor.address).stream(request, deadline - clock())
        async with contextlib.aclosing(items):
            async with guard.waiting(name, why_lost, within_s):
                item = await anext(items, None)
            if item is None:
                return
            heard_at = clock()
            on_item(item)
            async with guard.waiting(name, why_lost, deadline - clock()):
                async for item in items:
                    heard_at = clock()
                    on_item(item)

    def has_other(self, worker: Member[m.WorkerDescriptor, Any]) -> bool:
        """Whether another live worker could decode this worker's requests."""
        namespace = worker.descriptor.namespace
        return any(
            other.member_id != worker.member_id
            and other.state is State.LIVE
            and other.descriptor.role in ("decode", "both")
            and other.descriptor.namespace == namespace
            for other in self._workers
        )
