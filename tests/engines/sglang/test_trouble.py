"""Every failure is a timely miss, counted and logged: SGLang's threads see no exception or None."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY
from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageFailureInjector,
    PoolName,
    PoolTransfer,
)

from kvpool.errors import ConfigError, TransferFailed
from tests.engines.sglang.conftest import MakeBackend, keys
from tests.engines.sglang.real import indices, mha_pool, mla_pool, page_bytes
from tests.support.process_cluster import Cluster, wait_until

N = 3
QUICK = {"lookup_timeout_s": 0.6, "load_timeout_s": 0.8, "store_timeout_s": 0.8, "backoff_s": 0.2}
IN_TIME_S = 8.0  # of any call, with room for a busy machine


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Cluster]:
    """A pool that the test may break."""
    running = Cluster(tmp_path)
    with running.supervisor:
        yield running


def trouble(operation: str, reason: str) -> float:
    labels = {"operation": operation, "reason": reason, "rank": "0"}
    return REGISTRY.get_sample_value("kvpool_sglang_trouble_total", labels) or 0.0


def all_misses(backend: Any, pool: Any, names: list[str]) -> None:
    """Every call of the interface, none of which may find, store or take anything."""
    count = len(names)
    slots = indices(pool, range(count))
    v2 = [PoolTransfer(name=PoolName.KV, host_indices=slots, keys=names)]
    started = time.monotonic()
    assert backend.batch_exists(names) == 0
    assert backend.exists(names[0]) is False
    assert backend.batch_exists_v2(names, v2).kv_hit_pages == 0
    assert backend.batch_get_v1(names, slots) == [False] * count
    assert backend.batch_get_v2(v2) == {PoolName.KV: [False] * count}
    assert backend.batch_set_v1(names, slots) == [False] * count
    assert backend.batch_set_v2(v2) == {PoolName.KV: [False] * count}
    assert time.monotonic() - started < IN_TIME_S


def stored(backend: Any, pool: Any, names: list[str]) -> None:
    slots = indices(pool, range(len(names)))
    wait_until(lambda: all(backend.batch_set_v1(names, slots)), "they are stored")
    wait_until(lambda: backend.batch_exists(names) == len(names), "the index hears of them")


def test_sglang_starts_without_the_pool_and_finds_it_when_it_comes(
    make_backend: MakeBackend, own: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pool = mha_pool("page_first")
    backend = make_backend(pool, extra=QUICK | {"conductor": f"127.0.0.1:{port}"})
    assert "SGLang starts without the pool" in caplog.text
    for _ in range(20):
        all_misses(backend, pool, keys(N))
    # Logged once, not for each call; and most calls did not even try.
    assert caplog.text.count("lookup is a miss (pool_down): the pool") == 1
    assert trouble("lookup", "pool_down") >= 20

    own.start_conductor(port=str(port))
    own.start_node("n0")
    stored(backend, pool, keys(N))
    assert backend.batch_get_v1(keys(N), indices(pool, [8, 9, 10])) == [True] * N
    assert page_bytes(pool, 8) == page_bytes(pool, 0)
    assert "the pool answers again" in caplog.text


def test_a_node_killed_between_look_up_and_load_is_a_miss_and_another_one_serves(
    make_backend: MakeBackend, own: Cluster
) -> None:
    own.start_conductor()
    own.start_node("n0")
    pool = mha_pool("page_first")
    backend = make_backend(pool, extra=QUICK | {"conductor": own.conductor["wire"]})
    stored(backend, pool, keys(N))
    assert backend.batch_exists(keys(N)) == N
    before = [page_bytes(pool, p) for p in range(16)]
    own.kill("n0")

    started = time.monotonic()
    assert backend.batch_get_v1(keys(N), indices(pool, [8, 9, 10])) == [False] * N
    assert time.monotonic() - started < IN_TIME_S
    assert [page_bytes(pool, p) for p in range(16)] == before
    assert backend.batch_set_v1(keys(N), indices(pool, range(N))) == [False] * N

    own.start_node("n1")
    stored(backend, pool, keys(N))
    assert backend.batch_get_v1(keys(N), indices(pool, [8, 9, 10])) == [True] * N


def test_a_pool_that_hangs_is_a_miss_in_time(make_backend: MakeBackend, own: Cluster) -> None:
    conductor = own.start_conductor()["wire"]
    own.start_node("n0")
    pool = mha_pool("page_first")
    backend = make_backend(pool, extra=QUICK | {"conductor": conductor})
    stored(backend, pool, keys(N))
    slots = indices(pool, [8, 9, 10])
    for name in ("n0", own.supervisor.members[0].name):
        own.kill(name, signal.SIGSTOP)
        try:
            for _ in range(3):
                started = time.monotonic()
                assert backend.batch_exists(keys(N, name)) == 0
                assert backend.batch_get_v1(keys(N), slots) == [False] * N
                backend.batch_set_v1(keys(N, name), slots)  # a known node accepts them
                assert time.monotonic() - started < IN_TIME_S
        finally:
            own.kill(name, signal.SIGCONT)
        wait_until(lambda: backend.batch_exists(keys(N)) == N, "it is used again")
        wait_until(lambda: backend.batch_get_v1(keys(N), slots) == [True] * N, "it is read again")
        assert [page_bytes(pool, p) for p in (8, 9, 10)] == [page_bytes(pool, p) for p in range(N)]


def test_a_full_pool_refuses_and_takes_again_when_what_is_held_is_loaded(
    make_backend: MakeBackend, own: Cluster
) -> None:
    node = own.start_node("n0", "node.dram_bytes=2MiB", "node.advanced.slab_bytes=1MiB")
    pool = mha_pool("page_first", page_size=64, heads=8, head_dim=64, layers=4, pages=8)  # 512 KiB
    extra = {"conductor": None, "node": node["wire"], "lease_s": 60}
    backend = make_backend(pool, extra=extra)
    stored(backend, pool, keys(3))  # and leased by the look-up
    assert backend.batch_exists(keys(3)) == 3
    more = keys(3, "b")
    assert backend.batch_set_v1(more, indices(pool, [3, 4, 5])) == [True, False, False]
    assert trouble("store", "no_room") >= 1
    assert backend.batch_get_v1(keys(3), indices(pool, [3, 4, 5])) == [True] * 3

    wait_until(lambda: backend.batch_set_v1(more, indices(pool, [3, 4, 5])) == [True] * 3, "room")
    wait_until(lambda: backend.batch_exists(more) == 3, "the index hears of them")


def test_pages_are_found_after_the_node_restarts_from_its_files(
    make_backend: MakeBackend, own: Cluster, tmp_path: Path
) -> None:
    disk = ("node.nvme_bytes=16MiB", f"node.nvme_directories={tmp_path / 'disk'}")
    node = own.start_node("first", *disk, "node.node_id=phoenix")
    source, target = mha_pool("page_first"), mha_pool("page_first")
    backend = make_backend(source, extra={"conductor": None, "node": node["wire"]})
    stored(backend, source, keys(N))
    wait_until(lambda: own.node_stats("first")["counters"].get("demoted", 0) == N, "on the disk")
    own.kill("first")
    node = own.start_node("second", *disk, "node.node_id=phoenix")
    reader = make_backend(target, extra={"conductor": None, "node": node["wire"]})
    assert reader.batch_exists(keys(N)) == N
    assert reader.batch_get_v1(keys(N), indices(target, [8, 9, 10])) == [True] * N
    assert [page_bytes(target, p) for p in (8, 9, 10)] == [page_bytes(source, p) for p in range(N)]


def test_sglangs_failure_injector_finds_a_backend_that_bears_it(
    make_backend: MakeBackend, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE.name, "0.4")
    monkeypatch.setenv(envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY.name, "0.002")
    pool = mha_pool("page_first")
    # A single node has no index, which would have pages only a moment later.
    backend = make_backend(pool, extra={"conductor": None, "node": cluster.nodes["n0"]["wire"]})
    assert isinstance(backend, HiCacheStorageFailureInjector)
    outcomes = set()
    for turn in range(40):
        names = keys(4, f"turn-{turn}")
        backend.batch_set_v1(names, indices(pool, [0, 1, 2, 3]))
        found = backend.batch_exists(names)
        before = [page_bytes(pool, p) for p in range(8)]
        loaded = backend.batch_get_v1(names, indices(pool, [4, 5, 6, 7]))
        outcomes |= {("exists", found), ("get", sum(loaded))}
        assert loaded == sorted(loaded, reverse=True)
        after = [page_bytes(pool, p) for p in range(8)]
        assert after == before[:4] + before[: sum(loaded)] + before[4 + sum(loaded) :]
    assert {("exists", 0), ("get", 0), ("get", 4)} <= outcomes


def test_a_defect_of_our_own_is_a_miss_too(
    make_backend: MakeBackend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pool = mha_pool("page_first")
    backend = make_backend(pool)
    for method in ("pin", "get", "put", "exists"):
        monkeypatch.setattr(backend._pool, method, lambda *a, **k: 1 / 0)
    all_misses(backend, pool, keys(N))
    assert "ZeroDivisionError: division by zero" in caplog.text  # with its traceback
    assert trouble("load", "defect") >= 1


def test_a_transfer_that_breaks_is_one_miss_and_keeps_nobody_away(
    make_backend: MakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = mha_pool("page_first")
    backend = make_backend(pool)
    stored(backend, pool, keys(N))
    slots = indices(pool, [8, 9, 10])

    def broken(*_: Any, **__: Any) -> None:
        raise TransferFailed("a node went away in the middle")

    with monkeypatch.context() as patch:
        patch.setattr(backend._pool, "get", broken)
        assert backend.batch_get_v1(keys(N), slots) == [False] * N
    assert backend.batch_exists(keys(N)) == N
    assert backend.batch_get_v1(keys(N), slots) == [True] * N


def test_a_closed_backend_answers_misses(make_backend: MakeBackend) -> None:
    pool = mha_pool("page_first")
    backend = make_backend(pool)
    stored(backend, pool, keys(N))
    backend.close()
    backend.close()
    all_misses(backend, pool, keys(N))
    assert backend.clear() is False


def test_the_interface_before_v1_is_refused_and_never_serves(make_backend: MakeBackend) -> None:
    pool = mha_pool("page_first")
    with pytest.raises(ConfigError, match="interface_v1"):
        make_backend(pool, extra={"interface_v1": None})
    backend = make_backend(pool)
    page = torch.zeros(8)
    assert backend.get(keys(1)[0], page) is None
    assert backend.batch_get(keys(2), [page, page]) == [None, None]
    assert backend.set(keys(1)[0], page) is False
    assert backend.batch_set(keys(1), [page]) is False


def test_unsupported_instances_do_not_start(make_backend: MakeBackend) -> None:
    with pytest.raises(ConfigError, match="tp_lcm_size"):
        make_backend(mha_pool("page_head"), tp_lcm_size=4, should_split_heads=True)
    with pytest.raises(ConfigError, match="dcp_size"):
        make_backend(
            mla_pool("page_first"), is_mla_model=True, tp_size=2, dcp_size=2, logical_page_size=16
        )
