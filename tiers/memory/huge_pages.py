"""The pages of an arena: their kind and NUMA node, set through Linux itself, without libnuma.


Huge pages decide how fast other processes reach an arena (a copy between processes runs at 0.53 of
memcpy with plain pages and at 0.94 to 0.98 with huge ones). There are two kinds: transparent ones
(`thp`), which the kernel gives when it can, and reserved ones (`2m`, `1g`), which an administrator
has set aside and nobody else uses.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvpool.errors import ConfigError, NoSharedMemory

HugePages = Literal["auto", "off", "thp", "2m", "1g"]

PAGE_BYTES = 4096
RESERVED_BYTES = {"2m": 2 << 20, "1g": 1 << 30}
MFD_HUGETLB = 4
MFD_HUGE_SHIFT = 26
MADV_NOHUGEPAGE = 15
MADV_POPULATE_WRITE = 23
MPOL_BIND = 2
FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 1, 2
_MBIND_NUMBERS = {"x86_64": 237, "aarch64": 235}
_NUMA = Path("/sys/devices/system/node")
_HUGE = Path("/sys/kernel/mm/hugepages")
_SHMEM = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


@dataclass(slots=True, frozen=True)
class Obtained:
    """The pages that the kernel gave, read after every page was touched."""

    page_bytes: int  # of the mapping
    huge_bytes: int  # in transparent or reserved huge pages


def page_bytes(kind: HugePages) -> int:
    """Size of one page; arena sizes are multiples of it."""
    return RESERVED_BYTES.get(kind, PAGE_BYTES)


def reserved_free(kind: HugePages) -> int:
    """How many reserved pages of this kind are free."""
    try:
        return int((_HUGE / f"hugepages-{page_bytes(kind) >> 10}kB/free_hugepages").read_text())
    except (OSError, ValueError):
        return 0


def shmem_policy() -> str:
    """The kernel's setting for huge pages of shared memory, such as "advise"; "" if it has none."""
    try:
        text = _SHMEM.read_text()
    except OSError:
        return ""
    return text.partition("[")[2].partition("]")[0]


def create(name: str, size_bytes: int, kind: HugePages) -> int:
    """A memfd of this size and kind of pages.

    Raises:
        NoSharedMemory: the kernel has no such pages, or not enough of them.
    """
    flags = os.MFD_CLOEXEC
    if kind in RESERVED_BYTES:
        unit = RESERVED_BYTES[kind]
        wanted, free = -(-size_bytes // unit), reserved_free(kind)
        if free < wanted:
            raise NoSharedMemory(
                f"an arena of {wanted} reserved huge pages of {unit >> 20} MiB does not fit: "
                f"{free} are free",
                hint=f"sysctl vm.nr_hugepages={wanted}, or node.hugepages=auto"
                if kind == "2m"
                else f"boot with hugepagesz=1G hugepages={wanted}, or use node.hugepages=auto",
            )
        flags |= MFD_HUGETLB | (unit.bit_length() - 1) << MFD_HUGE_SHIFT
    try:
        fd = os.memfd_create(name, flags)
    except OSError as error:
        raise NoSharedMemory(
            f"the kernel gives no {kind} pages: {error.strerror}", hint="use node.hugepages=auto"
        ) from error
    try:
        os.ftruncate(fd, size_bytes)
    except OSError as error:
        os.close(fd)
        raise NoSharedMemory(
            f"cannot set aside {size_bytes >> 20} MiB of shared memory: {error}",
            hint="lower node.dram_bytes",
        ) from error
    return fd


def advise(mapped: mmap.mmap, base: int, kind: HugePages) -> None:
    """Request transparent huge pages, or none. Call it before the pages are touched.

    Raises:
        ConfigError: `kind` is "thp", and the kernel has no such pages.
    """
    if kind in RESERVED_BYTES:
        return
    advice = MADV_NOHUGEPAGE if kind == "off" else mmap.MADV_HUGEPAGE
    if _libc.madvise(base, len(mapped), advice) != 0 and kind == "thp":
        raise ConfigError(
            f"the kernel has no transparent huge pages: {os.strerror(ctypes.get_errno())}",
            hint="use node.hugepages=auto",
        )


def bind(base: int, size_bytes: int, numa_node: int) -> None:
    """Take the pages from one NUMA node. Call it before they are touched.


    Raises:
        ConfigError: there is no such node, or the kernel refuses.
    """
    nodes = numa_nodes()
    if numa_node not in nodes:
        raise ConfigError(
            f"this machine has no NUMA node {numa_node}",
            hint="node.advanced.numa_nodes may name "
            + (", ".join(map(str, nodes)) or "none: it has no NUMA"),
        )
    number = _MBIND_NUMBERS.get(platform.machine())
    if number is None:
        raise ConfigError(f"NUMA nodes cannot be chosen on {platform.machine()}")
    mask = ctypes.c_ulong * (numa_node // 64 + 1)
    words = mask()
    words[numa_node // 64] = 1 << (numa_node % 64)
    # The kernel reads one bit less than this number.
    max_node = ctypes.sizeof(words) * 8 + 1
    arguments = (
        ctypes.c_void_p(base),
        ctypes.c_ulong(size_bytes),
        ctypes.c_int(MPOL_BIND),
        words,
        ctypes.c_ulong(max_node),
        ctypes.c_uint(0),
    )
    if _libc.syscall(ctypes.c_long(number), *arguments) != 0:
        raise ConfigError(
            f"the kernel does not bind memory to NUMA node {numa_node}: "
            f"{os.strerror(ctypes.get_errno())}",
            hint="containers need CAP_SYS_NICE for it",
        )


def populate(base: int, size_bytes: int) -> None:
    """Touch every page, so that no later write meets a page fault or a lack of memory.

    Raises:
        NoSharedMemory: the kernel does not have that much memory.
    """
    if _libc.madvise(base, size_bytes, MADV_POPULATE_WRITE) != 0:
        raise NoSharedMemory(
            f"the kernel did not give {size_bytes >> 20} MiB: {os.strerror(ctypes.get_errno())}",
            hint="lower node.dram_bytes, or raise the container's memory limit",
        )


def give_back(fd: int, size_bytes: int) -> bool:
    """Free the pages of a memfd at once, even if clients map it; False if the kernel refuses."""
    flags = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
    return int(_libc.fallocate(fd, flags, 0, size_bytes)) == 0


def numa_nodes() -> list[int]:
    """The machine's NUMA nodes with memory; empty if the kernel lists none."""
    try:
        text = (_NUMA / "has_memory").read_text().strip()
    except OSError:
        return []
    nodes: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        nodes += range(int(first), int(last or first) + 1)
    return nodes


def obtained(base: int, size_bytes: int) -> Obtained:
    """The pages behind a mapping of this process."""
    page, huge = PAGE_BYTES, 0
    is_ours = False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            name, _, rest = line.partition(" ")
            if not name.endswith(":"):
                start, _, end = name.partition("-")
                is_ours = int(start, 16) < base + size_bytes and base < int(end, 16)
            elif is_ours and name == "KernelPageSize:":
                page = int(rest.split()[0]) << 10
            elif is_ours and name in ("ShmemPmdMapped:", "Shared_Hugetlb:", "Private_Hugetlb:"):
                huge += int(rest.split()[0]) << 10
    return Obtained(page, min(huge, size_bytes))
