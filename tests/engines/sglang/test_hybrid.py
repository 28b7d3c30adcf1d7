"""Side pools of hybrid models: a hit counts only if every pool has its pages and leases them."""

from __future__ import annotations

from typing import Any

import pytest
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

from kvpool.errors import ConfigError
from tests.engines.sglang.conftest import MakeBackend, keys
from tests.engines.sglang.real import (
    LogicalHostPool,
    indices,
    mamba_pool,
    mha_pool,
    mla_pool,
    page_bytes,
)
from tests.support.process_cluster import wait_until

N = 6
ALL, TRAILING = PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES


def transfer(name: PoolName, pool: Any, names: list[str], pages: list[int]) -> PoolTransfer:
    return PoolTransfer(name=name, host_indices=indices(pool, pages), keys=names)


def query(name: PoolName, policy: PoolHitPolicy, trailing: int = 1) -> PoolTransfer:
    return PoolTransfer(name=name, keys=["?"] * trailing, hit_policy=policy)


class Hybrid:
    """A backend with a main pool, an indexer beside it and the states of linear layers."""

    def __init__(self, make_backend: MakeBackend) -> None:
        self.kv = mha_pool("page_first")
        self.index = mha_pool("page_first_direct", heads=1, layers=1)
        self.mamba = mamba_pool()
        side = {PoolName.KV: self.kv, PoolName.INDEXER: self.index, PoolName.MAMBA: self.mamba}
        # Longer than a test waits: leases end because their pages were loaded.
        self.backend = make_backend(self.kv, side=side, extra={"lease_s": 120})

    def put(self, name: PoolName, pool: Any, names: list[str], pages: list[int]) -> None:
        result = self.backend.batch_set_v2([transfer(name, pool, names, pages)])
        assert result == {name: [True] * len(names)}

    def pages(self, *transfers: PoolTransfer) -> int:
        return int(self.backend.batch_exists_v2(keys(N), list(transfers)).kv_hit_pages)


@pytest.fixture
def hybrid(make_backend: MakeBackend) -> Hybrid:
    return Hybrid(make_backend)


def test_side_pools_come_back_byte_for_byte(hybrid: Hybrid) -> None:
    pools = (
        (PoolName.KV, hybrid.kv),
        (PoolName.INDEXER, hybrid.index),
        (PoolName.MAMBA, hybrid.mamba),
    )
    for name, pool in pools:
        hybrid.put(name, pool, keys(2), [3, 1])
    asked = [query(PoolName.INDEXER, ALL), query(PoolName.MAMBA, TRAILING)]
    wait_until(lambda: hybrid.pages(*asked) == 2, "all pools have them")
    loads = [transfer(name, pool, keys(2), [8, 9]) for name, pool in pools]
    assert hybrid.backend.batch_get_v2(loads) == {name: [True, True] for name, _ in pools}
    for _, pool in pools:
        assert page_bytes(pool, 8) == page_bytes(pool, 3)
        assert page_bytes(pool, 9) == page_bytes(pool, 1)


def test_a_missing_page_of_a_side_pool_shortens_the_hit(hybrid: Hybrid) -> None:
    hybrid.put(PoolName.KV, hybrid.kv, keys(N), list(range(N)))
    hybrid.put(PoolName.INDEXER, hybrid.index, keys(3), [0, 1, 2])
    wait_until(lambda: hybrid.pages() == N, "the main pool has all")
    wait_until(lambda: hybrid.pages(query(PoolName.INDEXER, ALL)) == 3, "the indexer has three")

    result = hybrid.backend.batch_exists_v2(keys(N), [query(PoolName.INDEXER, ALL)])
    assert result.kv_hit_pages == 3
    assert result.extra_pool_hit_pages == {PoolName.KV: N, PoolName.INDEXER: 3}
    # No page of the states: nothing can be restored, whatever the others have.
    both = [query(PoolName.INDEXER, ALL), query(PoolName.MAMBA, TRAILING)]
    result = hybrid.backend.batch_exists_v2(keys(N), both)
    assert (result.kv_hit_pages, result.restorable_prefix_pages) == (0, [])
    assert PoolName.MAMBA not in result.extra_pool_hit_pages


def test_of_trailing_pools_the_end_of_the_prefix_counts_alone(hybrid: Hybrid) -> None:
    hybrid.put(PoolName.KV, hybrid.kv, keys(N), list(range(N)))
    for i in (1, 3, 4):  # some checkpoints
        hybrid.put(PoolName.MAMBA, hybrid.mamba, [keys(N)[i]], [i])
    asked = query(PoolName.MAMBA, TRAILING)
    wait_until(lambda: hybrid.pages(asked) == 5, "the checkpoint at page 4 is found")
    result = hybrid.backend.batch_exists_v2(keys(N), [asked])
    assert result.restorable_prefix_pages == [2, 4, 5]
    # A window of two pages: only [3, 4] is whole.
    result = hybrid.backend.batch_exists_v2(keys(N), [query(PoolName.MAMBA, TRAILING, 2)])
    assert (result.kv_hit_pages, result.restorable_prefix_pages) == (5, [5])
    # Together with an indexer of three pages the checkpoint at page 1 is the last that serves.
    hybrid.put(PoolName.INDEXER, hybrid.index, keys(3), [0, 1, 2])
    wait_until(lambda: hybrid.pages(query(PoolName.INDEXER, ALL)) == 3, "the indexer has three")
    both = [query(PoolName.INDEXER, ALL), asked]
    assert hybrid.backend.batch_exists_v2(keys(N), both).kv_hit_pages == 2


def test_a_second_form_of_the_same_pages_never_decides_over_a_hit(hybrid: Hybrid) -> None:
    hybrid.put(PoolName.KV, hybrid.kv, keys(2), [0, 1])
    groups = query(PoolName.INDEXER, PoolHitPolicy.BLOCK_GROUPS)
    wait_until(lambda: hybrid.pages(groups) == 2, "the main pool has them")


def test_what_a_hit_takes_is_held_in_every_pool_until_it_is_loaded(
    hybrid: Hybrid, cluster: Any
) -> None:
    hybrid.put(PoolName.KV, hybrid.kv, keys(2), [0, 1])
    hybrid.put(PoolName.MAMBA, hybrid.mamba, [keys(2)[1]], [0])
    wait_until(lambda: hybrid.pages(query(PoolName.MAMBA, TRAILING)) == 2, "both pools have them")
    wait_until(lambda: cluster.node_stats("n0")["leases"] >= 2, "a lease in each namespace")
    hybrid.backend.batch_get_v1(keys(2), indices(hybrid.kv, [8, 9]))
    hybrid.backend.batch_get_v2([transfer(PoolName.MAMBA, hybrid.mamba, [keys(2)[1]], [9])])
    wait_until(lambda: not cluster.node_stats("n0")["leases"], "the leases are given back")


def test_a_model_whose_main_pool_is_logical_is_found_by_its_side_pools(
    make_backend: MakeBackend,
) -> None:
    side = mla_pool("page_first")
    anchor = LogicalHostPool(128, side.page_size)
    name = PoolName.DEEPSEEK_V4_C4
    backend = make_backend(anchor, side={name: side}, is_mla_model=True)
    assert backend.batch_set_v1(keys(2), indices(anchor, [0, 1])) == [True, True]
    assert backend.batch_exists_v2(keys(3), [query(name, ALL)]).kv_hit_pages == 0
    assert backend.batch_set_v2([transfer(name, side, keys(2), [0, 1])]) == {name: [True, True]}
    wait_until(
        lambda: backend.batch_exists_v2(keys(3), [query(name, ALL)]).kv_hit_pages == 2, "found"
    )
    assert backend.batch_get_v1(keys(2), indices(anchor, [4, 5])) == [True, True]
    assert backend.batch_get_v2([transfer(name, side, keys(2), [8, 9])]) == {name: [True, True]}
    assert page_bytes(side, 8) == page_bytes(side, 0)


def test_states_of_linear_layers_belong_to_each_rank_beside_mla(make_backend: MakeBackend) -> None:
    pools = [(mla_pool("page_first"), mamba_pool()) for _ in range(2)]
    ranks = [
        make_backend(kv, side={PoolName.MAMBA: mamba}, is_mla_model=True, tp_rank=rank, tp_size=2)
        for rank, (kv, mamba) in enumerate(pools)
    ]
    for rank, (kv, mamba) in zip(ranks, pools, strict=True):
        assert rank.batch_set_v1(keys(1), indices(kv, [0])) == [True]
        rank.batch_set_v2([transfer(PoolName.MAMBA, mamba, keys(1), [0])])
    asked = [query(PoolName.MAMBA, TRAILING)]
    for rank, (_, mamba) in zip(ranks, pools, strict=True):
        wait_until(lambda r=rank: r.batch_exists_v2(keys(1), asked).kv_hit_pages == 1, "found")
        rank.batch_get_v2([transfer(PoolName.MAMBA, mamba, keys(1), [7])])
        assert page_bytes(mamba, 7) == page_bytes(mamba, 0)
    assert page_bytes(pools[0][1], 7) != page_bytes(pools[1][1], 7)


def test_a_draft_model_with_shares_of_its_own_beside_mla_is_refused(
    make_backend: MakeBackend,
) -> None:
    with pytest.raises(ConfigError, match="'draft' has its own K and V"):
        make_backend(
            mla_pool("page_first"),
            side={PoolName.DRAFT: mha_pool("page_first")},
            is_mla_model=True,
            tp_size=2,
        )


def test_transfers_that_make_no_sense_are_misses(hybrid: Hybrid) -> None:
    backend, kv = hybrid.backend, hybrid.kv
    unknown = PoolTransfer(name=PoolName.SWA, host_indices=indices(kv, [0]), keys=keys(1))
    assert backend.batch_get_v2([unknown]) == {PoolName.SWA: [False]}
    assert backend.batch_set_v2([unknown]) == {PoolName.SWA: [False]}
    assert backend.batch_exists_v2(keys(2), [query(PoolName.SWA, ALL)]).kv_hit_pages == 0
    nothing = PoolTransfer(name=PoolName.MAMBA, keys=keys(1))
    assert backend.batch_get_v2([nothing]) == {PoolName.MAMBA: [False]}
    odd = PoolTransfer(name=PoolName.INDEXER, hit_policy="odd")
    assert backend.batch_exists_v2(keys(2), [odd]).kv_hit_pages == 0
    assert backend.batch_get_v2([PoolTransfer(name=PoolName.MAMBA)]) == {PoolName.MAMBA: []}
