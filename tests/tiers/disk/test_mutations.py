"""A crash at each write of the disk's files, and rotten bytes: without a guard, a check fails.

The process ends (or the power, with half of a write done) at every write that the code makes, one
after the other; after each, a restart must find only whole blocks, and all that were confirmed
(invariants 5 and 8).
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool.blocks.hashing import checksum
from kvpool.blocks.layout import Layout, Namespace
from kvpool.blocks.tier import Tier
from kvpool.errors import ChecksumMismatch
from tiers.disk import devices
from tiers.disk.devices import Device
from tiers.disk.manifest import Index
from tiers.disk.slab_file import NvmeFiles
from tiers.store.blocks import Migration
from tiers.store.slab_allocator import Place

PAGE = 4096
PART = 2 * PAGE
PLACES = 4
SPACE = Namespace("m", "r", Layout("uint8", 1, 1, PART // 128, 64))
WRITES = 10  # of blocks, over four places: most replace an older one
Patch = Callable[[pytest.MonkeyPatch], None]


class Crash(BaseException):
    """The process ends here."""


class Violation(Exception):
    """What a restart found is not what it must be."""


class CrashingWrites:
    """Kernel writes that do half of the one numbered `last`, and are the end.

    Args:
        last: counted from 1; 0 for none.
    """

    def __init__(self, last: int) -> None:
        self.done = 0
        self._last = last
        self._pwrite, self._pwritev = os.pwrite, os.pwritev

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        self.done += 1
        if self.done == self._last:
            self._pwrite(fd, memoryview(data)[: len(data) // 2], offset)
            raise Crash
        return self._pwrite(fd, data, offset)

    def pwritev(self, fd: int, views: list[Any], offset: int) -> int:
        self.done += 1
        if self.done == self._last:
            self._pwritev(fd, [memoryview(views[0])[:PAGE]], offset)
            raise Crash
        return self._pwritev(fd, views, offset)


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


def content(number: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Page-aligned, so that it goes to the disk as it is."""
    data = np.frombuffer(mmap.mmap(-1, PART), dtype=np.uint8)
    data[:] = np.random.default_rng(number).integers(0, 256, PART, dtype=np.uint8)
    return data


def move(number: int, source: Place, target: Place, sum_of: int) -> Migration:
    return Migration(
        number,
        SPACE.namespace_id,
        name(number),
        0,
        Tier.DRAM,
        source,
        Tier.NVME,
        target,
        PART,
        sum_of,
        b"",
    )


def target(number: int) -> Place:
    return Place(0, number * 3 % PLACES * PART)


def write_until_the_crash(directory: Path, writes: CrashingWrites) -> int:
    """Write blocks as the migrator's threads do; returns how many were confirmed."""
    confirmed = 0
    with pytest.MonkeyPatch.context() as patch:
        device = Device(0, NvmeFiles(directory, PLACES * PART, fsync="never"))
        patch.setattr(os, "pwrite", writes.pwrite)
        patch.setattr(os, "pwritev", writes.pwritev)
        try:
            for number in range(WRITES):
                data = content(number)
                device.write_part(
                    move(number, Place(0, 0), target(number), checksum(data)), SPACE, data
                )
                confirmed += 1
        except Crash:
            pass
        finally:
            device.close()  # under "never" this writes nothing
    return confirmed


def check_what_a_restart_finds(directory: Path, confirmed: int) -> None:
    """Raises Violation unless every block found is whole, and none that was confirmed is lost."""
    with NvmeFiles(directory, PLACES * PART, fsync="never") as files:
        found = set()
        for entry in files.recover():
            number = int.from_bytes(entry.block_hash, "big")
            out = np.zeros(PART, np.uint8)
            files.read(entry.place, out)
            if checksum(out) != entry.checksum or (out != content(number)).any():
                raise Violation(f"block {number} is found with other bytes")
            found.add(number)
        if found and files.namespaces() != [SPACE]:
            raise Violation("a block is found whose namespace is not")
        # The next write, number `confirmed`, may have begun on the place of an older one.
        begun = target(confirmed) if confirmed < WRITES else None
        for number in range(max(0, confirmed - PLACES), confirmed):
            if number not in found and target(number) != begun:
                raise Violation(f"block {number} was confirmed and is lost")


def crash_everywhere(directory: Path) -> int:
    """Run into a crash at each write in turn; returns how many there are."""
    whole = CrashingWrites(0)
    check_what_a_restart_finds(
        directory / "whole", write_until_the_crash(directory / "whole", whole)
    )
    for last in range(1, whole.done + 1):
        confirmed = write_until_the_crash(directory / f"{last}", CrashingWrites(last))
        check_what_a_restart_finds(directory / f"{last}", confirmed)
    return whole.done


def test_a_crash_at_any_write_leaves_whole_blocks_and_all_that_were_confirmed(
    tmp_path: Path,
) -> None:
    assert crash_everywhere(tmp_path) >= 3 * WRITES - PLACES  # bytes, record, and mostly a removal


def _bytes_change_under_their_record(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Index, "overlapping", lambda self, place, length: [])


def _recorded_before_written(patch: pytest.MonkeyPatch) -> None:
    record = NvmeFiles.record_put
    waiting: list[tuple[Place, Any]] = []

    def remember(self: NvmeFiles, place: Place, data: Any) -> None:
        with self._lock:
            for entry in self._manifest.index.overlapping(place, PART):
                self._manifest.remove(entry.namespace_id, entry.block_hash, entry.part)
        waiting.append((place, data))

    def record_and_write(self: NvmeFiles, *entry: Any) -> None:
        record(self, *entry)
        place, data = waiting.pop()
        os.pwritev(self._fd, [data.data], place.offset)

    patch.setattr(NvmeFiles, "write", remember)
    patch.setattr(NvmeFiles, "record_put", record_and_write)


def _blocks_before_their_namespace(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Device, "record_namespace", lambda self, namespace: None)


@pytest.mark.parametrize(
    ("take_guard_away", "caught"),
    [
        pytest.param(_bytes_change_under_their_record, "other bytes", id="8: removed too late"),
        pytest.param(_recorded_before_written, "other bytes", id="8: recorded too early"),
        pytest.param(_blocks_before_their_namespace, "namespace", id="8: no namespace"),
    ],
)
def test_the_crashes_notice_a_missing_guard(
    take_guard_away: Patch, caught: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_guard_away(monkeypatch)
    with pytest.raises(Violation) as noticed:
        crash_everywhere(tmp_path)
    assert re.search(caught, str(noticed.value))


# ---------------------------------------------------------------- bytes that rot


def read_a_rotten_block(directory: Path) -> None:
    """Write a block, flip a bit of it on the disk, and read it as a promotion does."""
    data, out = content(1), np.zeros(PART, np.uint8)
    written = move(1, Place(0, 0), Place(0, 0), checksum(data))
    device = Device(0, NvmeFiles(directory, PLACES * PART, fsync="never"))
    try:
        device.write_part(written, SPACE, data)
        with (directory / "slabs").open("r+b") as slabs:
            slabs.seek(PART // 2)
            slabs.write(bytes([data[PART // 2] ^ 1]))
        device.read_part(written, SPACE, out)
    finally:
        device.close()


def write_a_rotten_block(directory: Path) -> None:
    """Demote a block whose bytes in memory are not those committed."""
    data = content(1)
    written = move(1, Place(0, 0), Place(0, 0), checksum(data))
    data[7] ^= 1
    device = Device(0, NvmeFiles(directory, PLACES * PART, fsync="never"))
    try:
        device.write_part(written, SPACE, data)
    finally:
        device.close()


@pytest.mark.parametrize("meet_rot", [read_a_rotten_block, write_a_rotten_block])
def test_rot_is_noticed_by_the_checksum_and_by_nothing_else(
    meet_rot: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ChecksumMismatch):
        meet_rot(tmp_path / "guarded")
    sum_of = checksum(content(1))
    monkeypatch.setattr(devices, "checksum", lambda _data: sum_of)
    meet_rot(tmp_path / "unguarded")  # without the guard (invariant 5) it passes for good
