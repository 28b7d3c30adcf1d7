"""The conductor's Prometheus metrics."""

from __future__ import annotations

from collections import Counter as Counters
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from conductor.cluster.members import Members
from conductor.cluster.overview import PoolOverview
from conductor.gateway.gateway import Gateway
from conductor.requests.lifecycle import RequestLifecycle
from conductor.roles.actuator import RoleActuator
from kvpool.serving.metrics import LATENCY_BUCKETS


class RequestMetrics:
    """Histograms over finished requests."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._ttft = Histogram(
            "kvpool_ttft_seconds",
            "Time to first token",
            ["mode"],
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self._tpot = Histogram(
            "kvpool_tpot_seconds",
            "Time per output token after the first",
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self._phase = Histogram(
            "kvpool_request_phase_seconds",
            "Seconds per request and phase",
            ["phase"],
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self._source = Counter(
            "kvpool_prompt_tokens",
            "Prompt tokens by source of their KV: a tier, the engine's own cache, or computed",
            ["source"],
            registry=registry,
        )
        self._error = Histogram(
            "kvpool_prediction_error_ratio",
            "Predicted over measured time; 2: the prediction was twice the measured time",
            ["what"],
            buckets=(0.1, 0.25, 0.5, 0.8, 1.0, 1.25, 2.0, 4.0, 10.0),
            registry=registry,
        )

    def observe(self, lifecycle: RequestLifecycle) -> None:
        """Count one request, however it ended."""
        decision, measured = lifecycle.decision, lifecycle.measured
        if decision is None or not measured.ttft_s:
            return
        self._ttft.labels(decision.mode).observe(measured.ttft_s)
        errors = measured.prediction_errors(decision, lifecycle.fallback_reason)
        for what, ratio in zip(("ttft", "tpot"), errors, strict=True):
            if ratio:
                self._error.labels(what).observe(ratio)
        if measured.tpot_s:
            self._tpot.observe(measured.tpot_s)
        for tier, tokens in measured.tokens_by_tier.items():
            self._source.labels(tier).inc(tokens)
        computed = lifecycle.request.prompt_tokens - sum(measured.tokens_by_tier.values())
        self._source.labels("computed").inc(max(0, computed))
        for name, seconds in measured.phases.items():
            self._phase.labels(name).observe(seconds)


class ConductorCollector(Collector):
    """Members, index and counters, read at scrape time."""

    def __init__(
        self,
        members: Members,
        overview: PoolOverview,
        counters: Counters[str],
        gateway: Gateway,
        roles: RoleActuator,
    ) -> None:
        self._members = members
        self._overview = overview
        self._counters = counters
        self._gateway = gateway
        self._roles = roles

    def collect(self) -> Iterator[Metric]:
        members = GaugeMetricFamily(
            "kvpool_members", "Members by kind and state", labels=["kind", "state"]
        )
        counts: dict[tuple[str, str], int] = {}
        for kind, group in (("node", self._members.nodes), ("worker", self._members.workers)):
            for member in group.members():
                key = (kind, str(member.state))
                counts[key] = counts.get(key, 0) + 1
        for (kind, state), count in counts.items():
            members.add_metric([kind, state], count)
        yield members
        yield GaugeMetricFamily(
            "kvpool_index_blocks", "Blocks in the index", value=self._overview.index_blocks()
        )
        yield GaugeMetricFamily(
            "kvpool_active_requests", "Requests being served", value=self._gateway.active
        )
        waiting = GaugeMetricFamily(
            "kvpool_waiting_requests", "Requests in the admission queue", labels=["priority"]
        )
        for priority, count in self._gateway.admission.queue.by_priority().items():
            waiting.add_metric([priority], count)
        yield waiting
        yield CounterMetricFamily(
            "kvpool_goodput_requests",
            "Requests that met both objectives",
            value=float(self._counters["goodput_requests"]),
        )
        decoding = GaugeMetricFamily(
            "kvpool_decode_active_sequences",
            "Sequences being decoded, by the workers' last report",
            labels=["worker"],
        )
        for worker in self._members.workers:
            if worker.report is not None:
                decoding.add_metric([worker.member_id], worker.report.decode_sequences)
        yield decoding
        scaling = GaugeMetricFamily(
            "kvpool_instances",
            "Workers by role: current (instances) and advised (desired)",
            labels=["role", "which"],
        )
        advice = self._roles.advice()
        for which in ("instances", "desired"):
            for role, count in advice[which].items():
                scaling.add_metric([role, which], count)
        yield scaling
        events = CounterMetricFamily(
            "kvpool_conductor_events", "Counted events, by kind", labels=["kind"]
        )
        missed = CounterMetricFamily(
            "kvpool_missed_blocks", "Blocks of prompts that were not reused", labels=["reason"]
        )
        for name, value in sorted(self._counters.items()):
            if name.startswith("miss:"):
                missed.add_metric([name.removeprefix("miss:")], float(value))
            events.add_metric([name], float(value))
        yield missed
        yield events
