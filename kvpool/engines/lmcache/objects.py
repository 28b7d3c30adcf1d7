"""Finds, leases, reads and writes LMCache's objects in the pool: many at once, with a deadline.

Never raises.

Runs on one event loop. LMCache asks for arbitrary sets of objects, and the pool has chains: sets
are cut into runs, and a gap costs one object, not the objects after it. Every failure is a miss or
an object not stored, and is counted here. A circuit breaker skips calls while the pool is down.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from kvpool.blocks.layout import Namespace
from kvpool.bounded import BoundedDict
from kvpool.client import AsyncPool
from kvpool.client.data.pinning import PinnedBlocks
from kvpool.client.node.deadlines import time_left
from kvpool.engines.lmcache.keys import Item
from kvpool.engines.shared.circuit_breaker import CircuitBreaker, says_pool_is_down
from kvpool.errors import KvpoolError, NoRoom

MAX_ASKED = 8192  # hashes in one call to a conductor
MAX_GAPS = (
    # missing blocks per run, after a look-up found them; then the rest of the run counts as missing
    16
)
MAX_PARENTS = 131_072  # remembered predecessors of objects; about 200 bytes each
Warn = Callable[[str, BaseException], None]  # what happened, and why


@dataclass(slots=True, frozen=True)
class Held:
    """Leased objects, as indices into the items asked for."""

    pinned: PinnedBlocks
    indices: tuple[int, ...]


@dataclass(slots=True)
class Stored:
    """The result of storing a set of objects."""

    # indices of the objects that the pool has now
    resident: list[int] = field(default_factory=list)
    bytes_written: int = 0  # without the objects that the pool had already
    is_complete: bool = True


class ObjectStore:
    """The pool as a store of objects.

    Args:
        pool: used on the running loop.
        breaker: shared by all callers of the pool in this process.
        warn: called for every failure; limits what is logged.
    """

    def __init__(self, pool: AsyncPool, breaker: CircuitBreaker, warn: Warn) -> None:
        self._pool = pool
        self._breaker = breaker
        self._warn = warn
        self._parents: BoundedDict[bytes, bytes] = BoundedDict(MAX_PARENTS)  # by ident; of one row
        self.counters: Counter[str] = Counter()

    def may_ask(self) -> bool:
        """Whether to call the pool now. Counts skipped calls."""
        if self._breaker.may_ask(time.monotonic()):
            return True
        self.counters["skipped_while_down"] += 1
        return False

    # ------------------------------------------------------------ finding

    async def find(self, items: Sequence[Item], timeout_s: float) -> list[bool]:
        """Which items the pool has. Takes no lease. All False if the pool does not answer."""
        found = [False] * len(items)
        if not items or not self.may_ask():
            return found
        deadline = time.monotonic() + timeout_s
        try:
            for namespace, indices in _by_namespace(items):
                for start in range(0, len(indices), MAX_ASKED):
                    part = indices[start : start + MAX_ASKED]
                    names = [items[i].name for i in part]
                    resident = await self._pool.exists(
                        namespace, names, timeout_s=time_left(deadline)
                    )
                    for index, is_there in zip(part, resident, strict=True):
                        found[index] = is_there
        except KvpoolError as error:
            self._failed("looking up", error)
            return [False] * len(items)
        self._answered()
        return found

    async def hold(
        self, items: Sequence[Item], ttl_s: float, timeout_s: float
    ) -> tuple[list[bool], list[Held]]:
        """Find items and lease those in the pool for `ttl_s`.

        The caller renews and releases the leases.
        """
        deadline = time.monotonic() + timeout_s
        self.remember_order(items)
        found = await self.find(items, timeout_s)
        held: list[Held] = []
        kept = [False] * len(items)
        runs = [run for run in _runs(items) for run in _true_runs(run, found)]
        for outcome in await asyncio.gather(
            *(self._hold_run(items, run, ttl_s, deadline) for run in runs)
        ):
            held += outcome
        for one in held:
            for index in one.indices:
                kept[index] = True
        self.counters["looked_up"] += len(items)
        self.counters["held"] += sum(kept)
        return kept, held

    async def _hold_run(
        self, items: Sequence[Item], run: Sequence[int], ttl_s: float, deadline: float
    ) -> list[Held]:
        held: list[Held] = []
        rest, namespace = list(run), items[run[0]].space.namespace
        try:
            for _ in range(MAX_GAPS):
                pinned = await self._pool.pin(
                    namespace,
                    [items[i].name for i in rest],
                    ttl_s=ttl_s,
                    timeout_s=time_left(deadline),
                )
                if pinned.found:
                    held.append(Held(pinned, tuple(rest[: pinned.found])))
                else:
                    pinned.release()
                rest = rest[pinned.found + 1 :]
                if not rest:
                    break
        except KvpoolError as error:
            self._count_failure("holding", error)
        return held

    # ------------------------------------------------------------ reading

    async def read(
        self, items: Sequence[Item], buffers: Sequence[Any], timeout_s: float
    ) -> list[bool]:
        """Read items into the caller's memory.

        Returns which ones were read; the memory of others is undefined.

        Nothing is written there after this returns: a NIXL read that may arrive late goes through
        the client's own memory.
        """
        was_read = [False] * len(items)
        if not items or not self.may_ask():
            return was_read
        deadline = time.monotonic() + timeout_s
        await asyncio.gather(
            *(
                self._read_run(items, indices, buffers, was_read, deadline)
                for _, indices in _by_namespace(items)
            )
        )
        self.counters["loads_asked"] += len(items)
        self.counters["loaded"] += sum(was_read)
        return was_read

    async def _read_run(
        self,
        items: Sequence[Item],
        indices: Sequence[int],
        buffers: Sequence[Any],
        was_read: list[bool],
        deadline: float,
    ) -> None:
        rest, namespace = list(indices), items[indices[0]].space.namespace
        try:
            for _ in range(MAX_GAPS):
                result = await self._pool.get(
                    namespace,
                    [items[i].name for i in rest],
                    [buffers[i] for i in rest],
                    timeout_s=time_left(deadline),
                )
                self._answered()
                for index in rest[: result.found]:
                    was_read[index] = True
                if result.found < len(rest):
                    self.counters[f"miss:{result.miss_reason}"] += 1
                for transport, count in result.bytes_moved.items():
                    self.counters[f"bytes_read:{transport}"] += count
                rest = rest[result.found + 1 :]
                if not rest:
                    break
        except KvpoolError as error:
            self._failed("loading", error)

    # ------------------------------------------------------------ writing

    async def write(
        self, items: Sequence[Item], buffers: Sequence[Any], timeout_s: float
    ) -> Stored:
        """Write items from the caller's memory."""
        stored = Stored()
        if not items:
            return stored
        if not self.may_ask():
            stored.is_complete = False
            return stored
        deadline = time.monotonic() + timeout_s
        await asyncio.gather(
            *(
                self._write_run(items, run, buffers, stored, deadline)
                for rows in _runs(items)
                for run in self._chains(items, rows)
            )
        )
        stored.resident.sort()
        return stored

    async def _write_run(
        self,
        items: Sequence[Item],
        run: Sequence[int],
        buffers: Sequence[Any],
        stored: Stored,
        deadline: float,
    ) -> None:
        namespace = items[run[0]].space.namespace
        try:
            result = await self._pool.put(
                namespace,
                [items[i].name for i in run],
                [buffers[i] for i in run],
                parent=self._parents.get(items[run[0]].ident, b""),
                timeout_s=time_left(deadline),
            )
        except NoRoom as error:
            self._answered()
            stored.is_complete = False
            self.counters["rejected"] += len(run)
            self._warn("the pool has no room", error)
        except KvpoolError as error:
            stored.is_complete = False
            self.counters["store_failed"] += len(run)
            self._failed("storing", error)
        else:
            self._answered()
            # Slots are granted in order, so the rejected objects are the last ones.
            stored.resident += run[: len(run) - result.rejected]
            stored.bytes_written += sum(result.bytes_moved.values())
            stored.is_complete &= not result.rejected
            self.counters["stored"] += result.stored
            self.counters["existing"] += result.existing + result.in_progress
            self.counters["rejected"] += result.rejected
            for transport, count in result.bytes_moved.items():
                self.counters[f"bytes_written:{transport}"] += count

    async def drop(self, items: Sequence[Item], timeout_s: float) -> list[bool]:
        """Remove items from the pool; leased ones go when they are released.

        Returns which were removed.
        """
        gone = [False] * len(items)
        if not items or not self.may_ask():
            return gone
        deadline = time.monotonic() + timeout_s
        try:
            for namespace, indices in _by_namespace(items):
                names = [items[i].name for i in indices]
                await self._pool.drop(namespace, names, timeout_s=time_left(deadline))
                for index in indices:
                    gone[index] = True
        except KvpoolError as error:
            self._failed("deleting", error)
        else:
            self._answered()
        self.counters["dropped"] += sum(gone)
        return gone

    async def peers(self) -> list[dict[str, Any]]:
        """For each node: the transport, and the bytes read and written."""
        return [
            {
                "node": peer.node_id,
                "transport": peer.transport,
                "read_bytes": peer.read_bytes,
                "written_bytes": peer.written_bytes,
            }
            for peer in self._pool.peers()
        ]

    # ------------------------------------------------------------ order

    def remember_order(self, items: Sequence[Item]) -> None:
        """Remember each item's predecessor: lookups name the chunks of a prompt in order."""
        for run in _runs(items):
            first = items[run[0]].ident
            self._parents[first] = self._parents.get(first, b"")
            for before, after in pairwise(run):
                self._parents[items[after].ident] = items[before].name

    def _chains(self, items: Sequence[Item], run: Sequence[int]) -> Iterable[list[int]]:
        """Cut a run between objects that are known not to follow each other."""
        chain: list[int] = []
        for index in run:
            parent = self._parents.get(items[index].ident)
            if chain and parent is not None and parent != items[chain[-1]].name:
                yield chain
                chain = []
            chain.append(index)
        if chain:
            yield chain

    # ------------------------------------------------------------ failures

    def _answered(self) -> None:
        if self._breaker.answered():
            self.counters["reconnected"] += 1

    def _failed(self, doing: str, error: KvpoolError) -> None:
        """Record that a whole call failed. If the pool did not answer, the breaker pauses calls."""
        if says_pool_is_down(error):
            self._breaker.failed(time.monotonic())
        self._count_failure(doing, error)

    def _count_failure(self, doing: str, error: KvpoolError) -> None:
        self.counters[f"error:{error.code}"] += 1
        self._warn(f"{doing} failed", error)


def _by_namespace(items: Sequence[Item]) -> list[tuple[Namespace, list[int]]]:
    groups: dict[bytes, tuple[Namespace, list[int]]] = {}
    for index, item in enumerate(items):
        space = item.space
        groups.setdefault(space.namespace_id, (space.namespace, []))[1].append(index)
    return list(groups.values())


def _runs(items: Sequence[Item]) -> list[list[int]]:
    """Indices of neighbouring items of one row, run by run."""
    runs: list[list[int]] = []
    for index, item in enumerate(items):
        last = items[runs[-1][-1]] if runs else None
        if last is not None and last.row == item.row:
            runs[-1].append(index)
        else:
            runs.append([index])
    return runs


def _true_runs(run: Sequence[int], found: Sequence[bool]) -> list[list[int]]:
    """The parts of a run that were found."""
    parts: list[list[int]] = []
    for before, index in zip([None, *run[:-1]], run, strict=True):
        if found[index]:
            if before is not None and found[before]:
                parts[-1].append(index)
            else:
                parts.append([index])
    return parts
