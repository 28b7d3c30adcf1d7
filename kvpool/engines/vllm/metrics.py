"""The connector's metrics, and how vLLM shows them.

Both sides of the connector count into a `MetricsRecorder`. After each step vLLM takes the counts,
adds them up over ranks, logs them, and serves them at its `/metrics` as `kvpool_vllm_*`.
"""

from __future__ import annotations

import threading
from typing import Any

from prometheus_client import Counter, Histogram
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvpool.serving.metrics import LATENCY_BUCKETS

COUNTS = {
    "lookups": "Look-ups in the pool",
    "looked_up_tokens": "Tokens looked up",
    "lookup_wait_s": "Seconds that the scheduling loop waited for look-ups",
    "lookups_too_late": "Look-ups not answered within their deadline, counted as misses",
    "lookups_without_pool": "Look-ups skipped because the pool could not be reached",
    "misses": "Look-ups that found nothing",
    "requests_not_shareable": "Requests whose KV has no name that other instances could know",
    "loads": "Loads started",
    "loaded_tokens": "Tokens of the loads started",
    "loads_declined": "Loads skipped because computing was predicted to be faster",
    "loads_failed": "Loads with missing, wrong or late blocks, which vLLM recomputed",
    "load_bytes": "Bytes read from the pool",
    "saves": "Saves started",
    "saves_put_off": "Saves postponed because too much is pending",
    "saves_failed": "Saves with blocks that were not stored",
    "blocks_stored": "Blocks stored",
    "blocks_known": "Blocks not saved because the pool had them or was receiving them",
    "save_bytes": "Bytes written to the pool",
}
TIMES = {"load_s": "Seconds per load", "save_s": "Seconds per save"}


class MetricsRecorder:
    """Counters and times since they were last taken. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, float] = {}
        self._times: dict[str, list[float]] = {}
        self.totals: dict[str, float] = {}  # all counts since the start

    def count(self, name: str) -> None:
        """Add one to a count."""
        self.add(name, 1)

    def add(self, name: str, value: float) -> None:
        """Add to a count."""
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + value
            self.totals[name] = self.totals.get(name, 0) + value

    def time(self, name: str, seconds: float) -> None:
        """Record a duration."""
        with self._lock:
            self._times.setdefault(name, []).append(seconds)

    def take(self) -> Stats | None:
        """The counts and times since the last call; None if there are none."""
        with self._lock:
            if not self._counts and not self._times:
                return None
            data = {"counts": self._counts, "times": self._times}
            self._counts, self._times = {}, {}
        return Stats(data)


class Stats(KVConnectorStats):
    """Recorded metrics in the form that vLLM passes on."""

    data: dict[str, Any]

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data or {"counts": {}, "times": {}})

    def reset(self) -> None:
        self.data = {"counts": {}, "times": {}}

    def is_empty(self) -> bool:
        return not self.data["counts"] and not self.data["times"]

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        counts = self.data["counts"]
        for name, value in other.data["counts"].items():
            counts[name] = counts.get(name, 0) + value
        for name, values in other.data["times"].items():
            self.data["times"].setdefault(name, []).extend(values)
        return self

    def reduce(self) -> dict[str, int | float]:
        shown: dict[str, int | float] = {
            name: round(value, 6) for name, value in sorted(self.data["counts"].items())
        }
        for name, values in sorted(self.data["times"].items()):
            if values:
                shown[f"{name}_mean"] = round(sum(values) / len(values), 6)
                shown[f"{name}_max"] = round(max(values), 6)
        return shown


class PromMetrics(KVConnectorPromMetrics):
    """Shows the metrics at vLLM's `/metrics`."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter, histogram = metric_types[Counter], metric_types[Histogram]
        self._counters = {
            name: counter(
                name=f"kvpool_vllm_{_prom_name(name)}", documentation=text, labelnames=labelnames
            )
            for name, text in COUNTS.items()
        }
        self._histograms = {
            name: histogram(
                name=f"kvpool_vllm_{_prom_name(name)}",
                documentation=text,
                labelnames=labelnames,
                buckets=LATENCY_BUCKETS,
            )
            for name, text in TIMES.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data["counts"].items():
            self._counters[name].labels(*labels).inc(value)
        for name, values in transfer_stats_data["times"].items():
            histogram = self._histograms[name].labels(*labels)
            for seconds in values:
                histogram.observe(seconds)


def _prom_name(name: str) -> str:
    return f"{name.removesuffix('_s')}_seconds" if name.endswith("_s") else name
