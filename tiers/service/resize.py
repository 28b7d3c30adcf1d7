"""Grows and shrinks a node's DRAM while it serves: arenas are added, or emptied and given back.

Growing adds an arena. It is registered and announced before the store uses it. Shrinking evacuates
whole arenas; if the target lies within an arena, a smaller one replaces it. Evacuation runs in the
background. The store decides when an arena is empty; this module closes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import structlog

from kvpool.blocks.hashing import checksum
from kvpool.blocks.tier import Tier
from kvpool.errors import ChecksumMismatch, InvalidArgument, KvpoolError, NoRoom
from kvpool.transports.shm import MAX_ARENAS
from kvpool.wire import messages as m
from tiers.memory.arena import Arena
from tiers.memory.arena_set import ArenaSet
from tiers.store.blocks import Migration
from tiers.store.slab_allocator import SlabAllocator
from tiers.store.store import Store

log = structlog.get_logger(__name__)

BATCH_BLOCKS = 16  # moved together; their slots are held meanwhile
TICK_S = 0.1  # between two looks at leases and reservations
MiB = 1 << 20


@dataclass(slots=True, frozen=True)
class ResizePlan:
    """How to reach a target."""

    retire: tuple[int, ...]  # ids of the arenas to evacuate
    add_bytes: int  # size of the arena to add; 0: none


def plan_resize(sizes: Mapping[int, int], target_bytes: int, unit_bytes: int) -> ResizePlan:
    """Plan the way from arenas of these sizes to a target.

    Args:
        sizes: bytes of the arenas in use, by id, in the order in which they were added.
        unit_bytes: arenas are multiples of it; the target is rounded down to one.

    Raises:
        InvalidArgument: less than one unit would be left.
    """
    target_bytes -= target_bytes % unit_bytes
    if target_bytes < unit_bytes:
        raise InvalidArgument(
            f"dram of less than one slab of {unit_bytes} bytes", hint="drain the node instead"
        )
    excess = sum(sizes.values()) - target_bytes
    if excess <= 0:
        return ResizePlan((), -excess)
    retire: list[int] = []
    for arena_id in reversed(sizes):  # the last ones added are the emptiest
        if sizes[arena_id] <= excess:
            retire.append(arena_id)
            excess -= sizes[arena_id]
    kept = {arena_id: size for arena_id, size in sizes.items() if arena_id not in retire}
    if not excess:
        return ResizePlan(tuple(retire), 0)
    smallest = min(kept, key=lambda arena_id: kept[arena_id])
    return ResizePlan((*retire, smallest), kept[smallest] - excess)


class Resizer:
    """Changes the size of a node's DRAM tier.

    Args:
        arenas: those in use. Only the resizer changes the set.
        make: makes an arena by id and size. It runs in a thread and may take seconds.
        announce: registers and announces the arenas of the set. Awaited after each change.
        demote: carries out migrations to NVMe. Each future ends after the store has the result.
        may_demote: whether a disk takes writes.
    """

    def __init__(
        self,
        store: Store,
        arenas: ArenaSet,
        make: Callable[[int, int], Arena],
        announce: Callable[[Sequence[Arena]], Awaitable[None]],
        demote: Callable[[Sequence[Migration]], Sequence[asyncio.Future[Any]]],
        may_demote: Callable[[], bool],
        *,
        slab_bytes: int,
        unit_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._arenas = arenas
        self._unit_bytes = unit_bytes
        self._slab_bytes = slab_bytes
        self._make = make
        self._announce = announce
        self._demote = demote
        self._may_demote = may_demote
        self._clock = clock
        self._next_id = max(arenas, default=-1) + 1
        self._resizing: asyncio.Task[m.ResizeDramReply] | None = None
        self._wake = asyncio.Event()
        self._copy_thread = ThreadPoolExecutor(1, thread_name_prefix="kvpool-relocate")

    async def resize(self, request: m.ResizeDram) -> m.ResizeDramReply:
        """Begin to resize DRAM; returns when a new arena can be used.

        Raises:
            InvalidArgument: less than one slab.
            NoRoom: another resize is running, or there are too many arenas.
            NoSharedMemory: the machine does not have that much; nothing was changed.
        """
        if self._resizing is not None and not self._resizing.done():
            raise NoRoom("another resize is running", hint="try again when it has ended")
        # A separate task: it adds the new arena to the set even if the caller leaves.
        self._resizing = asyncio.create_task(self._resize(request), name="resize")
        self._resizing.add_done_callback(_tell_failure)
        return await asyncio.shield(self._resizing)

    async def _resize(self, request: m.ResizeDram) -> m.ResizeDramReply:
        before = sum(self._open().values())
        plan = plan_resize(self._open(), request.target_bytes, self._unit_bytes)
        if plan.add_bytes:
            await self._grow(plan.add_bytes)
        for arena_id in plan.retire:
            self._store.evacuations.begin(arena_id)
        self._wake.set()
        reply = m.ResizeDramReply(before, sum(self._open().values()), self._evacuating_bytes())
        log.info(
            "dram resized",
            mib_before=before // MiB,
            mib_now=reply.capacity_bytes // MiB,
            mib_evacuating=reply.evacuating_bytes // MiB,
        )
        return reply

    async def run(self) -> None:
        """Empty evacuated arenas and give them back, until cancelled.

        Raises:
            StoreCorrupt, or any other defect of the node.
        """
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(
                    TICK_S if self._store.evacuations.bytes_left() else None
                ):
                    await self._wake.wait()
            self._wake.clear()
            if await self._empty_some():
                self._wake.set()
                await asyncio.sleep(0)  # let requests in
            await self._close_empty()

    def close(self) -> None:
        """Wait for the running copy and cancel the others."""
        self._copy_thread.shutdown(wait=True, cancel_futures=True)

    # ------------------------------------------------------------ within

    def _open(self) -> dict[int, int]:
        evacuating = self._store.evacuations.bytes_left()
        return {
            key: arena.size_bytes for key, arena in self._arenas.items() if key not in evacuating
        }

    def _evacuating_bytes(self) -> int:
        return sum(
            self._arenas[arena_id].size_bytes for arena_id in self._store.evacuations.bytes_left()
        )

    async def _grow(self, size_bytes: int) -> None:
        if len(self._arenas) >= MAX_ARENAS:
            raise NoRoom(
                f"the node has {len(self._arenas)} arenas already",
                hint="shrink it first, then grow",
            )
        arena_id, self._next_id = self._next_id, self._next_id + 1
        arena = await asyncio.to_thread(self._make, arena_id, size_bytes)
        self._arenas.add(arena)
        try:
            await self._announce(tuple(self._arenas.values()))
            slots = SlabAllocator(arena.size_bytes, self._slab_bytes, arena_id)
            self._store.add_arena(Tier.DRAM, slots, self._clock())
        except KvpoolError:
            self._arenas.remove(arena_id).close(give_back=True)
            raise

    async def _empty_some(self) -> bool:
        """Move some blocks out of evacuated arenas; returns whether anything changed."""
        before = self._store.evacuations.bytes_left()
        if not before:
            return False
        migrations = self._store.plan_evacuation(
            BATCH_BLOCKS, self._clock(), may_demote=self._may_demote()
        )
        works: list[asyncio.Future[Any]] = [
            self._begin(migration) for migration in migrations if migration.target_tier == Tier.DRAM
        ]
        works += self._demote(
            [migration for migration in migrations if migration.target_tier != Tier.DRAM]
        )
        if works:
            await asyncio.wait(works)
        return bool(migrations) or self._store.evacuations.bytes_left() != before

    def _begin(self, migration: Migration) -> asyncio.Future[None]:
        source, target = (
            self._arenas[migration.source.arena_id],
            self._arenas[migration.target.arena_id],
        )
        work = asyncio.wrap_future(self._copy_thread.submit(_copy, migration, source, target))
        work.add_done_callback(lambda ended: self._settle(migration, ended))
        return work

    def _settle(self, migration: Migration, work: asyncio.Future[None]) -> None:
        now = self._clock()
        error = None if work.cancelled() else work.exception()
        if work.cancelled():
            self._store.cancel_migrations([migration], now)
            return
        self._store.finish_migration(migration.migration_id, error is None, now)
        if error is not None:
            log.error(
                "dropping a corrupt block", block=migration.block_hash.hex(), error=str(error)
            )
            self._store.drop(migration.namespace_id, migration.block_hash, "checksum", now)

    async def _close_empty(self) -> None:
        gone = [self._arenas.remove(arena_id) for arena_id in self._store.evacuations.take_empty()]
        if not gone:
            return
        await self._announce(tuple(self._arenas.values()))
        for arena in gone:
            # Clients may keep it mapped, but hold no lease in it.
            await asyncio.to_thread(arena.close, give_back=True)
            log.info("arena given back", arena_id=arena.arena_id, mib=arena.size_bytes // MiB)


def _tell_failure(task: asyncio.Task[m.ResizeDramReply]) -> None:
    """Log a failure: the caller may have left."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("dram was not resized", error=str(error))


def _copy(migration: Migration, source: Arena, target: Arena) -> None:
    data = target.view(migration.target.offset, migration.length)
    data[:] = source.view(migration.source.offset, migration.length)
    if checksum(data) != migration.checksum:
        raise ChecksumMismatch(f"part {migration.part} in DRAM is not what was committed")
