"""The arenas of a node, by id: one set, shared by all parts that reach into them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import structlog

from kvpool.config.loader import NodeConfig
from kvpool.errors import KvpoolError
from tiers.memory import huge_pages
from tiers.memory.arena import Arena

log = structlog.get_logger(__name__)


class ArenaSet(Mapping[int, Arena]):
    """Arenas by id. Changed on the event loop only; threads may read it.


    Args:
        arenas: the first ones.
    """

    def __init__(self, arenas: Iterable[Arena] = ()) -> None:
        self._arenas = {arena.arena_id: arena for arena in arenas}

    @classmethod
    def of(cls, arenas: ArenaSet | Iterable[Arena]) -> ArenaSet:
        """The same set, or a new one of these arenas."""
        return arenas if isinstance(arenas, ArenaSet) else cls(arenas)

    def add(self, arena: Arena) -> None:
        """Add an arena. This start of the node has never used its id."""
        self._arenas = {
            **self._arenas,
            arena.arena_id: arena,
        }  # readers in threads keep the old dictionary

    def remove(self, arena_id: int) -> Arena:
        """Remove an arena; the caller closes it."""
        arena = self._arenas[arena_id]
        self._arenas = {key: kept for key, kept in self._arenas.items() if key != arena_id}
        return arena

    def close(self) -> None:
        """Close all arenas."""
        for arena in self._arenas.values():
            arena.close()

    def __getitem__(self, arena_id: int) -> Arena:
        return self._arenas[arena_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._arenas)

    def __len__(self) -> int:
        return len(self._arenas)


def arena_unit(config: NodeConfig) -> int:
    """The unit of arena sizes: whole slabs, and whole pages of the configured kind."""
    return math.lcm(config.advanced.slab_bytes, huge_pages.page_bytes(config.hugepages))


def make_arenas(config: NodeConfig) -> ArenaSet:
    """The first arenas of a node, as equal as slabs allow.


    Raises:
        NoSharedMemory, ConfigError: see `Arena`.
    """
    unit, count = arena_unit(config), config.arena_count
    units = max(count, config.dram_bytes // unit)
    arenas: list[Arena] = []
    try:
        for number in range(count):
            share = units // count + (number < units % count)
            arenas.append(make_arena(config, number, share * unit))
    except KvpoolError:
        for arena in arenas:
            arena.close()
        raise
    return ArenaSet(arenas)


def make_arena(config: NodeConfig, arena_id: int, size_bytes: int) -> Arena:
    """One arena of the configured pages; arenas take the configured NUMA nodes in turn.


    Raises:
        NoSharedMemory, ConfigError: see `Arena`.
    """
    numa_nodes = config.advanced.numa_nodes
    numa_node = numa_nodes[arena_id % len(numa_nodes)] if numa_nodes else None
    arena = Arena(arena_id, size_bytes, hugepages=config.hugepages, numa_node=numa_node)
    log.info(
        "arena ready",
        arena_id=arena_id,
        mib=arena.size_bytes >> 20,
        hugepages=config.hugepages,
        page_kib=arena.obtained.page_bytes >> 10,
        huge_mib=arena.obtained.huge_bytes >> 20,
        numa_node=numa_node,
    )
    return arena
