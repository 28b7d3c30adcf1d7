"""The requests of a simulated run, and the figures over all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from conductor.requests.lifecycle import RequestLifecycle
from conductor.scheduling.decision import Decision
from planner.simulator.workload import Arrival


@dataclass(slots=True)
class SimulatedRequest:
    """One request in the simulated cluster. Times are in seconds since the start; -1: not yet."""

    arrival: Arrival
    lifecycle: RequestLifecycle | None = None  # since its arrival
    refused: str = ""  # the reason; "": not refused
    is_wasted: bool = False  # refused after its prefill
    resident: int = 0  # leading blocks that the pool had when its remote prefill began
    computed_tokens: int = 0  # on all instances
    first_at: float = -1.0
    finished_at: float = -1.0

    @property
    def decision(self) -> Decision | None:
        return self.lifecycle.decision if self.lifecycle is not None else None

    @property
    def reused_tokens(self) -> int:
        return self.lifecycle.measured.reused_tokens if self.lifecycle is not None else 0

    @property
    def is_served(self) -> bool:
        return self.finished_at >= 0

    @property
    def ttft_s(self) -> float:
        return self.first_at - self.arrival.at_s

    @property
    def tpot_s(self) -> float:
        """Mean time between tokens; 0 for an output of one token."""
        return (self.finished_at - self.first_at) / max(1, self.arrival.output_tokens - 1)


@dataclass(slots=True)
class SimulationRun:
    """All requests of a run, and its counters."""

    requests: list[SimulatedRequest]
    end_s: float
    moved_bytes: dict[str, float]
    busy: dict[str, tuple[float, float]]  # worker -> seconds of prefill and of decode steps
    role_changes: list[dict[str, Any]] = field(default_factory=list)
    counters: Counter[str] = field(default_factory=Counter)
    dollars_per_hour: float = 0.0


def spread(values: Iterable[float]) -> dict[str, float]:
    """Mean and percentiles; zeros if there are no values."""
    array = np.fromiter(values, float)
    if not array.size:
        return {"mean": 0.0, "p50": 0.0, "p90": 0.0, "p99": 0.0}
    p50, p90, p99 = np.percentile(array, (50, 90, 99))
    figures = {"mean": array.mean(), "p50": p50, "p90": p90, "p99": p99}
    return {name: round(float(value), 6) for name, value in figures.items()}


def is_good(request: SimulatedRequest, slo_ttft_s: float, slo_tpot_s: float) -> bool:
    """Whether the request was served within both objectives. An objective of 0 is always met."""
    return (
        request.is_served
        and (not slo_ttft_s or request.ttft_s <= slo_ttft_s)
        and (not slo_tpot_s or request.tpot_s <= slo_tpot_s)
    )


def summary(result: SimulationRun, slo_ttft_s: float, slo_tpot_s: float) -> dict[str, Any]:
    """The figures of one run.

    Goodput counts requests within both objectives, per second until the last request ended.
    `slo_share` is their share of all requests, including refused ones.
    """
    requests = result.requests
    served = [r for r in requests if r.is_served]
    good = [r for r in served if is_good(r, slo_ttft_s, slo_tpot_s)]
    prompt_tokens = sum(r.arrival.prompt_tokens for r in served)
    reused = sum(r.reused_tokens for r in served)
    output = sum(r.arrival.output_tokens for r in served)
    end_s = max(result.end_s, 1e-9)
    refusals = Counter(r.refused for r in requests if r.refused)
    modes = Counter(r.decision.mode for r in served if r.decision is not None)
    dollars = result.dollars_per_hour * end_s / 3600
    per_million = dollars / ((prompt_tokens + output) / 1e6) if prompt_tokens + output else 0.0
    return {
        "requests": len(requests),
        "served": len(served),
        "rejected": len(requests) - len(served),
        "rejections": dict(sorted(refusals.items())),
        "wasted_prefills": sum(r.is_wasted for r in requests),
        "seconds": round(end_s, 3),
        "ttft_s": spread(r.ttft_s for r in served),
        "tpot_s": spread(r.tpot_s for r in served if r.arrival.output_tokens > 1),
        "goodput_per_s": round(len(good) / end_s, 4),
        "slo_share": round(len(good) / max(1, len(requests)), 4),
        "ttft_met": _share(served, requests, lambda r: not slo_ttft_s or r.ttft_s <= slo_ttft_s),
        "tpot_met": _share(served, requests, lambda r: not slo_tpot_s or r.tpot_s <= slo_tpot_s),
        "hit_ratio": round(reused / max(1, prompt_tokens), 4),
        "computed_tokens": sum(r.computed_tokens for r in requests),
        "output_tokens": output,
        "modes": dict(sorted(modes.items())),
        "moved_bytes": {name: int(v) for name, v in sorted(result.moved_bytes.items())},
        "utilisation": _utilisation(result, end_s),
        "role_changes": result.role_changes,
        "dollars_per_million_tokens": round(per_million, 4),
        "counters": dict(sorted(result.counters.items())),
    }


def _share(
    served: Sequence[SimulatedRequest], requests: Sequence[SimulatedRequest], holds: Any
) -> float:
    return round(sum(bool(holds(r)) for r in served) / max(1, len(requests)), 4)


def _utilisation(result: SimulationRun, end_s: float) -> dict[str, float]:
    count = max(1, len(result.busy))
    prefill = sum(prefill for prefill, _ in result.busy.values())
    decode = sum(decode for _, decode in result.busy.values())
    return {
        "prefill": round(prefill / end_s / count, 4),
        "decode": round(decode / end_s / count, 4),
    }
