"""A node's figures: the accounting of its tiers and arenas, and the counters of its parts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from kvpool.blocks.tier import Tier
from kvpool.wire import messages as m
from kvpool.wire.principal import ANYBODY, Principal
from tiers.memory.arena_set import ArenaSet
from tiers.memory.hbm_arena import DeviceArena
from tiers.service.identity import NodeIdentity
from tiers.service.migrator import Migrator
from tiers.store.store import Store


class NodeStats:
    """Gathers the figures of a node's parts.

    Args:
        counters: of parts other than the store and the migrator.
        peers: what was copied from other nodes.
        ucx: transports and devices that UCX found (`kvpool.transports.ucx`).
        clock: monotonic seconds.
    """

    def __init__(
        self,
        identity: NodeIdentity,
        store: Store,
        arenas: ArenaSet,
        migrator: Migrator,
        *,
        hbm: DeviceArena | None = None,
        counters: Sequence[Counter[str]] = (),
        peers: Callable[[], list[m.PeerRate]] = list,
        ucx: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._identity = identity
        self._store = store
        self._arenas = arenas
        self._migrator = migrator
        self._hbm = hbm
        self._counters = counters
        self._peers = peers
        self._ucx = ucx
        self._clock = clock
        self._started = clock()

    def read(self, principal: Principal = ANYBODY) -> m.NodeStatsReply:
        """All figures, or those that a tenant may see."""
        counters = Counter(self._store.counters)
        for more in (self._migrator.counters, *self._counters):
            counters.update(more)
        stats = m.NodeStatsReply(
            self._identity.node_id,
            self._identity.epoch,
            self._identity.host,
            self._clock() - self._started,
            [self._with_facts(usage) for usage in self._store.inspection.tiers()],
            len(self._store.leases),
            len(self._store.reservations),
            len(self._store.namespaces),
            {name: float(value) for name, value in counters.items()},
            self._arena_usage(),
            list(self._ucx),
            self._peers(),
        )
        return m.visible_stats(stats, principal.sees_all)

    def device_states(self) -> dict[str, str]:
        """State of each NVMe directory: "ok", "read_only" or "failed"."""
        return dict(self._migrator.devices.states())

    def _arena_usage(self) -> list[m.ArenaUsage]:
        used_bytes = self._store.inspection.arena_bytes()
        evacuating = self._store.evacuations.bytes_left()
        return [
            m.ArenaUsage(
                arena_id,
                arena.size_bytes,
                used_bytes.get(arena_id, 0),
                arena_id in evacuating,
                arena.obtained.page_bytes,
                arena.obtained.huge_bytes,
                -1 if arena.numa_node is None else arena.numa_node,
            )
            for arena_id, arena in self._arenas.items()
        ]

    def _with_facts(self, usage: m.TierUsage) -> m.TierUsage:
        if usage.tier == Tier.HBM and self._hbm is not None:
            return msgspec.structs.replace(usage, note=self._hbm.note)
        if usage.tier != Tier.NVME:
            return usage
        return msgspec.structs.replace(
            usage,
            read_bytes_per_s=self._migrator.read_speed.bytes_per_s,
            write_bytes_per_s=self._migrator.write_speed.bytes_per_s,
            queued_read_bytes=self._migrator.queued_read_bytes,
        )
