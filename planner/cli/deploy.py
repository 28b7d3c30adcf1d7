"""`kvpool plan deploy`: which placement of so many GPUs to start from, with its reasons and files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvpool.cli.output import (
    console,
    error_console,
    format_bytes,
    format_seconds,
    print_json,
    print_table,
)
from kvpool.errors import ConfigError
from planner.cli.read_trace import say_wrong
from planner.traces import load_requests


def deploy(
    trace: Annotated[Path, typer.Argument(help="Trace in Mooncake's format.")],
    gpus: Annotated[int, typer.Option(min=1, max=4096, help="GPUs that there are.")],
    slo_ttft: Annotated[float, typer.Option(min=0.001, help="Milliseconds.")],
    slo_tpot: Annotated[float, typer.Option(min=0.001, help="Milliseconds.")],
    model: Annotated[str, typer.Option(help="Preset or config.json.")] = "llama-3-70b",
    gpu: Annotated[str, typer.Option(help="a100, h100, h200, ...")] = "h100",
    link: Annotated[str, typer.Option(help="Of each host.")] = "8x100Gb",
    kv_dtype: Annotated[str, typer.Option(help="dtype of the KV.")] = "fp16",
    weights: Annotated[str, typer.Option(help="dtype of the weights.")] = "fp16",
    dram: Annotated[str, typer.Option(help="That each host can lend to the pool.")] = "512GiB",
    requests: Annotated[int, typer.Option(min=10, help="Sample that is simulated.")] = 400,
    gpu_hour: Annotated[float | None, typer.Option(min=0, help="Dollars per GPU and hour.")] = None,
    speed: Annotated[float, typer.Option(help="Times as fast as recorded.")] = 1.0,
    eviction: Annotated[str, typer.Option(help="The nodes' eviction policy.")] = "prefix-lru",
    out: Annotated[
        Path | None, typer.Option(help="Directory to write rules.yaml and kvpool.yaml to.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail on a bad line.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Say whether to disaggregate, how many instances of which size, how much pool, and at what cost."""
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
    say_wrong(str(trace), report, "sorted")
    came = arrivals(recorded, speed=speed, trace_block_tokens=report.block_tokens)

    def progress(text: str) -> None:
        error_console().print(text, markup=False)

    found = placement_search.search(base, gpus, came[:requests], make_cache, progress)
    hits = pool_size.curve(came, make_cache)
    answer = advice.advise(base, gpus, came[:requests], found, hits, gpu_hour)
    answer |= {"trace": str(trace), "model": base.model.name, "gpu": gpu}
    answer |= {"requests": min(requests, len(came)), "skipped_lines": report.skipped}
    answer["files"] = _write(out, answer, advice, base) if out is not None else []
    if as_json:
        print_json(answer)
        return
    _print(answer)


def _write(out: Path, answer: dict[str, Any], advice: Any, base: Any) -> list[str]:
    files = {
        "rules.yaml": advice.rules_yaml(answer),
        "kvpool.yaml": advice.settings_yaml(answer, base),
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (out / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write to {out}: {error.strerror or error}") from None
    return [str(out / name) for name in files]


def _print(answer: dict[str, Any]) -> None:
    out = console()
    verdict = "disaggregate" if answer["disaggregate"] else "do not disaggregate"
    out.print(f"{verdict}: {answer['placement']}", markup=False)
    for reason in answer["reasons"]:
        out.print(f"  {reason}", markup=False)
    print_table(
        ("placement", "rate carried", "in SLO", "TTFT", "TPOT"),
        (
            (
                row["placement"],
                f"{row['rate_carried']:.2f} x",
                f"{row['slo_share']:.1%}",
                format_seconds(row["ttft_s"]),
                format_seconds(row["tpot_s"]),
            )
            for row in answer["alternatives"]
        ),
        right=("rate carried", "in SLO", "TTFT", "TPOT"),
    )
    pool = answer["pool"]
    out.print(
        f"pool: {format_bytes(pool['dram_bytes'])} of DRAM"
        + (f", {format_bytes(pool['nvme_bytes'])} of NVMe" if pool["nvme_bytes"] else ""),
        markup=False,
    )
    for point in pool["curve"]:
        out.print(f"  {format_bytes(point['bytes'])}: hits {point['hit_ratio']:.1%}", markup=False)
    out.print(
        f"at ${answer['dollars_per_gpu_hour']:g} a GPU and hour: "
        f"${answer['dollars_per_million_tokens']} per million tokens at the recorded rate, "
        f"${answer['dollars_per_million_tokens_at_capacity']} at the highest",
        markup=False,
    )
    for name in answer["files"]:
        out.print(f"wrote {name}", markup=False)
