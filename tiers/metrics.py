"""The node's figures for Prometheus, read from the service at scrape time."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tiers.node import NodeService

_STATES = ("free", "reserved", "committed", "pinned", "quarantined")


class NodeCollector(Collector):
    """Tier usage, leases, reservations and counters of one node."""

    def __init__(self, service: NodeService) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        stats = self._service.stats()
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
            capacity.add_metric([tier.tier], tier.capacity_bytes)
            blocks.add_metric([tier.tier], tier.blocks)
            for state in _STATES:
                used.add_metric([tier.tier, state], getattr(tier, f"{state}_bytes"))
        kept = GaugeMetricFamily(
            "kvpool_tier_protected_bytes", "Bytes promised to protected blocks", labels=["tier"]
        )
        for tier in stats.tiers:
            kept.add_metric([tier.tier], tier.protected_bytes)
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
                speed.add_metric([tier.tier, "read"], tier.read_bytes_per_s)
            if tier.write_bytes_per_s:
                speed.add_metric([tier.tier, "write"], tier.write_bytes_per_s)
            queued.add_metric([tier.tier], tier.queued_read_bytes)
        yield from (capacity, used, blocks, kept, speed, queued)
        yield GaugeMetricFamily("kvpool_node_leases", "Leases in force", value=stats.leases)
        yield GaugeMetricFamily(
            "kvpool_node_reservations", "Reservations in force", value=stats.reservations
        )
        failed = GaugeMetricFamily(
            "kvpool_nvme_failed",
            "1 when an NVMe device is used no more after an error, 0.5 when it is only read",
            labels=["directory"],
        )
        for directory, state in self._service.mover.devices.states().items():
            failed.add_metric([directory], {"ok": 0.0, "read_only": 0.5, "failed": 1.0}[state])
        yield failed
        events = CounterMetricFamily(
            "kvpool_node_events", "What happened to blocks, by kind", labels=["kind"]
        )
        for name, value in sorted(stats.counters.items()):
            events.add_metric([name], value)
        yield events
