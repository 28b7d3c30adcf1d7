"""The engine's own prefix cache: right bytes, bounded, and never a child without its parent."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvpool.errors import InvalidArgument, WrongByteCount
from workers.engine.contract import Bytes
from workers.engine.prefix_cache import LocalPrefixCache

PART = 8


def chain(name: str, length: int) -> list[bytes]:
    return [f"{name}{i}".encode().ljust(16, b".") for i in range(length)]


def bytes_of(hashes: list[bytes]) -> Bytes:
    return np.array([list(h[:PART]) for h in hashes], np.uint8).reshape(len(hashes), PART)


def test_longest_kept_run_comes_back_byte_for_byte() -> None:
    cache = LocalPrefixCache(640, 64)
    a = chain("a", 4)
    assert cache.match(a) is None
    assert cache.insert(a, bytes_of(a)) == 4
    found = cache.match([*a[:3], *chain("b", 2)])
    assert found is not None
    assert np.array_equal(found, bytes_of(a[:3]))
    assert cache.match(chain("b", 2)) is None
    assert cache.match([]) is None


def test_result_cannot_be_written_to() -> None:
    cache = LocalPrefixCache(640, 64)
    a = chain("a", 2)
    cache.insert(a, bytes_of(a))
    found = cache.match(a)
    assert found is not None
    with pytest.raises(ValueError, match="read-only"):
        found[0, 0] = 1


def test_blocks_are_copied_in() -> None:
    cache = LocalPrefixCache(640, 64)
    a = chain("a", 2)
    blocks = bytes_of(a)
    cache.insert(a, blocks)
    blocks[:] = 0
    assert np.array_equal(cache.match(a), bytes_of(a))  # type: ignore[arg-type]


def test_chain_grows_by_the_blocks_after_those_kept() -> None:
    cache = LocalPrefixCache(640, 64)
    a = chain("a", 5)
    cache.insert(a[:2], bytes_of(a[:2]))
    assert cache.insert(a, bytes_of(a[2:]), first_block=2) == 3
    assert cache.insert(a, bytes_of(a)) == 0  # all are here
    assert np.array_equal(cache.match(a), bytes_of(a))  # type: ignore[arg-type]


def test_blocks_whose_parent_is_gone_are_not_kept() -> None:
    cache = LocalPrefixCache(640, 64)
    a = chain("a", 5)
    assert cache.insert(a, bytes_of(a[2:]), first_block=2) == 0
    assert len(cache) == 0


def test_least_recently_used_tail_goes_first() -> None:
    cache = LocalPrefixCache(64 * 6, 64)
    a, b, c = chain("a", 3), chain("b", 3), chain("c", 2)
    cache.insert(a, bytes_of(a))
    cache.insert(b, bytes_of(b))
    cache.match(a)
    cache.insert(c, bytes_of(c))
    assert _kept(cache, a) == 3
    assert _kept(cache, b) == 1  # its tail went, its head stayed
    assert _kept(cache, c) == 2


def test_chain_longer_than_the_cache_keeps_its_head() -> None:
    cache = LocalPrefixCache(64 * 3 + 63, 64)
    a = chain("a", 5)
    assert cache.insert(a, bytes_of(a)) == 3
    assert _kept(cache, a) == 3
    assert cache.insert(a, bytes_of(a[4:]), first_block=4) == 0


def test_no_capacity_keeps_nothing() -> None:
    cache = LocalPrefixCache(63, 64)
    a = chain("a", 1)
    assert cache.insert(a, bytes_of(a)) == 0
    assert cache.match(a) is None


def test_any_history_keeps_parents_bytes_and_bound() -> None:
    rng = random.Random(5)
    cache = LocalPrefixCache(64 * 12, 64)
    # prompts that share prefixes: a tree of chains
    tree = {}
    for trunk in "abc":
        for branch in "xyz":
            tree[trunk + branch] = chain(trunk, 3) + chain(trunk + branch, 5)
    chains = list(tree.values())
    evictions = 0
    for _ in range(3000):
        hashes = rng.choice(chains)[: rng.randint(1, 8)]
        before = len(cache)
        if rng.random() < 0.5:
            first = rng.randint(0, len(hashes))
            new = cache.insert(hashes, bytes_of(hashes[first:]), first)
            evictions += before + new - len(cache)
        else:
            found = cache.match(hashes)
            if found is not None:
                assert np.array_equal(found, bytes_of(hashes[: len(found)]))
        assert cache.check_integrity() == []
        for known in chains:
            kept = [block_hash in cache for block_hash in known]
            assert kept == sorted(kept, reverse=True), "a child outlived its parent"
    assert evictions > 100


def test_wrong_shapes_are_refused() -> None:
    cache = LocalPrefixCache(640, 64)
    a = chain("a", 2)
    cache.insert(a, bytes_of(a))
    with pytest.raises(WrongByteCount):
        cache.insert(chain("b", 1), np.zeros((1, PART + 1), np.uint8))
    with pytest.raises(InvalidArgument):
        cache.insert(chain("b", 1), np.zeros((2, PART), np.uint8))
    with pytest.raises(InvalidArgument):
        cache.insert(chain("b", 1), np.zeros(PART, np.uint8))
    with pytest.raises(InvalidArgument):
        LocalPrefixCache(-1, 64)
    with pytest.raises(InvalidArgument):
        LocalPrefixCache(64, 0)


def test_cleared_cache_is_empty_and_usable() -> None:
    cache = LocalPrefixCache(640, 64)
    a = chain("a", 2)
    cache.insert(a, bytes_of(a))
    cache.clear()
    assert cache.match(a) is None
    assert cache.insert(a, bytes_of(a)) == 2


def _kept(cache: LocalPrefixCache, hashes: list[bytes]) -> int:
    return sum(block_hash in cache for block_hash in hashes)
