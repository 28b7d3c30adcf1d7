"""The migrator with a real store, arena and files: callers that wait or leave, and bad disks."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool.blocks.hashing import checksum, pack_hashes
from kvpool.blocks.layout import Layout, Namespace
from kvpool.blocks.tier import Tier
from kvpool.errors import InvalidArgument
from kvpool.wire import messages as m
from tests.support.waiting import until
from tiers.disk.devices import THREADS, Device, Devices
from tiers.disk.manifest import NvmeFailed
from tiers.disk.slab_file import NvmeFiles
from tiers.memory.arena import Arena
from tiers.service import inline_blocks, pending_pins
from tiers.service.migrator import Migrator
from tiers.service.service import NodeService
from tiers.store.slab_allocator import Place, SlabAllocator
from tiers.store.store import Store, StoreConfig

PAGE = 4096
SLAB = 16 * PAGE
NAMESPACE = Namespace("m", "r", Layout("float16", 1, 1, 16, 64))  # parts of one page
HALVES = Namespace("two ranks", "r", Layout("float16", 1, 2, 16, 64, tp_size=2))
ID = NAMESPACE.namespace_id


def names(count: int, tag: bytes = b"n") -> list[bytes]:
    return [tag + i.to_bytes(15, "big") for i in range(count)]


def content(i: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(i).integers(0, 256, PAGE, dtype=np.uint8)


class Node:
    """A node's parts without its server; `cold` blocks of one chain are on NVMe alone."""

    def __init__(
        self, directory: Path, cold: int = 0, *, dram_pages: int = 256, write_through: bool = True
    ) -> None:
        self.arena = Arena(0, dram_pages * PAGE, prefault=False)
        self.files = NvmeFiles(directory, 256 * PAGE, fsync="never")
        self.store = Store(
            SlabAllocator(dram_pages * PAGE, SLAB),
            SlabAllocator(256 * PAGE, SLAB),
            StoreConfig(write_through=write_through, grace_s=0.0),
        )
        self.devices = Devices([Device(0, self.files)])
        self.migrator = Migrator(self.store, [self.arena], self.devices)
        self.service = NodeService(self.store, [self.arena], self.migrator)
        self.chain = names(cold)
        self.store.namespaces.register(NAMESPACE)
        if cold:
            self.files.record_namespace(NAMESPACE)
        for i, (parent, name) in enumerate(zip([b"", *self.chain], self.chain, strict=False)):
            place, data = Place(0, i * PAGE), content(i)
            self.files.write(place, data)
            self.files.record_put(ID, name, parent, 0, place, PAGE, checksum(data))
            assert self.store.recovery.recover_part(ID, name, parent, 0, place, checksum(data))

    def pin(self, hashes: list[bytes], client: str = "c") -> Any:
        return self.service.pin(m.Pin(ID, pack_hashes(hashes), 60.0), client)

    async def put(self, name: bytes, parent: bytes = b"", seed: int = 0) -> None:
        data = content(seed).tobytes()
        reply = self.service.put_inline(m.PutInline(ID, name, parent, 0, data), "w")
        assert reply.status == m.BlockStatus.GRANTED

    def tiers(self, hashes: list[bytes]) -> list[Tier]:
        return self.store.lookup(ID, hashes)

    def has_moves(self, count: int) -> Callable[[], bool]:
        return lambda: self.store.migration_count == count

    def recorded(self) -> set[bytes]:
        return {entry.block_hash for entry in self.files.recover()}

    def close(self) -> None:
        self.migrator.close()
        self.files.close()
        self.arena.close()


@contextmanager
def running(*args: Any, **settings: Any) -> Iterator[Node]:
    made = Node(*args, **settings)
    try:
        yield made
    finally:
        made.close()


class Gate:
    """Blocks its callers until it is opened."""

    def __init__(self, real: Callable[..., Any]) -> None:
        self._real = real
        self._is_open = threading.Event()
        self.threads: list[str] = []

    def __call__(self, *args: Any) -> Any:
        self.threads.append(threading.current_thread().name)
        assert self._is_open.wait(60)
        return self._real(*args)

    def open(self) -> None:
        self._is_open.set()


def failing(number: int) -> Callable[..., int]:
    def fail(*args: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail


# ---------------------------------------------------------------- readers


async def test_concurrent_readers_of_one_cold_chain_all_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path, 128) as n:
        tickets = threading.Semaphore(0)
        read = n.files.read

        def one_by_one(place: Place, out: Any) -> None:
            assert tickets.acquire(timeout=10)
            read(place, out)

        monkeypatch.setattr(n.files, "read", one_by_one)
        calls = [asyncio.ensure_future(n.pin(n.chain, f"c{i}")) for i in range(4)]
        for left in reversed(range(128)):
            tickets.release()
            await until(n.has_moves(left), "the next block comes")
        replies = await asyncio.gather(*calls)
        assert [(r.found, r.miss_reason) for r in replies] == [(128, "")] * 4
        for i, (arena_id, offset) in enumerate(
            np.frombuffer(replies[3].places, "<i8").reshape(-1, 2)
        ):
            assert arena_id == 0
            assert np.array_equal(n.arena.view(int(offset), PAGE), content(i))
        assert n.store.counters["promoted"] == 128
        n.store.check_integrity()


async def test_a_run_that_comes_in_no_time_gives_what_has_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path, 4) as n:
        ready = await n.pin(n.chain[:2])
        assert ready.found == 2
        gate = Gate(n.files.read)
        monkeypatch.setattr(n.files, "read", gate)
        monkeypatch.setattr(pending_pins, "PROMOTION_TIMEOUT_S", 0.05)
        try:
            reply = await n.pin(n.chain)
        finally:
            gate.open()
        assert (reply.found, reply.miss_reason) == (2, "promoting")
        await until(lambda: n.tiers(n.chain) == [Tier.DRAM] * 4, "the rest comes all the same")


@pytest.mark.parametrize("leaves", ["while it waits", "before its call had a turn"])
async def test_a_reader_that_leaves_costs_no_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaves: str
) -> None:
    with running(tmp_path, 3) as n:
        gate = Gate(n.files.read)
        monkeypatch.setattr(n.files, "read", gate)
        try:
            call = n.pin(n.chain)
            if leaves == "while it waits":
                task = asyncio.ensure_future(call)
                await until(lambda: gate.threads, "a read began")
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:
                call.close()
            assert (
                n.store.migration_count == 3
            )  # the slots stay held while the disk may write to them
        finally:
            gate.open()
        await until(lambda: n.store.migration_count == 0, "the moves end by themselves")
        assert n.tiers(n.chain) == [Tier.DRAM] * 3
        assert n.recorded() == set(n.chain)
        assert "dropped" not in n.store.counters
        assert len(n.store.leases) == 0
        n.store.check_integrity()


# ---------------------------------------------------------------- bytes and disks


async def test_a_block_whose_bytes_changed_on_disk_is_dropped_as_such(tmp_path: Path) -> None:
    with running(tmp_path, 4) as n:
        damaged = bytearray(content(2))
        damaged[7] ^= 1
        slabs = os.open(tmp_path / "slabs", os.O_RDWR)
        os.pwrite(slabs, damaged, 2 * PAGE)
        os.close(slabs)
        reply = await n.pin(n.chain)
        assert (reply.found, reply.miss_reason) == (2, "checksum")
        assert n.migrator.counters["corrupt_blocks"] == 1
        assert n.recorded() == {*n.chain[:2], n.chain[3]}
        assert not n.migrator.is_disk_failed


async def test_blocks_of_a_disk_that_cannot_be_read_are_hidden_and_hold_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path, 4) as n:
        assert (await n.pin(n.chain[:1])).found == 1
        n.store.take_events()
        monkeypatch.setattr(os, "preadv", failing(errno.EIO))
        reply = await n.pin(n.chain)
        assert (reply.found, reply.miss_reason) == (1, "disk_failed")
        again = n.pin(n.chain)  # answered at once: nothing is tried any more
        assert (again.found, again.miss_reason) == (1, "disk_failed")
        assert n.tiers(n.chain) == [Tier.DRAM]
        gone = [(e.kind, e.block_hash, e.tier) for e in n.store.take_events()]
        assert sorted(gone) == [("removed", name, Tier.NVME) for name in n.chain]
        assert n.recorded() == set(n.chain)  # a restart tries again
        assert n.migrator.counters["corrupt_blocks"] == 0
        assert n.migrator.is_disk_failed
        await until(n.has_moves(0), "all reads are over")
        assert (
            n.store.inspection.tiers()[1].committed_bytes
            == n.store.inspection.tiers()[1].capacity_bytes
            == 0
        )
        n.store.check_integrity()


async def test_after_a_failed_write_the_blocks_on_the_disk_are_still_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path, 2) as n:
        task = asyncio.create_task(n.migrator.run())
        monkeypatch.setattr(os, "pwritev", failing(errno.EIO))
        await n.put(b"w" * 16)
        await until(lambda: n.migrator.is_disk_failed, "the write failed")
        assert (await n.pin(n.chain)).found == 2
        assert n.tiers([b"w" * 16]) == [Tier.DRAM]
        task.cancel()


async def test_promotions_do_not_queue_behind_demotions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path, 8) as n:
        gate = Gate(n.files.write)
        monkeypatch.setattr(n.files, "write", gate)
        task = asyncio.create_task(n.migrator.run())
        try:
            for i, name in enumerate(names(20, b"w")):
                await n.put(name, seed=i)
            await until(
                lambda: len(gate.threads) == THREADS // 2, "every thread that writes is held"
            )
            assert (await n.pin(n.chain)).found == 8
            assert len(gate.threads) == THREADS // 2
        finally:
            gate.open()
        written = names(20, b"w")
        await until(lambda: n.recorded() >= set(written), "the demotions end too")
        task.cancel()


async def test_a_block_that_rotted_in_dram_is_dropped_when_it_is_to_be_written(
    tmp_path: Path,
) -> None:
    with running(tmp_path) as n:
        await n.put(b"w" * 16)
        [offset] = np.frombuffer(n.pin([b"w" * 16]).places, "<i8")[1:]
        n.arena.view(int(offset), 1)[0] ^= 1
        task = asyncio.create_task(n.migrator.run())
        await until(lambda: n.migrator.counters["corrupt_blocks"], "the demotion looks at it")
        assert n.pin([b"w" * 16]).miss_reason == "checksum"
        assert n.recorded() == set()
        task.cancel()


async def test_a_defect_in_a_promotion_ends_the_migrator_where_its_owner_sees_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(*args: object) -> None:
        raise RuntimeError("a defect")

    with running(tmp_path, 1) as n:
        task = asyncio.create_task(n.migrator.run())
        monkeypatch.setattr(n.files, "read", explode)
        assert (await n.pin(n.chain)).found == 0
        with pytest.raises(RuntimeError, match="a defect"):
            await asyncio.wait_for(task, 60)


# ---------------------------------------------------------------- namespaces


async def test_a_namespace_is_recorded_beside_the_event_loop_and_before_its_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path) as n:
        gate = Gate(n.files.record_namespace)
        monkeypatch.setattr(n.files, "record_namespace", gate)
        task = asyncio.create_task(n.migrator.run())
        try:
            n.service.register_namespace(m.RegisterNamespace(NAMESPACE))  # returns before the gate
            for i, name in enumerate(names(8)):
                await n.put(name, seed=i)
            await until(lambda: len(gate.threads) >= 2, "two threads want the record")
            assert n.recorded() == set()
        finally:
            gate.open()
        await until(lambda: len(n.recorded()) == 8, "the blocks follow")
        assert n.files.namespaces() == [NAMESPACE]
        assert all(name.startswith("kvpool-disk") for name in gate.threads)
        task.cancel()


async def test_a_namespace_that_nobody_announced_is_recorded_with_its_first_block(
    tmp_path: Path,
) -> None:
    with running(tmp_path) as n:
        task = asyncio.create_task(n.migrator.run())
        await n.put(b"w" * 16)
        await until(n.recorded, "the block is written")
        assert n.files.namespaces() == [NAMESPACE]
        task.cancel()


@pytest.mark.parametrize("error", [NvmeFailed("full"), InvalidArgument("too long")])
async def test_a_namespace_that_cannot_be_recorded_is_counted_and_fails_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(namespace: Namespace) -> None:
        raise error

    with running(tmp_path) as n:
        monkeypatch.setattr(n.files, "record_namespace", refuse)
        n.service.register_namespace(m.RegisterNamespace(NAMESPACE))
        await until(lambda: n.migrator.counters["namespaces_not_recorded"] == 1, "it is counted")
        assert n.migrator.is_disk_failed == isinstance(error, NvmeFailed)
        await n.put(b"w" * 16)
        task = asyncio.create_task(n.migrator.run())
        if not n.migrator.is_disk_failed:
            await until(
                lambda: n.store.counters.get("migrations_failed"), "its block is not written"
            )
        assert n.tiers([b"w" * 16]) == [Tier.DRAM]
        assert n.recorded() == set()
        assert not task.done()
        task.cancel()


# ---------------------------------------------------------------- the node's own reads and writes


async def test_a_report_whose_sender_leaves_keeps_no_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path) as n:
        await n.put(b"w" * 16)
        gate = Gate(checksum)
        monkeypatch.setattr(inline_blocks, "checksum", gate)
        try:
            task = asyncio.create_task(n.service.inline.verify(m.ReportCorrupt(ID, b"w" * 16)))
            await until(lambda: gate.threads, "the bytes are being verified")
            assert len(n.store.leases) == 1
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert len(n.store.leases) == 0
        finally:
            gate.open()
        assert n.tiers([b"w" * 16]) == [Tier.DRAM]


async def test_a_report_about_a_block_on_nvme_alone_moves_and_evicts_nothing(
    tmp_path: Path,
) -> None:
    with running(tmp_path, 1, dram_pages=16, write_through=False) as n:
        full = names(16, b"w")
        for i, name in enumerate(full):
            await n.put(name, seed=i)
        await n.service.inline.verify(m.ReportCorrupt(ID, n.chain[0]))
        assert n.tiers(n.chain) == [Tier.NVME]
        assert [n.tiers([name]) for name in full] == [[Tier.DRAM]] * 16
        assert (n.store.migration_count, len(n.store.leases)) == (0, 0)
        assert "migrations_cancelled" not in n.store.counters


async def test_a_true_report_drops_the_block_and_a_false_one_does_not(tmp_path: Path) -> None:
    with running(tmp_path) as n:
        await n.put(b"w" * 16)
        await n.service.inline.verify(m.ReportCorrupt(ID, b"w" * 16))
        assert n.tiers([b"w" * 16]) == [Tier.DRAM]
        [offset] = np.frombuffer(n.pin([b"w" * 16]).places, "<i8")[1:]
        n.arena.view(int(offset), 1)[0] ^= 1
        await n.service.inline.verify(m.ReportCorrupt(ID, b"w" * 16))
        assert n.tiers([b"w" * 16]) == []


@pytest.mark.parametrize("part", [-1, 2, 1 << 40])
async def test_an_inline_put_of_a_part_that_does_not_exist_is_refused(
    tmp_path: Path, part: int
) -> None:
    with running(tmp_path) as n:
        two = n.service.register_namespace(m.RegisterNamespace(HALVES)).namespace_id
        data = bytes(HALVES.layout.part_bytes)
        with pytest.raises(InvalidArgument, match=f"part {part} of 2"):
            n.service.put_inline(m.PutInline(two, b"w" * 16, b"", part, data), "w")
        with pytest.raises(InvalidArgument, match=f"parts .{part}. of 2"):
            await n.service.inline.get(m.GetInline(two, b"w" * 16, part), "r")
        assert n.store.inspection.tiers()[0].reserved_bytes == 0
        for good in (0, 1):
            n.service.put_inline(m.PutInline(two, b"w" * 16, b"", good, data), "w")
        assert (await n.service.inline.get(m.GetInline(two, b"w" * 16, 1), "r")).data == data
