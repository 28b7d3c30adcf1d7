"""Shared memory of a node: prefaulted memfds.

A memfd has no name. The kernel frees it when its last user ends, however that one died, and the
size of /dev/shm (64 MiB in most containers) does not limit it.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import structlog

from kvpool.errors import ConfigError, KvpoolError, NoSharedMemory
from tiers.memory import huge_pages
from tiers.memory.huge_pages import PAGE_BYTES, HugePages

log = structlog.get_logger(__name__)

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
        size_bytes: rounded up to whole pages of the kind asked for.
        prefault: touch every page now, so that no write meets a page fault, or a lack of memory,
            later.
        hugepages: "auto" takes transparent huge pages where the kernel gives them and "thp"
            insists, "off" wants none, "2m" and "1g" take reserved ones of that size.
        numa_node: where the pages come from; None: wherever the kernel likes.

    Raises:
        NoSharedMemory: the machine has not got that much, or no such pages.
        ConfigError: there is no such NUMA node, or the kernel does not do what was asked by name.
    """

    def __init__(
        self,
        arena_id: int,
        size_bytes: int,
        *,
        prefault: bool = True,
        hugepages: HugePages = "auto",
        numa_node: int | None = None,
    ) -> None:
        unit = huge_pages.page_bytes(hugepages)
        size_bytes = -(-size_bytes // unit) * unit
        if unit == PAGE_BYTES:  # reserved pages are not of what is available to all
            _check_room(size_bytes)
        self.kind, self.device_id = "dram", 0  # as NIXL is told
        self.arena_id = arena_id
        self.size_bytes = size_bytes
        self.hugepages = hugepages
        self.numa_node = numa_node
        self.fd = huge_pages.create(f"kvpool-arena-{arena_id}", size_bytes, hugepages)
        try:
            self._map = mmap.mmap(self.fd, size_bytes)
        except OSError as error:
            os.close(self.fd)
            raise NoSharedMemory(
                f"cannot map {size_bytes >> 20} MiB of shared memory: {error}",
                hint="lower node.dram_bytes",
            ) from error
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)
        self.base = int(self.bytes.ctypes.data)
        try:
            huge_pages.advise(self._map, self.base, hugepages)
            if numa_node is not None:
                huge_pages.bind(self.base, size_bytes, numa_node)
            if prefault:
                huge_pages.populate(self.base, size_bytes)
            self.obtained = huge_pages.obtained(self.base, size_bytes)
            if hugepages == "thp" and prefault and not self.obtained.huge_bytes:
                raise ConfigError(
                    "the kernel gave no transparent huge pages, and node.hugepages=thp asks for them",
                    hint="echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
                )
        except KvpoolError:
            self.close()
            raise

    def view(self, offset: int, length: int) -> npt.NDArray[np.uint8]:
        """The bytes [offset, offset + length), not a copy."""
        return self.bytes[offset : offset + length]

    def close(self, *, give_back: bool = False) -> None:
        """Let go of the memory; mappings of clients stay valid until they drop them.

        Args:
            give_back: free its pages now all the same; whoever still looks sees zeros.
        """
        if give_back and not huge_pages.give_back(self.fd, self.size_bytes):
            log.warning("memory stays taken until clients unmap it", arena_id=self.arena_id)
        self.bytes = np.empty(0, dtype=np.uint8)
        try:
            self._map.close()
        except BufferError:
            log.warning("arena still in use at close", arena_id=self.arena_id)
        os.close(self.fd)


def _check_room(size_bytes: int) -> None:
    room = available_memory_bytes() - HEADROOM_BYTES
    if size_bytes > room:
        raise NoSharedMemory(
            f"an arena of {size_bytes >> 20} MiB does not fit: {max(room, 0) >> 20} MiB are available",
            hint="lower node.dram_bytes, or give the machine or container more memory",
        )
