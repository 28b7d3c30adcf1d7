"""Blocks whose bytes pass through the node's process: inline puts and gets, corruption reports.

gRPC and HTTP clients put and get one block part at a time this way. Other clients move the bytes
themselves, with one-sided operations, and ask the node only for places.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import structlog

from kvpool.blocks.hashing import HASH_BYTES, checksum
from kvpool.blocks.tier import Tier
from kvpool.errors import BlockMiss, InvalidArgument, KvpoolError, NoRoom, WrongByteCount
from kvpool.wire import messages as m
from tiers.memory.arena_set import ArenaSet
from tiers.memory.hbm_arena import DeviceArena
from tiers.store.slab_allocator import Place
from tiers.store.store import Store

log = structlog.get_logger(__name__)

OURSELVES = "\x01node"  # holds the node's own leases; no tenant's name contains this character
RESERVATION_S = 30.0
READ_LEASE_S = 10.0
CHECK_LEASE_S = 5.0

STATUS_NAMES = {
    m.BlockStatus.GRANTED: "stored",
    m.BlockStatus.EXISTS: "exists",
    m.BlockStatus.IN_PROGRESS: "in_progress",
}

Pin = Callable[[m.Pin, str], m.PinReply | Awaitable[m.PinReply]]


class InlineBlocks:
    """Reads, writes and verifies blocks in the memory tiers.

    Args:
        arenas: the memory that the store's DRAM places point into.
        hbm: the memory that the store's HBM places point into; None if the node has none.
        pin: leases blocks for a client, `NodeService.pin`.
        on_commit: called after a block was stored.
        counters: counts corrupt blocks.
    """

    def __init__(
        self,
        store: Store,
        arenas: ArenaSet,
        hbm: DeviceArena | None,
        pin: Pin,
        on_commit: Callable[[], None],
        counters: Counter[str],
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._arenas = arenas
        self._hbm = hbm
        self._pin = pin
        self._on_commit = on_commit
        self._counters = counters
        self._clock = clock

    def put(self, request: m.PutInline, holder: str) -> m.PutInlineReply:
        """Store one block part whose bytes came in the request.

        Raises:
            UnknownNamespace, InvalidArgument: no such part.
            WrongByteCount: the data is not exactly one part of the namespace's layout.
            NoRoom: no slot can be freed now.
        """
        length = self._store.namespaces[request.namespace_id].layout.part_bytes
        if len(request.data) != length:
            raise WrongByteCount(
                f"a block part of this namespace has {length} bytes, got {len(request.data)}"
            )
        granted = self._store.reserve(
            request.namespace_id,
            [request.block_hash],
            request.parent,
            request.part,
            holder,
            RESERVATION_S,
            self._clock(),
        )
        status = granted.statuses[0]
        if status == m.BlockStatus.NO_ROOM:
            raise NoRoom("no slot can be freed now", hint="all blocks are pinned; try again")
        if status == m.BlockStatus.GRANTED:
            try:
                place = granted.places[0]
                target = self._arenas[place.arena_id].view(place.offset, length)
                target[:] = np.frombuffer(request.data, dtype=np.uint8)
                self._store.commit(granted.reservation_id, [checksum(request.data)], self._clock())
            except KvpoolError:
                self._store.reservations.abort(granted.reservation_id, True, self._clock())
                raise
            self._on_commit()
        return m.PutInlineReply(status)

    async def get(self, request: m.GetInline, client_id: str) -> m.GetInlineReply:
        """Bytes of one block part, verified.

        Raises:
            BlockMiss: the block is not here; the text names the reason.
            UnknownNamespace, InvalidArgument: not one hash, or no such part.
        """
        _check_one_hash(request.block_hash)
        pin = m.Pin(
            request.namespace_id, request.block_hash, READ_LEASE_S, [request.part], Tier.HBM
        )
        pinned = self._pin(pin, client_id)
        reply = pinned if isinstance(pinned, m.PinReply) else await pinned
        if not reply.found:
            raise BlockMiss(f"block {request.block_hash.hex()} is not here: {reply.miss_reason}")
        try:
            arena_id, offset = np.frombuffer(reply.places, dtype="<i8")[:2]
            place = Place(int(arena_id), int(offset))
            length = self._store.namespaces[request.namespace_id].layout.part_bytes
            if self._is_in_hbm(place):
                data = (await asyncio.to_thread(self._bytes_at, place, length)).tobytes()
            else:
                data = self._bytes_at(place, length).tobytes()
        finally:
            self._store.leases.release(reply.lease_id)
        expected = int(np.frombuffer(reply.checksums, dtype="<u8")[0])
        if checksum(data) != expected:
            self._drop_corrupt(request.namespace_id, request.block_hash, Tier(reply.tiers[0]))
            raise BlockMiss(f"block {request.block_hash.hex()} failed its checksum and was dropped")
        return m.GetInlineReply(data, expected, Tier(reply.tiers[0]))

    async def verify(self, request: m.ReportCorrupt) -> m.Ok:
        """Check a block in which a reader saw wrong bytes; drop it if they are wrong here too.

        A copy on NVMe alone is not checked: every read from there verifies it.

        Raises:
            UnknownNamespace, InvalidArgument: not one hash.
        """
        _check_one_hash(request.block_hash)
        for tier in (Tier.HBM, Tier.DRAM):
            if tier in self._store.resident_tiers(request.namespace_id, request.block_hash):
                await self._verify(request.namespace_id, request.block_hash, tier)
        return m.Ok()

    async def _verify(self, namespace_id: bytes, block_hash: bytes, tier: Tier) -> None:
        result = self._store.pin(
            namespace_id, [block_hash], OURSELVES, CHECK_LEASE_S, self._clock(), None, tier
        )
        length = self._store.namespaces[namespace_id].layout.part_bytes
        try:
            sums = await asyncio.to_thread(
                lambda: [checksum(self._bytes_at(place, length)) for place in result.places]
            )
            if sums != list(result.checksums):
                self._drop_corrupt(namespace_id, block_hash, tier)
        finally:
            self._store.leases.release(result.lease_id)

    def _drop_corrupt(self, namespace_id: bytes, block_hash: bytes, tier: Tier) -> None:
        self._counters["corrupt_blocks"] += 1
        log.error("dropping a corrupt block", block=block_hash.hex(), tier=tier)
        self._store.drop(namespace_id, block_hash, "checksum", self._clock())

    def _is_in_hbm(self, place: Place) -> bool:
        return self._hbm is not None and place.arena_id == self._hbm.arena_id

    def _bytes_at(self, place: Place, length: int) -> Any:
        """A view of DRAM, or a copy of HBM, which blocks the calling thread."""
        if self._hbm is None or not self._is_in_hbm(place):
            return self._arenas[place.arena_id].view(place.offset, length)
        out = np.empty(length, dtype=np.uint8)
        self._hbm.read_into(place.offset, out)
        return out


def _check_one_hash(block_hash: bytes) -> None:
    if len(block_hash) != HASH_BYTES:
        raise InvalidArgument(f"a block hash has {HASH_BYTES} bytes, got {len(block_hash)}")
