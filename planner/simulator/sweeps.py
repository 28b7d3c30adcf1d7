"""Runs variants of a scenario over the same arrivals: strategies, splits, links, and the role controller."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from conductor.roles.controller import RoleLimits
from kvpool.errors import ConfigError
from planner.simulator.run_summary import SimulationRun, summary
from planner.simulator.scenario import Group, Scenario, setup_of
from planner.simulator.setup import CacheFactory
from planner.simulator.simulation import Simulation
from planner.simulator.workload import Arrival
from planner.sizing.hardware import NetworkLink

Row = dict[str, Any]
OnProgress = Callable[[str], None]
MET = 0.9  # a split meets the objectives if at least this share of requests does


def run(scenario: Scenario, arrivals: Sequence[Arrival], make_cache: CacheFactory) -> SimulationRun:
    """Run a scenario once."""
    return Simulation(setup_of(scenario), arrivals, make_cache).run()


def row_of(scenario: Scenario, arrivals: Sequence[Arrival], make_cache: CacheFactory) -> Row:
    """Run a scenario once. Returns its settings and its figures."""
    result = run(scenario, arrivals, make_cache)
    head = {
        "serving": scenario.serving,
        "strategy": scenario.strategy,
        "admission": scenario.admission,
        "overlap": scenario.is_overlapped,
        "prefill": sum(g.count for g in scenario.prefill),
        "decode": sum(g.count for g in scenario.decode),
        "link_gbytes_per_s": scenario.link_bytes_per_s / 1e9,
    }
    return head | summary(result, scenario.slo_ttft_s, scenario.slo_tpot_s)


def compare(
    scenarios: Iterable[Scenario],
    arrivals: Sequence[Arrival],
    make_cache: CacheFactory,
    progress: OnProgress = lambda _: None,
) -> list[Row]:
    """Run every scenario once."""
    rows = []
    for scenario in scenarios:
        progress(f"{scenario.serving}, {scenario.strategy}, {scenario.admission}")
        rows.append(row_of(scenario, arrivals, make_cache))
    return rows


def splits_of(scenario: Scenario) -> list[Scenario]:
    """Every division of the scenario's instances into prefill and decode.

    Raises:
        ConfigError: there are fewer than two instances, or they are of several kinds.
    """
    groups = [*scenario.prefill, *scenario.decode]
    count = sum(group.count for group in groups)
    kinds = {(group.gpu, group.tp) for group in groups if group.count}
    if count < 2 or len(kinds) > 1:
        raise ConfigError(
            "a sweep over splits needs at least two instances, all of one kind",
            hint="as --prefill 8 --decode 8",
        )
    [(gpu, tp)] = kinds
    return [
        replace(
            scenario,
            prefill=(Group(prefill, gpu, tp),),
            decode=(Group(count - prefill, gpu, tp),),
        )
        for prefill in range(1, count)
    ]


def ratio_sweep(
    scenario: Scenario,
    arrivals: Sequence[Arrival],
    make_cache: CacheFactory,
    progress: OnProgress = lambda _: None,
) -> list[Row]:
    """Run every split of the instances. `meets_both`: 90 % of all requests met both objectives.

    Raises:
        ConfigError: an objective is missing, or the instances cannot be split.
    """
    if not (scenario.slo_ttft_s and scenario.slo_tpot_s):
        raise ConfigError("a ratio sweep needs both objectives", hint="--slo-ttft and --slo-tpot")
    rows = []
    for split in splits_of(scenario):
        progress(f"{split.prefill[0].count} prefill, {split.decode[0].count} decode")
        row = row_of(split, arrivals, make_cache)
        row["meets_both"] = row["slo_share"] >= MET
        rows.append(row)
    return rows


def bandwidth_sweep(
    scenario: Scenario,
    links: Sequence[NetworkLink],
    arrivals: Sequence[Arrival],
    make_cache: CacheFactory,
    progress: OnProgress = lambda _: None,
) -> list[Row]:
    """Run coupled serving, then every link with sends that overlap the prefill and that do not."""
    rows = []
    coupled = replace(scenario, serving="coupled")
    progress("coupled")
    rows.append(row_of(coupled, arrivals, make_cache) | {"link": ""})
    for link in links:
        for is_overlapped in (True, False):
            progress(f"{link.name}, {'overlapped' if is_overlapped else 'not overlapped'}")
            varied = replace(
                scenario, link_bytes_per_s=link.bytes_per_s, is_overlapped=is_overlapped
            )
            rows.append(row_of(varied, arrivals, make_cache) | {"link": link.name})
    return rows


def role_sweep(
    scenario: Scenario,
    arrivals: Sequence[Arrival],
    make_cache: CacheFactory,
    progress: OnProgress = lambda _: None,
) -> list[Row]:
    """Run every fixed split, then the role controller from the scenario's split."""
    limits = scenario.roles or RoleLimits()
    fixed = replace(scenario, roles=None)
    rows = ratio_sweep(fixed, arrivals, make_cache, progress)
    progress("roles change")
    row = row_of(replace(scenario, roles=limits), arrivals, make_cache)
    row["meets_both"] = row["slo_share"] >= MET
    return [*(each | {"roles": "fixed"} for each in rows), row | {"roles": "dynamic"}]
