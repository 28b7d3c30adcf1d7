"""The backend's metrics: Prometheus counters in SGLang's registry, and its `StorageMetrics`.

SGLang's `/metrics` serves the default registry, or its files if there are several processes, so it
shows these metrics, too.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

from kvpool.engines.shared.rate_limited_log import RateLimitedLog
from kvpool.serving.metrics import LATENCY_BUCKETS

PAGES = Counter(
    "kvpool_sglang_pages",
    "Pages by operation (lookup, load, store) and outcome",
    ["operation", "outcome", "pool", "rank"],
)
BYTES = Counter("kvpool_sglang_bytes", "Bytes loaded and stored", ["operation", "pool", "rank"])
TROUBLE = Counter(
    "kvpool_sglang_trouble",
    "Calls that ended as a miss, by reason",
    ["operation", "reason", "rank"],
)
SECONDS = Histogram(
    "kvpool_sglang_seconds", "Time of a call", ["operation", "rank"], buckets=LATENCY_BUCKETS
)
REACHABLE = Gauge(
    "kvpool_sglang_pool_reachable",
    "Whether the pool answered the last call",
    ["rank"],
    multiprocess_mode="livemin",
)

MAX_STATS = 1000  # batches kept until SGLang asks for them


class BackendMetrics:
    """The metrics of one backend.

    Args:
        rank: tensor-parallel rank, used as a label.
    """

    def __init__(self, rank: int) -> None:
        self._rank = str(rank)
        self._lock = threading.Lock()
        self._log = RateLimitedLog("kvpool.sglang")
        self._batches: dict[str, deque[tuple[int, float]]] = {
            name: deque(maxlen=MAX_STATS) for name in ("load", "store")
        }
        REACHABLE.labels(self._rank).set(1)

    def pages(self, operation: str, pool: str, **outcomes: int) -> None:
        """Count pages by outcome, e.g. `hit=3, miss=1`."""
        for outcome, count in outcomes.items():
            if count:
                PAGES.labels(operation, outcome, pool, self._rank).inc(count)

    def moved(self, operation: str, pool: str, pages: int, page_bytes: int, took_s: float) -> None:
        """Record the bytes and speed of a load or store."""
        if pages:
            BYTES.labels(operation, pool, self._rank).inc(pages * page_bytes)
            gb_per_s = pages * page_bytes / max(took_s, 1e-9) / 1e9
            with self._lock:
                self._batches[operation].append((pages, gb_per_s))

    def took(self, operation: str, seconds: float) -> None:
        """Record the time of a call."""
        SECONDS.labels(operation, self._rank).observe(seconds)

    def reachable(self, is_reachable: bool) -> None:
        """Record whether the pool answers."""
        REACHABLE.labels(self._rank).set(is_reachable)

    def trouble(
        self, operation: str, reason: str, text: str, *, defect: BaseException | None = None
    ) -> None:
        """Count a call that ended as a miss, and log it, at a bounded rate.

        Args:
            defect: the exception, if it is a defect in kvpool.
        """
        TROUBLE.labels(operation, reason, self._rank).inc()
        kind = f"{operation} is a miss ({reason})"
        self._log.report(kind, text, time.monotonic(), error=defect)

    def for_sglang(self) -> Any:
        """`StorageMetrics` of the batches since the last call."""
        from sglang.srt.observability.metrics_collector import StorageMetrics

        with self._lock:
            taken = {name: list(batches) for name, batches in self._batches.items()}
            for batches in self._batches.values():
                batches.clear()
        return StorageMetrics(
            prefetch_pgs=[pages for pages, _ in taken["load"]],
            backup_pgs=[pages for pages, _ in taken["store"]],
            prefetch_bandwidth=[rate for _, rate in taken["load"]],
            backup_bandwidth=[rate for _, rate in taken["store"]],
        )
