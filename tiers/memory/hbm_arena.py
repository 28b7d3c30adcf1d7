"""Device memory of a node: one tensor. Other hosts reach it by NIXL, this process by copies.

No client maps it. The bytes pass through host memory only when the node itself moves, verifies or
serves them. The device "cpu" uses ordinary memory, for trials. Torch is loaded with the first
arena. Copies block their thread: do not call them on an event loop.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import structlog

from kvpool.errors import ConfigError, InvalidArgument, KvpoolError
from tiers.memory.arena import HEADROOM_BYTES, available_memory_bytes

log = structlog.get_logger(__name__)

Octets = npt.NDArray[np.uint8]
HBM_ARENA_ID = 1 << 16  # DRAM arenas are numbered from 0
STAGING_BYTES = 4 << 20  # pinned, per copying thread


class DeviceUnavailable(ConfigError):
    """The configured device, or that much of its memory, is not available."""

    code = "device_unavailable"


class DeviceFailed(KvpoolError):
    """The device, or its driver, refused a copy."""

    code = "device_failed"


class DeviceArena:
    """One region of device memory.

    Args:
        arena_id: number within the node.
        size_bytes: of the region.
        device: "cuda:0", "cuda" or the like, or "cpu".

    Raises:
        DeviceUnavailable: there is no such device, or it has too little memory.
    """

    def __init__(self, arena_id: int, size_bytes: int, device: str) -> None:
        self.arena_id = arena_id
        self.size_bytes = size_bytes
        self._torch = _load_torch()
        self._device = _find_device(self._torch, device)
        self._tensor: Any = self._allocate()
        self.base = int(self._tensor.data_ptr())
        self.is_on_host = self._device.type == "cpu"
        self.device_id = 0 if self.is_on_host else int(self._tensor.device.index)
        self._host: Octets = self._tensor.numpy() if self.is_on_host else np.empty(0, np.uint8)
        self._of_thread = threading.local()
        if self.is_on_host:
            log.warning("hbm on cpu: for trying out", size_bytes=size_bytes)

    @property
    def kind(self) -> str:
        """The memory's kind for NIXL: "vram" or "dram"."""
        return "dram" if self.is_on_host else "vram"

    @property
    def note(self) -> str:
        """A note for people; "" for a device."""
        return "hbm on cpu: for trying out" if self.is_on_host else ""

    def read_into(self, offset: int, out: Octets) -> None:
        """Fill `out` from the arena; returns when the bytes are there.

        Raises:
            InvalidArgument: the range is not within the arena.
            DeviceFailed: the device refused the copy.
        """
        self._check(offset, out.nbytes)
        if self.is_on_host:
            np.copyto(out, self._host[offset : offset + out.nbytes])
            return
        try:
            self._read_staged(offset, out)
        except RuntimeError as error:  # torch raises CUDA's errors as this
            raise DeviceFailed(f"{self._device}: {error}") from error

    def _read_staged(self, offset: int, out: Octets) -> None:
        staging, stream = self._staging()
        for at in range(0, out.nbytes, STAGING_BYTES):
            step = min(STAGING_BYTES, out.nbytes - at)
            with self._torch.cuda.stream(stream):
                source = self._tensor[offset + at : offset + at + step]
                staging[:step].copy_(source, non_blocking=True)
            stream.synchronize()
            np.copyto(out[at : at + step], staging[:step].numpy())

    def write_from(self, offset: int, data: Octets) -> None:
        """Copy `data` into the arena; returns when the device has it.

        Raises:
            InvalidArgument: the range is not within the arena.
            DeviceFailed: the device refused the copy.
        """
        self._check(offset, data.nbytes)
        if self.is_on_host:
            np.copyto(self._host[offset : offset + data.nbytes], data)
            return
        try:
            self._write_staged(offset, data)
        except RuntimeError as error:
            raise DeviceFailed(f"{self._device}: {error}") from error

    def _write_staged(self, offset: int, data: Octets) -> None:
        staging, stream = self._staging()
        for at in range(0, data.nbytes, STAGING_BYTES):
            step = min(STAGING_BYTES, data.nbytes - at)
            np.copyto(staging[:step].numpy(), data[at : at + step])
            with self._torch.cuda.stream(stream):
                target = self._tensor[offset + at : offset + at + step]
                target.copy_(staging[:step], non_blocking=True)
            stream.synchronize()  # the staging memory is used again

    def close(self) -> None:
        """Free the memory."""
        self._host = np.empty(0, np.uint8)
        self._tensor = None
        if not self.is_on_host:
            self._torch.cuda.empty_cache()

    # ------------------------------------------------------------ within

    def _check(self, offset: int, length: int) -> None:
        if offset < 0 or offset + length > self.size_bytes:
            raise InvalidArgument(
                f"bytes [{offset}, {offset + length}) of a device arena of {self.size_bytes}"
            )

    def _allocate(self) -> Any:
        size = self.size_bytes
        if self._device.type == "cpu":
            room = available_memory_bytes() - HEADROOM_BYTES
            if size > room:
                raise DeviceUnavailable(
                    f"{size >> 20} MiB of hbm on cpu do not fit: "
                    f"{max(room, 0) >> 20} MiB are available",
                    hint="lower node.hbm_bytes",
                )
        try:
            # Zeroed: every page is touched, and no data of another process remains.
            tensor = self._torch.empty(size, dtype=self._torch.uint8, device=self._device)
            return tensor.zero_()
        except RuntimeError as error:  # torch's out-of-memory errors are of this kind
            raise DeviceUnavailable(
                f"{self._device} did not give {size >> 20} MiB: {str(error).splitlines()[0]}",
                hint="lower node.hbm_bytes, or leave the engine less of the device",
            ) from error

    def _staging(self) -> tuple[Any, Any]:
        """This thread's pinned memory and stream, so that threads copy in parallel."""
        if not hasattr(self._of_thread, "staging"):
            torch = self._torch
            self._of_thread.stream = torch.cuda.Stream(self._device)
            self._of_thread.staging = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True)
        return self._of_thread.staging, self._of_thread.stream


def _load_torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise DeviceUnavailable(
            f"device memory needs PyTorch: {error}",
            hint="pip install 'kvpool[server]', or set node.hbm_bytes=0",
        ) from error
    return torch


def _find_device(torch: Any, name: str) -> Any:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise DeviceUnavailable(
            f"node.advanced.hbm_device={name!r} is no device", hint='"cuda:0", or "cpu" for trials'
        ) from error
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise DeviceUnavailable(
            f"node.advanced.hbm_device={name!r}: CUDA devices only",
            hint='"cuda:0", or "cpu" for trials',
        )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        raise DeviceUnavailable(
            f"node.advanced.hbm_device={name!r} is not there: PyTorch sees {count} CUDA devices",
            hint='node.hbm_bytes=0, or node.advanced.hbm_device=cpu for trials; see "nvidia-smi"',
        )
    return torch.device("cuda", device.index or 0)
