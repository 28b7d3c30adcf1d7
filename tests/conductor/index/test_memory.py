"""The memory index beyond the contract, which `test_conformance` tests."""

from __future__ import annotations

import pytest

from conductor.index import packed_hashes
from conductor.index.contract import Holder
from conductor.index.memory import MemoryIndex, complete
from kvpool.blocks.tier import Tier
from kvpool.errors import InvalidArgument
from tests.conductor.index.test_conformance import ALL, CHAIN, NS, event, leading_run, stored
from tests.support.driven import Driven


def test_memory_is_bounded_and_dropped_pages_counted() -> None:
    index = Driven(MemoryIndex(max_blocks=3), complete)
    index.apply("node-a", 1, stored(CHAIN))
    assert (index.blocks(), index.dropped) == (3, len(CHAIN) - 3)
    assert leading_run(index, NS, CHAIN) == 3
    index.apply("node-b", 1, stored(CHAIN[:3]))
    index.check_integrity()


def test_masks_stay_short_when_nodes_come_and_go() -> None:
    index = Driven(MemoryIndex(), complete)
    for life in range(50):
        index.apply(f"node-{life}", 1, stored(CHAIN))
        index.remove_node(f"node-{life}", ALL)
    index.apply("node-a", 1, stored(CHAIN))
    assert max(index._spaces[NS].blocks.values()) < 1 << 3
    index.remove_node("node-a", ALL)
    assert not index._spaces


def test_a_reused_bit_does_not_return_the_old_node() -> None:
    index = Driven(MemoryIndex(), complete)
    index.apply("node-a", 1, stored(CHAIN))
    index.apply("node-b", 1, stored(CHAIN[:1]))  # keeps the namespace alive meanwhile
    assert index.holders(NS, CHAIN[1:2]) == [(Holder("node-a", Tier.DRAM),)]
    assert index.remove_node("node-a", ALL)
    index.apply("node-c", 1, stored(CHAIN))
    assert index.holders(NS, CHAIN[1:2]) == [(Holder("node-c", Tier.DRAM),)]


def test_limits_must_be_positive() -> None:
    with pytest.raises(InvalidArgument):
        MemoryIndex(max_blocks=0)


def test_blocks_that_come_and_go_leave_nothing_in_the_reverse_index(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packed_hashes, "CHUNK", 8)
    monkeypatch.setattr(packed_hashes, "MIN_NOTES", 4)
    index = Driven(MemoryIndex(), complete)
    index.apply("node-a", 1, stored(CHAIN))
    for life in range(500):
        passing = [(1000 + life).to_bytes(16, "big")]
        index.apply("node-a", 1, stored(passing))
        index.apply("node-a", 1, [event("removed", passing, Tier.DRAM)])
        index.reclaim(100)
    index.check_integrity()
    [holding] = [holding for holding in index._spaces[NS].holdings if holding is not None]
    assert sum(map(len, holding.hashes._chunks)) < 50
