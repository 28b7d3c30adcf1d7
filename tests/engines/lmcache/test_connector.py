"""The remote connector in LMCache's own RemoteBackend, with its CPU backend and memory objects."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.connector import CreateConnector
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.remote_backend import RemoteBackend

from tests.engines.lmcache.server_side import bytes_of
from tests.support.process_cluster import Cluster, wait_until

TOKENS, LAYERS, HEADS, SIZE = 16, 4, 2, 32
CHUNK_BYTES = 2 * LAYERS * TOKENS * HEADS * SIZE * 2
PREFIX = "remote_storage_plugin.kvpool."


def engine_config(where: dict[str, Any], **options: Any) -> LMCacheEngineConfig:
    """LMCache's configuration with our plugin; `where` are settings of the plugin."""
    plugin = {
        "module_path": "kvpool.engines.lmcache",
        "class_name": "KVPoolConnectorAdapter",
        "host_label": "here",
        **where,
    }
    return LMCacheEngineConfig.from_defaults(
        chunk_size=TOKENS,
        local_cpu=False,
        max_local_cpu_size=0.05,
        remote_storage_plugins=["kvpool"],
        extra_config={f"{PREFIX}{key}": value for key, value in plugin.items()},
        **options,
    )


def metadata(**fields: Any) -> LMCacheMetadata:
    given: dict[str, Any] = {
        "model_name": "tests/model",
        "world_size": 1,
        "local_world_size": 1,
        "worker_id": 0,
        "local_worker_id": 0,
        "kv_dtype": torch.bfloat16,
        "kv_shape": (LAYERS, 2, TOKENS, HEADS, SIZE),
        "chunk_size": TOKENS,
    }
    return LMCacheMetadata(**{**given, **fields})


class Engine:
    """One LMCache in a process, as far as remote storage goes."""

    def __init__(self, config: LMCacheEngineConfig, **fields: Any) -> None:
        self.metadata = metadata(**fields)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.cpu = LocalCPUBackend(config, self.metadata, dst_device="cpu")
        self.backend = RemoteBackend(
            config, self.metadata, self.loop, self.cpu, "cpu", plugin_name="kvpool"
        )

    @property
    def connector(self) -> Any:
        """Ours, within LMCache's instrumentation."""
        assert self.backend.connection is not None
        return self.backend.connection.getWrappedConnector()

    def close(self) -> None:
        self.backend.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.cpu.memory_allocator.close()

    def key(self, number: int, tags: dict[str, str] | None = None) -> CacheEngineKey:
        configs = {f"lmcache.tag.{name}": value for name, value in (tags or {}).items()}
        m = self.metadata
        return CacheEngineKey(
            m.model_name, m.world_size, m.worker_id, number, m.kv_dtype, configs or None
        )

    def memory(self, key: CacheEngineKey, tokens: int = TOKENS) -> Any:
        made = self.cpu.allocate(
            self.metadata.get_shapes(tokens), self.metadata.get_dtypes(), MemoryFormat.KV_2LTD
        )
        bytes_of(made)[:] = content(key, made.get_size())
        return made

    def put(self, keys: Sequence[CacheEngineKey]) -> None:
        """Store through the backend and wait until it can be found."""
        self.backend.batched_submit_put_task(list(keys), [self.memory(key) for key in keys])
        wait_until(lambda: self.backend.batched_contains(list(keys)) == len(keys), "stored")


def content(key: CacheEngineKey, size: int = CHUNK_BYTES) -> np.ndarray:
    return np.random.default_rng(key.chunk_hash).integers(0, 256, size, dtype=np.uint8)


def where(cluster: Cluster) -> dict[str, Any]:
    return {"conductor": cluster.conductor["wire"], "revision": "r1", "lookup_timeout_s": 5.0}


@contextlib.contextmanager
def engine(settings: dict[str, Any], **fields: Any) -> Iterator[Engine]:
    made = Engine(engine_config(settings), **fields)
    try:
        yield made
    finally:
        made.close()


def wait_known(settings: dict[str, Any], keys: Sequence[CacheEngineKey], **fields: Any) -> None:
    """Wait until an engine that stored nothing finds chunks, which depends on the index."""
    with engine(settings, **fields) as third:
        wait_until(
            lambda: third.backend.batched_contains(list(keys)) == len(keys), "another finds them"
        )


def test_chunks_come_back_byte_for_byte_in_another_process_of_the_same_model(
    cluster: Cluster,
) -> None:
    with engine(where(cluster)) as writer, engine(where(cluster)) as reader:
        keys = [writer.key(n) for n in range(100, 112)]
        assert writer.backend.batched_contains(keys) == 0
        writer.put(keys)
        # The writer finds its own chunks at once, others when the index has them.
        wait_until(lambda: reader.backend.batched_contains(keys) == len(keys), "all are known")
        assert not reader.backend.contains(reader.key(1))
        for key, memory in zip(keys, reader.backend.batched_get_blocking(keys), strict=True):
            assert np.array_equal(bytes_of(memory), content(key))
            assert memory.get_shape() == reader.metadata.get_shapes()[0]
            memory.ref_count_down()
        one = reader.backend.get_blocking(keys[5])
        assert np.array_equal(bytes_of(one), content(keys[5]))
        one.ref_count_down()
        assert reader.cpu.memory_allocator.memcheck()


def test_single_puts_and_the_non_blocking_calls(cluster: Cluster) -> None:
    with engine(where(cluster)) as e:
        keys = [e.key(n) for n in range(200, 206)]
        for key in keys[:4]:
            e.backend.submit_put_task(key, e.memory(key)).result(10)
        wait_until(lambda: e.backend.batched_contains(keys) == 4, "four are stored")

        async def ask() -> tuple[int, list[Any]]:
            count = await e.backend.batched_async_contains("lookup-1", keys)
            return count, await e.backend.batched_get_non_blocking("lookup-1", keys)

        count, objects = asyncio.run_coroutine_threadsafe(ask(), e.loop).result(10)
        assert count == len(objects) == 4
        for key, memory in zip(keys, objects, strict=False):
            assert np.array_equal(bytes_of(memory), content(key))
            memory.ref_count_down()
        assert e.connector.exists_sync(keys[0])
        assert asyncio.run_coroutine_threadsafe(e.connector.list(), e.loop).result(10) == [
            key.to_string() for key in keys[:4]
        ]
        assert e.backend.remove(keys[0])
        wait_until(lambda: not e.backend.contains(keys[0]), "removed")


def test_a_missing_chunk_is_none_and_its_memory_goes_back(cluster: Cluster) -> None:
    with engine(where(cluster)) as e:
        keys = [e.key(n) for n in range(300, 306)]
        e.put([keys[0], keys[2]])
        objects = e.backend.batched_get_blocking(keys)
        assert [memory is not None for memory in objects] == [True, False, True] + [False] * 3
        for memory in objects:
            if memory is not None:
                memory.ref_count_down()
        allocator = e.cpu.memory_allocator
        assert allocator.memcheck()
        wait_until(lambda: all_is_free(e), "nothing of LMCache's memory is held")


def all_is_free(e: Engine) -> bool:
    """Whether every byte of LMCache's memory can be had at once."""
    allocator = e.cpu.memory_allocator.pin_allocator
    return bool(
        allocator.address_manager.get_free_size() == allocator.address_manager.get_heap_size()
    )


@pytest.mark.parametrize(
    "other",
    [
        {"model_name": "tests/other"},
        {"world_size": 2, "worker_id": 1},
        {"kv_dtype": torch.float16},
        {"kv_shape": (LAYERS // 2, 2, TOKENS, HEADS * 2, SIZE)},
        {"kv_shape": (LAYERS, 2, TOKENS // 2, HEADS, SIZE), "chunk_size": TOKENS // 2},
    ],
    ids=["model", "rank", "dtype", "shape", "chunk"],
)
def test_engines_that_differ_never_meet(cluster: Cluster, other: dict[str, Any]) -> None:
    with engine(where(cluster)) as writer, engine(where(cluster), **other) as reader:
        written = [writer.key(n) for n in range(400, 404)]
        writer.put(written)
        wait_known(where(cluster), written)
        keys = [reader.key(n) for n in range(400, 404)]
        assert reader.backend.batched_contains(keys) == 0
        assert reader.backend.batched_get_blocking(keys) == [None] * 4


def test_tags_revisions_and_salts_never_meet(cluster: Cluster) -> None:
    with engine(where(cluster)) as e:
        e.put([alices := e.key(500, {"user": "alice"})])
        assert not e.backend.contains(e.key(500))
        assert not e.backend.contains(e.key(500, {"user": "bob"}))
    wait_known(where(cluster), [alices])
    for option in ({"revision": "r2"}, {"salt": "other"}):
        with engine({**where(cluster), **option}) as e:
            assert not e.backend.contains(alices)


def test_a_partial_chunk_is_refused_and_never_read_as_a_whole_one(cluster: Cluster) -> None:
    with engine(where(cluster)) as e:
        key = e.key(600)
        e.backend.submit_put_task(key, e.memory(key, TOKENS // 2)).result(10)
        assert e.connector.counters["refused"] == 1
        assert not e.backend.contains(key)
        assert e.backend.get_blocking(key) is None


def test_without_a_pool_all_is_a_miss_at_once() -> None:
    nowhere = {"conductor": "127.0.0.1:9", "revision": "r1"}
    with engine(nowhere) as e:
        keys = [e.key(n) for n in range(700, 704)]
        began = time.monotonic()
        for _ in range(5):
            assert e.backend.batched_contains(keys) == 0
            assert e.backend.batched_get_blocking(keys) == [None] * 4
            e.backend.submit_put_task(keys[0], e.memory(keys[0])).result(10)
        assert time.monotonic() - began < 2
        assert e.connector.counters["skipped_while_down"] > 5
        assert e.cpu.memory_allocator.memcheck()


def test_a_read_that_lmcache_gave_up_keeps_its_memory_until_it_has_ended(cluster: Cluster) -> None:
    with engine(where(cluster)) as e:
        keys = [e.key(n) for n in range(800, 816)]
        e.put(keys)
        wait_until(lambda: all_is_free(e), "nothing of LMCache's memory is held")

        async def give_up() -> None:
            task = asyncio.ensure_future(e.connector.batched_get(keys))
            await asyncio.sleep(0)  # it allocates before its first await
            assert not all_is_free(e)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

        cluster.kill("n0", signal.SIGSTOP)
        try:
            asyncio.run_coroutine_threadsafe(give_up(), e.loop).result(10)
            for _ in range(20):  # turns of the connector's loop, in which it could free the memory
                e.connector._thread.start(asyncio.sleep(0)).result(10)
            assert not all_is_free(e)
        finally:
            cluster.kill("n0", signal.SIGCONT)
        wait_until(lambda: all_is_free(e), "the memory goes back when the read has ended")


@pytest.mark.parametrize(
    ("settings", "options", "says"),
    [
        ({"revsion": "r1"}, {}, r"'revsion'.*'revision'"),
        ({"revision": "r1"}, {"use_layerwise": True}, "use_layerwise"),
        ({"revision": "r1"}, {"remote_serde": "cachegen"}, "remote_serde"),
        ({}, {}, "no files of the model"),
    ],
    ids=["unknown-key", "layerwise", "serde", "no-revision"],
)
def test_what_cannot_work_is_refused_when_the_connector_is_made(
    settings: dict[str, Any], options: dict[str, Any], says: str
) -> None:
    from kvpool.errors import KvpoolError

    config = engine_config(settings, **options)
    loop = asyncio.new_event_loop()
    with pytest.raises(KvpoolError, match=says):
        CreateConnector("plugin://kvpool", loop, None, config, metadata(), "kvpool")
    loop.close()


def test_the_revision_is_read_off_the_models_files_where_none_is_given(
    cluster: Cluster, tmp_path: Path
) -> None:
    for name, weights in (("a", b"one"), ("b", b"two")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(weights)
    options = {"conductor": cluster.conductor["wire"], "lookup_timeout_s": 5.0}
    with engine(options, model_name=str(tmp_path / "a")) as e:
        e.put([e.key(900)])
        wait_known(options, [e.key(900)], model_name=str(tmp_path / "a"))
    # The name is equal, the weights are not.
    other = {**options, "model_path": str(tmp_path / "b")}
    with engine(other, model_name=str(tmp_path / "a")) as e:
        assert not e.backend.contains(e.key(900))


def test_the_configuration_in_the_documentation_works(cluster: Cluster, tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs/lmcache.md").read_text()
    text = page.partition("```yaml\n")[2].partition("```")[0]
    written = tmp_path / "lmcache.yaml"
    written.write_text(text.replace("127.0.0.1:7800", cluster.conductor["wire"]))
    config = LMCacheEngineConfig.from_file(str(written))
    config.max_local_cpu_size = 0.05
    e = Engine(config)
    e.connector.settings = e.connector.settings.model_copy(update={"lookup_timeout_s": 5.0})
    try:
        e.put([e.key(1000)])
        memory = e.backend.get_blocking(e.key(1000))
        assert np.array_equal(bytes_of(memory), content(e.key(1000)))
        memory.ref_count_down()
    finally:
        e.close()
