"""What a node shows of its blocks to people, and that showing them counts as no use."""

from __future__ import annotations

import pytest

from kvpool.blocks.tier import Tier
from kvpool.errors import InvalidArgument, UnknownNamespace
from tests.tiers.store.test_store import WRITE_THROUGH, A, B, demote, names, put, store
from tiers.store.access_clock import MAX_SAMPLES, AccessClock


def test_a_block_is_described_by_all_that_keeps_it_where_it_is() -> None:
    s = store(dram=2, nvme=1, config=WRITE_THROUGH)
    put(s, names(3))
    demote(s)
    s.pin(A, names(2), "c", 9.0, 0.0)
    s.retention.retain(A, names(1), None, 0.0)
    s.retention.retain(A, names(2), 60.0, 0.0)
    first, second, third = s.inspection.blocks(A, 0, 10, 10.0)
    assert [b.block_hash for b in (first, second, third)] == names(3)
    assert [b.parent for b in (first, second, third)] == [b"", *names(2)]
    assert [b.depth for b in (first, second, third)] == [0, 1, 2]
    assert first.tiers == [Tier.DRAM, Tier.NVME]
    assert (first.pins, second.pins, third.pins) == (1, 1, 0)
    assert (first.retained_s, second.retained_s, third.retained_s) == (0.0, 50.0, -1.0)
    assert first.size_bytes == 2 * 4096
    [usage] = [u for u in s.inspection.namespaces() if u.namespace_id == A]
    assert (usage.blocks, usage.resident) == (3, {Tier.DRAM: 3, Tier.NVME: 3})


def test_a_page_past_the_end_is_empty_however_far() -> None:
    s = store(dram=2)
    put(s, names(2))
    assert [len(s.inspection.blocks(A, offset, 10, 0.0)) for offset in (1, 2, 2**63)] == [1, 0, 0]


def test_a_block_that_is_being_written_shows_its_parts() -> None:
    s = store(dram=2)
    granted = s.reserve(B, names(1), b"", 1, "w", 9.0, 0.0)
    [block] = s.inspection.blocks(B, 0, 10, 0.0)
    assert (block.tiers, block.parts) == ([], 0)
    s.commit(granted.reservation_id, [1], 0.0)
    [block] = s.inspection.blocks(B, 0, 10, 0.0)
    assert (block.tiers, block.parts) == ([], 1)


def test_pages_make_the_whole_and_are_bounded() -> None:
    s = store(dram=4)
    put(s, names(10))
    pages = [s.inspection.blocks(A, offset, 4, 0.0) for offset in (0, 4, 8)]
    assert [len(page) for page in pages] == [4, 4, 2]
    assert [b.block_hash for page in pages for b in page] == names(10)
    for offset, limit in ((-1, 4), (0, 0), (0, 1001)):
        with pytest.raises(InvalidArgument):
            s.inspection.blocks(A, offset, limit, 0.0)
    with pytest.raises(UnknownNamespace):
        s.inspection.blocks(bytes(16), 0, 1, 0.0)


def test_the_age_is_that_of_the_last_use_and_a_look_is_none() -> None:
    s = store(dram=4)
    put(s, names(1), now=0.0)
    s.expire(0.0)
    put(s, names(1, b"x"), now=50.0)
    s.expire(50.0)
    for now in (60.0, 70.0):
        old, new = s.inspection.blocks(A, 0, 10, now)
        assert (old.idle_s, new.idle_s) == (now, now - 50.0)
    lease = s.pin(A, names(1), "c", 9.0, 80.0)
    s.leases.release(lease.lease_id)
    s.expire(80.0)
    assert [b.idle_s for b in s.inspection.blocks(A, 0, 10, 90.0)] == [10.0, 40.0]


def test_ages_are_kept_in_bounded_memory_and_exact_for_the_recent_past() -> None:
    access_clock = AccessClock()
    for second in range(20_000):
        access_clock.advance_to(second)
        access_clock.sample(float(second))
        assert len(access_clock._times) <= MAX_SAMPLES
    now = 20_000.0
    assert access_clock.age_s(19_990, now) == 10.0
    assert 18_900 <= access_clock.age_s(1000, now) <= 19_000  # samples are sparser there
    assert access_clock.age_s(30_000, now) == 0.0
