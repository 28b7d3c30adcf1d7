"""Shared memory of a node: prefaulted memfds.

A memfd has no name. The kernel frees it when its last user ends, even after a kill. The size of
/dev/shm (64 MiB in most containers) does not limit it.
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

HEADROOM_BYTES = 256 << 20  # left for the rest of the machine


def available_memory_bytes() -> int:
    """Memory that this process can still allocate, within the machine and its cgroup."""
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
        prefault: touch every page now, so that no later write meets a page fault or a lack of
            memory.
        hugepages: "auto": transparent huge pages if the kernel gives them; "thp": fail without
            them; "off": none; "2m", "1g": reserved pages of that size.
        numa_node: where the pages come from; None: the kernel decides.

    Raises:
        NoSharedMemory: the machine does not have that much memory, or no such pages.
        ConfigError: there is no such NUMA node, or the kernel refuses the pages.
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
        if unit == PAGE_BYTES:  # reserved pages are counted separately
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
                    "node.hugepages=thp, but the kernel gave no transparent huge pages",
                    hint="echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
                )
        except KvpoolError:
            self.close()
            raise

    def view(self, offset: int, length: int) -> npt.NDArray[np.uint8]:
        """The bytes [offset, offset + length), not a copy."""
        return self.bytes[offset : offset + length]

    def close(self, *, give_back: bool = False) -> None:
        """Release the memory; clients' mappings stay valid until they unmap.

        Args:
            give_back: free the pages now; clients that still map them read zeros.
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
            f"an arena of {size_bytes >> 20} MiB does not fit: "
            f"{max(room, 0) >> 20} MiB are available",
            hint="lower node.dram_bytes, or give the machine or container more memory",
        )
