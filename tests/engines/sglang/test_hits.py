"""The longest prefix that several pools restore together, with pages that vanish meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

from kvpool.engines.sglang.hits import ATTEMPTS, Hits, Wanted, combined_hits

KEYS = [str(i) for i in range(8)]
INDEXER, MAMBA = PoolName.INDEXER.value, PoolName.MAMBA.value


class Pools:
    """Side pools as sets of pages; `vanished` are seen, and gone when they shall be held."""

    def __init__(self, pages: dict[str, set[str]], vanished: set[str] | None = None) -> None:
        self._pages = pages
        self._vanished = vanished or set()

    def hits(self, kv_found: int, wanted: Sequence[Wanted]) -> Hits:
        return combined_hits(
            KEYS, kv_found, wanted, self._hold_leading, self._hold_all, self._standing
        )

    def _hold_leading(self, name: str, keys: Sequence[str]) -> int:
        has = [key in self._pages[name] for key in keys]
        return has.index(False) if False in has else len(has)

    def _hold_all(self, name: str, keys: Sequence[str]) -> bool:
        return set(keys) <= self._pages[name] - self._vanished

    def _standing(self, name: str, keys: Sequence[str]) -> list[bool]:
        return [key in self._pages[name] for key in keys]


@given(
    kv_found=st.integers(0, 8),
    indexer=st.sets(st.sampled_from(KEYS)),
    mamba=st.sets(st.sampled_from(KEYS)),
    window=st.integers(1, 3),
)
def test_every_length_reported_can_be_restored_and_no_longer_one(
    kv_found: int, indexer: set[str], mamba: set[str], window: int
) -> None:
    wanted = [Wanted(INDEXER, 0), Wanted(MAMBA, window)]
    hits = Pools({INDEXER: indexer, MAMBA: mamba}).hits(kv_found, wanted)
    restorable = [
        n
        for n in range(1, kv_found + 1)
        if set(KEYS[:n]) <= indexer and set(KEYS[max(0, n - window) : n]) <= mamba
    ]
    assert hits.restorable == restorable
    assert hits.pages == max(restorable, default=0)


def test_a_page_that_vanished_before_it_was_held_leaves_a_shorter_hit() -> None:
    pools = Pools({MAMBA: {"1", "3", "6"}}, vanished={"6"})
    hits = pools.hits(8, [Wanted(MAMBA, 1)])
    assert (hits.pages, hits.restorable) == (4, [2, 4])
    assert hits.by_pool == {PoolName.KV.value: 8, MAMBA: 7}


def test_it_gives_up_where_page_after_page_vanishes() -> None:
    pools = Pools({MAMBA: set(KEYS)}, vanished=set(KEYS[8 - ATTEMPTS :]))
    assert pools.hits(8, [Wanted(MAMBA, 1)]).pages == 0


def test_what_transfers_ask_for_is_read_off_their_policy() -> None:
    transfers = [
        PoolTransfer(name=PoolName.INDEXER),
        PoolTransfer(name=PoolName.SWA, keys=["a", "b"], hit_policy=PoolHitPolicy.TRAILING_PAGES),
        PoolTransfer(name=PoolName.MAMBA, hit_policy=PoolHitPolicy.TRAILING_PAGES),
        PoolTransfer(name=PoolName.DRAFT, hit_policy=PoolHitPolicy.BLOCK_GROUPS),
    ]
    assert Wanted.by(transfers) == [Wanted(INDEXER, 0), Wanted("swa", 2), Wanted(MAMBA, 1)]
