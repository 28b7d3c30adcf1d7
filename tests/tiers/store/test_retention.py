"""Retention: soft pins are evicted last, hard pins never, and neither exceeds a share of a tier."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpool.blocks.tier import Tier
from kvpool.errors import ConfigError, InvalidArgument, NoRoom, UnknownNamespace
from tests.support.pool_model import CONFIG, PAGE
from tests.tiers.store.test_store import GRANTED, NO_ROOM, OTHER, A, B, demote, names, put, store
from tiers.store.store import Store

HALF = replace(CONFIG, dram_high_watermark=0.0, dram_low_watermark=0.0)


def retained_bytes(s: Store, tier: int = 0) -> int:
    s.check_integrity()
    return s.inspection.tiers()[tier].retained_bytes


def put_alone(s: Store, count: int, tag: bytes = b"x", now: float = 0.0) -> None:
    for i in range(count):
        put(s, [names(count, tag)[i]], now=now)


def test_a_soft_pinned_block_is_evicted_last() -> None:
    s = store()
    system = names(2)
    put(s, system)
    assert s.retention.retain(A, system, 100.0, 0.0) == 2
    put_alone(s, 9)
    assert s.lookup(A, system) == [Tier.DRAM, Tier.DRAM]
    assert s.counters.get("evicted:soft", 0) == 0


def test_a_soft_pinned_block_is_evicted_when_nothing_else_can_be() -> None:
    s = store()
    system = names(2)
    put(s, system)
    s.retention.retain(A, system, 100.0, 0.0)
    put(s, names(2, b"y"))
    s.pin(A, names(2, b"y"), "reader", 50.0, 0.0)
    put_alone(s, 1)
    assert s.lookup(A, system) == [Tier.DRAM]  # the tail was evicted
    assert s.counters["evicted:soft"] == 1
    assert retained_bytes(s) == PAGE  # a block that is gone has no promise


def test_a_hard_pinned_block_is_never_evicted() -> None:
    s = store()
    system = names(2)
    put(s, system)
    assert s.retention.retain(A, system, None, 0.0) == 2
    put(s, names(2, b"y"))
    s.pin(A, names(2, b"y"), "reader", 50.0, 0.0)
    granted = s.reserve(A, names(1, b"z"), b"", 0, "w", 5.0, 0.0)
    assert granted.statuses == [NO_ROOM]
    s.expire(1e6)
    put_alone(s, 9, now=1e6)
    assert s.lookup(A, system) == [Tier.DRAM, Tier.DRAM]


def test_a_slab_with_a_hard_pinned_block_is_not_reclaimed() -> None:
    s = store()
    put(s, names(4))
    s.retention.retain(A, names(1), None, 0.0)
    granted = s.reserve(OTHER.namespace_id, names(1), b"", 0, "w", 1.0, 0.0)
    assert granted.statuses == [NO_ROOM]
    assert s.lookup(A, names(4)) == [Tier.DRAM] * 4
    s.retention.end(A, names(1), 0.0)
    s.retention.retain(A, names(1), 50.0, 0.0)  # a soft pin does not block a slab for ever
    granted = s.reserve(OTHER.namespace_id, names(1), b"", 0, "w", 1.0, 0.0)
    assert granted.statuses == [GRANTED]


def test_a_slab_without_retained_blocks_is_preferred() -> None:
    s = store(dram=2)
    put(s, names(4))
    s.retention.retain(A, names(4), 50.0, 0.0)
    put(s, names(4, b"y"))
    put(s, names(1, b"z"), space=OTHER.namespace_id)
    assert s.lookup(A, names(4)) == [Tier.DRAM] * 4
    assert s.lookup(A, names(4, b"y")) == []


def test_retention_ends_with_its_time() -> None:
    s = store()
    put(s, names(2))
    s.retention.retain(A, names(2), 10.0, 0.0)
    s.expire(9.9)
    assert retained_bytes(s) == 2 * PAGE
    put_alone(s, 4, now=10.0)  # a reservation expires retentions as well
    assert retained_bytes(s) == 0
    assert s.lookup(A, names(2)) == []
    assert s.counters["retentions_expired"] == 2


def test_a_second_retention_extends_and_never_shortens() -> None:
    s = store()
    put(s, names(1))
    s.retention.retain(A, names(1), 10.0, 0.0)
    s.retention.retain(A, names(1), 20.0, 0.0)
    s.retention.retain(A, names(1), 5.0, 0.0)
    s.expire(19.0)
    assert retained_bytes(s) == PAGE
    s.retention.retain(A, names(1), None, 19.0)
    s.expire(1e9)
    assert retained_bytes(s) == PAGE  # counted once, and for ever now
    assert s.retention.end(A, names(1), 1e9) == 1
    assert s.retention.end(A, names(1), 1e9) == 0
    assert retained_bytes(s) == 0


def test_more_than_the_share_is_refused_whole() -> None:
    s = store()  # four pages, of which two may be promised
    put(s, names(3))
    with pytest.raises(NoRoom, match="retention_share"):
        s.retention.retain(A, names(3), None, 0.0)
    assert retained_bytes(s) == 0
    s.retention.retain(A, names(2), None, 0.0)
    with pytest.raises(NoRoom):
        s.retention.retain(A, names(3), 9.0, 0.0)
    s.retention.retain(A, names(2), None, 0.0)  # a retained block is not counted again
    assert s.counters["retention_refused"] == 2


def test_the_share_can_be_chosen() -> None:
    s = store(config=replace(CONFIG, retention_share=1.0))
    put(s, names(4))
    assert s.retention.retain(A, names(4), None, 0.0) == 4
    assert s.reserve(A, names(1, b"z"), b"", 0, "w", 5.0, 0.0).statuses == [NO_ROOM]
    with pytest.raises(ConfigError):
        replace(CONFIG, retention_share=1.5)
    nothing = store(config=replace(CONFIG, retention_share=0.0))
    put(nothing, names(1))
    with pytest.raises(NoRoom):
        nothing.retention.retain(A, names(1), 1.0, 0.0)


def test_blocks_that_are_not_here_are_passed_over() -> None:
    s = store()
    assert s.retention.retain(A, names(2), None, 0.0) == 0
    s.reserve(A, names(1), b"", 0, "w", 5.0, 0.0)
    assert s.retention.retain(A, names(1), None, 0.0) == 0  # not written yet
    with pytest.raises(UnknownNamespace):
        s.retention.retain(bytes(16), names(1), None, 0.0)


def test_a_tail_is_not_retained_without_its_head() -> None:
    s = store()
    put(s, names(2))
    with pytest.raises(InvalidArgument, match="from its start"):
        s.retention.retain(A, names(2)[1:], None, 0.0)
    s.retention.retain(A, names(1), 10.0, 0.0)
    with pytest.raises(InvalidArgument):
        s.retention.retain(A, names(2)[1:], 11.0, 0.0)  # longer than its head
    assert s.retention.retain(A, names(2)[1:], 10.0, 0.0) == 1


@pytest.mark.parametrize("until", [1.0, 0.5, float("nan")])
def test_a_retention_that_has_ended_is_refused(until: float) -> None:
    s = store()
    put(s, names(1))
    with pytest.raises(InvalidArgument):
        s.retention.retain(A, names(1), until, 1.0)


def test_a_head_stays_retained_while_another_chain_builds_on_it() -> None:
    s = store(dram=2)
    head, one, other = names(1), names(1, b"a"), names(1, b"b")
    put(s, head)
    put(s, one, parent=head[0])
    put(s, other, parent=head[0])
    s.retention.retain(A, head + one, None, 0.0)
    s.retention.retain(A, head + other, None, 0.0)
    assert s.retention.end(A, head + one, 0.0) == 1
    assert retained_bytes(s) == 2 * PAGE
    assert s.retention.end(A, head + other, 0.0) == 2
    assert retained_bytes(s) == 0


def test_a_dropped_block_is_no_longer_retained() -> None:
    s = store()
    put(s, names(2))
    s.retention.retain(A, names(2), None, 0.0)
    s.drop(A, names(2)[0], "checksum", 0.0)
    assert retained_bytes(s) == PAGE
    put(s, names(1))  # written again: another block
    assert retained_bytes(s) == PAGE
    s.drop(A, names(2)[1], "checksum", 0.0)
    assert retained_bytes(s) == 0


def test_retention_follows_the_block_through_the_tiers() -> None:
    s = store(dram=1, nvme=1, config=HALF)
    put(s, names(2))
    demote(s)
    s.retention.retain(A, names(2), 50.0, 0.0)
    assert retained_bytes(s, 0) == retained_bytes(s, 1) == 2 * PAGE
    put(s, names(4, b"y"))  # nothing else can be evicted: the run shields itself
    assert s.lookup(A, names(2)) == [Tier.NVME, Tier.NVME]
    demote(s)
    demote(s)
    assert s.lookup(A, names(2)) == [Tier.NVME, Tier.NVME]  # the disk evicts others first
    assert s.drop(A, names(2)[0], "test", 0.0)
    assert s.drop(A, names(2)[1], "test", 0.0)
    assert retained_bytes(s, 0) == retained_bytes(s, 1) == 0


def test_parts_count_together() -> None:
    s = store(dram=2)
    put(s, names(1), space=B)
    s.retention.retain(B, names(1), None, 0.0)
    assert retained_bytes(s) == 4 * PAGE  # two parts of two pages
