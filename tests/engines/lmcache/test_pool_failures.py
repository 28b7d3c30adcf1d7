"""Failures of the pool: it was never there, a node dies during a load, it is full, it restarts."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc
from lmcache.v1.memory_allocators.host_memory_allocator import HostMemoryAllocator

from tests.engines.lmcache import server_side as s
from tests.engines.lmcache.driver import Driver
from tests.support.process_cluster import Cluster, wait_until

SHM = "node.transports=shm"  # starts faster than with NIXL
SMALL = ("node.dram_bytes=1MiB", "node.advanced.slab_bytes=128KiB", SHM)
# Long enough to kill a node during a read.
LARGE = MemoryLayoutDesc([torch.Size((2, 16, 64, 1024))], [torch.float32])


@dataclasses.dataclass
class Late:
    """What an adapter did before there was a pool."""

    looked_up: list[list[bool]]
    seconds: list[float]
    stored: list[bool]
    status: dict[str, Any]


@dataclasses.dataclass
class World:
    """The pool, an adapter that is older than it, and what that adapter lived through."""

    cluster: Cluster
    driver: Driver
    late: Late

    def start(self, name: str, *settings: str) -> None:
        """One more node, on a host of its own."""
        self.cluster.start_node(name, *settings, f"node.node_id={name}", host=name)
        wait_until(
            lambda: self.cluster.stats()["node_states"].get(name) == "live", f"{name} joined"
        )


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as reserved:
        port = reserved.getsockname()[1]
    directory = tmp_path_factory.mktemp("failures")
    cluster = Cluster(directory)
    cluster.conductor = {"wire": f"127.0.0.1:{port}"}
    memory = HostMemoryAllocator(192 << 20)
    options = {"max_backoff_s": 1.0, "lookup_timeout_s": 5.0}
    with s.adapter(s.parameters(cluster, **options)) as adapter, cluster.supervisor:
        driver = Driver(adapter, memory)
        late = Late([], [], [], {})
        for seed in range(5):
            began = time.monotonic()
            late.looked_up.append(driver.lookup(s.keys(seed, 8)))
            late.stored.append(driver.try_store(s.keys(seed, 8)).is_successful())
            late.seconds.append(time.monotonic() - began)
        late.status = adapter.report_status()
        cluster.start_conductor(
            "conductor.advanced.heartbeat_s=0.2",
            "conductor.advanced.suspect_after_s=0.8",
            "conductor.advanced.dead_after_s=2",
            port=str(port),
        )
        nvme = (f"node.nvme_directories={directory / 'disk'}", "node.nvme_bytes=16MiB")
        cluster.launch_node("here", "node.dram_bytes=128MiB", host="here")
        cluster.launch_node("small", *SMALL, host="small")
        cluster.launch_node("disk", *nvme, "node.advanced.write_through=true", SHM, host="disk")
        for name in ("here", "small", "disk"):
            cluster.ready_node(name)
        cluster.wait_joined(nodes=3)
        yield World(cluster, driver, late)


def test_without_a_pool_all_is_a_miss_at_once(world: World) -> None:
    assert world.late.looked_up == [[False] * 8] * 5
    assert world.late.stored == [False] * 5
    assert max(world.late.seconds) < 3  # no call waits for lookup_timeout_s
    counters = world.late.status["counters"]
    assert not world.late.status["is_reachable"]
    assert counters["skipped_while_down"] >= 5


def test_an_adapter_older_than_the_pool_finds_it_when_it_comes(world: World) -> None:
    keys = s.keys(50, 8)
    wait_until(lambda: world.driver.try_store(keys).is_successful(), "the pool is found")
    world.driver.wait_known(keys)
    world.driver.assert_loads(keys)
    assert world.driver.adapter.report_status()["is_reachable"]


def test_a_full_pool_rejects_and_takes_again_what_fits_after_unlocking(world: World) -> None:
    fits = s.keys(51, 56)  # of 64 that fit
    more = s.keys(52, 16)
    with s.adapter(s.parameters(world.cluster, host_label="small")) as adapter:
        driver = Driver(adapter, world.driver.allocator)
        assert driver.store(fits[:32]).is_successful()
        assert driver.store(fits[32:]).is_successful()
        assert all(driver.lookup(fits))
        # Room for eight is left: they are stored, and the rest is rejected.
        rejected = driver.try_store(more)
        assert not rejected.is_successful()
        assert rejected.bytes_transferred() == 0  # as LMCache counts a store that failed
        assert s.counters(adapter)["rejected"] == 8
        driver.wait_known(more[:8])
        assert adapter.get_usage().total_bytes_used == 64 * s.CHUNK_BYTES
        driver.assert_loads(fits)  # locked objects stay
        adapter.submit_unlock(fits)
        wait_until(lambda: driver.try_store(more).is_successful(), "there is room again")
        driver.wait_known(more)
        driver.assert_loads(more)


@pytest.mark.parametrize("transport", ["shm", "nixl"])
def test_a_node_killed_in_mid_load_is_a_miss_and_never_a_wrong_byte(
    world: World, transport: str
) -> None:
    name = f"doomed-{transport}"
    world.start(
        name,
        "node.dram_bytes=128MiB",
        "node.advanced.slab_bytes=16MiB",
        f"node.transports={transport}",
    )
    host = name if transport == "shm" else "elsewhere"
    keys = s.keys(60 if transport == "shm" else 61, 8)
    options = {"host_label": name, "load_timeout_s": 5.0}
    with s.adapter(s.parameters(world.cluster, **options)) as adapter:
        driver = Driver(adapter, world.driver.allocator)
        assert driver.store(keys, LARGE).is_successful()
        assert driver.lookup(keys, {0: LARGE}) == [True] * 8
    outcomes: list[list[bool]] = []
    options |= {"host_label": host, "transport": "auto" if transport == "shm" else "nixl"}
    with s.adapter(s.parameters(world.cluster, **options)) as adapter:
        driver = Driver(adapter, world.driver.allocator)
        has_read, is_over = threading.Event(), threading.Event()

        def load_on() -> None:
            while not outcomes or all(outcomes[-1]):
                bits, objects = driver.load(keys, LARGE)
                for key, memory, came in zip(keys, objects, bits, strict=True):
                    if came:
                        assert np.array_equal(s.bytes_of(memory), s.content(key, memory.get_size()))
                    memory.ref_count_down()
                outcomes.append(bits)
                has_read.set()
            is_over.set()

        reader = threading.Thread(target=load_on)
        reader.start()
        assert has_read.wait(30)
        world.cluster.kill(name)
        reader.join(30)
        assert is_over.is_set()
        wait_until(lambda: not any(driver.lookup(keys, {0: LARGE})), "what it had is gone")
        assert "defects" not in s.counters(adapter)


def test_a_load_stuck_at_a_stopped_node_ends_when_that_dies(world: World) -> None:
    world.start("stuck", "node.dram_bytes=16MiB", SHM)
    keys = s.keys(70, 4)
    with s.adapter(s.parameters(world.cluster, host_label="stuck")) as adapter:
        driver = Driver(adapter, world.driver.allocator)
        driver.store(keys)
        driver.lookup(keys)
        world.cluster.kill("stuck", signal.SIGSTOP)
        objects = driver.memory(4)
        began = time.monotonic()
        task = adapter.submit_load_task(keys, objects)
        world.cluster.kill("stuck")
        s.wait_signal(adapter.get_load_event_fd())
        loaded = adapter.query_load_result(task)
        assert loaded is not None
        assert loaded.popcount() == 0
        assert time.monotonic() - began < adapter.settings.load_timeout_s
        adapter.submit_unlock(keys)


def test_objects_outlast_a_node_that_is_killed_and_started_again_on_its_disk(world: World) -> None:
    cluster, keys = world.cluster, s.keys(80, 24)
    with s.adapter(s.parameters(cluster, host_label="disk")) as adapter:
        driver = Driver(adapter, world.driver.allocator)
        assert driver.store(keys).is_successful()
        wait_until(
            lambda: cluster.node_stats("disk")["counters"].get("demoted", 0) >= 24, "on NVMe"
        )
        cluster.kill("disk")
        nvme = (f"node.nvme_directories={cluster.directory / 'disk'}", "node.nvme_bytes=16MiB")
        cluster.start_node("again", *nvme, "node.advanced.write_through=true", SHM, host="disk")
        driver.wait_known(keys)  # the same server continues
        driver.assert_loads(keys)
    with s.adapter(s.parameters(cluster, host_label="disk")) as adapter:
        driver = Driver(adapter, world.driver.allocator)
        assert driver.lookup(keys) == [True] * 24
        driver.assert_loads(keys)
