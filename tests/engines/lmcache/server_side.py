"""LMCache's storage manager with kvpool's L2 adapter, as its multi-process server builds it."""

from __future__ import annotations

import contextlib
import json
import os
import select
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from lmcache.v1.distributed.api import (
    FULL_ATTENTION_WINDOW_CHUNKS,
    GroupedObjectKeys,
    MemoryLayoutDesc,
    ObjectKey,
    PrefetchTaskSpec,
)
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.l2_adapters.config import (
    L2AdaptersConfig,
    add_l2_adapters_args,
    parse_args_to_l2_adapters_config,
)
from lmcache.v1.distributed.storage_manager import StorageManager

from kvpool.engines.lmcache import KVPoolL2Adapter, KVPoolL2AdapterConfig
from tests.support.process_cluster import Cluster, wait_until

CHUNK_TOKENS = 16
SHAPE = torch.Size((2, 4, CHUNK_TOKENS, 64))  # K and V of four layers: 16 KiB a chunk
LAYOUT = MemoryLayoutDesc([SHAPE], [torch.bfloat16])
CHUNK_BYTES = 2 * SHAPE.numel()
MODEL = "tests/model"


def parameters(cluster: Cluster, **options: Any) -> dict[str, Any]:
    """`adapter_params` for the pool of `cluster`."""
    where = {"conductor": cluster.conductor["wire"], "host_label": "here", "revision": "r1"}
    return {**where, **options}


def adapters_config(params: Mapping[str, Any]) -> L2AdaptersConfig:
    """What LMCache makes of its command line."""
    spec = {
        "type": "plugin",
        "module_path": "kvpool.engines.lmcache",
        "class_name": "KVPoolL2Adapter",
        "adapter_params": params,
    }
    parser = add_l2_adapters_args(ArgumentParser())
    return parse_args_to_l2_adapters_config(parser.parse_args(["--l2-adapter", json.dumps(spec)]))


@contextlib.contextmanager
def storage_manager(
    params: Mapping[str, Any], *, l1_bytes: int = 32 << 20
) -> Iterator[StorageManager]:
    """LMCache's storage manager over an L1 of its own, closed at the end."""
    memory = L1MemoryManagerConfig(size_in_bytes=l1_bytes, use_lazy=False, shm_name="")
    config = StorageManagerConfig(
        L1ManagerConfig(memory), EvictionConfig("LRU"), adapters_config(params)
    )
    manager = StorageManager(config)
    try:
        yield manager
    finally:
        manager.close()


@contextlib.contextmanager
def adapter(params: Mapping[str, Any]) -> Iterator[KVPoolL2Adapter]:
    """Our adapter alone."""
    made = KVPoolL2Adapter(KVPoolL2AdapterConfig.from_dict(dict(params)))
    try:
        yield made
    finally:
        made.close()


def keys(seed: int, count: int, **fields: Any) -> list[ObjectKey]:
    """Keys of a prompt's chunks, in order; another seed is another prompt."""
    hashes = np.random.default_rng(seed).integers(0, 256, (count, 32), dtype=np.uint8)
    fields = {"model_name": MODEL, "kv_rank": ObjectKey.ComputeKVRank(1, 0, 1, 0), **fields}
    return [ObjectKey(chunk_hash=row.tobytes(), **fields) for row in hashes]


def content(key: ObjectKey, size: int = CHUNK_BYTES) -> np.ndarray:
    """The bytes in place of a key's KV, which differ for every key."""
    seed = int.from_bytes(key.chunk_hash[:8], "little") ^ hash((key.kv_rank, key.object_group_id))
    return np.random.default_rng(seed & (2**63 - 1)).integers(0, 256, size, dtype=np.uint8)


def bytes_of(memory: Any) -> np.ndarray:
    """The bytes of an LMCache memory object, in place."""
    return np.frombuffer(memory.byte_array, dtype=np.uint8)


def put_in_l1(manager: StorageManager, wanted: Sequence[ObjectKey]) -> None:
    """Write chunks as an engine would; storing them in L2 is then the manager's affair."""
    reserved = manager.reserve_write(list(wanted), LAYOUT)
    assert len(reserved) == len(wanted)
    for key, memory in reserved.items():
        bytes_of(memory)[:] = content(key)
    manager.finish_write(list(wanted))


def prefetch(manager: StorageManager, rows: Sequence[Sequence[ObjectKey]]) -> Any:
    """Look up and load; returns LMCache's result."""
    groups = [
        GroupedObjectKeys(list(row), row[0].object_group_id, LAYOUT, FULL_ATTENTION_WINDOW_CHUNKS)
        for row in rows
    ]
    handle = manager.submit_prefetch_task(PrefetchTaskSpec(groups))
    assert manager.wait_prefetch_status(handle, 20.0)
    return manager.query_prefetch_status(handle)


def read_back(manager: StorageManager, wanted: Sequence[ObjectKey], result: Any) -> None:
    """Compare the bytes in L1 after `prefetch` with those written, and release them."""
    with manager.read_prefetched_results(list(wanted), result.l1_owners) as objects:
        assert objects is not None
        for key, memory in zip(wanted, objects, strict=True):
            assert np.array_equal(bytes_of(memory), content(key)), key
    manager.finish_read_prefetched(list(wanted), 1, result.l1_owners)


def wait_signal(fd: int, timeout_s: float = 60.0) -> int:
    """Wait for an event descriptor; returns how many signals it had, and takes them."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    assert poller.poll(timeout_s * 1000), "no signal"
    return os.eventfd_read(fd)


def counters(made: KVPoolL2Adapter) -> dict[str, int]:
    found: dict[str, int] = made.report_status()["counters"]
    return found


def wait_stored(manager: StorageManager, count: int) -> None:
    """Wait until the pool has `count` objects of this server's store tasks."""
    [(_, made)] = manager.l2_adapters()
    wait_until(
        lambda: counters(made).get("stored", 0) + counters(made).get("existing", 0) >= count,
        f"{count} objects stored",
    )
