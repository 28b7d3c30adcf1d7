"""Which ranks, processes, models, layouts and tenants find each other's pages."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from kvpool.errors import ConfigError, LayoutMismatch
from tests.engines.sglang.conftest import MakeBackend, OtherProcess, keys
from tests.engines.sglang.real import indices, mha_pool, mla_pool, page_bytes
from tests.support.process_cluster import Cluster, wait_until
from tests.support.secured import environment, token, tokens_file


def put(backend: Any, pool: Any, names: list[str], pages: list[int]) -> None:
    assert backend.batch_set_v1(names, indices(pool, pages)) == [True] * len(names)


def wait_for(backend: Any, names: list[str], found: int) -> None:
    wait_until(lambda: backend.batch_exists(names) == found, f"{found} pages are found")


def wait_for_others(make_backend: MakeBackend, pool: Any, names: list[str], **how: Any) -> None:
    """Wait until an instance that stored nothing finds them, which depends on the index."""
    wait_for(make_backend(pool, **how), names, len(names))


def test_a_page_is_a_hit_once_all_ranks_have_stored_it_and_in_every_process(
    make_backend: MakeBackend, other_process: OtherProcess, settings: dict[str, Any]
) -> None:
    pool = mha_pool("page_first")
    rank0 = make_backend(pool, tp_rank=0, tp_size=2)
    other_process.ask(make=settings, seed=1, fields={"tp_rank": 1, "tp_size": 2})
    names = keys(5)

    put(rank0, pool, names[:4], [0, 1, 2, 3])
    # Once the index has a later page of both, it has everything that came before it.
    put(rank0, pool, keys(1, "later"), [4])
    other_process.ask(call="batch_set_v1", keys=keys(1, "later"), pages=[4])
    wait_for_others(make_backend, pool, keys(1, "later"), tp_rank=0, tp_size=2)
    assert rank0.batch_exists(names) == 0
    assert other_process.ask(call="batch_exists", keys=names) == 0
    other_process.ask(call="batch_set_v1", keys=names[:3], pages=[5, 6, 7])
    wait_for(rank0, names, 3)
    assert other_process.ask(call="batch_exists", keys=names) == 3

    before = [other_process.ask(page=p) for p in (5, 6, 7)]
    assert other_process.ask(call="batch_get_v1", keys=names[:3], pages=[8, 9, 10]) == [True] * 3
    assert [other_process.ask(page=p) for p in (8, 9, 10)] == before
    assert rank0.batch_get_v1(names[:3], indices(pool, [8, 9, 10])) == [True] * 3
    assert [page_bytes(pool, p) for p in (8, 9, 10)] == [page_bytes(pool, p) for p in (0, 1, 2)]
    assert hashlib.sha256(page_bytes(pool, 8)).hexdigest() not in before


def test_two_instances_started_apart_agree_on_keys(
    make_backend: MakeBackend, other_process: OtherProcess, settings: dict[str, Any]
) -> None:
    pool = mha_pool("page_first")
    backend = make_backend(pool)
    put(backend, pool, keys(3), [0, 1, 2])
    other_process.ask(make=settings, seed=2, fields={})
    wait_until(lambda: other_process.ask(call="batch_exists", keys=keys(3)) == 3, "they are found")
    assert other_process.ask(call="batch_get_v1", keys=keys(3), pages=[4, 5, 6]) == [True] * 3
    digests = [hashlib.sha256(page_bytes(pool, p)).hexdigest() for p in range(3)]
    assert [other_process.ask(page=p) for p in (4, 5, 6)] == digests


def test_one_page_stored_by_many_at_once_is_stored_once_and_whole(
    make_backend: MakeBackend,
) -> None:
    pools = [mha_pool("page_first") for _ in range(4)]
    backends = [make_backend(pool) for pool in pools]
    gate = threading.Barrier(len(backends))

    def store(at: int) -> list[bool]:
        gate.wait(10)
        stored: list[bool] = backends[at].batch_set_v1(keys(4), indices(pools[at], [0, 1, 2, 3]))
        return stored

    with ThreadPoolExecutor(len(backends)) as threads:
        outcomes = list(threads.map(store, range(len(backends))))
    assert outcomes == [[True] * 4] * len(backends)
    wait_for(backends[0], keys(4), 4)
    assert backends[0].batch_get_v1(keys(4), indices(pools[0], [8, 9, 10, 11])) == [True] * 4
    for page in range(4):
        written = [page_bytes(pool, page) for pool in pools]
        assert page_bytes(pools[0], 8 + page) in written


def test_of_mla_ranks_the_first_stores_and_all_load(make_backend: MakeBackend) -> None:
    pools = [mla_pool("page_first") for _ in range(2)]
    first, second = (
        make_backend(pool, is_mla_model=True, tp_rank=rank, tp_size=2)
        for rank, pool in enumerate(pools)
    )
    put(second, pools[1], keys(2), [0, 1])  # succeeds, and stores nothing
    put(first, pools[0], keys(1, "b"), [0])
    wait_for(second, keys(1, "b"), 1)
    assert first.batch_exists(keys(2)) == 0
    assert second.batch_get_v1(keys(1, "b"), indices(pools[1], [5])) == [True]
    assert page_bytes(pools[1], 5) == page_bytes(pools[0], 0)


def test_mla_pages_are_shared_between_tensor_parallel_sizes(make_backend: MakeBackend) -> None:
    pools = [mla_pool("layer_first"), mla_pool("page_first_direct")]
    small = make_backend(pools[0], is_mla_model=True)
    large = make_backend(pools[1], is_mla_model=True, tp_rank=3, tp_size=4)
    put(small, pools[0], keys(1), [2])
    wait_for(large, keys(1), 1)
    assert large.batch_get_v1(keys(1), indices(pools[1], [4])) == [True]
    assert page_bytes(pools[1], 4) == page_bytes(pools[0], 2)


def test_pipeline_stages_keep_their_layers_apart(make_backend: MakeBackend) -> None:
    pools = [mha_pool("page_first", start_layer=s) for s in (0, 3)]
    stages = [make_backend(p, pp_rank=i, pp_size=2) for i, p in enumerate(pools)]
    for stage, pool in zip(stages, pools, strict=True):
        put(stage, pool, keys(1), [0])
    for stage, pool in zip(stages, pools, strict=True):
        wait_for(stage, keys(1), 1)
        assert stage.batch_get_v1(keys(1), indices(pool, [7])) == [True]
        assert page_bytes(pool, 7) == page_bytes(pool, 0)


@pytest.mark.parametrize(
    "extra", [{"revision": "another"}, {"model": "another"}, {"salt": "pepper"}, {"tenant": "acme"}]
)
def test_nothing_is_found_under_another_identity(
    make_backend: MakeBackend, extra: dict[str, str]
) -> None:
    pool = mha_pool("page_first")
    backend = make_backend(pool)
    other = make_backend(pool, extra=extra)
    put(backend, pool, keys(2), [0, 1])
    wait_for_others(make_backend, pool, keys(2))
    assert other.batch_exists(keys(2)) == 0
    assert other.batch_get_v1(keys(2), indices(pool, [4, 5])) == [False, False]


@pytest.mark.parametrize(
    ("changed", "fields", "difference"),
    [
        ({"page_size": 16}, {}, "block_tokens: 8 != 16"),
        ({"dtype": torch.float16}, {}, "dtype: bfloat16 != float16"),
        ({"layout": "page_head"}, {}, "order: "),
        ({"heads": 1}, {"tp_size": 2}, "tp_size: 1 != 2"),
    ],
)
def test_an_instance_of_another_layout_does_not_start_unless_it_may_keep_apart(
    make_backend: MakeBackend, changed: dict[str, Any], fields: dict[str, Any], difference: str
) -> None:
    pool = mha_pool("page_first")
    backend = make_backend(pool)
    put(backend, pool, keys(1), [0])
    wait_for_others(make_backend, pool, keys(1))
    other_pool = mha_pool(**({"layout": "page_first"} | changed))
    with pytest.raises(LayoutMismatch, match=difference):
        make_backend(other_pool, **fields)
    apart = make_backend(other_pool, extra={"on_mismatch": "separate"}, **fields)
    assert apart.batch_exists(keys(1)) == 0


def test_8_bit_formats_are_told_apart(make_backend: MakeBackend) -> None:
    pool = mha_pool("page_first", dtype=torch.uint8)
    with pytest.raises(ConfigError, match="kv_cache_dtype"):
        make_backend(pool)
    make_backend(pool, extra={"kv_cache_dtype": "fp8_e4m3"})
    with pytest.raises(LayoutMismatch, match="dtype: fp8_e4m3 != fp8_e5m2"):
        make_backend(pool, extra={"kv_cache_dtype": "fp8_e5m2"})


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory: Path = tmp_path_factory.mktemp("tenants")
    running = Cluster(directory, env=environment(tokens_file(directory)))
    with running.supervisor:
        running.start_conductor()
        running.start_node("n0")
        yield running


def test_two_tenants_never_meet(make_backend: MakeBackend, secured: Cluster) -> None:
    def tenant_of(name: str, claimed: str) -> tuple[Any, Any]:
        pool = mha_pool("page_first")
        extra = {"conductor": secured.conductor["wire"], "token": token(name), "tenant": claimed}
        return make_backend(pool, extra=extra), pool

    acme, acme_pool = tenant_of("acme", "acme")
    bolt, bolt_pool = tenant_of("bolt", "bolt")
    wait_until(lambda: acme.batch_set_v1(keys(2), indices(acme_pool, [0, 1]))[0], "a node is there")
    wait_for(tenant_of("acme", "acme")[0], keys(2), 2)  # it has stored nothing yet
    assert bolt.batch_exists(keys(2)) == 0
    before = page_bytes(bolt_pool, 4)
    assert bolt.batch_get_v1(keys(2), indices(bolt_pool, [4, 5])) == [False, False]
    assert page_bytes(bolt_pool, 4) == before

    # Another tenant than the token's gets nothing; SGLang starts, and everything is a miss.
    liar, liar_pool = tenant_of("bolt", "acme")
    assert liar.batch_exists(keys(2)) == 0
    assert liar.batch_get_v1(keys(2), indices(liar_pool, [4, 5])) == [False, False]
    assert liar.batch_set_v1(keys(2), indices(liar_pool, [4, 5])) == [False, False]
