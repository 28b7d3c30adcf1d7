"""kvpool as a remote storage of LMCache's in-process mode: `remote_storage_plugins: ["kvpool"]`.

LMCache calls from its own event loop and from threads; the connector's own loop does the work. It
stores only whole chunks of the layout in LMCache's metadata, because `get` has only a key, which
does not contain a chunk's length. Every failure is a miss.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from lmcache.v1.storage_backend.connector import (
    ConnectorAdapter,
    ConnectorContext,
    extract_plugin_type,
)
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from kvpool.blocks.model_revision import model_directory
from kvpool.client.node.transfer_threads import close_in_thread
from kvpool.engines.lmcache.keys import Item, Keyspace, layout_of, object_layout
from kvpool.engines.lmcache.object_table import ObjectTable
from kvpool.engines.lmcache.objects import ObjectStore
from kvpool.engines.lmcache.settings import ConnectorSettings
from kvpool.engines.shared.circuit_breaker import CircuitBreaker
from kvpool.engines.shared.loop_thread import LoopThread
from kvpool.engines.shared.rate_limited_log import RateLimitedLog
from kvpool.engines.shared.settings import read_settings
from kvpool.errors import ConfigError, KvpoolError, Unavailable

T = TypeVar("T")

PLUGIN_TYPE = "kvpool"
LOADERS_OWN = ("module_path", "class_name")  # keys that LMCache reads itself


class KVPoolConnectorAdapter(ConnectorAdapter):
    """Creates the connector.

    LMCache's loader finds this class by `module_path` and `class_name`.
    """

    def __init__(self) -> None:
        super().__init__(f"plugin://{PLUGIN_TYPE}")

    def can_parse(self, url: str) -> bool:
        """Whether `url` is `plugin://kvpool` or `plugin://kvpool.<instance>`."""
        scheme, _, name = url.partition("://")
        return scheme == "plugin" and extract_plugin_type(name) == PLUGIN_TYPE

    def create_connector(self, context: ConnectorContext) -> KVPoolConnector:
        """Create the connector. Raises as `KVPoolConnector`."""
        return KVPoolConnector(context)


def settings_of(context: ConnectorContext) -> ConnectorSettings:
    """The settings in LMCache's extra configuration. Raises ConfigError: a setting is wrong."""
    prefix = f"remote_storage_plugin.{context.plugin_name or PLUGIN_TYPE}."
    extra = (context.config.extra_config if context.config is not None else None) or {}
    given = {
        key.removeprefix(prefix): value for key, value in extra.items() if key.startswith(prefix)
    }
    ours = {key: value for key, value in given.items() if key not in LOADERS_OWN}
    return read_settings(ConnectorSettings, ours, f"extra_config {prefix}*")


class KVPoolConnector(RemoteConnector):
    """LMCache's `RemoteConnector` on a pool. `KVPoolConnectorAdapter` creates it.

    Raises:
        ConfigError: a setting is wrong; LMCache works layer by layer or compresses what it stores.
        ModelNotFound: there are no files at `model_path`; or neither it nor a revision is given,
            and the model's files are not on this host.
    """

    def __init__(self, context: ConnectorContext) -> None:
        config = context.config
        if context.metadata is None or config is None:
            raise ConfigError("LMCache gave no metadata", hint="class_name: KVPoolConnectorAdapter")
        if config.use_layerwise:
            raise ConfigError("use_layerwise is not supported with kvpool", hint="set it to false")
        if config.remote_serde not in (None, "naive"):
            raise ConfigError(
                f"remote_serde {config.remote_serde!r} is not supported with kvpool",
                hint="use naive; nodes can quantise on NVMe",
            )
        super().__init__(config, context.metadata)
        self._model = context.metadata.model_name
        self.settings = settings = settings_of(context)
        if not settings.revision and settings.model_path is None:
            found = model_directory(self._model)
            self.settings = settings = settings.model_copy(update={"model_path": found})
        self._memory = context.local_cpu_backend
        self._layout = object_layout(self.meta_shapes, self.meta_dtypes, self.meta_fmt.name)
        self._log = RateLimitedLog("kvpool.engines.lmcache")
        self._breaker = CircuitBreaker(settings.backoff_s, settings.max_backoff_s)
        self._keys = Keyspace(settings)
        self._object_table = ObjectTable(settings.max_listed)
        # they use LMCache's memory; used on the loop only
        self._jobs: set[asyncio.Task[Any]] = set()
        self._is_closed = False
        self._thread = LoopThread("kvpool-lmcache")
        self._thread.open(self._open(), 10.0)

    async def _open(self) -> None:
        self._pool = self.settings.open_async_pool(self.settings.load_timeout_s)
        self._objects = ObjectStore(self._pool, self._breaker, self._warn)
        self._greeting = asyncio.ensure_future(self._greet())

    async def _greet(self) -> None:
        """Connect to the pool before the first request. If it does not answer, start anyway."""
        try:
            await self._pool.connect(timeout_s=self.settings.load_timeout_s)
            space = self._keys.space(self._model, self._layout)
            await self._pool.register(space.namespace)
        except KvpoolError as error:
            self._breaker.failed(time.monotonic())
            self._warn("the pool cannot be reached; everything is a miss until it can", error)

    @property
    def counters(self) -> dict[str, int]:
        """How much was found, loaded, stored and refused so far."""
        return dict(self._objects.counters)

    # ------------------------------------------------------------ finding

    async def exists(self, key: Any) -> bool:
        """Whether the pool has the chunk."""
        return bool(await self._ask(self._leading([key]), 0))

    def exists_sync(self, key: Any) -> bool:
        """`exists` for threads."""
        return bool(self.batched_contains([key]))

    def support_batched_contains(self) -> bool:
        """Always true."""
        return True

    def batched_contains(self, keys: list[Any]) -> int:
        """How many leading chunks the pool has."""
        return self._wait(self._leading(keys), 0)

    def support_batched_async_contains(self) -> bool:
        """Always true."""
        return True

    async def batched_async_contains(
        self, lookup_id: str, keys: list[Any], pin: bool = False
    ) -> int:
        """`batched_contains` for asyncio. Ignores `pin`: LMCache never says when to unpin."""
        return await self._ask(self._leading(keys), 0)

    async def _leading(self, keys: Sequence[Any]) -> int:
        items = [self._item(key) for key in keys]
        self._objects.remember_order(items)
        found = await self._objects.find(items, self.settings.lookup_timeout_s)
        self._objects.counters["looked_up"] += len(found)
        return found.index(False) if False in found else len(found)

    # ------------------------------------------------------------ reading

    async def get(self, key: Any) -> Any | None:
        """A memory object with the chunk; None if it cannot be read."""
        return (await self.batched_get([key]))[0]

    def support_batched_get(self) -> bool:
        """Always true."""
        return True

    async def batched_get(self, keys: list[Any]) -> list[Any | None]:
        """Memory objects with the chunks; None for each that cannot be read."""
        objects = self._allocate(len(keys))
        try:
            job = self._thread.start(self._read(keys[: len(objects)], objects))
        except Unavailable as error:
            self._warn("loading failed", error)
            _free(objects)
            return [None] * len(keys)
        try:
            # If LMCache is cancelled, the read continues: it may write to the memory until it ends.
            was_read = await asyncio.shield(asyncio.wrap_future(job))
        except asyncio.CancelledError:
            job.add_done_callback(_free_result)
            raise
        return [*was_read, *[None] * (len(keys) - len(was_read))]

    def support_batched_get_non_blocking(self) -> bool:
        """Always true."""
        return True

    async def batched_get_non_blocking(self, lookup_id: str, keys: list[Any]) -> list[Any]:
        """Memory objects of the leading chunks that could be read."""
        objects = await self.batched_get(keys)
        count = objects.index(None) if None in objects else len(objects)
        _free(objects[count:])
        return objects[:count]

    async def _read(self, keys: Sequence[Any], objects: Sequence[Any]) -> list[Any | None]:
        was_read = [False] * len(objects)
        self._enlist()
        try:
            items = [self._item(key) for key in keys]
            buffers = [memoryview(memory.byte_array) for memory in objects]
            was_read = await self._objects.read(items, buffers, self.settings.load_timeout_s)
            loaded = [i for i, is_read in enumerate(was_read) if is_read]
            self._note([keys[i] for i in loaded], [items[i] for i in loaded])
        finally:
            _free(
                [memory for memory, is_read in zip(objects, was_read, strict=True) if not is_read]
            )
        return [
            memory if is_read else None for memory, is_read in zip(objects, was_read, strict=True)
        ]

    def _allocate(self, count: int) -> list[Any]:
        """Up to `count` memory objects of LMCache; fewer if it has no room."""
        objects: list[Any] = []
        try:
            while len(objects) < count:
                memory = self._memory.allocate(
                    self.meta_shapes, self.meta_dtypes, self.meta_fmt, busy_loop=False
                )
                if memory is None:
                    break
                objects.append(memory)
        except RuntimeError as error:  # LMCache in the scheduler's process has no memory
            self._warn("LMCache gave no memory", error)
        if len(objects) < count:
            self._objects.counters["no_memory"] += count - len(objects)
        return objects

    # ------------------------------------------------------------ writing

    async def put(self, key: Any, memory_obj: Any) -> None:
        """Store a chunk. LMCache drops its reference when this returns."""
        await self.batched_put([key], [memory_obj])

    def support_batched_put(self) -> bool:
        """Always true."""
        return True

    async def batched_put(self, keys: list[Any], memory_objs: list[Any]) -> None:
        """Store chunks. Refuses and counts those that are not whole."""
        job = self._write(list(keys), list(memory_objs))
        try:
            running = self._thread.start(job)
        except Unavailable as error:
            self._warn("storing failed", error)
            return
        # The caller frees the memory when this returns or raises.
        await _wait_until_end(running)

    async def _write(self, keys: Sequence[Any], objects: Sequence[Any]) -> None:
        self._enlist()
        kept: list[Any] = []
        buffers: list[memoryview] = []
        for key, memory in zip(keys, objects, strict=True):
            layout = layout_of(memory, memory.get_memory_format().name)
            buffer = memoryview(memory.byte_array)
            if layout != self._layout or buffer.nbytes != layout.size_bytes:
                self._objects.counters["refused"] += 1
                what = ConfigError(
                    f"a chunk is {layout.text} of {buffer.nbytes} bytes, not {self._layout.text}",
                    hint="partial chunks are not stored",
                )
                self._warn("a chunk was refused", what)
                continue
            kept.append(key)
            buffers.append(buffer)
        items = [self._item(key) for key in kept]
        stored = await self._objects.write(items, buffers, self.settings.store_timeout_s)
        self._note([kept[i] for i in stored.resident], [items[i] for i in stored.resident])

    # ------------------------------------------------------------ the rest

    async def list(self) -> list[str]:
        """Keys that this process stored or loaded, if the pool still has their chunks."""
        entries = self._object_table.page(0, self.settings.max_listed, None)
        found = await self._ask(
            self._objects.find([e.item for e in entries], self.settings.load_timeout_s), []
        )
        return [e.key.to_string() for e, is_there in zip(entries, found, strict=False) if is_there]

    def remove_sync(self, key: Any) -> bool:
        """Remove a chunk from the whole pool. Returns whether it was removed."""
        return self._wait(self._remove(key), False)

    async def _remove(self, key: Any) -> bool:
        item = self._item(key)
        [is_gone] = await self._objects.drop([item], self.settings.load_timeout_s)
        if is_gone:
            self._object_table.remove([item])
        return is_gone

    async def close(self) -> None:
        """Wait for running calls and stop. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            await _wait_until_end(self._thread.start(self._close()))
        except Unavailable as error:
            self._warn("closing failed", error)
        await close_in_thread(self._thread.stop)

    async def _close(self) -> None:
        self._greeting.cancel()
        if self._jobs:  # all have deadlines
            longest_s = max(self.settings.load_timeout_s, self.settings.store_timeout_s)
            await asyncio.wait(self._jobs, timeout=longest_s)
        await self._pool.close()

    # ------------------------------------------------------------ internal

    def _enlist(self) -> None:
        """Make `close` wait for the current task."""
        task = asyncio.current_task()
        assert task is not None
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)

    def _item(self, key: Any) -> Item:
        return self._keys.engine_item(key, self._layout)

    def _note(self, keys: Sequence[Any], items: Sequence[Item]) -> None:
        size = self._layout.size_bytes
        known = [(key, item, size) for key, item in zip(keys, items, strict=True)]
        self._object_table.add(known, time.monotonic())

    async def _ask(self, job: Coroutine[Any, Any, T], otherwise: T) -> T:
        try:
            return await asyncio.wrap_future(self._thread.start(job))
        except KvpoolError as error:
            self._warn("a call failed", error)
            return otherwise

    def _wait(self, job: Coroutine[Any, Any, T], otherwise: T) -> T:
        try:
            return self._thread.start(job).result(self.settings.load_timeout_s + 2.0)
        except (KvpoolError, TimeoutError) as error:
            self._warn("a call failed", error)
            return otherwise

    def _warn(self, kind: str, error: BaseException) -> None:
        self._log.report(kind, f"{type(error).__name__}: {error}", time.monotonic())


async def _wait_until_end(job: Future[Any]) -> None:
    """Wait until `job` ends, even if the waiting task is cancelled.

    Then raise the error of `job`.
    """
    waiting = asyncio.wrap_future(job)
    try:
        await asyncio.shield(waiting)
    except asyncio.CancelledError:
        await asyncio.wait([waiting])
        raise


def _free(objects: Sequence[Any]) -> None:
    for memory in objects:
        if memory is not None:
            memory.ref_count_down()


def _free_result(job: Future[list[Any | None]]) -> None:
    if not job.cancelled() and job.exception() is None:
        _free(job.result())
