"""Several NVMe devices, with a real store, migrator and files: spreading, restarts, failures."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvpool.blocks.hashing import checksum, pack_hashes
from kvpool.blocks.layout import Layout, Namespace
from kvpool.blocks.tier import Tier
from kvpool.errors import ConfigError
from kvpool.wire import messages as m
from tests.support.waiting import until
from tiers.disk.devices import Device, open_devices
from tiers.disk.manifest import NvmeFailed
from tiers.disk.slab_file import NvmeInUse
from tiers.memory.arena import Arena
from tiers.service.migrator import BATCH_BLOCKS, Migrator
from tiers.service.service import NodeService
from tiers.store.fp8 import Encoding, decode, encode
from tiers.store.slab_allocator import Place, SlabAllocator
from tiers.store.store import Store, StoreConfig

PAGE = 4096
SLAB = 16 * PAGE
# Two ranks of two pages each, of which fp8 makes one page and a scale: two pages again, but see
# `WIDE`.
HALVES = Namespace("two ranks", "r", Layout("bfloat16", 1, 2, 16, 64, tp_size=2))
WIDE = Namespace("wide", "r", Layout("bfloat16", 2, 1, 64, 64))  # 8 pages, in fp8 5
Octets = npt.NDArray[np.uint8]


def names(count: int, tag: bytes = b"n") -> list[bytes]:
    return [tag + i.to_bytes(16 - len(tag), "big") for i in range(count)]


def content(namespace: Namespace, seed: int) -> Octets:
    """A block part of bfloat16 numbers around 1."""
    count = namespace.layout.part_bytes // 2
    values = np.random.default_rng(seed).normal(size=count).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


class DiskNode:
    """A node's parts without its server, over real directories."""

    def __init__(
        self,
        directories: Sequence[Path],
        *,
        dram_pages: int = 512,
        disk_pages: int = 512,
        dtype: Encoding = "as_is",
        write_through: bool = True,
    ) -> None:
        self.arena = Arena(0, dram_pages * PAGE, prefault=False)
        self.devices = open_devices(directories, disk_pages * PAGE, fsync="never")
        self.store = Store(
            SlabAllocator(dram_pages * PAGE, SLAB),
            self.devices.slots(SLAB),
            StoreConfig(
                write_through=write_through, grace_s=0.0, nvme_dtype=dtype, migration_retry_s=0.01
            ),
        )
        self.migrator = Migrator(self.store, [self.arena], self.devices)
        self.service = NodeService(self.store, [self.arena], self.migrator)
        self.recovered = self.devices.recover_into(self.store, 0.0)
        for namespace in (HALVES, WIDE):
            self.store.namespaces.register(namespace)

    async def put(self, namespace: Namespace, hashes: Sequence[bytes]) -> None:
        """Store a chain; the bytes of block i, part p are those of seed 10 * i + p."""
        for i, (parent, name) in enumerate(zip([b"", *hashes], hashes, strict=False)):
            for part in range(namespace.layout.tp_size):
                data = content(namespace, 10 * i + part).tobytes()
                request = m.PutInline(namespace.namespace_id, name, parent, part, data)
                self.service.put_inline(request, "w")

    async def cleaned(self, namespace: Namespace, hashes: Sequence[bytes]) -> None:
        """Wait until all of the blocks are on NVMe."""
        visible = self.store._table.spaces[namespace.namespace_id].visible[Tier.NVME]
        await until(lambda: all(name in visible for name in hashes), "all are on NVMe")

    async def pin(self, namespace: Namespace, hashes: Sequence[bytes]) -> m.PinReply:
        answer = self.service.pin(
            m.Pin(namespace.namespace_id, pack_hashes(list(hashes)), 60.0), "c"
        )
        return answer if isinstance(answer, m.PinReply) else await answer

    async def read(self, namespace: Namespace, hashes: Sequence[bytes]) -> list[Octets]:
        """Parts of the leading run, each compared with the checksum that came with it."""
        reply = await self.pin(namespace, hashes)
        places = np.frombuffer(reply.places, "<i8").reshape(-1, 2)
        length = namespace.layout.part_bytes
        parts = [self.arena.view(int(offset), length).copy() for _, offset in places]
        assert [checksum(part) for part in parts] == np.frombuffer(reply.checksums, "<u8").tolist()
        self.service.release(m.Release([reply.lease_id]))
        return parts

    def tiers(self, namespace: Namespace, hashes: Sequence[bytes]) -> list[Tier]:
        return self.store.lookup(namespace.namespace_id, list(hashes))

    def on(self, device: int, namespace: Namespace = WIDE) -> set[bytes]:
        """Blocks of which the device has a part on record."""
        entries = self.devices[device].files.recover()
        return {e.block_hash for e in entries if e.namespace_id == namespace.namespace_id}

    def close(self) -> None:
        self.migrator.close()
        self.arena.close()


@contextmanager
def running(*args: Any, **settings: Any) -> Iterator[DiskNode]:
    made = DiskNode(*args, **settings)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def disks(tmp_path: Path) -> list[Path]:
    return [tmp_path / name for name in ("a", "b", "c")]


async def stored(directories: Sequence[Path], hashes: Sequence[bytes], **settings: Any) -> None:
    """One life of a node that leaves a chain of both namespaces on its disks."""
    with running(directories, **settings) as n:
        task = asyncio.create_task(n.migrator.run())
        for namespace in (WIDE, HALVES):
            await n.put(namespace, hashes)
            await n.cleaned(namespace, hashes)
        task.cancel()


def is_exact(namespace: Namespace, parts: Sequence[Octets]) -> bool:
    tp_size = namespace.layout.tp_size
    expected = [
        content(namespace, 10 * i + part)
        for i in range(len(parts) // tp_size)
        for part in range(tp_size)
    ]
    return len(parts) > 0 and all(map(np.array_equal, parts, expected))


# ---------------------------------------------------------------- spreading


async def test_blocks_are_spread_evenly_and_read_back_from_all_devices(disks: list[Path]) -> None:
    chain = names(12)
    await stored(disks, chain)
    with running(disks) as n:
        for device in range(3):
            assert len(n.on(device)) == 4
            assert len(n.on(device, HALVES)) == 8
        assert n.tiers(WIDE, chain) == n.tiers(HALVES, chain) == [Tier.NVME] * 12
        assert is_exact(WIDE, await n.read(WIDE, chain))
        assert is_exact(HALVES, await n.read(HALVES, chain))
        n.store.check_integrity()


async def test_a_slow_device_holds_up_no_read_from_another(
    disks: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = names(12)
    await stored(disks[:2], chain)
    with running(disks[:2]) as n:
        quick = [name for name in chain if name not in n.on(1)]
        slow = [name for name in chain if name in n.on(1)]
        released = threading.Event()
        real = n.devices[1].files.read

        def late(place: Place, out: Any) -> None:
            assert released.wait(60)
            real(place, out)

        monkeypatch.setattr(n.devices[1].files, "read", late)
        pending = [asyncio.create_task(n.pin(WIDE, [name])) for name in slow]
        await until(lambda: n.store.migration_count >= len(slow), "all of the slow reads wait")
        for name in quick:
            assert (await n.pin(WIDE, [name])).found == 1
        assert not any(task.done() for task in pending)
        released.set()
        assert [(await task).found for task in pending] == [1] * len(slow)


@pytest.mark.parametrize("write_through", [True, False])
async def test_disks_that_cannot_follow_hold_a_bounded_number_of_slots_and_no_writer(
    disks: list[Path], monkeypatch: pytest.MonkeyPatch, write_through: bool
) -> None:
    with running(disks[:2], disk_pages=1024, write_through=write_through) as n:
        task = asyncio.create_task(n.migrator.run())
        released = threading.Event()
        for device in n.devices:

            def late(place: Place, data: Any, real: Any = device.files.write) -> None:
                assert released.wait(20)
                real(place, data)

            monkeypatch.setattr(device.files, "write", late)
        chains = [names(6, b"c%d" % i) for i in range(10)]
        for chain in chains[:9]:  # 54 of the 64 blocks that DRAM holds
            await n.put(WIDE, chain)
        await n.put(WIDE, chains[9])
        await until(lambda: n.store.migration_count > 0, "demotion has begun")
        for i in range(20):  # as much again, twice: written without waiting for any disk
            await n.put(WIDE, names(6, b"m%d" % i))
            assert n.store.migration_count <= 2 * BATCH_BLOCKS
        assert n.store.counters["lost"] > 0  # evicted unwritten
        assert n.store.inspection.tiers()[1].reserved_bytes <= 2 * BATCH_BLOCKS * 8 * PAGE
        released.set()
        for i in range(20):
            await n.put(WIDE, names(6, b"l%d" % i))
            await until(lambda: n.store.migration_count == 0, "a batch is over")
        await until(lambda: n.store.counters.get("demoted", 0) > 2 * BATCH_BLOCKS, "and goes on")
        n.store.check_integrity()
        task.cancel()


async def test_a_device_that_hangs_in_a_write_holds_up_no_other(
    disks: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(disks[:2], disk_pages=128, dram_pages=1024) as n:  # 8 blocks on each
        task = asyncio.create_task(n.migrator.run())
        released = threading.Event()
        hanging = n.devices[0]
        write = hanging.files.write

        def hang(place: Place, data: Any) -> None:
            is_hanging.set()
            assert released.wait(30)
            write(place, data)

        is_hanging = threading.Event()
        monkeypatch.setattr(hanging.files, "write", hang)
        first = [name for i in range(2) for name in names(1, b"f%d" % i)]  # one for each device
        for name in first:
            await n.put(WIDE, [name])
        await until(is_hanging.is_set, "a write hangs")
        # More than the other one holds, so that room must be made on it.
        for i in range(20):
            await n.put(WIDE, names(1, b"b%d" % i))
            await n.cleaned(WIDE, names(1, b"b%d" % i))
        assert not n.on(0)
        assert n.store.migration_count == 1
        n.store.check_integrity()
        released.set()
        await until(lambda: n.store.migration_count == 0, "the hanging write ends")
        late = [name for i in range(8) for name in names(1, b"l%d" % i)]
        for name in late:
            await n.put(WIDE, [name])
            await n.cleaned(WIDE, [name])
        assert n.on(0) & set(late)  # it takes part again
        n.store.check_integrity()
        task.cancel()


# ---------------------------------------------------------------- restarts


async def test_the_order_of_the_list_does_not_matter(disks: list[Path]) -> None:
    chain = names(9)
    await stored(disks, chain)
    identities = {d: (d / "device").read_text() for d in disks}
    with running([disks[2], disks[0], disks[1]]) as n:
        assert n.recovered == 9 + 18
        assert is_exact(WIDE, await n.read(WIDE, chain))
        assert is_exact(HALVES, await n.read(HALVES, chain))
    assert identities == {d: (d / "device").read_text() for d in disks}


async def test_a_missing_device_costs_its_own_blocks_alone_and_brings_them_back(
    disks: list[Path],
) -> None:
    chain = names(9)
    await stored(disks, chain)
    with running(disks) as n:
        of_b = n.on(1, HALVES)
    hidden = disks[1].rename(disks[1].with_name("elsewhere"))
    disks[1].write_text("no directory")
    with running(disks) as n:
        assert n.devices.states()[str(disks[1])] == "failed"
        for name in chain:
            is_here = any(name in n.on(d.number) for d in n.devices)
            assert n.tiers(WIDE, [name]) == ([Tier.NVME] if is_here else [])
        left = [name for name in chain if n.tiers(WIDE, [name])]
        assert len(left) == 6
        seeds = {name: 10 * i for i, name in enumerate(chain)}
        for name in left:
            [part] = await n.read(WIDE, [name])
            assert np.array_equal(part, content(WIDE, seeds[name]))
        # Of two parts on two devices one is missing: the block is no more, and its other part is
        # forgotten.
        for name in chain:
            assert n.tiers(HALVES, [name]) == ([] if name in of_b else [Tier.NVME])
            assert (name in of_b) != any(name in n.on(d.number, HALVES) for d in n.devices)
        n.store.check_integrity()
    disks[1].unlink()
    hidden.rename(disks[1])
    with running(disks) as n:
        assert is_exact(WIDE, await n.read(WIDE, chain))
        n.store.check_integrity()


async def test_a_new_device_beside_known_ones_is_used(disks: list[Path]) -> None:
    chain = names(8)
    await stored(disks[:2], chain)
    with running(disks) as n:
        task = asyncio.create_task(n.migrator.run())
        assert is_exact(WIDE, await n.read(WIDE, chain))
        await n.put(WIDE, names(9, b"more"))
        await n.cleaned(WIDE, names(9, b"more"))
        assert len(n.on(2)) == 3
        task.cancel()


async def test_a_namespace_that_fits_no_more_is_left_out_and_stops_no_start(
    disks: list[Path],
) -> None:
    hashes = names(4)
    await stored(disks[:2], hashes)
    # Another layout under one name, and one whose parts are larger than a slab by now.
    clashing = Namespace("wide", "r", Layout("bfloat16", 4, 1, 64, 64))
    too_large = Namespace("large", "r", Layout("bfloat16", 64, 8, 64, 64))
    devices = open_devices(disks[:2], 512 * PAGE, fsync="never")
    for device in devices:
        for namespace in (clashing, too_large):
            device.files.record_namespace(namespace)
        device.files.record_put(
            too_large.namespace_id, hashes[0], b"", 0, Place(device.number, 200 * PAGE), PAGE, 1
        )
    devices.close()
    with running(disks[:2]) as n:
        assert n.recovered == 3 * len(hashes)
        assert sorted(n.devices.unrecovered) == sorted([clashing.name, too_large.name])
        task = asyncio.create_task(n.migrator.run())
        assert is_exact(WIDE, await n.read(WIDE, hashes))
        n.store.check_integrity()
        task.cancel()


def test_a_copied_device_is_refused_and_a_used_one_as_well(disks: list[Path]) -> None:
    open_devices(disks[:2], 64 * PAGE).close()
    (disks[1] / "device").write_text((disks[0] / "device").read_text())
    with pytest.raises(ConfigError, match="are the same device"):
        open_devices(disks[:2], 64 * PAGE)
    (disks[1] / "device").unlink()
    one = open_devices(disks[:1], 64 * PAGE)
    with pytest.raises(NvmeInUse):
        open_devices(disks[:2], 64 * PAGE)
    one.close()
    open_devices(disks[:2], 64 * PAGE).close()  # every lock was given up


def test_a_node_does_not_start_when_no_device_can_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NvmeFailed):
        open_devices([tmp_path / "file" / "x", tmp_path / "file" / "y"], 64 * PAGE)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "device").write_text("no uuid")
    with pytest.raises(NvmeFailed, match="device"):
        open_devices([tmp_path / "a"], 64 * PAGE)
    (tmp_path / "a" / "device").unlink()
    open_devices([tmp_path / "a"], 64 * PAGE).close()


# ---------------------------------------------------------------- failing devices


def fail(device: Device, monkeypatch: pytest.MonkeyPatch, *, reads: bool, writes: bool) -> None:
    def refuse(place: Place, data: Any) -> None:
        raise NvmeFailed("broken")

    if reads:
        monkeypatch.setattr(device.files, "read", refuse)
    if writes:
        monkeypatch.setattr(device.files, "write", refuse)


async def test_a_device_that_cannot_be_read_loses_its_blocks_and_the_others_go_on(
    disks: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = names(12)
    await stored(disks, chain)
    with running(disks) as n:
        task = asyncio.create_task(n.migrator.run())
        n.store.take_events()
        of_b = n.on(1)
        fail(n.devices[1], monkeypatch, reads=True, writes=True)
        reply = await n.pin(WIDE, chain)
        assert reply.miss_reason == "disk_failed"
        assert set(chain[: reply.found]).isdisjoint(of_b)
        for name in chain:  # no client sees an error, and nothing else is gone
            reply = await n.pin(WIDE, [name])
            assert reply.found == (name not in of_b)
            assert reply.miss_reason == ("disk_failed" if name in of_b else "")
        gone = {e.block_hash for e in n.store.take_events() if (e.kind, e.tier) == REMOVED}
        assert of_b <= gone
        assert n.devices.states() == {
            str(d): state for d, state in zip(disks, ("ok", "failed", "ok"), strict=True)
        }
        assert n.migrator.counters["devices_lost"] == 1
        await until(lambda: n.store.migration_count == 0, "the reads are over")
        n.store.check_integrity()
        # What is stored again goes to the others.
        await n.put(WIDE, chain)
        await n.cleaned(WIDE, chain)
        for name in chain:
            copy = n.store._table.spaces[WIDE.namespace_id].visible[Tier.NVME][name]
            assert {place.arena_id for place in copy.whole_places} <= {0, 2}
        assert of_b.isdisjoint(n.on(1))  # else its old records would win at the next start
        n.store.check_integrity()
        task.cancel()


REMOVED = ("removed", Tier.NVME)


async def test_a_device_that_cannot_be_written_is_still_read(
    disks: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = names(6)
    await stored(disks[:2], chain)
    with running(disks[:2]) as n:
        task = asyncio.create_task(n.migrator.run())
        fail(n.devices[0], monkeypatch, reads=False, writes=True)
        more = names(6, b"more")
        await n.put(WIDE, more)
        await n.cleaned(WIDE, more)  # those that were refused were tried again elsewhere
        assert n.devices.states()[str(disks[0])] == "read_only"
        assert n.on(0).isdisjoint(more)
        assert is_exact(WIDE, await n.read(WIDE, chain))
        n.store.check_integrity()
        task.cancel()


async def test_when_all_devices_fail_the_node_goes_on_with_dram(
    disks: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = names(6)
    await stored(disks[:2], chain)
    with running(disks[:2]) as n:
        task = asyncio.create_task(n.migrator.run())
        for device in n.devices:
            fail(device, monkeypatch, reads=True, writes=True)
        for name in chain:
            assert (await n.pin(WIDE, [name])).found == 0
        assert n.migrator.is_disk_failed
        assert not n.migrator.can_promote
        assert n.store.inspection.tiers()[1].capacity_bytes == 0
        for i in range(20):  # chains of 80 pages, in 512
            more = names(10, b"more%d" % i)
            await n.put(WIDE, more)
            assert n.tiers(WIDE, more) == [Tier.DRAM] * 10
        await until(lambda: n.store.migration_count == 0, "all moves are over")
        n.store.check_integrity()
        assert not task.done()
        task.cancel()


async def test_a_write_that_ends_after_its_device_was_lost_makes_nothing_visible(
    disks: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(disks[:1]) as n:
        task = asyncio.create_task(n.migrator.run())
        real, going, may_end = n.devices[0].files.write, threading.Event(), threading.Event()

        def late(place: Place, data: Any) -> None:
            real(place, data)
            going.set()
            assert may_end.wait(60)

        monkeypatch.setattr(n.devices[0].files, "write", late)
        await n.put(HALVES, names(1))
        await until(going.is_set, "a write is under way")
        n.migrator._give_up(n.devices[0], is_read=True, error="pulled out")
        may_end.set()
        await until(lambda: n.store.migration_count == 0, "all moves are over")
        assert n.tiers(HALVES, names(1)) == [Tier.DRAM]
        assert not n.store._table.spaces[HALVES.namespace_id].visible[Tier.NVME]
        n.store.check_integrity()
        task.cancel()


# ---------------------------------------------------------------- fp8


async def test_fp8_parts_take_half_the_room_and_come_back_as_they_were_decoded(
    disks: list[Path],
) -> None:
    chain = names(6)
    with running(disks[:2], dtype="fp8") as n:
        task = asyncio.create_task(n.migrator.run())
        await n.put(WIDE, chain)
        await n.cleaned(WIDE, chain)
        assert n.store.inspection.tiers()[1].committed_bytes == 6 * 5 * PAGE
        # Blocks in DRAM keep their exact bytes.
        assert is_exact(WIDE, await n.read(WIDE, chain))
        task.cancel()
    with running(disks[:2], dtype="fp8") as n:
        parts = await n.read(WIDE, chain)
        for i, part in enumerate(parts):
            expected = np.empty_like(part)
            decode(WIDE.layout, encode(WIDE.layout, content(WIDE, 10 * i)), expected)
            assert np.array_equal(part, expected)
            assert not np.array_equal(part, content(WIDE, 10 * i))
        n.store.check_integrity()


@pytest.mark.parametrize(("before", "after"), [("as_is", "fp8"), ("fp8", "as_is")])
async def test_old_blocks_are_read_after_the_setting_changed(
    disks: list[Path], before: Encoding, after: Encoding
) -> None:
    chain, more = names(6), names(6, b"more")
    await stored(disks[:2], chain, dtype=before)
    with running(disks[:2], dtype=after) as n:
        task = asyncio.create_task(n.migrator.run())
        await n.put(WIDE, more)
        await n.cleaned(WIDE, more)
        assert (
            n.store.inspection.tiers()[1].committed_bytes > 6 * (5 + 8) * PAGE
        )  # both kinds, and HALVES
        assert is_exact(WIDE, await n.read(WIDE, chain)) == (before == "as_is")
        n.store.check_integrity()
        task.cancel()
    with running(disks[:2], dtype=before) as n:
        assert n.tiers(WIDE, chain) == n.tiers(WIDE, more) == [Tier.NVME] * 6
        assert is_exact(WIDE, await n.read(WIDE, chain)) == (before == "as_is")
        assert is_exact(WIDE, await n.read(WIDE, more)) == (after == "as_is")
        n.store.check_integrity()


async def test_a_full_disk_of_old_blocks_gives_way_to_new_ones(disks: list[Path]) -> None:
    chain, more = names(8), names(12, b"more")
    with running(disks[:1], disk_pages=64) as n:
        task = asyncio.create_task(n.migrator.run())
        await n.put(WIDE, chain)
        await n.cleaned(WIDE, chain)
        assert n.store.inspection.tiers()[1].free_bytes == 0
        task.cancel()
    with running(disks[:1], disk_pages=64, dtype="fp8") as n:
        task = asyncio.create_task(n.migrator.run())
        assert n.tiers(WIDE, chain) == [Tier.NVME] * 8
        await n.put(WIDE, more)
        await n.cleaned(WIDE, more)  # three slots of five pages in each of four slabs
        n.store.check_integrity()
        task.cancel()


async def test_a_flipped_bit_of_an_encoded_part_is_a_miss(disks: list[Path]) -> None:
    await stored(disks[:1], names(1), dtype="fp8")
    with running(disks[:1], dtype="fp8") as n:
        [place] = [
            e.place for e in n.devices[0].files.recover() if e.namespace_id == WIDE.namespace_id
        ]
        with (disks[0] / "slabs").open("r+b") as slabs:
            slabs.seek(place.offset + 100)
            byte = slabs.read(1)[0]
            slabs.seek(place.offset + 100)
            slabs.write(bytes([byte ^ 1]))
        reply = await n.pin(WIDE, names(1))
        assert (reply.found, reply.miss_reason) == (0, "checksum")
        assert n.migrator.counters["corrupt_blocks"] == 1
