"""Turns a search of placements into advice: whether to disaggregate and why, pool sizes, costs, and files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from planner.simulator.placement_search import EvaluatedPlacement
from planner.simulator.pool_size import NEAR, Hits, recommended
from planner.simulator.scenario import Group, Scenario
from planner.simulator.workload import Arrival
from planner.sizing.crossover import least_bandwidth
from planner.sizing.hardware import Machine, fitting, gpu_named

MARGIN = 1.05  # disaggregation must carry so many times more to be worth its complexity
LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)


def advise(
    base: Scenario,
    gpus: int,
    arrivals: Sequence[Arrival],
    found: Sequence[EvaluatedPlacement],
    hits: Sequence[Hits],
    gpu_dollars_per_hour: float | None,
) -> dict[str, Any]:
    """The result of `kvpool plan deploy`."""
    coupled = max((p for p in found if p.scenario.serving == "coupled"), key=_worth, default=None)
    apart = max((p for p in found if p.scenario.serving != "coupled"), key=_worth, default=None)
    is_apart = apart is not None and (coupled is None or _worth(apart) > MARGIN * _worth(coupled))
    best = apart if is_apart or coupled is None else coupled
    assert best is not None
    group = best.scenario.decode[0]
    machine = _machine(base, group)
    shortest = _shortest_remote(machine, base.link_bytes_per_s)
    block_bytes = base.block_tokens * base.model.bytes_per_token(base.kv_value_bytes)
    wanted, nvme = recommended(hits)
    hosts = sum(g.count for g in (*best.scenario.prefill, *best.scenario.decode))
    dram = min(wanted, hosts * base.dram_bytes // block_bytes)
    reasons = _reasons(base, gpus, arrivals, best, coupled, apart, machine, shortest)
    if dram < wanted:  # what memory cannot hold, disks may
        nvme = max(nvme, wanted)
        reasons.append(
            f"pool: {wanted * block_bytes / 1e9:,.0f} GB would find {NEAR:.0%} of what can be found; "
            f"{hosts} hosts have {hosts * base.dram_bytes / 1e9:,.0f} GB of DRAM for it"
        )
    price = gpu_dollars_per_hour
    if price is None:
        price = gpu_named(base.gpu).dollars_per_hour
    return {
        "gpus": gpus,
        "disaggregate": is_apart,
        "reasons": reasons,
        "placement": best.named(),
        "prefill": _role(best.scenario.prefill),
        "decode": _role(best.scenario.decode),
        "rate_carried": best.speed,
        "goodput_per_s": best.row["goodput_per_s"],
        "slo_share": best.row["slo_share"],
        "ttft_s": best.row["ttft_s"],
        "tpot_s": best.row["tpot_s"],
        "dollars_per_gpu_hour": price,
        "dollars_per_million_tokens": _dollars(best, price, 1.0),
        "dollars_per_million_tokens_at_capacity": _dollars(best, price, best.speed),
        "pool": {
            "dram_bytes": dram * block_bytes,
            "nvme_bytes": nvme * block_bytes,
            "curve": [{"bytes": h.blocks * block_bytes, "hit_ratio": h.hit_ratio} for h in hits],
        },
        "min_remote_tokens": shortest,
        "alternatives": [_alternative(p) for p in found],
    }


def _alternative(placement: EvaluatedPlacement) -> dict[str, Any]:
    row = placement.row
    return {
        "placement": placement.named(),
        "serving": placement.scenario.serving,
        "rate_carried": round(placement.speed, 3),
        "slo_share": row["slo_share"],
        "ttft_s": row["ttft_s"]["mean"],
        "tpot_s": row["tpot_s"]["mean"],
    }


def rules_yaml(answer: dict[str, Any]) -> str:
    """Routing rules to start from (`kvpool rules check`)."""
    if not answer["disaggregate"]:
        document: dict[str, Any] = {"version": 1, "mode": "aggregated"}
    else:
        document = {"version": 1, "mode": "auto"}
        if answer["min_remote_tokens"]:
            document["remote_prefill"] = {"min_input_tokens": answer["min_remote_tokens"]}
    return str(yaml.safe_dump(document, sort_keys=False))


def settings_yaml(answer: dict[str, Any], base: Scenario) -> str:
    """Settings of the conductor and of each pool node (`kvpool --config`)."""
    nodes = max(1, answer["prefill"]["replicas"] + answer["decode"]["replicas"])
    pool = answer["pool"]
    node: dict[str, Any] = {"dram_bytes": _share(pool["dram_bytes"], nodes, base.dram_bytes >> 30)}
    if pool["nvme_bytes"]:
        node["nvme_directories"] = ["/var/lib/kvpool/nvme"]
        node["nvme_bytes"] = _share(pool["nvme_bytes"], nodes)
    document = {
        "conductor": {
            "slo_ttft_s": base.slo_ttft_s,
            "slo_tpot_s": base.slo_tpot_s,
            "strategy": base.strategy,
        },
        "node": node,
    }
    return str(yaml.safe_dump(document, sort_keys=False))


def _worth(placed: EvaluatedPlacement) -> float:
    return placed.speed / max(1, placed.gpus)


def _role(groups: Sequence[Group]) -> dict[str, int]:
    return {"replicas": sum(g.count for g in groups), "tp": groups[0].tp or 1 if groups else 0}


def _machine(base: Scenario, group: Group) -> Machine:
    return fitting(
        base.model,
        gpu_named(base.gpu),
        group.tp,
        weight_bytes=base.weight_bytes,
        kv_value_bytes=base.kv_value_bytes,
    )


def _shortest_remote(machine: Machine, bytes_per_s: float) -> int | None:
    """The prompt length above which a transfer costs less than the interference it removes; None: none."""
    for tokens in LENGTHS:
        needed = least_bandwidth(machine, tokens)
        if needed is not None and needed <= bytes_per_s:
            return tokens
    return None


def _share(size_bytes: int, nodes: int, most_gib: int = 1 << 30) -> str:
    gib = max(1, min(-(-size_bytes // nodes >> 30) + 1, most_gib))
    return f"{gib}GiB"


def _dollars(placed: EvaluatedPlacement, price: float, speed: float) -> float | None:
    """Dollars per million tokens computed or generated, at `speed` times the recorded rate."""
    row = placed.row
    tokens = int(row["computed_tokens"] + row["output_tokens"])
    if not tokens or speed <= 0:
        return None
    hours = float(row["seconds"]) / 3600 / speed
    return round(placed.gpus * price * hours / (tokens / 1e6), 4)


def _reasons(
    base: Scenario,
    gpus: int,
    arrivals: Sequence[Arrival],
    best: EvaluatedPlacement,
    coupled: EvaluatedPlacement | None,
    apart: EvaluatedPlacement | None,
    machine: Machine,
    shortest: int | None,
) -> list[str]:
    prompts = sum(a.prompt_tokens for a in arrivals)
    outputs = sum(a.output_tokens for a in arrivals)
    found = [f"prompt to output: {prompts / max(1, outputs):.1f} tokens to 1"]
    row = best.row
    running = (row["ttft_s"]["mean"] + row["tpot_s"]["mean"] * outputs / len(arrivals)) * (
        len(arrivals) / row["seconds"]
    )
    found.append(f"concurrency: {running:.0f} requests running on average")
    if shortest is None:
        found.append(
            f"bandwidth: at {base.link_bytes_per_s / 1e9:g} GB/s, a transfer always costs more TTFT than the "
            "interference that it removes"
        )
    else:
        found.append(
            f"bandwidth: at {base.link_bytes_per_s / 1e9:g} GB/s, remote prefill pays for prompts of "
            f"{shortest} tokens or more"
        )
    if apart is None:
        found.append(f"GPUs: {gpus} are too few for two roles of this model")
    elif coupled is not None:
        found.append(
            f"simulated: {apart.named()} carries {apart.speed:.2f} times the recorded rate within both "
            f"objectives, {coupled.named()} carries {coupled.speed:.2f} times"
        )
        if apart.gpus != gpus or coupled.gpus != gpus:
            found.append(f"GPUs: of {gpus}, these use {apart.gpus} and {coupled.gpus}")
    if best.speed < 1:
        found.append(
            f"{gpus} GPUs are too few: they do not carry the recorded rate within both objectives"
        )
    return found
