"""Shared memory of a node: one memfd, prefaulted, handed to local clients by file descriptor.

A memfd has no name and no place in /dev/shm: it is gone when its last user is, however that one died, and
the size of /dev/shm (64 MiB in most containers) does not limit it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import structlog

from kvpool.errors import NoSharedMemory
from kvpool.transports.shm import ArenaHandout
from kvpool.wire.server import remove_stale_socket

log = structlog.get_logger(__name__)

PAGE_BYTES = 4096
MADV_POPULATE_WRITE = 23
HEADROOM_BYTES = 256 << 20  # left to the rest of the machine


def available_memory_bytes() -> int:
    """Memory that this process may still take: the machine's, or its cgroup's if that is less."""
    with open("/proc/meminfo") as lines:
        fields = dict(line.split(":", 1) for line in lines)
    available = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        if limit != "max":
            available = min(available, int(limit) - used)
    except (OSError, ValueError):
        pass  # no cgroup limit to respect
    return available


class Arena:
    """One region of shared memory.

    Args:
        arena_id: number within the node.
        size_bytes: a multiple of the page size.
        prefault: touch every page now, so that no write meets a page fault, or a lack of memory, later.

    Raises:
        NoSharedMemory: the machine has not got that much.
    """

    def __init__(self, arena_id: int, size_bytes: int, *, prefault: bool = True) -> None:
        room = available_memory_bytes() - HEADROOM_BYTES
        if size_bytes > room:
            raise NoSharedMemory(
                f"an arena of {size_bytes >> 20} MiB does not fit: {max(room, 0) >> 20} MiB are available",
                hint="lower node.dram_bytes, or give the machine or container more memory",
            )
        self.arena_id = arena_id
        self.size_bytes = size_bytes
        self.fd = os.memfd_create(f"kvpool-arena-{arena_id}", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, size_bytes)
            self._map = mmap.mmap(self.fd, size_bytes)
        except OSError as error:
            os.close(self.fd)
            raise NoSharedMemory(
                f"cannot map {size_bytes >> 20} MiB of shared memory: {error}",
                hint="lower node.dram_bytes",
            ) from error
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)
        self.base = int(self.bytes.ctypes.data)
        if prefault:
            self._populate()

    def _populate(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self._map.madvise(mmap.MADV_HUGEPAGE)
        if libc.madvise(self.base, self.size_bytes, MADV_POPULATE_WRITE) != 0:
            code = ctypes.get_errno()
            self.close()
            raise NoSharedMemory(
                f"the kernel did not give {self.size_bytes >> 20} MiB: {os.strerror(code)}",
                hint="lower node.dram_bytes, or raise the container's memory limit",
            )

    def view(self, offset: int, length: int) -> npt.NDArray[np.uint8]:
        """The bytes [offset, offset + length), not a copy."""
        return self.bytes[offset : offset + length]

    def close(self) -> None:
        """Give the memory back; mappings of clients stay valid until they drop them."""
        self.bytes = np.empty(0, dtype=np.uint8)
        try:
            self._map.close()
        except BufferError:
            log.warning("arena still in use at close", arena_id=self.arena_id)
        os.close(self.fd)


class ArenaServer:
    """Hands the arenas' file descriptors to processes of the same user, over a Unix socket."""

    def __init__(self, path: str, node_id: str, epoch: int, arenas: Sequence[Arena]) -> None:
        remove_stale_socket(path)
        self.path = path
        self._fds = [arena.fd for arena in arenas]
        self._handout = msgspec.msgpack.encode(
            ArenaHandout(
                node_id,
                epoch,
                [arena.arena_id for arena in arenas],
                [arena.size_bytes for arena in arenas],
            )
        )
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        os.chmod(path, 0o600)
        self._listener.listen(64)
        self._thread = threading.Thread(target=self._serve, name="kvpool-arenas", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return  # closed
            with link:
                try:
                    link.settimeout(1.0)
                    socket.send_fds(link, [self._handout], self._fds)
                except OSError as error:
                    log.warning("a client left before it had the memory", error=str(error))

    def close(self) -> None:
        """Stop and remove the socket."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(timeout=2)
        if os.path.exists(self.path):
            os.unlink(self.path)
