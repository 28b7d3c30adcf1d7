"""A client's memory of failed pins and reads: bounded, and for a while only."""

from __future__ import annotations

from kvpool.client.node.negative_cache import NegativeCache

SPACE, OTHER = b"s" * 16, b"o" * 16
A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


def test_a_failure_is_remembered_per_node_namespace_and_block() -> None:
    cache = NegativeCache(ttl_s=3.0)
    cache.remember("n1", SPACE, [B], now=10.0)
    assert cache.count_leading("n1", SPACE, [A, B, C], now=10.0) == 1
    assert cache.count_leading("n1", SPACE, [C, A], now=10.0) == 2
    assert cache.count_leading("n2", SPACE, [A, B, C], now=10.0) == 3
    assert cache.count_leading("n1", OTHER, [A, B, C], now=10.0) == 3
    assert cache.nodes_lacking(SPACE, B, now=10.0) == {"n1"}
    assert cache.nodes_lacking(SPACE, A, now=10.0) == set()


def test_a_failure_is_forgotten_after_its_time_and_prolonged_by_another() -> None:
    cache = NegativeCache(ttl_s=3.0)
    cache.remember("n1", SPACE, [A, B], now=10.0)
    cache.remember("n1", SPACE, [A], now=12.0)
    assert cache.count_leading("n1", SPACE, [B], now=12.9) == 0
    assert cache.count_leading("n1", SPACE, [B], now=13.0) == 1
    assert cache.count_leading("n1", SPACE, [A], now=14.9) == 0
    assert cache.count_leading("n1", SPACE, [A], now=15.0) == 1
    assert len(cache) == 0


def test_a_restarted_node_is_asked_again() -> None:
    cache = NegativeCache()
    cache.remember("n1", SPACE, [A], now=0.0)
    cache.remember("n2", SPACE, [A], now=0.0)
    cache.forget_node("n1")
    assert cache.nodes_lacking(SPACE, A, now=0.0) == {"n2"}


def test_the_oldest_failures_make_room() -> None:
    cache = NegativeCache(ttl_s=100.0, limit=2)
    for i, block in enumerate((A, B, C)):
        cache.remember("n1", SPACE, [block], now=float(i))
    assert len(cache) == 2
    assert cache.count_leading("n1", SPACE, [A], now=3.0) == 1
    assert cache.count_leading("n1", SPACE, [C], now=3.0) == 0


def test_short_waits_without_a_reply_add_up_until_the_node_replies() -> None:
    cache = NegativeCache()
    assert not cache.add_silence("n1", 0.3)  # a hasty caller
    assert not cache.add_silence("n2", 0.3)
    assert cache.add_silence("n1", 0.3)  # the next one: this is the node
    cache.reset_silence("n1")
    assert not cache.add_silence("n1", 0.3)
    cache.forget_node("n2")
    assert not cache.add_silence("n2", 0.3)
