"""Searches the placement of N GPUs that serves the most within the objectives, by simulation, as DistServe does.

It simulates every division into prefill and decode instances with every tensor parallelism that the
model fits, and coupled serving, on a sample of the trace. For the best few it finds the highest
rate at which 90 % of all requests meet both objectives (goodput, OSDI'24).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvpool.errors import ConfigError
from planner.simulator.scenario import Group, Scenario
from planner.simulator.setup import CacheFactory
from planner.simulator.sweeps import MET, row_of
from planner.simulator.workload import Arrival
from planner.sizing.hardware import fitting, gpu_named

MAX_TP = 64
FINALISTS = 3  # of disaggregated placements, and as many of coupled ones
MAX_SPLITS = 7  # tried for each pair of tensor parallelisms
SEARCH_STEPS = 5
HIGHEST_SPEED = 64.0

OnProgress = Callable[[str], None]


@dataclass(slots=True, frozen=True)
class EvaluatedPlacement:
    """One placement and its figures.

    `row`: at the recorded rate. `speed`: the highest factor on the recorded rate within the
    objectives; 0: the objectives are missed even at a quarter of the rate.
    """

    scenario: Scenario
    row: dict[str, Any]
    speed: float = 0.0

    @property
    def gpus(self) -> int:
        groups = (*self.scenario.prefill, *self.scenario.decode)
        return sum(group.count * (group.tp or 1) for group in groups)

    def named(self) -> str:
        parts = []
        for role, groups in (("prefill", self.scenario.prefill), ("decode", self.scenario.decode)):
            parts += [f"{g.count} {role} x tp{g.tp}" for g in groups if g.count]
        if self.scenario.serving == "coupled":
            group = self.scenario.decode[0]
            return f"{group.count} coupled x tp{group.tp}"
        return " + ".join(parts)


def placements(base: Scenario, gpus: int) -> list[Scenario]:
    """Every placement to try.

    Raises:
        ConfigError: the model does not fit on so many GPUs.
    """
    sizes = _sizes(base, gpus)
    found = [
        replace(base, serving="coupled", prefill=(Group(0),), decode=(Group(gpus // tp, None, tp),))
        for tp in sizes
    ]
    for of_prefill in sizes:
        for of_decode in sizes:
            splits = [
                (count, (gpus - count * of_prefill) // of_decode)
                for count in range(1, gpus // of_prefill + 1)
                if gpus - count * of_prefill >= of_decode
            ]
            stride = -(-len(splits) // MAX_SPLITS) if splits else 1
            for count, rest in splits[::stride]:
                found.append(
                    replace(
                        base,
                        prefill=(Group(count, None, of_prefill),),
                        decode=(Group(rest, None, of_decode),),
                    )
                )
    return found


def search(
    base: Scenario,
    gpus: int,
    arrivals: Sequence[Arrival],
    make_cache: CacheFactory,
    progress: OnProgress = lambda _: None,
) -> list[EvaluatedPlacement]:
    """The finalists, best first: by rate carried per GPU, then by the share within the objectives and TTFT.

    Raises:
        ConfigError: the model does not fit, or an objective is missing.
    """
    if not (base.slo_ttft_s and base.slo_tpot_s):
        raise ConfigError("a placement needs both objectives", hint="--slo-ttft and --slo-tpot")
    tried = []
    for scenario in placements(base, gpus):
        placed = EvaluatedPlacement(scenario, row_of(scenario, arrivals, make_cache))
        progress(f"{placed.named()}: {placed.row['slo_share']:.1%} within both objectives")
        tried.append(placed)

    def better(placed: EvaluatedPlacement) -> tuple[float, float]:
        return -placed.row["slo_share"], placed.row["ttft_s"]["mean"]

    finalists: list[EvaluatedPlacement] = []
    for is_coupled in (True, False):
        of_kind = [p for p in tried if (p.scenario.serving == "coupled") == is_coupled]
        finalists += sorted(of_kind, key=better)[:FINALISTS]
    found = []
    for placed in finalists:
        speed = _highest_speed(placed.scenario, arrivals, make_cache)
        progress(f"{placed.named()}: carries {speed:.2f} times the recorded rate")
        found.append(replace(placed, speed=speed))
    return sorted(found, key=lambda p: (-round(p.speed / p.gpus, 6), *better(p)))


def _sizes(base: Scenario, gpus: int) -> list[int]:
    """The tensor parallelisms, powers of two, with which the model fits."""
    gpu = gpu_named(base.gpu)
    found: list[int] = []
    tp = 1
    error: ConfigError | None = None
    while tp <= min(gpus, MAX_TP):
        try:
            fitting(
                base.model,
                gpu,
                tp,
                weight_bytes=base.weight_bytes,
                kv_value_bytes=base.kv_value_bytes,
            )
        except ConfigError as does_not_fit:
            error = does_not_fit
        else:
            # With more than 8 GPUs, all-reduces leave the fast links within a host that the rates
            # assume.
            if tp <= 8 or not found:
                found.append(tp)
        tp *= 2
    if not found:
        raise error or ConfigError(f"{gpus} GPUs are too few", hint="give at least 1")
    return found


def _highest_speed(
    scenario: Scenario, arrivals: Sequence[Arrival], make_cache: CacheFactory
) -> float:
    """The highest factor on the arrival rate at which 90 % of the requests meet both objectives."""

    def holds(speed: float) -> bool:
        faster = [replace(arrival, at_s=arrival.at_s / speed) for arrival in arrivals]
        return bool(row_of(scenario, faster, make_cache)["slo_share"] >= MET)

    low, high = 0.25, 0.5
    if not holds(low):
        return 0.0
    while high < HIGHEST_SPEED and holds(high):
        low, high = high, high * 2
    for _ in range(SEARCH_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
