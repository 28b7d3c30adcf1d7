"""The arena in device memory: on cpu everywhere, on a GPU where there is one."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kvpool.errors import InvalidArgument
from kvpool.transports.nixl_agent import NixlAgent
from tiers.memory.hbm_arena import STAGING_BYTES, DeviceArena, DeviceFailed, DeviceUnavailable


def _has_cuda() -> bool:
    import torch

    return bool(torch.cuda.is_available())


needs_cuda = pytest.mark.skipif(not _has_cuda(), reason="needs a CUDA device")
SIZE = 2 * STAGING_BYTES + 4096  # more than passes through the staging memory at once


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=needs_cuda)])
def arena(request: pytest.FixtureRequest) -> Iterator[DeviceArena]:
    made = DeviceArena(7, SIZE, request.param)
    yield made
    made.close()


def noise(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def test_what_is_written_is_read(arena: DeviceArena) -> None:
    whole = noise(SIZE)
    arena.write_from(0, whole)
    out = np.zeros(SIZE, np.uint8)
    arena.read_into(0, out)
    assert (out == whole).all()
    piece = noise(5000, seed=1)
    arena.write_from(SIZE - 5000, piece)
    arena.read_into(0, out)
    assert (out[: SIZE - 5000] == whole[: SIZE - 5000]).all()
    assert (out[SIZE - 5000 :] == piece).all()


def test_it_is_empty_at_first(arena: DeviceArena) -> None:
    out = noise(SIZE)
    arena.read_into(0, out)
    assert not out.any()


def test_threads_do_not_disturb_each_other(arena: DeviceArena) -> None:
    step = SIZE // 4
    wrong: list[int] = []

    def work(number: int) -> None:
        data = noise(step, seed=number)
        out = np.empty(step, np.uint8)
        for _ in range(5):
            arena.write_from(number * step, data)
            arena.read_into(number * step, out)
            if not (out == data).all():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_ranges_outside_it_are_refused(arena: DeviceArena) -> None:
    for offset, length in ((-1, 10), (SIZE - 9, 10), (SIZE, 1)):
        with pytest.raises(InvalidArgument):
            arena.read_into(offset, np.empty(length, np.uint8))
        with pytest.raises(InvalidArgument):
            arena.write_from(offset, np.empty(length, np.uint8))


def test_on_cpu_it_says_so() -> None:
    made = DeviceArena(7, 4096, "cpu")
    assert (made.kind, made.device_id) == ("dram", 0)
    assert made.note == "hbm on cpu: for trying out"
    made.close()


@pytest.mark.parametrize("device", ["cuda:99", "cuda:x", "mps", "gpu"])
def test_a_device_that_is_not_there_is_a_clear_error(device: str) -> None:
    with pytest.raises(DeviceUnavailable) as raised:
        DeviceArena(7, 4096, device)
    assert device in str(raised.value)
    assert raised.value.hint


def test_more_than_there_is_is_a_clear_error() -> None:
    with pytest.raises(DeviceUnavailable, match="do not fit"):
        DeviceArena(7, 1 << 50, "cpu")


@needs_cuda
def test_more_than_the_device_has_is_a_clear_error() -> None:
    with pytest.raises(DeviceUnavailable, match="did not give"):
        DeviceArena(7, 1 << 50, "cuda:0")


@needs_cuda
def test_on_a_device_it_is_vram_that_nixl_registers_and_moves() -> None:
    arena = DeviceArena(7, 1 << 20, "cuda:0")
    assert (arena.kind, arena.device_id, arena.note) == ("vram", 0, "")
    data = noise(1 << 20)
    arena.write_from(0, data)
    target, reader = NixlAgent("hbm-target"), NixlAgent("hbm-reader")
    target.register(arena.base, arena.size_bytes, arena.kind, arena.device_id)
    out = np.zeros_like(data)
    reader.register(out.ctypes.data, out.nbytes)
    peer = reader.raw.add_remote_agent(target.metadata())
    local = np.array([[out.ctypes.data, out.nbytes, 0]], np.uint64)
    remote = np.array([[arena.base, arena.size_bytes, arena.device_id]], np.uint64)
    handle = reader.raw.initialize_xfer(
        "READ",
        reader.raw.get_xfer_descs(local, "DRAM"),
        reader.raw.get_xfer_descs(remote, "VRAM"),
        peer.decode() if isinstance(peer, bytes) else peer,
    )
    state = reader.raw.transfer(handle)
    for _ in range(100_000):
        if state != "PROC":
            break
        target.progress()
        state = reader.raw.check_xfer_state(handle)
    assert state == "DONE"
    assert (out == data).all()
    arena.close()


@needs_cuda
def test_an_error_of_the_device_is_one_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = DeviceArena(7, 4096, "cuda:0")

    def fail() -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(arena, "_staging", fail)
    with pytest.raises(DeviceFailed, match="cuda:0"):
        arena.read_into(0, np.empty(16, np.uint8))
