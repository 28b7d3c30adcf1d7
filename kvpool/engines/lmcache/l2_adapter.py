"""kvpool as an L2 of LMCache's multi-process server: `--l2-adapter '{"type": "plugin", ...}'`.

LMCache's controllers submit tasks from their threads. An event loop does the work (`objects`), and
each task ends with one result and one signal on the event descriptor of its kind. No task raises or
is lost: a failure is a miss, or an object that was not stored.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import KeyEntry, KeyListPage
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface

from kvpool.engines.lmcache.keys import Item, Keyspace, layout_of, object_layout
from kvpool.engines.lmcache.l2_config import KVPoolL2AdapterConfig
from kvpool.engines.lmcache.locks import Group, LockTable
from kvpool.engines.lmcache.object_names import ObjectNames
from kvpool.engines.lmcache.object_table import Entry, ObjectTable
from kvpool.engines.lmcache.objects import Held, ObjectStore
from kvpool.engines.lmcache.task_results import TaskResults
from kvpool.engines.shared.circuit_breaker import CircuitBreaker
from kvpool.engines.shared.loop_thread import LoopThread
from kvpool.engines.shared.rate_limited_log import RateLimitedLog
from kvpool.errors import InvalidArgument, KvpoolError, Unavailable

RENEW_AFTER = 1 / 3  # of a lock's lease
INDEX_DELAY_S = 5.0  # the longest time until the pool's index has a stored object


class KVPoolL2Adapter(L2AdapterInterface):
    """LMCache's `L2AdapterInterface` on a pool.

    A lookup leases what it found until LMCache unlocks it. The leases are renewed until then, and
    end after `max_lock_s` in any case. The pool evicts by itself and tells LMCache no capacity, so
    LMCache's aggregate eviction of L2 stays off. Quotas by salt work on what this server stored.

    Args:
        config: from `KVPoolL2AdapterConfig.from_dict`, or the mapping that it takes.
        l1_memory_desc: unused: no memory must be registered.

    Raises:
        ValueError: as `KVPoolL2AdapterConfig.from_dict`.
        ConfigError: a TLS file cannot be used.
        ModelNotFound: there are no files at `model_path`.
    """

    def __init__(
        self, config: KVPoolL2AdapterConfig | Mapping[str, Any], l1_memory_desc: object = None
    ) -> None:
        super().__init__(max_capacity_bytes=0)
        if not isinstance(config, KVPoolL2AdapterConfig):
            config = KVPoolL2AdapterConfig.from_dict(dict(config))
        self.settings = settings = config.settings
        self._log = RateLimitedLog("kvpool.engines.lmcache")
        self._breaker = CircuitBreaker(settings.backoff_s, settings.max_backoff_s)
        self._names = ObjectNames(Keyspace(settings))
        self._locks: LockTable[Held] = LockTable()  # used on the loop only
        self._object_table = ObjectTable(settings.max_listed)
        self._task_ids = itertools.count()
        self._stores: TaskResults[L2StoreResult] = TaskResults()
        self._lookups: TaskResults[Bitmap] = TaskResults()
        self._loads: TaskResults[Bitmap] = TaskResults()
        self._jobs: set[asyncio.Task[None]] = set()  # used on the loop only
        self._is_closed = False
        self._thread = LoopThread("kvpool-lmcache")
        self._thread.open(self._open(), 10.0)

    async def _open(self) -> None:
        pool = self.settings.open_async_pool(self.settings.load_timeout_s)
        self._pool = pool
        self._objects = ObjectStore(pool, self._breaker, self._warn)
        self._store_slots = asyncio.Semaphore(self.settings.max_stores)
        self._run(self._greet())
        self._renewer = self._run(self._renew_locks())

    async def _greet(self) -> None:
        """Connect to the pool before the first request. If it does not answer, start anyway."""
        try:
            await self._pool.connect(timeout_s=self.settings.lookup_timeout_s)
        except KvpoolError as error:
            self._breaker.failed(time.monotonic())
            self._warn("the pool cannot be reached; everything is a miss until it can", error)

    # ------------------------------------------------------------ event descriptors

    def get_store_event_fd(self) -> int:
        """The descriptor signalled once for each store that ended."""
        return self._stores.fd

    def get_lookup_and_lock_event_fd(self) -> int:
        """The descriptor signalled once for each lookup that ended."""
        return self._lookups.fd

    def get_load_event_fd(self) -> int:
        """The descriptor signalled once for each load that ended."""
        return self._loads.fd

    # ------------------------------------------------------------ store

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Store objects. The task succeeds if the pool has all of them in the end."""
        task_id = next(self._task_ids)
        deadline = time.monotonic() + self.settings.store_timeout_s
        self._submit(
            self._store(task_id, list(keys), list(objects), deadline),
            lambda: self._stores.put(task_id, L2StoreResult(False, 0)),
        )
        return task_id

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """The results of the stores that ended since the last call."""
        return self._stores.take_all()

    async def _store(
        self, task_id: int, keys: Sequence[Any], objects: Sequence[Any], deadline: float
    ) -> None:
        result = L2StoreResult(False, 0)
        try:
            places, items, buffers = self._items_of(keys, objects)
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + _left(deadline)):
                await self._store_slots.acquire()
            try:
                stored = await self._objects.write(items, buffers, _left(deadline))
            finally:
                self._store_slots.release()
            is_complete = stored.is_complete and len(places) == len(keys)
            result = L2StoreResult(is_complete, stored.bytes_written)
            self._note((keys[places[i]], items[i], len(buffers[i])) for i in stored.resident)
        except TimeoutError as error:
            self._objects.counters["store_gave_up"] += 1
            self._warn("a store waited too long for other stores", error)
        finally:
            self._stores.put(task_id, result)

    # ------------------------------------------------------------ lookup

    def submit_lookup_and_lock_task(
        self, keys: list[Any], group_layout_descs: Mapping[int, Any]
    ) -> int:
        """Find objects of the given layouts, and lock those found.

        Objects of other layouts are misses.
        """
        task_id = next(self._task_ids)
        self._submit(
            self._lookup(task_id, list(keys), dict(group_layout_descs)),
            lambda: self._lookups.put(task_id, Bitmap(len(keys))),
        )
        return task_id

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """The result of a lookup; None if there is none yet, or if it was taken."""
        return self._lookups.take(task_id)

    async def _lookup(self, task_id: int, keys: Sequence[Any], descs: Mapping[int, Any]) -> None:
        bitmap = Bitmap(len(keys))
        try:
            given = {
                group: object_layout(desc.shapes, desc.dtypes)
                for group, desc in descs.items()
                if desc.shapes  # LMCache's own benchmark gives none
            }
            layouts = [
                given.get(key.object_group_id) or self._names.last_layout(key) for key in keys
            ]
            places = [i for i, layout in enumerate(layouts) if layout is not None]
            items = [
                self._names.item(keys[i], layout) for i, layout in enumerate(layouts) if layout
            ]
            settings = self.settings
            kept, held = await self._objects.hold(
                items, settings.lock_ttl_s, settings.lookup_timeout_s
            )
            until = time.monotonic() + settings.max_lock_s
            for one in held:
                self._locks.lock([items[i].ident for i in one.indices], one, until)
            for place, is_kept in zip(places, kept, strict=True):
                if is_kept:
                    bitmap.set(place)
            if not self._breaker.is_down:
                self._not_found([i for i, is_kept in zip(items, kept, strict=True) if not is_kept])
        finally:
            self._lookups.put(task_id, bitmap)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Remove one lock from each key. Never fails."""
        try:
            self._thread.call_soon(self._unlock, list(keys))
        except Unavailable:
            return  # the adapter is closed, and its leases ended with the connection

    def _unlock(self, keys: Sequence[Any]) -> None:
        # A key does not say which layout was looked up, so unlock under every layout of its group.
        idents = [item.ident for key in keys for item in self._names.all_of(key)]
        for held in self._locks.unlock(idents):
            held.pinned.release()

    async def _renew_locks(self) -> None:
        ttl_s = self.settings.lock_ttl_s
        while True:
            await asyncio.sleep(ttl_s * RENEW_AFTER)
            now = time.monotonic()
            for held in self._locks.expire(now):
                self._objects.counters["locks_given_up"] += 1
                held.pinned.release()
            due = [g for g in self._locks.groups() if g.lease.pinned.deadline < now + ttl_s]
            await asyncio.gather(*(self._renew(group, ttl_s) for group in due))

    async def _renew(self, group: Group[Held], ttl_s: float) -> None:
        try:
            await group.lease.pinned.renew(ttl_s, ttl_s * RENEW_AFTER)
        except KvpoolError as error:
            if group.lease.pinned.is_released:
                return  # it was unlocked during the call
            # The pool may evict its objects now; a load then finds what is left.
            self._objects.counters["locks_lost"] += 1
            self._locks.drop(group)
            group.lease.pinned.release()
            self._warn("a lock was lost", error)

    # ------------------------------------------------------------ load

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Read objects into LMCache's memory. Nothing is written there after the task ends."""
        task_id = next(self._task_ids)
        self._submit(
            self._load(task_id, list(keys), list(objects)),
            lambda: self._loads.put(task_id, Bitmap(len(keys))),
        )
        return task_id

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """The result of a load; None if there is none yet, or if it was taken."""
        return self._loads.take(task_id)

    async def _load(self, task_id: int, keys: Sequence[Any], objects: Sequence[Any]) -> None:
        bitmap = Bitmap(len(keys))
        try:
            places, items, buffers = self._items_of(keys, objects)
            was_read = await self._objects.read(items, buffers, self.settings.load_timeout_s)
            loaded = [i for i, is_read in enumerate(was_read) if is_read]
            for i in loaded:
                bitmap.set(places[i])
            if loaded:
                self._note((keys[places[i]], items[i], len(buffers[i])) for i in loaded)
                self._notify_keys_accessed([keys[places[i]] for i in loaded])
        finally:
            self._loads.put(task_id, bitmap)

    # ------------------------------------------------------------ delete, list, status

    def delete(self, keys: list[Any]) -> None:
        """Remove objects from the whole pool, except locked ones and those of unknown layouts."""
        timeout_s = self.settings.lookup_timeout_s
        try:
            self._thread.start(self._delete(list(keys), timeout_s)).result(timeout_s + 2.0)
        except (Unavailable, TimeoutError) as error:
            self._warn("deleting failed", error)

    async def _delete(self, keys: Sequence[Any], timeout_s: float) -> None:
        items = [item for key in keys for item in self._names.all_of(key)]
        items = [item for item in items if not self._locks.is_locked(item.ident)]
        gone = await self._objects.drop(items, timeout_s)
        dropped = [item for item, is_gone in zip(items, gone, strict=True) if is_gone]
        self._notify_gone(self._object_table.remove(dropped))

    def list_l2_keys(
        self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None
    ) -> KeyListPage:
        """Keys that this server stored or loaded, if the pool still has their objects.

        Raises:
            ValueError: the page size is not positive, or the cursor is invalid.
        """
        if page_size < 1:
            raise ValueError(f"page_size must be positive, got {page_size}")
        if cursor is not None and not (cursor.isascii() and cursor.isdigit()):
            raise ValueError(f"invalid cursor {cursor!r}")
        page = self._object_table.page(int(cursor or 0), page_size, model_name)
        resident = self._still_resident(page)
        entries = tuple(KeyEntry(e.key.to_encoded_object_key(), e.size_bytes) for e in resident)
        return KeyListPage(entries, str(page[-1].number) if len(page) == page_size else None)

    def _still_resident(self, page: Sequence[Entry]) -> Sequence[Entry]:
        timeout_s = self.settings.lookup_timeout_s
        job = self._objects.find([entry.item for entry in page], timeout_s)
        try:
            found = self._thread.start(job).result(timeout_s + 2.0)
        except (Unavailable, TimeoutError):
            return page
        if self._breaker.is_down:
            return page
        self._not_found([e.item for e, is_there in zip(page, found, strict=True) if not is_there])
        return [entry for entry, is_there in zip(page, found, strict=True) if is_there]

    def report_status(self) -> dict[str, Any]:
        """What LMCache's server shows of the adapter at /status."""
        return {
            "is_healthy": self._thread.is_alive and not self._breaker.is_down,
            "type": "KVPoolL2Adapter",
            "pool": self.settings.node or self.settings.conductor,
            "is_reachable": not self._breaker.is_down,
            "locked_key_count": len(self._locks),
            "known_key_count": len(self._object_table),
            "counters": dict(self._objects.counters),
            "peers": self._peers(),
        }

    def _peers(self) -> list[dict[str, Any]]:
        try:
            return self._thread.start(self._objects.peers()).result(1.0)
        except (Unavailable, TimeoutError):
            return []

    def close(self) -> None:
        """Wait for running tasks, end all leases, and stop. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        longest_s = max(self.settings.load_timeout_s, self.settings.store_timeout_s)
        try:
            self._thread.start(self._close(longest_s)).result(longest_s + 10.0)
        except (Unavailable, TimeoutError) as error:
            self._warn("closing took too long", error)
        self._thread.stop()
        for results in (self._stores, self._lookups, self._loads):
            results.close()

    async def _close(self, longest_s: float) -> None:
        self._renewer.cancel()
        # A running task may use LMCache's memory. All tasks have deadlines.
        if self._jobs:
            await asyncio.wait(self._jobs, timeout=longest_s)
        for held in self._locks.expire(float("inf")):
            held.pinned.release()
        await self._pool.close()

    # ------------------------------------------------------------ internal

    def _submit(self, job: Coroutine[Any, Any, None], give_up: Any) -> None:
        """Run a task on the loop; if the loop has stopped, call `give_up` instead."""
        try:
            if self._is_closed:
                raise Unavailable("the adapter is closed")
            self._thread.call_soon(self._run, job)
        except Unavailable as error:
            job.close()
            self._warn("a task was_read after close", error)
            give_up()

    def _run(self, job: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(job)
        self._jobs.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """Count and log an exception that ended a task: it is a defect in kvpool."""
        self._jobs.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._objects.counters["defects"] += 1
            self._warn("a task died", error)

    def _items_of(
        self, keys: Sequence[Any], objects: Sequence[Any]
    ) -> tuple[list[int], list[Item], list[memoryview]]:
        """Indices, items and buffers of the objects that can be stored.

        Refuses and counts the others.
        """
        places: list[int] = []
        items: list[Item] = []
        buffers: list[memoryview] = []
        for place, (key, memory) in enumerate(zip(keys, objects, strict=True)):
            try:
                layout = layout_of(memory)
                buffer = memoryview(memory.byte_array)
                if buffer.nbytes != layout.size_bytes:
                    raise InvalidArgument(
                        f"an object of {buffer.nbytes} bytes has the layout {layout.text}",
                        hint="LMCache's serde is not supported",
                    )
                item = self._names.item(key, layout)
            except (KvpoolError, TypeError, NotImplementedError) as error:
                self._objects.counters["refused"] += 1
                self._warn("an object cannot be stored", error)
                continue
            places.append(place)
            items.append(item)
            buffers.append(buffer)
        return places, items, buffers

    def _note(self, known: Any) -> None:
        new, forgotten = self._object_table.add(known, time.monotonic())
        if new:
            self._notify_keys_stored([e.key for e in new], [e.size_bytes for e in new])
        self._notify_gone(forgotten)

    def _not_found(self, items: Sequence[Item]) -> None:
        """Forget items that the pool evicted. It may not know new ones yet, so those stay."""
        self._notify_gone(self._object_table.remove(items, time.monotonic() - INDEX_DELAY_S))

    def _notify_gone(self, entries: Sequence[Entry]) -> None:
        if entries:
            self._notify_keys_deleted([e.key for e in entries], [e.size_bytes for e in entries])

    def _warn(self, kind: str, error: BaseException) -> None:
        self._log.report(kind, f"{type(error).__name__}: {error}", time.monotonic())


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())
