"""Arenas of every kind of page, on a NUMA node, and what the kernel says that they got."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from kvpool.errors import ConfigError, NoSharedMemory
from tiers.memory import huge_pages
from tiers.memory.arena import Arena

MIB = 1 << 20
NEEDS_2M = pytest.mark.skipif(
    huge_pages.reserved_free("2m") < 8,
    reason="fewer than 8 reserved huge pages of 2 MiB are free: sysctl vm.nr_hugepages=64",
)
NEEDS_THP = pytest.mark.skipif(
    huge_pages.shmem_policy() not in ("advise", "always", "within_size"),
    reason="the kernel gives no transparent huge pages for shared memory (shmem_enabled)",
)


def shared_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssShmem:")[2].split()[0]) << 10


def test_plain_pages_are_had_where_huge_ones_are_off() -> None:
    arena = Arena(0, 8 * MIB, hugepages="off")
    try:
        assert arena.obtained == huge_pages.Obtained(4096, 0)
        arena.view(8 * MIB - 1, 1)[:] = 7
    finally:
        arena.close()


@NEEDS_THP
@pytest.mark.parametrize("kind", ["auto", "thp"])
def test_transparent_huge_pages_are_had_and_counted(kind: huge_pages.HugePages) -> None:
    arena = Arena(0, 32 * MIB, hugepages=kind)
    try:
        assert 0 < arena.obtained.huge_bytes <= 32 * MIB
        assert arena.obtained.page_bytes == 4096
    finally:
        arena.close()


@NEEDS_2M
def test_reserved_huge_pages_are_taken_and_given_back_in_whole_pages() -> None:
    free = huge_pages.reserved_free("2m")
    arena = Arena(0, 5 * MIB, hugepages="2m")
    try:
        assert arena.size_bytes == 6 * MIB
        assert arena.obtained == huge_pages.Obtained(2 * MIB, 6 * MIB)
        assert huge_pages.reserved_free("2m") == free - 3
        with mmap.mmap(arena.fd, arena.size_bytes) as mapped:  # as a client does
            arena.view(6 * MIB - 3, 3)[:] = (1, 2, 3)
            assert mapped[-3:] == b"\x01\x02\x03"
    finally:
        arena.close()
    assert huge_pages.reserved_free("2m") == free


@pytest.mark.parametrize("kind", ["2m", "1g"])
def test_too_few_reserved_pages_are_an_error_that_says_what_to_do(
    kind: huge_pages.HugePages,
) -> None:
    unit = huge_pages.page_bytes(kind)
    wanted = huge_pages.reserved_free(kind) + 1
    with pytest.raises(NoSharedMemory, match=f"{wanted} reserved .*hugepages"):
        Arena(0, wanted * unit, hugepages=kind)


@pytest.mark.skipif(not huge_pages.numa_nodes(), reason="the kernel knows of no NUMA nodes")
def test_pages_come_from_the_numa_node_asked_for() -> None:
    node = huge_pages.numa_nodes()[-1]
    arena = Arena(0, 4 * MIB, numa_node=node)
    try:
        maps = Path("/proc/self/numa_maps")
        if maps.exists():
            line = next(x for x in maps.read_text().splitlines() if x.startswith(f"{arena.base:x}"))
            assert f" bind:{node}" in line
        assert arena.numa_node == node
    finally:
        arena.close()


def test_a_numa_node_that_does_not_exist_is_refused_and_nothing_leaks() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match="no NUMA node 999"):
        Arena(0, MIB, numa_node=999)
    assert len(os.listdir("/proc/self/fd")) == before


def test_memory_is_given_back_although_somebody_still_maps_it() -> None:
    arena = Arena(0, 64 * MIB)
    with mmap.mmap(arena.fd, arena.size_bytes) as mapped:
        arena.view(0, 1)[:] = 7
        assert mapped[0] == 7
        before = shared_bytes()
        arena.close(give_back=True)
        assert shared_bytes() <= before - 60 * MIB
        assert mapped[0] == 0
