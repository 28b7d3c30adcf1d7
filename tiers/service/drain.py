"""Empties a node before it stops: refuse new blocks, move the only copies, wait for readers.

The node stays readable while its blocks move, because the other nodes pull them from here. The node
decides what to move; the other nodes decide whether they have room.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from kvpool.blocks.hash_check import proof_of
from kvpool.blocks.hashing import pack_hashes
from kvpool.client.node.placement import nodes_for_tenant, rank_nodes
from kvpool.errors import Draining, InvalidArgument, KvpoolError
from kvpool.wire import FailoverClient, WireClient
from kvpool.wire import messages as m
from kvpool.wire.credentials import NO_CREDENTIALS, Credentials
from tiers.store.store import Store

log = structlog.get_logger(__name__)

CALL_TIMEOUT_S = 2.0
RUN_BLOCKS = 256
LEASE_POLL_S = 0.02
ANNOUNCE_RETRY_S = 0.2
ANNOUNCE_S = 4.0  # then go on: the node announces it again when it joins a conductor


@dataclass(slots=True, frozen=True)
class ChainRun:
    """Consecutive blocks of one chain."""

    parent: bytes
    hashes: tuple[bytes, ...]


def cut_into_runs(parents: Mapping[bytes, bytes]) -> Iterator[ChainRun]:
    """Cut a forest of blocks (hash to parent) into runs, parents before children."""
    children: dict[bytes, list[bytes]] = {}
    for name, parent in parents.items():
        children.setdefault(parent if parent in parents else b"", []).append(name)
    heads = list(reversed(children.get(b"", ())))
    while heads:
        run = [heads.pop()]
        while (following := children.get(run[-1])) is not None:
            heads += following[1:]
            run.append(following[0])
        for start in range(0, len(run), RUN_BLOCKS):
            parent = run[start - 1] if start else parents[run[0]]
            yield ChainRun(parent, tuple(run[start : start + RUN_BLOCKS]))


@dataclass(slots=True)
class _DrainTally:
    moved: int = 0
    elsewhere: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    full: set[str] = field(default_factory=set)  # nodes without room, or that failed


class Drainer:
    """Empties this node once.

    Args:
        describe: this node's descriptor, which the other nodes pull by.
        conductor: wire addresses; None: the node knows no other nodes.
        credentials: shown to conductors and nodes.
    """

    def __init__(
        self,
        store: Store,
        describe: Callable[[], m.NodeDescriptor],
        conductor: str | None,
        credentials: Credentials = NO_CREDENTIALS,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.is_draining = False
        self.refuses_readers = False
        self.drained = asyncio.Event()
        self._store = store
        self._describe = describe
        self._conductor_address = conductor
        self._credentials = credentials
        self._clock = clock
        self._task: asyncio.Task[m.DrainReply] | None = None
        self._clients: dict[str, WireClient] = {}
        self._to_conductor: FailoverClient | None = None

    async def drain_on_stop(
        self, stop: asyncio.Event, drain_s: float | None, ended: asyncio.Event
    ) -> None:
        """Set `ended` when the node was drained or `stop` is set.

        Args:
            drain_s: drain for at most this long on `stop`; None: end at once.
        """
        waiting = [
            asyncio.create_task(stop.wait(), name="stop"),
            asyncio.create_task(self.drained.wait(), name="drained"),
        ]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if drain_s is not None and not self.drained.is_set():
                await self.drain(m.Drain(drain_s))
        finally:
            for task in waiting:
                task.cancel()
            ended.set()

    def refuse_writers(self) -> None:
        """Raises Draining once the node takes no new blocks."""
        if self.is_draining:
            node_id = self._describe().node_id
            raise Draining(f"node {node_id} is about to stop", hint="put to another node")

    async def drain(self, request: m.Drain) -> m.DrainReply:
        """Drain, or wait for the running drain, whose first request decides.

        Raises:
            InvalidArgument: the deadline is not within a day.
        """
        if not 0 < request.deadline_s <= 86_400:
            raise InvalidArgument(f"deadline_s must lie in (0, 86400], got {request.deadline_s}")
        if self._task is None:
            self.is_draining = True
            self._task = asyncio.create_task(self._drain(request), name="drain")
        # Shielded: the drain goes on if the caller leaves.
        return await asyncio.shield(self._task)

    async def _drain(self, request: m.Drain) -> m.DrainReply:
        started = self._clock()
        deadline = started + request.deadline_s
        log.info("draining", drop=request.drop, deadline_s=request.deadline_s)
        tally = _DrainTally()
        try:
            await self.announce(min(deadline, started + ANNOUNCE_S))
            for namespace in self._store.namespaces:
                parents = self._store.inspection.parents(namespace.namespace_id)
                for run in cut_into_runs(parents):
                    await self._empty(namespace.namespace_id, run, request.drop, deadline, tally)
            self.refuses_readers = True
            while self._store.leases and self._clock() < deadline:
                await asyncio.sleep(LEASE_POLL_S)
                self._store.expire(self._clock())
        finally:
            for client in (*self._clients.values(), self._to_conductor):
                if client is not None:
                    await client.close()
            # Set on the next turn of the loop, so that the reply is sent first.
            asyncio.get_running_loop().call_soon(self.drained.set)
        reply = m.DrainReply(
            tally.moved,
            tally.elsewhere,
            dict(tally.lost),
            len(self._store.leases),
            self._clock() - started,
        )
        log.info("drained", moved=reply.moved, elsewhere=reply.elsewhere, lost=reply.lost)
        return reply

    async def announce(self, deadline: float) -> None:
        """Tell the conductor, so that it sends no more requests here."""
        if self._conductor_address is None:
            return
        node = self._describe()
        while self._clock() < deadline:
            try:
                await self._conductor().call(
                    m.NodeDraining(node.node_id, node.epoch), CALL_TIMEOUT_S
                )
            except KvpoolError as error:
                log.warning("cannot tell the conductor of draining", error=str(error))
                await asyncio.sleep(ANNOUNCE_RETRY_S)
                if self._clock() + ANNOUNCE_RETRY_S > deadline:
                    return
                continue
            return

    # ------------------------------------------------------------ moving

    async def _empty(
        self, namespace_id: bytes, run: ChainRun, drop: bool, deadline: float, tally: _DrainTally
    ) -> None:
        copies = await self._copies(namespace_id, run.hashes)
        tally.elsewhere += sum(1 for count in copies if count)
        for parent, hashes in _alone(run, copies):
            if drop:
                tally.lost["dropped"] += len(hashes)
                continue
            await self._move(namespace_id, parent, hashes, deadline, tally)

    async def _move(
        self,
        namespace_id: bytes,
        parent: bytes,
        hashes: Sequence[bytes],
        deadline: float,
        tally: _DrainTally,
    ) -> None:
        """Let other nodes pull a run; when one is full, the next one continues."""
        reason = "no_other_node"
        while hashes:
            left = deadline - self._clock()
            if left <= 0:
                reason = "deadline"
                break
            target = await self._target(hashes[0], tally)
            if target is None:
                break
            request = m.Replicate(namespace_id, pack_hashes(hashes), parent, self._describe(), left)
            try:
                reply = await self._replicate(target, request, left)
            except KvpoolError as error:
                reason = error.code
                tally.full.add(target.node_id)
                log.warning("a node takes no blocks", node=target.node_id, error=str(error))
                continue
            dealt = reply.stored + reply.existing + reply.in_progress
            tally.moved += reply.stored
            tally.elsewhere += reply.existing + reply.in_progress
            if not reply.reason:
                return
            reason = reply.reason
            parent = hashes[dealt - 1] if dealt else parent
            hashes = hashes[dealt:]
            if reason.startswith("source:") or reason == "checksum":  # our copy is at fault
                tally.lost[reason] += 1
                parent, hashes = hashes[0], hashes[1:]
            else:
                tally.full.add(target.node_id)
        tally.lost[reason] += len(hashes)

    async def _replicate(
        self, target: m.NodeDescriptor, request: m.Replicate, timeout_s: float
    ) -> m.ReplicateReply:
        client = self._clients.get(target.node_id)
        if client is None:
            me = self._describe()
            client = WireClient(
                target.address,
                f"drain-{me.epoch}",
                kind="node",
                epoch=me.epoch,
                credentials=self._credentials,
            )
            self._clients[target.node_id] = client
        for namespace in self._store.namespaces:
            if namespace.namespace_id == request.namespace_id:
                await client.call(m.RegisterNamespace(namespace, proof_of(namespace)), timeout_s)
        reply: m.ReplicateReply = await client.call(request, timeout_s + 1.0)
        return reply

    async def _target(self, key: bytes, tally: _DrainTally) -> m.NodeDescriptor | None:
        """The node to move a run to, by the clients' placement; None if no node is left."""
        if self._conductor_address is None:
            return None
        me = self._describe().node_id
        try:
            reply: m.NodesReply = await self._conductor().call(m.Nodes(), CALL_TIMEOUT_S)
        except KvpoolError as error:
            log.warning("cannot ask the conductor for nodes", error=str(error))
            return None
        tenant = self._describe().tenant
        ranked = rank_nodes(nodes_for_tenant(reply.nodes, tenant), key)
        return next(
            (
                info.descriptor
                for info in ranked
                if info.descriptor.node_id != me and info.descriptor.node_id not in tally.full
            ),
            None,
        )

    async def _copies(self, namespace_id: bytes, hashes: Sequence[bytes]) -> bytes:
        """How many other nodes hold each block; zeros if no conductor answers."""
        if self._conductor_address is not None:
            request = m.CountCopies(namespace_id, pack_hashes(hashes), [self._describe().node_id])
            try:
                reply: m.CopyCounts = await self._conductor().call(request, CALL_TIMEOUT_S)
                return reply.copies
            except KvpoolError as error:
                log.warning("cannot ask which nodes hold blocks", error=str(error))
        return bytes(len(hashes))

    def _conductor(self) -> FailoverClient:
        assert self._conductor_address is not None
        if self._to_conductor is None:
            me = self._describe()
            self._to_conductor = FailoverClient(
                self._conductor_address,
                f"drain-{me.epoch}",
                kind="node",
                epoch=me.epoch,
                credentials=self._credentials,
            )
        return self._to_conductor


def _alone(run: ChainRun, copies: bytes) -> Iterator[tuple[bytes, tuple[bytes, ...]]]:
    """The stretches of a run that no other node holds, each with its parent."""
    start: int | None = None
    for i in range(len(run.hashes) + 1):
        is_alone = i < len(run.hashes) and not copies[i]
        if is_alone and start is None:
            start = i
        elif not is_alone and start is not None:
            yield (run.hashes[start - 1] if start else run.parent), run.hashes[start:i]
            start = None
