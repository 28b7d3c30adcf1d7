"""The L2 adapter through LMCache's interface: tasks, locks, keys and bad input."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.memory_allocators.host_memory_allocator import HostMemoryAllocator

from kvpool import Pool
from kvpool.engines.lmcache import KVPoolL2AdapterConfig
from kvpool.engines.lmcache.keys import Keyspace, object_layout
from tests.engines.lmcache import server_side as s
from tests.engines.lmcache.driver import GROUPS, Driver
from tests.support.process_cluster import Cluster, wait_until

LAYOUT = object_layout(s.LAYOUT.shapes, s.LAYOUT.dtypes)


@pytest.fixture(scope="module")
def allocator() -> Iterator[HostMemoryAllocator]:
    made = HostMemoryAllocator(64 << 20)
    yield made
    made.close()


@pytest.fixture
def driver(cluster: Cluster, allocator: HostMemoryAllocator) -> Iterator[Driver]:
    with s.adapter(s.parameters(cluster)) as adapter:
        yield Driver(adapter, allocator)


def leases(cluster: Cluster) -> int:
    return int(cluster.node_stats("n0")["leases"])


# ---------------------------------------------------------------- tasks


def test_what_was_stored_is_found_locked_and_loaded_byte_for_byte(driver: Driver) -> None:
    keys = s.keys(10, 24)
    assert driver.lookup(keys) == [False] * 24
    stored = driver.store(keys)
    assert stored.is_successful()
    assert stored.bytes_transferred() == 24 * s.CHUNK_BYTES
    assert driver.lookup(keys) == [True] * 24
    driver.assert_loads(keys)
    driver.adapter.submit_unlock(keys)


def test_storing_again_succeeds_and_moves_nothing(driver: Driver) -> None:
    keys = s.keys(11, 4)
    driver.store(keys)
    again = driver.store(keys)
    assert again.is_successful()
    assert again.bytes_transferred() == 0


def test_a_gap_costs_the_missing_objects_alone(driver: Driver) -> None:
    keys = s.keys(12, 12)
    present = [i for i in range(12) if i not in (0, 5, 6, 11)]
    driver.store([keys[i] for i in present])
    wanted = [i in present for i in range(12)]
    assert driver.lookup(keys) == wanted
    bits, objects = driver.load(keys)
    assert bits == wanted
    for i in present:
        assert np.array_equal(s.bytes_of(objects[i]), s.content(keys[i]))


def test_each_task_gives_one_signal_and_one_result(driver: Driver) -> None:
    keys, adapter = s.keys(13, 3), driver.adapter
    descriptors = {
        adapter.get_store_event_fd(),
        adapter.get_lookup_and_lock_event_fd(),
        adapter.get_load_event_fd(),
    }
    assert len(descriptors) == 3
    tasks = [adapter.submit_store_task(keys, driver.memory(3)) for _ in range(5)]
    lookups = [adapter.submit_lookup_and_lock_task(keys, GROUPS) for _ in range(5)]
    loads = [adapter.submit_load_task(keys, driver.memory(3)) for _ in range(5)]
    assert len({*tasks, *lookups, *loads}) == 15
    done: dict[int, Any] = {}
    wait_until(lambda: done.update(adapter.pop_completed_store_tasks()) or len(done) == 5, "stores")
    assert sorted(done) == tasks
    for fd, query, waiting in (
        (adapter.get_lookup_and_lock_event_fd(), adapter.query_lookup_and_lock_result, lookups),
        (adapter.get_load_event_fd(), adapter.query_load_result, loads),
    ):
        signals, results = 0, []
        while signals < 5:
            signals += s.wait_signal(fd)
            results += [task for task in waiting if query(task) is not None]
        assert signals == 5
        assert sorted(results) == waiting
        assert all(query(task) is None for task in waiting)
        with pytest.raises(BlockingIOError):
            os.eventfd_read(fd)
    assert os.eventfd_read(adapter.get_store_event_fd()) == 5


def test_threads_share_one_adapter(driver: Driver) -> None:
    adapter, failures = driver.adapter, []

    def work(seed: int) -> None:
        try:
            for turn in range(4):
                keys = s.keys(1000 + 10 * seed + turn, 6)
                objects = driver.memory(6)
                for key, memory in zip(keys, objects, strict=True):
                    s.bytes_of(memory)[:] = s.content(key)
                adapter.submit_store_task(keys, objects)
                # Results of all threads come from one place: ask by task, as the prefetch
                # controller does.
                found = 0
                while found < 6:
                    task = adapter.submit_lookup_and_lock_task(keys, GROUPS)
                    bits = wait_until(partial(adapter.query_lookup_and_lock_result, task), "look")
                    found = bits.popcount()
                    if found < 6:
                        adapter.submit_unlock([k for i, k in enumerate(keys) if bits.test(i)])
                into = driver.memory(6)
                task = adapter.submit_load_task(keys, into)
                bits = wait_until(partial(adapter.query_load_result, task), "load")
                assert bits.popcount() == 6
                for key, memory in zip(keys, into, strict=True):
                    assert np.array_equal(s.bytes_of(memory), s.content(key))
                adapter.submit_unlock(keys)
        except BaseException as error:  # shown by the assertion below
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert len(adapter.pop_completed_store_tasks()) == 24


def test_a_task_after_the_end_is_a_miss_and_raises_nothing(
    cluster: Cluster, allocator: HostMemoryAllocator
) -> None:
    with s.adapter(s.parameters(cluster)) as adapter:
        driver = Driver(adapter, allocator)
    keys = s.keys(14, 2)
    task = adapter.submit_load_task(keys, driver.memory(2))
    loaded = adapter.query_load_result(task)
    assert loaded is not None
    assert loaded.popcount() == 0
    task = adapter.submit_store_task(keys, driver.memory(2))
    assert not adapter.pop_completed_store_tasks()[task].is_successful()
    adapter.submit_unlock(keys)
    adapter.close()


def test_close_waits_for_tasks_that_still_use_lmcaches_memory(
    cluster: Cluster, allocator: HostMemoryAllocator
) -> None:
    keys = s.keys(15, 64)
    with s.adapter(s.parameters(cluster)) as adapter:
        driver = Driver(adapter, allocator)
        objects = driver.memory(64)
        task = adapter.submit_store_task(keys, objects)
    assert adapter.pop_completed_store_tasks()[task].is_successful()


# ---------------------------------------------------------------- locks


def test_a_lock_is_a_lease_from_lookup_to_unlock(driver: Driver, cluster: Cluster) -> None:
    keys = s.keys(20, 8)
    driver.store(keys)
    wait_until(lambda: not leases(cluster), "no lease is left of what went before")
    assert driver.lookup(keys) == [True] * 8
    assert leases(cluster) == 1
    driver.adapter.submit_unlock(keys[4:])
    driver.assert_loads(keys[:4])
    assert leases(cluster) == 1
    driver.adapter.submit_unlock(keys[:4])
    wait_until(lambda: not leases(cluster), "unlocked objects are let go", 5)


def test_two_lookups_of_one_object_need_two_unlocks(driver: Driver, cluster: Cluster) -> None:
    keys = s.keys(21, 3)
    driver.store(keys)
    wait_until(lambda: not leases(cluster), "no lease is left of what went before")
    driver.lookup(keys)
    driver.lookup(keys)
    assert leases(cluster) == 2
    driver.adapter.submit_unlock(keys)
    wait_until(lambda: leases(cluster) == 1, "one of two is left", 5)
    driver.adapter.submit_unlock(keys)
    wait_until(lambda: not leases(cluster), "none is left", 5)


def test_unlocking_what_was_never_locked_does_nothing(driver: Driver, cluster: Cluster) -> None:
    keys = s.keys(22, 3)
    driver.store(keys)
    driver.adapter.submit_unlock(s.keys(23, 2))
    driver.adapter.submit_unlock(keys)
    wait_until(lambda: not leases(cluster), "no lease is left of what went before")
    assert driver.lookup(keys) == [True] * 3
    assert leases(cluster) == 1
    driver.adapter.submit_unlock([*s.keys(24, 2), *keys, *keys])
    wait_until(lambda: not leases(cluster), "the known ones are unlocked", 5)
    assert "defects" not in s.counters(driver.adapter)


def test_a_lock_is_renewed_while_it_is_held_and_given_up_in_the_end(
    cluster: Cluster, allocator: HostMemoryAllocator
) -> None:
    keys = s.keys(25, 3)
    with s.adapter(s.parameters(cluster, lock_ttl_s=1.2, max_lock_s=6)) as adapter:
        driver = Driver(adapter, allocator)
        driver.store(keys)
        locked_at = time.monotonic()
        driver.lookup(keys)
        # The node keeps a lease for two seconds of grace beyond its time.
        wait_until(lambda: not leases(cluster), "nobody unlocks, and so it ends", 20)
        assert time.monotonic() - locked_at >= 5.9
        assert s.counters(adapter)["locks_given_up"] == 1
        assert adapter.report_status()["locked_key_count"] == 0
        driver.assert_loads(keys)


def test_leases_end_with_the_adapter(cluster: Cluster, allocator: HostMemoryAllocator) -> None:
    keys = s.keys(26, 3)
    with s.adapter(s.parameters(cluster)) as adapter:
        driver = Driver(adapter, allocator)
        driver.store(keys)
        wait_until(lambda: not leases(cluster), "no lease is left of what went before")
        driver.lookup(keys)
        assert leases(cluster) == 1
    wait_until(lambda: not leases(cluster), "closing lets go", 5)


# ---------------------------------------------------------------- keys


@pytest.mark.parametrize(
    "other",
    [
        {"model_name": "tests/other"},
        {"cache_salt": "someone-else"},
        {"kv_rank": ObjectKey.ComputeKVRank(2, 1, 2, 1)},
        {"object_group_id": 1},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_keys_that_differ_in_one_field_never_meet(
    driver: Driver, cluster: Cluster, other: dict[str, Any]
) -> None:
    groups = {0: s.LAYOUT, 1: s.LAYOUT}
    driver.store(s.keys(30, 4))
    driver.wait_known_to_others(cluster, s.keys(30, 4))
    assert driver.lookup(s.keys(30, 4), groups) == [True] * 4
    assert driver.lookup(s.keys(30, 4, **other), groups) == [False] * 4
    bits, _ = driver.load(s.keys(30, 4, **other))
    assert bits == [False] * 4


@pytest.mark.parametrize("option", [{"revision": "r2"}, {"salt": "deployment-2"}])
def test_servers_of_another_revision_or_salt_never_meet(
    driver: Driver, cluster: Cluster, option: dict[str, str]
) -> None:
    keys = s.keys(31, 4)
    driver.store(keys)
    driver.wait_known_to_others(cluster, keys)
    with s.adapter(s.parameters(cluster, **option)) as adapter:
        other = Driver(adapter, driver.allocator)
        assert other.lookup(keys) == [False] * 4
        assert other.load(keys)[0] == [False] * 4


@pytest.mark.parametrize(
    "layout",
    [
        MemoryLayoutDesc([s.SHAPE], [torch.float16]),  # as many bytes
        MemoryLayoutDesc([torch.Size((2, 4, 64, 16))], [torch.bfloat16]),  # as many bytes
        MemoryLayoutDesc([torch.Size((2, 4, 8, 64))], [torch.bfloat16]),  # half a chunk
    ],
    ids=["dtype", "shape", "partial"],
)
def test_an_object_of_another_layout_is_a_miss(
    driver: Driver, cluster: Cluster, layout: MemoryLayoutDesc
) -> None:
    keys = s.keys(32 + layout.shapes[0].numel() % 7, 3)
    assert driver.store(keys, layout).is_successful()
    driver.wait_known_to_others(cluster, keys, layout)
    assert driver.lookup(keys, {0: layout}) == [True] * 3
    assert driver.lookup(keys) == [False] * 3
    assert driver.load(keys)[0] == [False] * 3


def test_an_object_narrowed_to_fewer_bytes_is_refused(driver: Driver) -> None:
    keys = s.keys(34, 2)
    objects = driver.memory(2)
    objects[1].set_used_size(100)
    task = driver.adapter.submit_store_task(keys, objects)
    s.wait_signal(driver.adapter.get_store_event_fd())
    assert not driver.adapter.pop_completed_store_tasks()[task].is_successful()
    driver.wait_known(keys[:1])
    assert driver.lookup(keys) == [True, False]
    assert s.counters(driver.adapter)["refused"] == 1


def test_objects_are_chained_in_the_order_in_which_they_were_looked_up(
    driver: Driver, cluster: Cluster
) -> None:
    model = "tests/chained"
    one, two = (s.keys(seed, 8, model_name=model) for seed in (35, 36))
    driver.lookup(one)
    driver.lookup(two)
    driver.store(one[:4])
    driver.store([*one[4:], *two])  # of two prompts in one task, as LMCache's listener gathers them
    with Pool(conductor=cluster.conductor["wire"], host_label="here") as pool:
        [node] = pool.list_blocks(model=model)
    [listing] = node.namespaces
    parents = {block.block_hash: block.parent for block in listing.blocks}
    keyspace = Keyspace(driver.adapter.settings)
    for keys in (one, two):
        names = [keyspace.server_item(key, LAYOUT).name for key in keys]
        assert [parents[name] for name in names] == [b"", *names[:-1]]


# ---------------------------------------------------------------- delete, list, usage


def test_deleted_objects_are_gone_for_everybody_and_locked_ones_stay(
    driver: Driver, cluster: Cluster
) -> None:
    keys = s.keys(40, 6)
    driver.store(keys)
    assert driver.lookup(keys[:2]) == [True] * 2
    driver.adapter.delete(keys)
    with s.adapter(s.parameters(cluster)) as adapter:
        other = Driver(adapter, driver.allocator)
        wait_until(lambda: other.lookup(keys) == [True] * 2 + [False] * 4, "four are gone")
    driver.adapter.submit_unlock(keys)
    assert driver.adapter.get_usage().total_bytes_used == 2 * s.CHUNK_BYTES


def test_listing_pages_through_the_resident_blocks(driver: Driver) -> None:
    keys = [*s.keys(41, 5), *s.keys(42, 3, model_name="tests/other")]
    driver.store(keys)
    adapter, listed, cursor = driver.adapter, [], None
    while True:
        page = adapter.list_l2_keys(page_size=3, cursor=cursor)
        listed += [entry.key.to_object_key() for entry in page.entries]
        assert all(entry.size_bytes == s.CHUNK_BYTES for entry in page.entries)
        cursor = page.next_page_token
        if cursor is None:
            break
    assert set(listed) == set(keys)
    assert len(listed) == 8
    assert len(adapter.list_l2_keys("tests/other").entries) == 3
    adapter.delete(keys[:5])
    wait_until(lambda: len(adapter.list_l2_keys().entries) == 3, "deleted ones are not listed")
    with pytest.raises(ValueError, match="cursor"):
        adapter.list_l2_keys(cursor="elsewhere")
    with pytest.raises(ValueError, match="page_size"):
        adapter.list_l2_keys(page_size=0)


def test_usage_counts_bytes_by_salt(driver: Driver) -> None:
    driver.store(s.keys(43, 3, cache_salt="alice"))
    driver.store(s.keys(43, 2, cache_salt="bob"))
    usage = driver.adapter.get_usage()
    assert usage.bytes_by_cache_salt == {
        "alice": 3 * s.CHUNK_BYTES,
        "bob": 2 * s.CHUNK_BYTES,
    }
    assert usage.usage_fraction == -1  # the pool evicts by itself
    assert not driver.adapter.supports_global_eviction


# ---------------------------------------------------------------- bad input


def test_lmcaches_loader_names_an_unknown_parameter_and_the_nearest_known_one() -> None:
    [config] = s.adapters_config({"revision": "r", "conducter": "127.0.0.1:1"}).adapters
    with pytest.raises(ValueError, match=r"'conducter'.*'conductor'"):
        create_l2_adapter(config)


def test_a_revision_is_asked_for() -> None:
    with pytest.raises(ValueError, match="revision"):
        KVPoolL2AdapterConfig.from_dict({"conductor": "127.0.0.1:1"})


def test_help_has_a_line_for_each_parameter() -> None:
    text = KVPoolL2AdapterConfig.help()
    assert all(f"- {name}:" in text for name in ("conductor", "revision", "lock_ttl_s"))
