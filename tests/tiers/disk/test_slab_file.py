"""The NVMe files on a real filesystem: bytes, crashes, full and failing disks, locks."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog

from kvpool.blocks import layout
from kvpool.blocks.hashing import checksum
from kvpool.blocks.layout import Layout, Namespace
from kvpool.errors import InvalidArgument, KvpoolError
from tiers.disk import manifest, slab_file
from tiers.disk.manifest import Manifest
from tiers.disk.slab_file import NvmeEntry, NvmeFailed, NvmeFiles, NvmeInUse
from tiers.store.slab_allocator import Place

PAGE = 4096
CAPACITY = 64 * PAGE
SPACE = bytes(16)
NAMESPACE = Namespace("m", "r", Layout("float16", 1, 1, 16, 64), salt="hush")


def name(i: int) -> bytes:
    return i.to_bytes(16, "big")


def place(page: int) -> Place:
    return Place(0, page * PAGE)


def content(seed: int, length: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)


def put(files: NvmeFiles, i: int, page: int, length: int = PAGE, part: int = 0) -> None:
    data = content(i, length)
    files.write(place(page), data)
    files.record_put(SPACE, name(i), b"", part, place(page), length, checksum(data))


def names(entries: list[NvmeEntry]) -> list[int]:
    return [int.from_bytes(entry.block_hash, "big") for entry in entries]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "pool"


# ---------------------------------------------------------------- bytes


@pytest.mark.parametrize("length", [1, 100, PAGE - 1, PAGE, PAGE + 1, 5 * PAGE, 9 * PAGE + 17])
@pytest.mark.parametrize("misalignment", [0, 1, 64])
def test_bytes_come_back_whatever_their_length_and_alignment(
    directory: Path, length: int, misalignment: int
) -> None:
    memory = np.frombuffer(mmap.mmap(-1, 16 * PAGE), dtype=np.uint8)
    data = memory[misalignment : misalignment + length]
    data[:] = content(1, length)
    with NvmeFiles(directory, CAPACITY) as files:
        files.write(place(3), data)
        out = np.frombuffer(mmap.mmap(-1, 16 * PAGE), dtype=np.uint8)
        target = out[misalignment : misalignment + length]
        files.read(place(3), target)
        assert np.array_equal(target, data)
        assert not out[misalignment + length :].any()  # nothing past the end was touched
        assert not out[:misalignment].any()


def test_data_larger_than_the_bounce_buffer_comes_back(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slab_file, "BOUNCE_BYTES", 2 * PAGE)
    data = bytes(content(1, 7 * PAGE + 5))
    with NvmeFiles(directory, CAPACITY) as files:
        files.write(place(0), data)
        out = bytearray(len(data))
        files.read(place(0), out)
        assert bytes(out) == data


def test_transfers_that_the_kernel_cuts_short_are_finished(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_page(call: Callable[..., int]) -> Callable[..., int]:
        return lambda fd, views, offset: call(fd, [memoryview(views[0])[:PAGE]], offset)

    monkeypatch.setattr(os, "pwritev", one_page(os.pwritev))
    monkeypatch.setattr(os, "preadv", one_page(os.preadv))
    data = bytes(content(1, 5 * PAGE + 9))
    with NvmeFiles(directory, CAPACITY) as files:
        files.write(place(0), data)
        out = bytearray(len(data))
        files.read(place(0), out)
        assert bytes(out) == data


def test_threads_do_not_disturb_each_other(directory: Path) -> None:
    with NvmeFiles(directory, CAPACITY) as files:
        errors: list[BaseException] = []

        def work(i: int) -> None:
            try:
                for turn in range(20):
                    put(files, 100 * i + turn, 4 * i, 3 * PAGE + i)
                    out = np.zeros(3 * PAGE + i, dtype=np.uint8)
                    files.read(place(4 * i), out)
                    assert np.array_equal(out, content(100 * i + turn, len(out)))
            except BaseException as error:
                errors.append(error)
                raise

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert sorted(names(files.recover(verify=True))) == [19, 119, 219, 319]


@pytest.mark.parametrize(("page", "length"), [(-1, PAGE), (64, PAGE), (63, PAGE + 1), (0, 0)])
def test_places_outside_the_file_are_refused(directory: Path, page: int, length: int) -> None:
    with NvmeFiles(directory, CAPACITY) as files:
        with pytest.raises(InvalidArgument):
            files.write(place(page), bytes(length))
        with pytest.raises(InvalidArgument):
            files.write(Place(0, 100), bytes(10))


def test_reading_into_read_only_memory_is_refused(directory: Path) -> None:
    with NvmeFiles(directory, CAPACITY) as files, pytest.raises(KvpoolError, match="read-only"):
        files.read(place(0), bytes(PAGE))


def test_a_filesystem_without_o_direct_is_used_through_the_page_cache(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    with NvmeFiles(directory, CAPACITY) as files:
        assert not files.is_direct
        put(files, 1, 0, 5000)
        assert names(files.recover(verify=True)) == [1]


# ---------------------------------------------------------------- restart


def test_a_restart_finds_what_was_recorded_last(directory: Path) -> None:
    with NvmeFiles(directory, CAPACITY) as files:
        files.record_namespace(NAMESPACE)
        files.record_namespace(NAMESPACE)
        put(files, 1, 0)
        put(files, 2, 1, 3 * PAGE + 7)
        put(files, 3, 8)
        put(files, 1, 9)  # moved
        files.record_removed(SPACE, name(3))
        files.record_removed(SPACE, name(4))
    with NvmeFiles(directory, CAPACITY) as files:
        assert files.namespaces() == [NAMESPACE]
        assert files.recover(verify=True) == [
            NvmeEntry(
                SPACE, name(2), b"", 0, place(1), 3 * PAGE + 7, checksum(content(2, 3 * PAGE + 7))
            ),
            NvmeEntry(SPACE, name(1), b"", 0, place(9), PAGE, checksum(content(1, PAGE))),
        ]


def test_parts_can_be_removed_one_by_one_or_together(directory: Path) -> None:
    with NvmeFiles(directory, CAPACITY) as files:
        for part in range(3):
            put(files, 1, part, part=part)
        files.record_removed(SPACE, name(1), 1)
        assert [entry.part for entry in files.recover()] == [0, 2]
        files.record_removed(SPACE, name(1))
        assert files.recover() == []


def test_writing_over_a_part_removes_it_before_its_bytes_change(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with NvmeFiles(directory, CAPACITY) as files:
        put(files, 1, 0, 2 * PAGE)
        put(files, 2, 2)
        monkeypatch.setattr(os, "pwritev", _failing(errno.EIO))
        with pytest.raises(NvmeFailed):
            files.write(place(1), bytes(PAGE))
    monkeypatch.undo()
    with NvmeFiles(directory, CAPACITY) as files:
        assert names(files.recover(verify=True)) == [2]


def test_bytes_written_but_not_recorded_are_not_found(directory: Path) -> None:
    with NvmeFiles(directory, CAPACITY) as files:
        files.write(place(0), bytes(PAGE))
    with NvmeFiles(directory, CAPACITY) as files:
        assert files.recover() == []


def test_a_part_whose_bytes_changed_is_left_out_and_forgotten(directory: Path) -> None:
    with NvmeFiles(directory, CAPACITY) as files:
        put(files, 1, 0)
        put(files, 2, 1)
    with (directory / "slabs").open("r+b") as slabs:
        slabs.write(b"x")
    with NvmeFiles(directory, CAPACITY) as files:
        assert names(files.recover()) == [1, 2]
        assert names(files.recover(verify=True)) == [2]
        assert names(files.recover()) == [2]


def test_a_smaller_file_forgets_what_lay_beyond(directory: Path) -> None:
    with NvmeFiles(directory, CAPACITY) as files:
        put(files, 1, 0)
        put(files, 2, 60)
    with NvmeFiles(directory, CAPACITY // 2) as files:
        assert names(files.recover()) == [1]
        assert (directory / "slabs").stat().st_size == CAPACITY // 2


def test_a_manifest_cut_anywhere_yields_its_whole_records_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "manifest"
    written = Manifest(path)
    ends = [path.stat().st_size]
    for i in range(4):
        written.put(NvmeEntry(SPACE, name(i), b"", 0, place(i), PAGE, i))
        ends.append(path.stat().st_size)
    written.close()
    data = path.read_bytes()
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        replayed = Manifest(path)
        whole = max(0, sum(end <= cut for end in ends) - 1)
        assert names(list(replayed.index.entries.values())) == list(range(whole))
        replayed.put(NvmeEntry(SPACE, name(9), b"", 0, place(9), PAGE, 9))
        replayed.close()
        again = Manifest(path)
        assert names(list(again.index.entries.values())) == [*range(whole), 9]
        again.close()


def test_a_flipped_byte_anywhere_costs_its_own_record_alone(tmp_path: Path) -> None:
    path = tmp_path / "manifest"
    written = Manifest(path)
    written.add_namespace(NAMESPACE)
    ends = [path.stat().st_size]
    for i in range(4):
        written.put(NvmeEntry(NAMESPACE.namespace_id, name(i), b"", 0, place(i), PAGE, i))
        ends.append(path.stat().st_size)
    written.close()
    data = path.read_bytes()
    for position in range(ends[0], ends[3]):
        damaged = bytearray(data)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        with structlog.testing.capture_logs() as logs:
            replayed = Manifest(path)
        lost = sum(end <= position for end in ends) - 1
        kept = [i for i in range(4) if i != lost]
        assert names(list(replayed.index.entries.values())) == kept
        [said] = [entry for entry in logs if "skipped" in entry["event"]]
        assert (said["stretches"], said["lost_bytes"]) == (1, ends[lost + 1] - ends[lost])
        replayed.put(NvmeEntry(NAMESPACE.namespace_id, name(9), b"", 0, place(9), PAGE, 9))
        replayed.close()
        again = Manifest(path)
        assert names(list(again.index.entries.values())) == [*kept, 9]
        again.close()


def test_blocks_whose_namespace_was_damaged_are_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "manifest"
    other = Namespace("other", "r", NAMESPACE.layout)
    written = Manifest(path)
    end = 0
    for i, namespace in enumerate((NAMESPACE, other)):
        written.add_namespace(namespace)
        end = end or path.stat().st_size
        written.put(NvmeEntry(namespace.namespace_id, name(i), b"", 0, place(i), PAGE, i))
    written.close()
    data = bytearray(path.read_bytes())
    data[end - 1] ^= 1
    path.write_bytes(data)
    replayed = Manifest(path)
    assert list(replayed.namespaces.values()) == [other]
    assert names(list(replayed.index.entries.values())) == [1]
    replayed.close()


def test_a_recorded_namespace_that_is_refused_by_now_costs_its_blocks_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "manifest"
    long = Namespace("m", "r", NAMESPACE.layout, tenant="t" * 100)
    written = Manifest(path)
    for i, namespace in enumerate((long, NAMESPACE)):
        written.add_namespace(namespace)
        written.put(NvmeEntry(namespace.namespace_id, name(i), b"", 0, place(i), PAGE, i))
    written.close()
    monkeypatch.setattr(layout, "MAX_NAME_CHARS", 99)
    replayed = Manifest(path)
    assert names(list(replayed.index.entries.values())) == [1]
    replayed.close()


def test_a_record_too_large_to_be_replayed_is_never_written(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with NvmeFiles(directory, CAPACITY) as files:
        put(files, 1, 0)
        with monkeypatch.context() as patch:
            patch.setattr(layout, "MAX_NAME_CHARS", 1 << 20)
            namespace = Namespace("m", "r", NAMESPACE.layout, tenant="t" * 70_000)
            with pytest.raises(InvalidArgument, match="at most 65536"):
                files.record_namespace(namespace)
        assert files.namespaces() == []
        put(files, 2, 1)
    with NvmeFiles(directory, CAPACITY) as files:
        assert names(files.recover(verify=True)) == [1, 2]


def test_the_longest_namespace_that_is_allowed_survives_a_restart(directory: Path) -> None:
    wide = "\N{GRINNING FACE}"  # four bytes
    texts = [wide * layout.MAX_NAME_CHARS] * 4
    order = wide * layout.MAX_ORDER_CHARS
    shape = Layout("float16", 1, 1, 16, 64, order=order)
    namespace = Namespace(texts[0], texts[1], shape, tenant=texts[2], salt=texts[3])
    with NvmeFiles(directory, CAPACITY) as files:
        files.record_namespace(namespace)
    with NvmeFiles(directory, CAPACITY) as files:
        assert files.namespaces() == [namespace]


def test_a_file_that_is_no_manifest_is_refused_and_kept(directory: Path) -> None:
    directory.mkdir()
    (directory / "manifest").write_bytes(b"something else entirely")
    with pytest.raises(NvmeFailed, match="not a manifest"):
        NvmeFiles(directory, CAPACITY)
    assert (directory / "manifest").read_bytes() == b"something else entirely"


def test_the_manifest_is_compacted_when_most_of_it_is_dead(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "MIN_DEAD_RECORDS", 20)
    with NvmeFiles(directory, CAPACITY) as files:
        files.record_namespace(NAMESPACE)
        sizes = []
        for turn in range(200):
            put(files, turn % 8, turn % 8)
            sizes.append((directory / "manifest").stat().st_size)
        assert max(sizes) < 60 * (sizes[1] - sizes[0])
        expected = files.recover()
    with NvmeFiles(directory, CAPACITY) as files:
        assert files.recover(verify=True) == expected
        assert files.namespaces() == [NAMESPACE]


def test_a_failed_compaction_leaves_the_old_manifest_in_use(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "MIN_DEAD_RECORDS", 4)

    def refuse(*paths: object) -> None:
        raise OSError(errno.EIO, "no")

    monkeypatch.setattr(os, "rename", refuse)
    with NvmeFiles(directory, CAPACITY) as files:
        for turn in range(40):
            put(files, turn % 3, turn % 3)
    with NvmeFiles(directory, CAPACITY) as files:
        assert sorted(names(files.recover(verify=True))) == [0, 1, 2]


_WRITER = """
import sys
import numpy as np
from tests.tiers.disk.test_slab_file import CAPACITY, put
from tiers.disk.slab_file import NvmeFiles
files = NvmeFiles(sys.argv[1], CAPACITY, fsync="never")
turn = int(sys.argv[2])
while True:
    put(files, turn, turn * 7 % 30 * 2, 4097 + turn % 4000)
    print(turn, flush=True)
    turn += 1
"""


def test_after_kill_9_at_any_point_a_restart_finds_only_whole_blocks(directory: Path) -> None:
    turn = 1
    for kill_after in (1, 7, 40, 90):
        writer = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(directory), str(turn)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert writer.stdout is not None
        for _ in range(kill_after):
            turn = int(writer.stdout.readline()) + 1
        writer.send_signal(signal.SIGKILL)
        rest = writer.stdout.read().split()
        writer.wait(10)
        turn = int(rest[-1]) + 1 if rest else turn
        with NvmeFiles(directory, CAPACITY) as files:
            recorded = files.recover()
            assert files.recover(verify=True) == recorded
            assert recorded
            # The last that was confirmed is there, unless a later write had begun on its bytes.
            assert turn - 1 in names(recorded)
            assert max(names(recorded)) <= turn


# ---------------------------------------------------------------- failing disks


def _failing(number: int) -> Callable[..., int]:
    def fail(*args: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_refuses_gives_a_typed_error(
    directory: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    with NvmeFiles(directory, CAPACITY, fsync="never") as files:
        put(files, 1, 0)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", _failing(number))
            patch.setattr(os, "preadv", _failing(number))
            with pytest.raises(NvmeFailed, match=os.strerror(number)):
                files.write(place(1), bytes(PAGE))
            with pytest.raises(NvmeFailed, match=os.strerror(number)):
                files.read(place(0), bytearray(PAGE))
        put(files, 2, 1)
        assert names(files.recover(verify=True)) == [1, 2]


def test_a_record_that_could_not_be_appended_whole_leaves_no_trace(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite

    def half(fd: int, data: memoryview, offset: int) -> int:
        real(fd, data[: len(data) // 2], offset)
        raise OSError(errno.ENOSPC, "disk full")

    with NvmeFiles(directory, CAPACITY) as files:
        put(files, 1, 0)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", half)
            with pytest.raises(NvmeFailed, match="disk full"):
                put(files, 2, 1)
        assert names(files.recover()) == [1]
        put(files, 3, 2)
    with NvmeFiles(directory, CAPACITY) as files:
        assert names(files.recover(verify=True)) == [1, 3]


def test_a_disk_without_room_for_the_slab_file_shows_at_start(directory: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (CAPACITY // 2, hard))
    try:
        with pytest.raises(NvmeFailed, match="lower nvme_bytes"):
            NvmeFiles(directory, CAPACITY)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    NvmeFiles(directory, CAPACITY).close()  # the lock was given up


def test_a_failed_sync_fails_the_put_under_always(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = NvmeFiles(directory, CAPACITY, fsync="always")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", _failing(errno.EIO))
        with pytest.raises(NvmeFailed):
            put(files, 1, 0)
        assert files.recover() == []  # never recorded: its bytes may not be there
    files.close()


def test_bytes_are_synced_before_their_record_under_always(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    with NvmeFiles(directory, CAPACITY, fsync="always") as files:
        monkeypatch.setattr(os, "fdatasync", _noting(calls, os.fdatasync))
        monkeypatch.setattr(os, "pwrite", _noting(calls, os.pwrite, "append to "))
        put(files, 1, 0)
        assert calls == ["slabs", "append to manifest", "manifest"]
        monkeypatch.undo()


def test_syncs_are_spaced_under_interval_and_absent_under_never(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    synced: list[str] = []
    monkeypatch.setattr(os, "fdatasync", _noting(synced, os.fdatasync))
    with NvmeFiles(
        directory, CAPACITY, fsync="interval", fsync_interval_s=5.0, clock=lambda: now[0]
    ) as files:
        put(files, 1, 0)
        assert synced == []
        now[0] = 5.0
        put(files, 2, 1)
        put(files, 3, 2)
        assert synced == ["slabs", "manifest"]
    synced.clear()
    with NvmeFiles(directory, CAPACITY, fsync="never") as files:
        put(files, 4, 3)
    assert synced == []


def _noting(calls: list[str], real: Callable[..., Any], prefix: str = "") -> Callable[..., Any]:
    def noting(fd: int, *rest: Any) -> Any:
        calls.append(prefix + Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        return real(fd, *rest)

    return noting


# ---------------------------------------------------------------- locks


def test_two_nodes_cannot_share_a_directory(directory: Path) -> None:
    first = NvmeFiles(directory, CAPACITY)
    with pytest.raises(NvmeInUse, match="give each node its own directory"):
        NvmeFiles(directory, CAPACITY)
    first.close()
    with NvmeFiles(directory, CAPACITY):
        pass


def test_a_directory_that_cannot_be_made_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NvmeFailed, match="cannot use"):
        NvmeFiles(tmp_path / "file" / "pool", CAPACITY)


def test_closed_files_refuse_work_and_closing_twice_is_harmless(directory: Path) -> None:
    files = NvmeFiles(directory, CAPACITY)
    files.close()
    files.close()
    with pytest.raises(NvmeFailed, match="closed"):
        files.write(place(0), bytes(PAGE))


def test_salts_are_readable_by_their_owner_alone(directory: Path) -> None:
    with NvmeFiles(directory, CAPACITY) as files:
        files.record_namespace(NAMESPACE)
    assert (directory / "manifest").stat().st_mode & 0o077 == 0
    assert directory.stat().st_mode & 0o077 == 0
