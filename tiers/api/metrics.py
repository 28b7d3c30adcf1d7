"""The node's figures for Prometheus, read from the service at scrape time."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvpool.wire import messages as m
from tiers.service.stats import NodeStats

_STATES = ("free", "reserved", "committed", "pinned", "quarantined")


class NodeCollector(Collector):
    """Tier usage, leases, reservations and counters of one node."""

    def __init__(self, stats: NodeStats) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats.read()
        capacity = GaugeMetricFamily(
            "kvpool_tier_capacity_bytes", "Size of a tier", labels=["tier"]
        )
        used = GaugeMetricFamily(
            "kvpool_tier_bytes", "Bytes of a tier by state", labels=["tier", "state"]
        )
        blocks = GaugeMetricFamily(
            "kvpool_tier_blocks", "Blocks visible in a tier", labels=["tier"]
        )
        for tier in stats.tiers:
            capacity.add_metric([str(tier.tier)], tier.capacity_bytes)
            blocks.add_metric([str(tier.tier)], tier.blocks)
            for state in _STATES:
                used.add_metric([str(tier.tier), state], getattr(tier, f"{state}_bytes"))
        kept = GaugeMetricFamily(
            "kvpool_tier_retained_bytes", "Bytes promised to protected blocks", labels=["tier"]
        )
        for tier in stats.tiers:
            kept.add_metric([str(tier.tier)], tier.retained_bytes)
        speed = GaugeMetricFamily(
            "kvpool_tier_bytes_per_second",
            "Measured speed of a tier's disk while it works; absent until known",
            labels=["tier", "direction"],
        )
        queued = GaugeMetricFamily(
            "kvpool_tier_queued_read_bytes", "Promotions under way or waiting", labels=["tier"]
        )
        for tier in stats.tiers:
            if tier.read_bytes_per_s:
                speed.add_metric([str(tier.tier), "read"], tier.read_bytes_per_s)
            if tier.write_bytes_per_s:
                speed.add_metric([str(tier.tier), "write"], tier.write_bytes_per_s)
            queued.add_metric([str(tier.tier)], tier.queued_read_bytes)
        yield from (capacity, used, blocks, kept, speed, queued)
        yield GaugeMetricFamily("kvpool_node_leases", "Leases in force", value=stats.leases)
        yield GaugeMetricFamily(
            "kvpool_node_reservations", "Reservations in force", value=stats.reservations
        )
        failed = GaugeMetricFamily(
            "kvpool_nvme_failed",
            "1: an NVMe device failed after a read error; 0.5: read-only after a write error",
            labels=["directory"],
        )
        for directory, state in self._stats.device_states().items():
            failed.add_metric([directory], {"ok": 0.0, "read_only": 0.5, "failed": 1.0}[state])
        yield failed
        yield from _transports(stats)
        events = CounterMetricFamily(
            "kvpool_node_events", "Events of blocks, by kind", labels=["kind"]
        )
        for name, value in sorted(stats.counters.items()):
            events.add_metric([name], value)
        yield events


def _transports(stats: m.NodeStatsReply) -> Iterator[Metric]:
    """UCX's transports, and the traffic with the nodes that this one copied from."""
    resources = GaugeMetricFamily(
        "kvpool_ucx_resource",
        "1 for each transport and device that UCX has; RDMA where one is rc, dc, ud or srd",
        labels=["transport", "device"],
    )
    for resource in stats.ucx:
        transport, _, device = resource.partition("/")
        resources.add_metric([transport, device], 1.0)
    labels = ["peer", "transport", "fabric", "direction"]
    moved = CounterMetricFamily("kvpool_peer_bytes", "Moved from and to other nodes", labels=labels)
    speed = GaugeMetricFamily(
        "kvpool_peer_bytes_per_second", "As measured lately; absent until known", labels=labels
    )
    for peer in stats.peers:
        if not peer.transport:
            continue
        for direction, count, rate in (
            ("read", peer.read_bytes, peer.read_bytes_per_s),
            ("write", peer.written_bytes, peer.write_bytes_per_s),
        ):
            values = [peer.node_id, peer.transport, peer.fabric, direction]
            moved.add_metric(values, count)
            if rate:
                speed.add_metric(values, rate)
    yield from (resources, moved, speed)
