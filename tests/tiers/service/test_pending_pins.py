"""A hit on a slow disk has a predicted wait; a caller may decline it and get the rest at once."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from kvpool.blocks.hashing import pack_hashes
from kvpool.blocks.tier import Tier
from kvpool.errors import InvalidArgument
from kvpool.wire import messages as m
from tests.support.waiting import until
from tests.tiers.disk.test_io_stats import drive
from tests.tiers.service.test_migrator import ID, PAGE, Gate, Node, running
from tiers.memory.arena_set import ArenaSet
from tiers.service import pending_pins
from tiers.service.identity import NodeIdentity
from tiers.service.stats import NodeStats


def pin(n: Node, hashes: list[bytes], max_wait_s: float = 0.0, timeout_s: float = 0.0) -> Any:
    request = m.Pin(ID, pack_hashes(hashes), 60.0, max_wait_s=max_wait_s, timeout_s=timeout_s)
    return n.service.pin(request, "c")


def teach(n: Node, pages_per_s: float, *, ago_s: float = 0.0) -> None:
    """Let the node believe that it has read at this rate, last `ago_s` ago."""
    seconds = pending_pins.PROBE_BLOCKS / pages_per_s
    start = time.monotonic() - ago_s - seconds
    drive(
        n.migrator.read_speed, pending_pins.PROBE_BLOCKS, pages_per_s * PAGE, size=PAGE, start=start
    )


async def test_what_takes_longer_than_its_worth_is_declined_at_once_and_not_promoted(
    tmp_path: Path,
) -> None:
    with running(tmp_path, 8) as n:
        assert (await pin(n, n.chain[:2])).found == 2
        teach(n, 1.0)
        reply = pin(n, n.chain, max_wait_s=0.5)  # no coroutine: answered at once
        assert (reply.found, reply.miss_reason) == (2, "declined_cost")
        assert reply.wait_s == pytest.approx(6.0, rel=0.5)
        assert n.store.migration_count == 0
        assert n.tiers(n.chain) == [Tier.DRAM] * 2 + [Tier.NVME] * 6
        assert n.service.counters["miss:declined_cost"] == 1
        assert n.service.counters["misses"] == 6
        again = pin(n, n.chain[2:], max_wait_s=0.5)
        assert (again.lease_id, again.found, again.miss_reason) == (0, 0, "declined_cost")
        n.store.check_integrity()


async def test_only_what_can_come_in_time_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path, 8) as n:
        teach(n, 1.0)
        gate = Gate(n.files.read)
        monkeypatch.setattr(n.files, "read", gate)
        try:
            call = pin(n, n.chain, max_wait_s=3.5)
            assert n.store.migration_count == 3
        finally:
            gate.open()
        reply = await call
        assert reply.found >= 3
        assert reply.miss_reason == ("" if reply.found == 8 else "declined_cost")


async def test_a_caller_without_a_limit_waits_and_learns_what_it_took(tmp_path: Path) -> None:
    with running(tmp_path, 8) as n:
        teach(n, 4.0)
        reply = await pin(n, n.chain)
        assert (reply.found, reply.miss_reason) == (8, "")
        assert reply.wait_s == pytest.approx(2.0, rel=0.1)
        assert 0 < reply.waited_s < reply.wait_s
        assert set(reply.tiers) == {Tier.NVME}  # where it was found, not where it is now
        warm = pin(n, n.chain, max_wait_s=1e-9)
        assert set(warm.tiers) == {Tier.DRAM}
        assert (warm.found, warm.wait_s, warm.waited_s) == (8, 0.0, 0.0)


async def test_a_deadline_that_cannot_be_kept_is_said_beforehand(tmp_path: Path) -> None:
    with running(tmp_path, 8) as n:
        teach(n, 1.0)
        reply = pin(n, n.chain, timeout_s=0.9)
        assert (reply.found, reply.miss_reason) == (0, "declined_deadline")
        assert n.service.counters["miss:declined_deadline"] == 1
        dearer = pin(n, n.chain, timeout_s=0.9, max_wait_s=0.5)
        assert dearer.miss_reason == "declined_cost"
        assert n.store.migration_count == 0


async def test_a_patient_caller_is_waited_for_longer_than_usual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path, 4) as n:
        monkeypatch.setattr(pending_pins, "PROMOTION_TIMEOUT_S", 0.0)
        assert (await pin(n, n.chain[:2])).miss_reason == "promoting"
        assert (await pin(n, n.chain, timeout_s=30.0)).found == 4


async def test_of_an_unknown_disk_a_few_blocks_are_read_to_know_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path, 64) as n:
        gate = Gate(n.files.read)
        monkeypatch.setattr(n.files, "read", gate)
        try:
            call = pin(n, n.chain, max_wait_s=20.0)
            assert n.store.migration_count == pending_pins.PROBE_BLOCKS
        finally:
            gate.open()
        reply = await call
        assert (reply.found, reply.miss_reason, reply.wait_s) == (64, "", -1.0)
        assert n.migrator.read_speed.bytes_per_s > 0


async def test_an_unknown_disk_that_hangs_costs_no_more_than_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path, 64) as n:
        assert (await pin(n, n.chain[:1])).found == 1
        gate = Gate(n.files.read)
        monkeypatch.setattr(n.files, "read", gate)
        try:
            reply = await pin(n, n.chain, max_wait_s=0.05)
        finally:
            gate.open()
        assert (reply.found, reply.miss_reason) == (1, "declined_cost")
        assert 0.05 <= reply.waited_s < 5
        assert n.store.migration_count <= pending_pins.PROBE_BLOCKS


async def test_a_disk_found_slow_is_tried_again_after_a_while(tmp_path: Path) -> None:
    with running(tmp_path, 40) as n:
        teach(n, 1.0, ago_s=pending_pins.PROBE_AFTER_S + 1)
        reply = pin(n, n.chain, max_wait_s=0.5)
        assert (reply.found, reply.miss_reason) == (0, "declined_cost")
        assert (n.store.migration_count, n.service.counters["disk_probes"]) == (1, 1)
        pin(n, n.chain, max_wait_s=0.5)
        await until(lambda: n.tiers(n.chain).count(Tier.DRAM) == 1, "one block is read")
        pin(n, n.chain, max_wait_s=0.5)
        assert n.service.counters["disk_probes"] == 1  # one is enough for now


async def test_promotions_of_others_lie_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path, 8) as n:
        teach(n, 1.0)
        gate = Gate(n.files.read)
        monkeypatch.setattr(n.files, "read", gate)
        try:
            first = pin(n, n.chain[:6])
            assert n.migrator.queued_read_bytes == 6 * PAGE
            waits = n.migrator.disk_waits(ID, n.chain, n.tiers(n.chain))
            assert waits == pytest.approx([1, 2, 3, 4, 5, 6, 7, 8], rel=0.1)
            rest = n.migrator.disk_waits(ID, n.chain[6:], [Tier.NVME] * 2)
            assert rest == pytest.approx([7, 8], rel=0.1)
            declined = pin(n, n.chain[6:], max_wait_s=4)
            assert declined.miss_reason == "declined_cost"
        finally:
            gate.open()
        assert (await first).found == 6
        assert n.migrator.queued_read_bytes == 0


async def test_lookup_and_stats_say_what_is_known(tmp_path: Path) -> None:
    with running(tmp_path, 8) as n:
        look = m.NodeLookup(ID, pack_hashes(n.chain))
        stats = NodeStats(NodeIdentity("n", 1, "h"), n.store, ArenaSet([n.arena]), n.migrator)
        assert n.service.lookup(look).wait_s == -1.0
        teach(n, 2.0)
        assert n.service.lookup(look).wait_s == pytest.approx(4.0, rel=0.1)
        [nvme] = [t for t in stats.read().tiers if t.tier == Tier.NVME]
        assert nvme.read_bytes_per_s == pytest.approx(2.0 * PAGE, rel=0.1)
        assert nvme.write_bytes_per_s == 0.0
        await pin(n, n.chain)
        assert n.service.lookup(look).wait_s == 0.0


@pytest.mark.parametrize("limit_s", [-1.0, float("nan")])
async def test_a_limit_that_is_none_is_refused(tmp_path: Path, limit_s: float) -> None:
    with running(tmp_path, 1) as n:
        with pytest.raises(InvalidArgument):
            pin(n, n.chain, max_wait_s=limit_s)
        with pytest.raises(InvalidArgument):
            pin(n, n.chain, timeout_s=limit_s)
