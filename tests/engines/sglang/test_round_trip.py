"""Pages through the pool and back, byte for byte, between SGLang's own host pools."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo

from kvpool.errors import ConfigError
from tests.engines.sglang.conftest import MakeBackend, keys
from tests.engines.sglang.real import indices, mha_pool, mla_pool, page_bytes
from tests.support.process_cluster import wait_until

MHA = ("layer_first", "page_first", "page_first_direct", "page_head")
MLA = ("layer_first", "page_first", "page_first_direct")
N = 4


def stored(backend: Any, pool: Any, names: list[str], pages: list[int]) -> None:
    assert backend.batch_set_v1(names, indices(pool, pages)) == [True] * len(names)
    wait_until(lambda: backend.batch_exists(names) == len(names), "the index hears of them")


@pytest.mark.parametrize(
    ("make_pool", "layout", "is_mla"),
    [*((mha_pool, name, False) for name in MHA), *((mla_pool, name, True) for name in MLA)],
)
@pytest.mark.parametrize("transport", ["shm", "nixl"])
def test_pages_come_back_byte_for_byte(
    make_backend: MakeBackend, make_pool: Any, layout: str, is_mla: bool, transport: str
) -> None:
    extra = {"transport": transport}
    source, target = make_pool(layout), make_pool(layout)
    writer = make_backend(source, is_mla_model=is_mla, extra=extra)
    reader = make_backend(target, is_mla_model=is_mla, extra=extra)
    stored(writer, source, keys(N), [3, 1, 9, 0])
    untouched = page_bytes(target, 5)

    wait_until(lambda: reader.batch_exists([*keys(N), "0" * 64]) == N, "another hears of them")
    assert reader.batch_get_v1(keys(N), indices(target, [2, 8, 4, 7])) == [True] * N
    for source_page, target_page in zip([3, 1, 9, 0], [2, 8, 4, 7], strict=True):
        assert page_bytes(target, target_page) == page_bytes(source, source_page)
    assert page_bytes(target, 5) == untouched


def test_layouts_of_equal_bytes_share_pages(make_backend: MakeBackend) -> None:
    source, target = mha_pool("layer_first"), mha_pool("page_first_direct")
    stored(make_backend(source), source, keys(1), [2])
    reader = make_backend(target)
    wait_until(lambda: reader.batch_exists(keys(1)) == 1, "another hears of it")
    assert reader.batch_get_v1(keys(1), indices(target, [6])) == [True]
    # [kv, layer, token, head, dim] both, as SGLang shows a page of either.
    assert page_bytes(target, 6) == page_bytes(source, 2)


def test_hits_are_a_prefix(make_backend: MakeBackend) -> None:
    pool = mha_pool("page_first")
    backend = make_backend(pool)
    names = keys(6)
    stored(backend, pool, [*names[:2], names[4]], [0, 1, 2])  # a gap, as after an eviction

    assert backend.batch_exists(names) == 2
    assert backend.batch_exists(names[2:]) == 0
    assert backend.batch_exists(names[4:]) == 1
    before = page_bytes(pool, 12)
    result = backend.batch_get_v1(names, indices(pool, [10, 11, 12, 13, 14, 15]))
    assert result == [True, True, False, False, False, False]
    assert page_bytes(pool, 10) == page_bytes(pool, 0)
    assert page_bytes(pool, 12) == before
    assert backend.batch_exists([]) == 0
    assert backend.batch_get_v1([], indices(pool, [])) == []


def test_a_page_that_exists_is_stored_again_with_success(make_backend: MakeBackend) -> None:
    pool = mha_pool("page_first")
    backend = make_backend(pool)
    stored(backend, pool, keys(2), [0, 1])
    assert backend.batch_set_v1(keys(3), indices(pool, [4, 5, 6])) == [True] * 3
    wait_until(lambda: backend.batch_exists(keys(3)) == 3, "the index hears of it")
    # The first bytes stay: equal keys are equal KV.
    assert backend.batch_get_v1(keys(1), indices(pool, [9])) == [True]
    assert page_bytes(pool, 9) == page_bytes(pool, 0)


def test_chains_reach_the_pool_by_their_prefix_keys(
    make_backend: MakeBackend, cluster: Any, caplog: pytest.LogCaptureFixture
) -> None:
    pool = mha_pool("page_first")
    backend = make_backend(pool)
    names = keys(4)
    info = HiCacheStorageExtraInfo(prefix_keys=[])
    assert all(backend.batch_set_v1(names[:2], indices(pool, [0, 1]), info))
    info = HiCacheStorageExtraInfo(prefix_keys=names[:2])
    assert all(backend.batch_set_v1(names[2:], indices(pool, [2, 3]), info))
    assert "hicache_storage_pass_prefix_keys" not in caplog.text
    wait_until(lambda: backend.batch_exists(names) == 4, "the index hears of them")

    backend.batch_set_v1(keys(1, "b"), indices(pool, [4]))
    backend.batch_set_v1(keys(1, "c"), indices(pool, [4]))
    assert caplog.text.count("hicache_storage_pass_prefix_keys") == 1


@pytest.mark.parametrize("count", [0, 7, 9, 24])
def test_wrong_sizes_are_misses(make_backend: MakeBackend, count: int) -> None:
    pool = mha_pool("page_first")
    backend = make_backend(pool)
    stored(backend, pool, keys(2), [0, 1])
    before = [page_bytes(pool, p) for p in range(4)]
    wrong = torch.arange(count)
    assert backend.batch_get_v1(keys(2), wrong) == [False, False]
    assert backend.batch_set_v1(keys(2, "b"), wrong) == [False, False]
    assert [page_bytes(pool, p) for p in range(4)] == before


def test_indices_outside_the_host_pool_are_misses(make_backend: MakeBackend) -> None:
    pool = mha_pool("page_first", pages=4)
    backend = make_backend(pool)
    stored(backend, pool, keys(1), [0])
    assert backend.batch_get_v1(keys(1), torch.arange(1_000_000, 1_000_008)) == [False]
    assert backend.batch_set_v1(keys(1, "b"), torch.arange(1_000_000, 1_000_008)) == [False]


def test_a_layout_whose_pages_cannot_be_addressed_is_refused(make_backend: MakeBackend) -> None:
    with pytest.raises(ConfigError, match=r"'kv'.*page_unified.*hicache-mem-layout layer_first"):
        make_backend(mha_pool("page_unified"))
