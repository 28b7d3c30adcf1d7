"""`kvpool simulate`: run a trace through a simulated cluster, with the real scheduler and a virtual clock."""

from __future__ import annotations

import itertools
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from kvpool.cli.output import (
    AsJson,
    console,
    error_console,
    format_seconds,
    print_json,
    print_table,
)
from kvpool.config.settings import parse_bytes
from kvpool.errors import ConfigError
from planner.cli.plots import check_plot, draw_simulation
from planner.cli.read_trace import Strict, warn_of_bad_lines
from planner.traces import MOONCAKE_BLOCK_TOKENS, TraceRequest, load_requests

if TYPE_CHECKING:
    from planner.simulator.scenario import Scenario
    from planner.simulator.setup import CacheFactory
    from planner.simulator.workload import Arrival
    from planner.sizing.hardware import NetworkLink

SWEEPS = ("ratio", "bandwidth", "roles")


def simulate(
    trace: Annotated[
        Path | None, typer.Argument(help="Trace in Mooncake's format (JSON lines); or use --load.")
    ] = None,
    load: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RATE,PROMPT,OUTPUT,SECONDS",
            help="Synthetic Poisson load instead of a trace; repeat for phases that follow each other.",
        ),
    ] = None,
    model: Annotated[
        str, typer.Option(help="Model: a preset such as llama-3-70b, or a config.json.")
    ] = "llama-3-70b",
    gpu: Annotated[str, typer.Option(help="GPU: a100, h100, h200, ...")] = "h100",
    tp: Annotated[int | None, typer.Option(min=1, max=64, help="GPUs per instance.")] = None,
    prefill: Annotated[
        str, typer.Option(help="Prefill instances: 8, or 4@h100:8,4@a100:8 for mixed GPUs.")
    ] = "8",
    decode: Annotated[str, typer.Option(help="Decode instances, in the same form.")] = "8",
    hosts: Annotated[int, typer.Option(min=0, help="Number of hosts; 0: one per instance.")] = 0,
    serving: Annotated[
        str, typer.Option(help="pooled, disaggregated or coupled; several are separated by commas.")
    ] = "pooled",
    strategy: Annotated[
        str, typer.Option(help="Scheduling strategies, separated by commas.")
    ] = "kv-centric",
    admission: Annotated[
        str,
        typer.Option(
            help="Admission: none, late, arrival or predicted; several are separated by commas."
        ),
    ] = "none",
    link: Annotated[str, typer.Option(help="Link of each host; several for --sweep bandwidth.")] = (
        "8x100Gb"
    ),
    overlap: Annotated[
        bool, typer.Option(help="Send finished layers while later ones compute.")
    ] = True,
    dram: Annotated[str, typer.Option(help="DRAM of each host for the pool.")] = "512GiB",
    nvme: Annotated[str, typer.Option(help="NVMe space of each host for the pool.")] = "0",
    eviction: Annotated[str, typer.Option(help="Eviction policy of the nodes.")] = "prefix-lru",
    kv_dtype: Annotated[str, typer.Option(help="Data type of the KV.")] = "fp16",
    weights: Annotated[str, typer.Option(help="Data type of the weights.")] = "fp16",
    block_tokens: Annotated[
        int, typer.Option(help="Tokens per block; must divide those of the trace (usually 512).")
    ] = 512,
    chunk: Annotated[
        int,
        typer.Option(
            min=0, help="Tokens per mixed prefill and decode step; 0: prefill in one step."
        ),
    ] = 2048,
    slo_ttft: Annotated[
        float, typer.Option(min=0, help="Objective for TTFT, in ms; 0: none.")
    ] = 0.0,
    slo_tpot: Annotated[
        float, typer.Option(min=0, help="Objective for TPOT, in ms; 0: none.")
    ] = 0.0,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Simulate at most this many requests.")
    ] = None,
    speed: Annotated[float, typer.Option(help="Factor on the recorded request rate.")] = 1.0,
    rules: Annotated[Path | None, typer.Option(help="File with routing rules (YAML).")] = None,
    profile: Annotated[
        Path | None, typer.Option(help="File with the measured costs of an instance.")
    ] = None,
    roles: Annotated[
        bool, typer.Option("--roles", help="Let instances change between prefill and decode.")
    ] = False,
    waiting: Annotated[int, typer.Option(min=0, help="Length of the admission queue.")] = 0,
    sweep: Annotated[
        str | None, typer.Option(help="Vary one thing: ratio, bandwidth or roles.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of synthetic loads and random choices.")] = 0,
    strict: Strict = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the result to this image file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a cluster on a trace. Prints TTFT, TPOT, goodput, hits, transfers, rejections and role changes."""
    from conductor.roles.controller import RoleLimits
    from conductor.routing.rules import parse_rules
    from conductor.scheduling.strategies import strategies
    from planner.simulator.policy_cache import cache_factory
    from planner.simulator.scenario import ADMISSIONS, Scenario, groups_of
    from planner.simulator.setup import SERVINGS, Serving
    from planner.simulator.workload import arrivals
    from planner.sizing.hardware import links_named, value_bytes
    from planner.sizing.model_presets import model_named

    if plot is not None:
        check_plot(plot)
    _one_of("--sweep", [sweep] if sweep else [], SWEEPS)
    ways = itertools.product(
        _one_of("--serving", serving.split(","), get_args(Serving) or SERVINGS),
        _one_of("--strategy", strategy.split(","), strategies()),
        _one_of("--admission", admission.split(","), ADMISSIONS),
    )
    links = links_named(link)
    base = Scenario(
        model_named(model),
        prefill=groups_of(prefill),
        decode=groups_of(decode),
        gpu=gpu,
        tp=tp,
        hosts=hosts,
        link_bytes_per_s=links[0].bytes_per_s,
        dram_bytes=size_option("--dram", dram),
        nvme_bytes=size_option("--nvme", nvme),
        block_tokens=block_tokens,
        weight_bytes=value_bytes(weights),
        kv_value_bytes=value_bytes(kv_dtype),
        routing=parse_rules(_text(rules), f"file {rules}") if rules else None,
        slo_ttft_s=slo_ttft / 1e3,
        slo_tpot_s=slo_tpot / 1e3,
        is_overlapped=overlap,
        chunk_tokens=chunk,
        roles=RoleLimits() if roles else None,
        max_waiting=waiting,
        seed=seed,
    )
    base = _as_measured(base, profile) if profile is not None else base
    make_cache = cache_factory(eviction)
    recorded, cut, skipped = _requests(trace, load or [], requests, seed, strict)
    arrived = arrivals(recorded, speed=speed, block_tokens=block_tokens, trace_block_tokens=cut)
    started = time.monotonic()
    document = _facts(base) | {
        "trace": str(trace) if trace else "synthetic",
        "requests": len(arrived),
        "skipped_lines": skipped,
        "speed": speed,
        "sweep": sweep or "",
        "rows": _rows(sweep, _varied(base, ways), links, arrived, make_cache),
    }
    if plot is not None:
        draw_simulation(document, plot)
    if as_json:
        print_json(document)
    else:
        _print(document, time.monotonic() - started)


def _varied(base: Scenario, ways: Iterable[tuple[str, ...]]) -> list[Scenario]:
    return [
        replace(base, serving=s, strategy=n, admission=a)  # type: ignore[arg-type]
        for s, n, a in ways
    ]


def _facts(base: Scenario) -> dict[str, Any]:
    return {
        "model": base.model.name,
        "instances": _kinds(base),
        "slo_ttft_s": base.slo_ttft_s,
        "slo_tpot_s": base.slo_tpot_s,
        "seed": base.seed,
    }


def _as_measured(base: Scenario, profile: Path) -> Scenario:
    from conductor.scheduling.cost_model import LinkProfile
    from planner.sizing.measured_profile import read_profile

    other = LinkProfile(2e-4, base.link_bytes_per_s)
    return replace(base, measured=read_profile(profile, base.same_host, other))


def _rows(
    sweep: str | None,
    varied: list[Scenario],
    links: Sequence[NetworkLink],
    arrived: Sequence[Arrival],
    make_cache: CacheFactory,
) -> list[dict[str, Any]]:
    from planner.simulator import sweeps

    if sweep is None:
        return sweeps.compare(varied, arrived, make_cache, _progress)
    if sweep == "ratio":
        return sweeps.ratio_sweep(varied[0], arrived, make_cache, _progress)
    if sweep == "bandwidth":
        return sweeps.bandwidth_sweep(varied[0], links, arrived, make_cache, _progress)
    return sweeps.role_sweep(varied[0], arrived, make_cache, _progress)


def _requests(
    trace: Path | None, load: list[str], limit: int | None, seed: int, strict: bool
) -> tuple[list[TraceRequest], int, int]:
    """The requests, the tokens per block, and the number of skipped lines."""
    from planner.simulator.workload import Shape, synthetic

    if (trace is None) == (not load):
        raise ConfigError("give either a trace or --load", hint="--load 4,8000,200,300")
    if trace is not None:
        found, report = load_requests(str(trace), is_strict=strict, limit=limit)
        warn_of_bad_lines(str(trace), report, "sorted")
        return found, report.block_tokens, report.skipped
    shapes = []
    for text in load:
        try:
            rate, prompt, output, seconds = (float(part) for part in text.split(","))
        except ValueError:
            raise ConfigError(
                f"--load {text!r} is not a load",
                hint="write RATE,PROMPT,OUTPUT,SECONDS, e.g. 4,8000,200,300",
            ) from None
        shapes.append(Shape(rate, prompt, output, seconds))
    found = synthetic(shapes, seed, shared_prefixes=8)[:limit]
    if not found:
        raise ConfigError("--load makes no requests", hint="raise its rate or its duration")
    return found, MOONCAKE_BLOCK_TOKENS, 0


def _one_of(flag: str, given: list[str], known: Any) -> list[str]:
    for name in given:
        if name not in known:
            raise ConfigError(f"{flag} {name!r} is unknown", hint=f"use {', '.join(known)}")
    return given


def size_option(flag: str, text: str) -> int:
    """The bytes that a flag like `--dram 512GiB` gives. Raises ConfigError."""
    try:
        size = parse_bytes(text)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{flag} {text!r}: {error}") from None
    if not 0 <= size < 1 << 62:
        raise ConfigError(f"{flag} {text!r} is out of range")
    return size


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', error)}") from None


def _kinds(scenario: Scenario) -> dict[str, Any]:
    from planner.simulator.scenario import setup_of

    found: dict[str, Any] = {}
    for one in setup_of(scenario).instances:
        entry = found.setdefault(
            one.kind,
            {"count": 0, "kv_capacity_tokens": one.kv_capacity_tokens, "cost": _cost(one.cost)},
        )
        entry["count"] += 1
    return found


def _cost(cost: Any) -> dict[str, float]:
    names = [name for name in type(cost).__dataclass_fields__ if name.endswith("_s")]
    return {name: getattr(cost, name) for name in names}


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        error_console().print(f"simulating: {text}", markup=False)


def _print(document: dict[str, Any], took_s: float) -> None:
    out = console()
    kinds = ", ".join(f"{v['count']} x {k}" for k, v in document["instances"].items())
    out.print(f"{document['model']} on {kinds}; {document['requests']:,} requests", markup=False)
    print_table(
        (
            *("serving", "strategy", "admission", "P:D", "GB/s", "overlap", "served", "rejected"),
            *("TTFT mean", "p50", "p90", "p99", "TPOT mean", "TPOT p99", "in SLO", "goodput/s"),
            *("hits", "moved GB", "moves"),
        ),
        (
            (
                row["serving"] + (f", {row['roles']}" if row.get("roles") else ""),
                row["strategy"],
                row["admission"],
                f"{row['prefill']}:{row['decode']}",
                f"{row['link_gbytes_per_s']:g}",
                "yes" if row["overlap"] else "no",
                row["served"],
                row["rejected"],
                *(_seconds(row, "ttft_s", k) for k in ("mean", "p50", "p90", "p99")),
                *(_seconds(row, "tpot_s", k) for k in ("mean", "p99")),
                f"{row['slo_share']:.1%}",
                f"{row['goodput_per_s']:.2f}",
                f"{row['hit_ratio']:.1%}",
                f"{row['moved_bytes'].get('other_host', 0) / 1e9:,.0f}",
                len(row["role_changes"]),
            )
            for row in document["rows"]
        ),
        right=("served", "rejected", "TTFT mean", "p50", "p90", "p99", "TPOT mean", "TPOT p99"),
    )
    refused: Counter[str] = Counter()
    for row in document["rows"]:
        refused.update(row["rejections"])
    if refused:
        reasons = ", ".join(f"{count:,} for {reason}" for reason, count in refused.most_common())
        out.print(f"rejected: {reasons}", markup=False)
    out.print(f"simulated in {format_seconds(took_s)}", markup=False)


def _seconds(row: dict[str, Any], name: str, figure: str) -> str:
    """A latency of the served requests, or a hyphen if none was served."""
    return format_seconds(row[name][figure]) if row["served"] else "-"
