"""Reports this node's blocks to the conductor: join, full report, event batches, heartbeats.

The conductor's index is soft state. After any fault (a lost or restarted conductor, a gap in the
events) the node joins again with a full report, and serves meanwhile. Heartbeats have a connection
of their own, so that a long report does not delay them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest

import structlog

from kvpool.blocks.hash_check import proof_of
from kvpool.blocks.hashing import HASH_BYTES, pack_hashes
from kvpool.blocks.layout import Namespace
from kvpool.blocks.tier import Tier
from kvpool.errors import REFUSALS, KvpoolError, Unavailable
from kvpool.wire import WireClient, split_addresses
from kvpool.wire import messages as m
from kvpool.wire.credentials import NO_CREDENTIALS, Credentials
from tiers.service.identity import NodeIdentity
from tiers.store.blocks import StoreEvent
from tiers.store.store import Store

log = structlog.get_logger(__name__)

FLUSH_S = 0.02
MISSED_PULSES = 2  # unanswered heartbeats after which another conductor is tried
CALL_TIMEOUT_S = 2.0
RETRY_S = 0.5
SLICE_BLOCKS = 65_536
BATCH_RUNS = 2_048  # in one message, which a conductor applies at once: 7 µs a run


class IndexReporter:
    """Keeps one conductor informed: the first that answers, and the next if that one is lost.

    Args:
        stats: sent with every heartbeat.
        conductors: wire addresses, separated by commas.
        is_draining: whether the node is about to stop; reported after each join.
        credentials: shown to the conductors.
    """

    def __init__(
        self,
        identity: NodeIdentity,
        store: Store,
        stats: Callable[[], m.NodeStatsReply],
        conductors: str,
        descriptor: m.NodeDescriptor,
        *,
        is_draining: Callable[[], bool] = lambda: False,
        credentials: Credentials = NO_CREDENTIALS,
    ) -> None:
        self.is_joined = False
        self._identity = identity
        self._store = store
        self._stats = stats
        self._descriptor = descriptor
        self._is_draining = is_draining
        self._credentials = credentials
        self._sequence = 0
        self._lost_before = 0.0
        self._heartbeat_s = 1.0
        self._must_join = asyncio.Event()
        self._is_lost = False
        # Heartbeats have a link of their own.
        self._links = [
            (self._link(address), self._link(address)) for address in split_addresses(conductors)
        ]
        self._at = 0

    async def run(self) -> None:
        """Report until cancelled; then leave the conductor if it answers."""
        pulse = asyncio.create_task(self._pulse())
        failures = 0
        try:
            while True:
                try:
                    await self._join()
                    failures = 0
                    await self._report()
                except KvpoolError as error:
                    if self.is_joined or (isinstance(error, REFUSALS) and not failures):
                        log.warning("conductor lost, serving on", error=str(error))
                    self.is_joined = False
                    failures += 1
                    self._at = (self._at + 1) % len(self._links)
                    if failures % len(self._links) == 0:  # nobody answers
                        await asyncio.sleep(RETRY_S)
        finally:
            pulse.cancel()
            with contextlib.suppress(KvpoolError, asyncio.CancelledError):
                identity = self._identity
                await self._events_link.call(m.NodeLeave(identity.node_id, identity.epoch), 0.5)
            for events_link, pulse_link in self._links:
                await events_link.close()
                await pulse_link.close()

    def _link(self, address: str) -> WireClient:
        identity = self._identity
        return WireClient(
            address,
            identity.node_id,
            kind="node",
            epoch=identity.epoch,
            credentials=self._credentials,
        )

    @property
    def _events_link(self) -> WireClient:
        return self._links[self._at][0]

    async def nodes(self) -> list[m.NodeInfo]:
        """The nodes that the conductor knows. Raises as `WireClient.call`."""
        reply: m.NodesReply = await self._links[self._at][1].call(m.Nodes(), CALL_TIMEOUT_S)
        return reply.nodes

    def announce(self, descriptor: m.NodeDescriptor) -> None:
        """Join again with a new descriptor: the node's addresses or arenas have changed."""
        self._descriptor = descriptor
        self._must_join.set()

    def add_namespace(self, namespace: Namespace) -> None:
        """Report a new namespace before the events of its blocks."""
        self._events_link.send_nowait(m.RegisterNamespace(namespace, proof_of(namespace)))

    async def _join(self) -> None:
        self._must_join.clear()
        self._is_lost = False
        join = m.NodeJoin(self._descriptor, list(self._store.namespaces))
        reply: m.MemberReply = await self._events_link.call(join, CALL_TIMEOUT_S)
        self._heartbeat_s = reply.heartbeat_s
        self._lost_before = self._lost_events()
        # The full report holds all events so far; later ones follow it.
        self._store.take_events()
        slices = [
            m.BlockEvent("stored", namespace_id, packed[i : i + SLICE_BLOCKS * HASH_BYTES], tier)
            for (namespace_id, tier), packed in packed_blocks(self._store).items()
            for i in range(0, len(packed), SLICE_BLOCKS * HASH_BYTES)
        ]
        for event in slices:
            await self._send([event], snapshot=True)
        await self._send([], snapshot=True, snapshot_end=True)
        if self._is_draining():
            identity = self._identity
            draining = m.NodeDraining(identity.node_id, identity.epoch)
            await self._events_link.call(draining, CALL_TIMEOUT_S)
        if not self.is_joined:
            log.info("joined the conductor", conductor=self._events_link.address)
        self.is_joined = True

    async def _report(self) -> None:
        while not self._must_join.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_S):
                    await self._must_join.wait()
            is_cut = len(self._links) > 1 and not self._events_link.is_connected
            if self._is_lost or is_cut:
                raise Unavailable(f"the conductor at {self._events_link.address} is lost")
            events = self._store.take_events()
            if self._lost_events() > self._lost_before:
                self._must_join.set()  # events are lost: send a full report
                return
            if not events:
                continue
            for batch in batches(events):
                await self._send(batch)
                if self._must_join.is_set():
                    return  # the full report holds the rest

    def _lost_events(self) -> float:
        return self._store.counters.get("events_lost", 0.0)

    async def _send(
        self, events: list[m.BlockEvent], *, snapshot: bool = False, snapshot_end: bool = False
    ) -> None:
        identity = self._identity
        self._sequence += 1
        message = m.NodeEvents(
            identity.node_id, identity.epoch, self._sequence, events, snapshot, snapshot_end
        )
        reply: m.MemberReply = await self._events_link.call(message, CALL_TIMEOUT_S)
        if reply.resync and not snapshot:
            self._must_join.set()

    async def _pulse(self) -> None:
        identity = self._identity
        missed = 0
        while True:
            await asyncio.sleep(self._heartbeat_s)
            if not self.is_joined:
                missed = 0
                continue
            at = self._at
            beat = m.NodeHeartbeat(identity.node_id, identity.epoch, self._sequence, self._stats())
            try:
                reply: m.MemberReply = await self._links[at][1].call(beat, self._heartbeat_s)
            except KvpoolError:
                missed += 1
                # With a single conductor there is no other to try.
                if missed >= MISSED_PULSES and len(self._links) > 1 and at == self._at:
                    self._is_lost = True
                    self._must_join.set()
                continue
            missed = 0
            if reply.resync and at == self._at:
                self._must_join.set()


def packed_blocks(store: Store) -> dict[tuple[bytes, Tier], bytes]:
    """The packed hashes of every visible block, by namespace id and tier."""
    hashes: dict[tuple[bytes, Tier], list[bytes]] = {}
    for namespace_id, tier, block_hash in store.inspection.snapshot():
        hashes.setdefault((namespace_id, tier), []).append(block_hash)
    return {key: pack_hashes(found) for key, found in hashes.items()}


def batches(events: Sequence[StoreEvent]) -> Iterator[list[m.BlockEvent]]:
    """The events in order, alike neighbours as runs, in messages of bounded size."""
    batch: list[m.BlockEvent] = []
    run: list[bytes] = []
    blocks = 0
    for event, following in zip_longest(events, events[1:]):
        run.append(event.block_hash)
        blocks += 1
        is_full = blocks >= SLICE_BLOCKS
        if following is None or is_full or not _is_alike(event, following):
            batch.append(m.BlockEvent(event.kind, event.namespace_id, pack_hashes(run), event.tier))
            run = []
        if batch and (following is None or is_full or len(batch) >= BATCH_RUNS):
            yield batch
            batch, blocks = [], 0


def _is_alike(event: StoreEvent, other: StoreEvent) -> bool:
    return (event.kind, event.namespace_id, event.tier) == (
        other.kind,
        other.namespace_id,
        other.tier,
    )
