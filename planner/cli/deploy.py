"""`kvpool plan deploy`: a placement of the given GPUs to start from, with reasons and configuration files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvpool.cli.output import (
    AsJson,
    console,
    error_console,
    format_bytes,
    format_seconds,
    print_json,
    print_table,
)
from kvpool.errors import ConfigError
from planner.cli.read_trace import Strict, warn_of_bad_lines
from planner.traces import load_requests


def deploy(
    trace: Annotated[Path, typer.Argument(help="Trace in Mooncake's format (JSON lines).")],
    gpus: Annotated[int, typer.Option(min=1, max=4096, help="Number of GPUs.")],
    slo_ttft: Annotated[float, typer.Option(min=0.001, help="Objective for TTFT, in ms.")],
    slo_tpot: Annotated[float, typer.Option(min=0.001, help="Objective for TPOT, in ms.")],
    model: Annotated[
        str, typer.Option(help="Model: a preset such as llama-3-70b, or a config.json.")
    ] = "llama-3-70b",
    gpu: Annotated[str, typer.Option(help="GPU: a100, h100, h200, ...")] = "h100",
    link: Annotated[str, typer.Option(help="Link of each host.")] = "8x100Gb",
    kv_dtype: Annotated[str, typer.Option(help="Data type of the KV.")] = "fp16",
    weights: Annotated[str, typer.Option(help="Data type of the weights.")] = "fp16",
    dram: Annotated[str, typer.Option(help="DRAM of each host for the pool.")] = "512GiB",
    requests: Annotated[int, typer.Option(min=10, help="Requests of the trace to simulate.")] = 400,
    gpu_hour: Annotated[
        float | None, typer.Option(min=0, help="Price of a GPU in dollars per hour.")
    ] = None,
    speed: Annotated[float, typer.Option(help="Factor on the recorded request rate.")] = 1.0,
    eviction: Annotated[str, typer.Option(help="Eviction policy of the nodes.")] = "prefix-lru",
    out: Annotated[
        Path | None, typer.Option(help="Directory to write rules.yaml and kvpool.yaml to.")
    ] = None,
    strict: Strict = False,
    as_json: AsJson = False,
) -> None:
    """Print whether to disaggregate, the number and size of instances, the size of the pool, and the cost."""
    from planner.cli.simulate import size_option
    from planner.simulator import advice, placement_search, pool_size
    from planner.simulator.policy_cache import cache_factory
    from planner.simulator.scenario import Scenario
    from planner.simulator.workload import arrivals
    from planner.sizing.hardware import link_named, value_bytes
    from planner.sizing.model_presets import model_named

    base = Scenario(
        model_named(model),
        gpu=gpu,
        link_bytes_per_s=link_named(link).bytes_per_s,
        dram_bytes=size_option("--dram", dram),
        weight_bytes=value_bytes(weights),
        kv_value_bytes=value_bytes(kv_dtype),
        slo_ttft_s=slo_ttft / 1e3,
        slo_tpot_s=slo_tpot / 1e3,
    )
    make_cache = cache_factory(eviction)
    recorded, report = load_requests(str(trace), is_strict=strict)
    warn_of_bad_lines(str(trace), report, "sorted")
    arrived = arrivals(recorded, speed=speed, trace_block_tokens=report.block_tokens)

    def progress(text: str) -> None:
        error_console().print(text, markup=False)

    found = placement_search.search(base, gpus, arrived[:requests], make_cache, progress)
    hits = pool_size.curve(arrived, make_cache)
    plan = advice.advise(base, gpus, arrived[:requests], found, hits, gpu_hour)
    plan |= {"trace": str(trace), "model": base.model.name, "gpu": gpu}
    plan |= {"requests": min(requests, len(arrived)), "skipped_lines": report.skipped}
    plan["files"] = _write(out, plan, advice, base) if out is not None else []
    if as_json:
        print_json(plan)
        return
    _print(plan)


def _write(out: Path, plan: dict[str, Any], advice: Any, base: Any) -> list[str]:
    files = {
        "rules.yaml": advice.rules_yaml(plan),
        "kvpool.yaml": advice.settings_yaml(plan, base),
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (out / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write to {out}: {error.strerror or error}") from None
    return [str(out / name) for name in files]


def _print(plan: dict[str, Any]) -> None:
    out = console()
    advised = "disaggregate" if plan["disaggregate"] else "do not disaggregate"
    out.print(f"{advised}: {plan['placement']}", markup=False)
    for reason in plan["reasons"]:
        out.print(f"  {reason}", markup=False)
    print_table(
        ("placement", "highest rate", "in SLO", "TTFT", "TPOT"),
        (
            (
                row["placement"],
                f"{row['rate_carried']:.2f} x",
                f"{row['slo_share']:.1%}",
                format_seconds(row["ttft_s"]),
                format_seconds(row["tpot_s"]),
            )
            for row in plan["alternatives"]
        ),
        right=("highest rate", "in SLO", "TTFT", "TPOT"),
    )
    pool = plan["pool"]
    out.print(
        f"pool: {format_bytes(pool['dram_bytes'])} of DRAM"
        + (f", {format_bytes(pool['nvme_bytes'])} of NVMe" if pool["nvme_bytes"] else ""),
        markup=False,
    )
    for point in pool["curve"]:
        out.print(
            f"  {format_bytes(point['bytes'])}: hit ratio {point['hit_ratio']:.1%}", markup=False
        )
    out.print(
        f"at ${plan['dollars_per_gpu_hour']:g} per GPU and hour: "
        f"${plan['dollars_per_million_tokens']} per million tokens at the recorded rate, "
        f"${plan['dollars_per_million_tokens_at_capacity']} at the highest",
        markup=False,
    )
    for name in plan["files"]:
        out.print(f"wrote {name}", markup=False)
