"""What survives a restart besides the blocks: the order of their use, and their protection."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.waiting import until
from tests.tiers.disk.test_devices import WIDE, DiskNode, disks, names, running
from tiers.disk import access_checkpoint
from tiers.disk.access_checkpoint import VERSION, AccessCheckpointer, restore
from tiers.disk.atomic_file import read_atomic_file, write_atomic_file

__all__ = ["disks"]

BLOCKS = 16  # what the disks below hold: 8 pages each
SIZES = {"disk_pages": 8 * BLOCKS, "dram_pages": 1024}
ID = WIDE.namespace_id


def keeper(
    n: DiskNode, interval_s: float = 60.0, *, now: float = 0.0, wall: float = 0.0
) -> AccessCheckpointer:
    return AccessCheckpointer(
        n.store, n.devices, interval_s, is_synced=False, clock=lambda: now, wall=lambda: wall
    )


async def put_alone(n: DiskNode, hashes: Sequence[bytes]) -> None:
    """Blocks of chains of their own, one after the other, each of which reaches the disk."""
    for name in hashes:
        await n.put(WIDE, [name])
        await n.cleaned(WIDE, [name])


async def use(n: DiskNode, hashes: Sequence[bytes]) -> None:
    for name in hashes:
        assert len(await n.read(WIDE, [name])) == 1


async def full_of(
    directories: Sequence[Path], hashes: Sequence[bytes], used: Sequence[bytes]
) -> None:
    """Run a node until its disks are full of `hashes`; read `used`, and stop it properly."""
    with running(directories, **SIZES) as n:
        task = asyncio.create_task(n.migrator.run())
        await put_alone(n, hashes)
        await use(n, used)
        task.cancel()
        await keeper(n).close()


async def survivors(n: DiskNode, hashes: Sequence[bytes], fresh: int) -> list[bytes]:
    """Those of `hashes` that are still there after so many new blocks."""
    task = asyncio.create_task(n.migrator.run())
    await put_alone(n, names(fresh, b"new"))
    task.cancel()
    return [name for name in hashes if n.tiers(WIDE, [name])]


async def test_what_was_not_used_before_a_restart_goes_first_after_it(disks: list[Path]) -> None:
    hashes = names(BLOCKS)
    used = hashes[:8]  # written first, and so the first to go if nothing were known
    await full_of(disks[:1], hashes, used)
    with running(disks[:1], **SIZES) as n:
        await restore(n.devices, n.store, 0.0, 0.0)
        assert await survivors(n, hashes, 8) == used


async def test_the_order_holds_over_several_devices_and_a_second_restart(disks: list[Path]) -> None:
    hashes = names(BLOCKS)
    used = hashes[:8]
    await full_of(disks[:2], hashes, used)
    for _ in range(2):
        with running(disks[:2], **SIZES) as n:
            await restore(n.devices, n.store, 0.0, 0.0)
            latest = n.store.recovery.tick
            await keeper(n).close()
    with running(disks[:2], **SIZES) as n:
        await restore(n.devices, n.store, 0.0, 0.0)
        assert (
            n.store.recovery.tick > latest
        )  # what a device tells that was away is older than all since
        assert await survivors(n, hashes, 8) == used
        n.store.check_integrity()


async def test_what_a_kill_takes_of_the_order_counts_as_used_when_it_was_written(
    disks: list[Path],
) -> None:
    hashes = names(BLOCKS)
    with running(disks[:1], **SIZES) as n:
        tasks = [asyncio.create_task(n.migrator.run())]
        await put_alone(n, hashes[:12])
        await use(n, hashes[:4])
        await keeper(n).close()
        await put_alone(n, hashes[12:])  # after the last checkpoint; then it is killed
        tasks[0].cancel()
    with running(disks[:1], **SIZES) as n:
        await restore(n.devices, n.store, 0.0, 0.0)
        assert await survivors(n, hashes, 8) == hashes[:4] + hashes[12:]


async def test_checkpoints_are_written_now_and_then_and_only_when_something_changed(
    disks: list[Path],
) -> None:
    with running(disks[:1], **SIZES) as n:
        keeping = AccessCheckpointer(n.store, n.devices, 0.02, is_synced=False)
        tasks = [asyncio.create_task(n.migrator.run()), asyncio.create_task(keeping.run())]
        await put_alone(n, names(2))
        await until(lambda: keeping._saved_tick == n.store.recovery.tick, "the order is on disk")
        checkpoint = disks[0] / "access_order"
        first = checkpoint.stat().st_mtime_ns
        changes = n.store.retention.changes
        assert n.store.retention.retain(ID, names(1), None, 0.0) == 1
        await until(lambda: keeping._saved_protections > changes, "the protection is on disk")
        assert checkpoint.stat().st_mtime_ns == first
        for task in tasks:
            task.cancel()
    with running(disks[:1], **SIZES) as n:
        await restore(n.devices, n.store, 0.0, 0.0)
        assert [p.block_hash for p in n.store.retention.values()] == names(1)


@pytest.mark.parametrize("harm", ["flipped", "cut", "of another version", "nonsense", "unreadable"])
async def test_a_damaged_checkpoint_costs_the_order_and_nothing_else(
    disks: list[Path], harm: str
) -> None:
    hashes = names(BLOCKS)
    await full_of(disks[:1], hashes, hashes[:8])
    for name in ("access_order", "retention"):
        checkpoint = disks[0] / name
        data = checkpoint.read_bytes()
        if harm == "flipped":
            checkpoint.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        elif harm == "cut":
            checkpoint.write_bytes(data[: len(data) // 2])
        elif harm == "of another version":
            await write_atomic_file(
                checkpoint,
                VERSION + 1,
                (await read_atomic_file(checkpoint, VERSION)) or b"",
                is_synced=True,
            )
        elif harm == "nonsense":
            await write_atomic_file(checkpoint, VERSION, b"\x93\x01\x02\x03", is_synced=True)
        else:
            checkpoint.unlink()
            checkpoint.mkdir()
    with running(disks[:1], **SIZES) as n:
        await restore(n.devices, n.store, 0.0, 0.0)
        assert n.recovered == BLOCKS
        n.store.check_integrity()
        if harm != "unreadable":
            assert await survivors(n, hashes, 4) == hashes[4:]


async def test_a_kill_in_mid_write_leaves_the_one_before(disks: list[Path]) -> None:
    hashes = names(BLOCKS)
    await full_of(disks[:1], hashes, hashes[:8])
    (disks[0] / "access_order.new").write_bytes(b"kvp-file and then")
    with running(disks[:1], **SIZES) as n:
        await restore(n.devices, n.store, 0.0, 0.0)
        assert await survivors(n, hashes, 8) == hashes[:8]
        await keeper(n).close()
    assert await read_atomic_file(disks[0] / "access_order", VERSION) is not None


async def test_a_stop_in_mid_write_waits_for_the_write_before_the_last_one(
    disks: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on = asyncio.Event(), asyncio.Event()
    under_way = 0

    async def slow_write(path: Path, version: int, content: bytes, *, is_synced: bool) -> None:
        nonlocal under_way
        under_way += 1
        assert under_way == 1, "two writes of one temporary file"
        began.set()
        await go_on.wait()
        await write_atomic_file(path, version, content, is_synced=is_synced)
        under_way -= 1

    monkeypatch.setattr(access_checkpoint, "write_atomic_file", slow_write)
    with running(disks[:1], **SIZES) as n:
        moving = asyncio.create_task(n.migrator.run())
        await put_alone(n, names(1))
        moving.cancel()
        keeping = AccessCheckpointer(n.store, n.devices, 0.01, is_synced=True)
        task = asyncio.create_task(keeping.run())
        await began.wait()
        task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not task.done()
        assert n.store.retention.retain(ID, names(1), None, 0.0) == 1
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await keeping.close()
    with running(disks[:1], **SIZES) as n:
        await restore(n.devices, n.store, 0.0, 0.0)
        assert [p.block_hash for p in n.store.retention.values()] == names(1)


# ---------------------------------------------------------------- protection


async def protected_life(disks: Sequence[Path], hashes: Sequence[bytes]) -> None:
    """Stops at 1,000 s monotonic and 50,000 s wall clock; soft protections last 100 s more."""
    with running(disks, **SIZES) as n:
        task = asyncio.create_task(n.migrator.run())
        await put_alone(n, hashes[:4])
        await n.put(WIDE, hashes[4:8])  # a chain, of which the head is protected for longer
        await n.cleaned(WIDE, hashes[4:8])
        task.cancel()
        n.store.retention.retain(ID, hashes[:2], None, 900.0)
        n.store.retention.retain(ID, hashes[2:4], 1100.0, 900.0)
        n.store.retention.retain(ID, hashes[4:8], 1100.0, 900.0)
        n.store.retention.retain(ID, hashes[4:6], None, 900.0)
        await keeper(n, now=1000.0, wall=50_000.0).close()


def kept(n: DiskNode) -> dict[bytes, float]:
    return {p.block_hash: p.until for p in n.store.retention.values()}


async def test_protection_outlasts_a_restart_with_the_time_that_was_left(disks: list[Path]) -> None:
    hashes = names(8)
    await protected_life(disks[:2], hashes)
    hard, soft = [*hashes[:2], *hashes[4:6]], [*hashes[2:4], *hashes[6:8]]
    for wall, left_s in ((50_040.0, 60.0), (49_000.0, 100.0)):  # a clock set back prolongs nothing
        with running(disks[:2], **SIZES) as n:
            await restore(n.devices, n.store, 7.0, wall)
            assert kept(n) == dict.fromkeys(hard, float("inf")) | dict.fromkeys(soft, 7.0 + left_s)
            n.store.check_integrity()
    with running(disks[:2], **SIZES) as n:
        await restore(n.devices, n.store, 7.0, 50_200.0)
        assert sorted(kept(n)) == sorted(hard)
        n.store.expire(1e9)
        # A hard protection stays in any case.
        assert await survivors(n, hashes, BLOCKS - len(hard)) == hard


async def test_what_finds_no_room_for_its_promise_any_more_is_counted_and_costs_no_start(
    disks: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    await protected_life(disks[:1], names(8))
    with running(disks[:1], **SIZES) as n:
        monkeypatch.setattr(n.store.retention, "_share", 0.25)  # four blocks of sixteen
        await restore(n.devices, n.store, 7.0, 50_000.0)
        assert len(kept(n)) == 4
        assert n.store.counters["retentions_not_restored"] == 4
        n.store.check_integrity()


async def test_a_device_that_was_away_revives_no_protection_that_was_ended(
    disks: list[Path],
) -> None:
    hashes = names(8)
    await protected_life(disks[:2], hashes)
    with running(disks[:1], **SIZES) as n:
        await restore(n.devices, n.store, 0.0, 50_010.0)
        n.store.retention.end(ID, hashes[:4], 0.0)
        n.store.retention.end(ID, hashes[4:8], 0.0)
        await keeper(n, wall=50_020.0).close()
    with running(disks[:2], **SIZES) as n:
        await restore(n.devices, n.store, 0.0, 50_030.0)
        assert not {*kept(n)} & {*hashes[:4]}
