"""`kvpool plan`: KV sizes, link speeds, deployments, and the profile of a request log."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kvpool.cli.output import (
    AsJson,
    console,
    format_bytes,
    format_seconds,
    print_json,
    print_table,
)
from planner.cli.deploy import deploy
from planner.cli.plots import check_plot, draw_crossover
from planner.cli.read_trace import Strict, warn_of_bad_lines
from planner.traces import open_trace

app = typer.Typer(help="Size KV, links and deployments.", no_args_is_help=True)
app.command()(deploy)
LENGTHS = (256, 1024, 4096, 16384, 65536)

GpuName = Annotated[
    str, typer.Option("--gpu", help="GPU: a100, a800, h100, h200, h20, b200, l40s, ...")
]
Tp = Annotated[
    int | None,
    typer.Option(
        "--tp", min=1, max=64, help="GPUs per instance; default: as many as the model needs."
    ),
]
Weights = Annotated[str, typer.Option("--weights", help="Data type of the weights.")]
Mfu = Annotated[
    float, typer.Option(min=0.01, max=1, help="Share of the GPU's peak FLOPS that prefill reaches.")
]


@app.command()
def size(
    model: Annotated[
        str, typer.Argument(help="Model: a preset such as llama-3-70b, or a config.json.")
    ],
    tokens: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 8192,
    dtype: Annotated[str, typer.Option(help="Data type of the KV: fp16, bf16, fp8, ...")] = "fp16",
    link: Annotated[
        str, typer.Option(help="Links, separated by commas: 400Gb, 8x400Gb, 100GbE, 25GB/s.")
    ] = "100GbE,400Gb,8x400Gb",
    gpu: GpuName = "h100",
    tp: Tp = None,
    weights: Weights = "fp16",
    mfu: Mfu = 0.5,
    as_json: AsJson = False,
) -> None:
    """Print the size of a prompt's KV, and whether prefill hides its transfer layer by layer."""
    from planner.sizing import hardware
    from planner.sizing.model_presets import model_named
    from planner.sizing.transfer_size import size_report

    shape = model_named(model)
    machine = hardware.fitting(
        shape,
        hardware.gpu_named(gpu),
        tp,
        weight_bytes=hardware.value_bytes(weights),
        kv_value_bytes=hardware.value_bytes(dtype),
        mfu=mfu,
    )
    report = size_report(
        shape, tokens, dtype, hardware.value_bytes(dtype), hardware.links_named(link), machine
    )
    if as_json:
        print_json(report)
        return
    _print_size(report)


@app.command()
def crossover(
    model: Annotated[
        str, typer.Argument(help="Model: a preset such as llama-3-70b, or a config.json.")
    ],
    link: Annotated[str, typer.Option(help="Links, separated by commas.")] = "25GbE,100GbE,400Gb",
    batch: Annotated[int, typer.Option(min=0, help="Sequences that decode at the same time.")] = 32,
    context: Annotated[int, typer.Option(min=0, help="Tokens of each decoding sequence.")] = 4096,
    chunk: Annotated[
        int, typer.Option(min=64, help="Tokens per mixed prefill and decode step.")
    ] = 2048,
    dtype: Annotated[str, typer.Option(help="Data type of the KV.")] = "fp16",
    gpu: GpuName = "h100",
    tp: Tp = None,
    weights: Weights = "fp16",
    plot: Annotated[Path | None, typer.Option(help="Draw the result to this image file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print the prompt lengths and bandwidths above which a remote prefill improves TTFT."""
    from planner.sizing import crossover as curves
    from planner.sizing import hardware
    from planner.sizing.model_presets import model_named

    if plot is not None:
        check_plot(plot)
    machine = hardware.fitting(
        model_named(model),
        hardware.gpu_named(gpu),
        tp,
        weight_bytes=hardware.value_bytes(weights),
        kv_value_bytes=hardware.value_bytes(dtype),
    )
    beside = {"batch": batch, "context": context, "chunk_tokens": chunk}
    points = curves.curve(machine, hardware.links_named(link), LENGTHS, **beside)
    least = {tokens: curves.least_bandwidth(machine, tokens, **beside) for tokens in LENGTHS}
    document = {
        "model": machine.model.name,
        "gpu": machine.gpu.name,
        "tp": machine.tp,
        "batch": batch,
        "context": context,
        "rows": [{**asdict(point), "is_worth_it": point.is_worth_it} for point in points],
        "least_gbytes_per_s": {
            str(tokens): None if rate is None else rate / 1e9 for tokens, rate in least.items()
        },
    }
    if plot is not None:
        draw_crossover(document, plot)
    if as_json:
        print_json(document)
        return
    console().print(
        f"{machine.model.name} on {machine.tp} x {machine.gpu.name}, with {batch} decoding sequences of "
        f"{context} tokens",
        markup=False,
    )
    print_table(
        ("prompt", "link", "transfer adds", "interference", "worth it", "least GB/s"),
        (
            (
                point.prompt_tokens,
                point.link,
                format_seconds(point.transfer_s),
                format_seconds(point.interference_s),
                "yes" if point.is_worth_it else "no",
                _rate(least[point.prompt_tokens]),
            )
            for point in points
        ),
        right=("prompt", "transfer adds", "interference", "least GB/s"),
    )


def _rate(bytes_per_s: float | None) -> str:
    return "none" if bytes_per_s is None else f"{bytes_per_s / 1e9:.3g}"


def _print_size(report: dict[str, Any]) -> None:
    out = console()
    machine = report["machine"]
    out.print(f"{report['model']} ({report['source']})", markup=False)
    out.print(
        f"{report['bytes_per_token']:,} B per token in {report['dtype']}; {report['tokens']:,} tokens: "
        f"{report['kv_bytes']:,} B ({format_bytes(report['kv_bytes'])})",
        markup=False,
    )
    if report["window_tokens"]:
        out.print(f"some layers keep only the last {report['window_tokens']:,} tokens")
    out.print(
        f"prefill on {machine['tp']} x {machine['gpu']} at {machine['mfu']:.0%} of peak: "
        f"{format_seconds(machine['prefill_s'])}",
        markup=False,
    )
    print_table(
        ("link", "GB/s", "transfer", "prefill", "exposed", "verdict"),
        (
            (
                row["link"],
                f"{row['gbytes_per_s']:g}",
                format_seconds(row["transfer_s"]),
                format_seconds(row["prefill_s"]),
                format_seconds(row["exposed_s"]),
                row["verdict"],
            )
            for row in report["links"]
        ),
        right=("GB/s", "transfer", "prefill", "exposed"),
    )


@app.command()
def profile(
    log: Annotated[Path, typer.Argument(help="Request log or trace, also as .gz; - reads stdin.")],
    rag_min_input: Annotated[
        int, typer.Option(help="A request counts as RAG from this many prompt tokens on, ...")
    ] = 2000,
    rag_min_ratio: Annotated[
        float, typer.Option(help="... and from this ratio of prompt to output tokens on.")
    ] = 10.0,
    rag_match: Annotated[
        str | None, typer.Option(help="It also counts as RAG if its text matches this pattern.")
    ] = None,
    strict: Strict = False,
    as_json: AsJson = False,
) -> None:
    """Profile a request log: lengths, RAG share, turns, streaming, TTFT and TPOT."""
    from planner.sizing.log_profile import RagRule, profile_log, report

    rule = RagRule(rag_min_input, rag_min_ratio)
    if rag_match is not None:
        rule = RagRule(rag_min_input, rag_min_ratio, rag_match)
    found = profile_log(open_trace(str(log)), str(log), rule, is_strict=strict)
    warn_of_bad_lines(str(log), found.read, "kept in their order")
    document = report(found)
    if as_json:
        print_json(document)
        return
    console().print(f"{log}: {document['requests']:,} requests", markup=False)
    shares = ("rag_share", "multi_turn_share", "streaming_share", "prefix_reuse")
    spreads = {name: value for name, value in document.items() if isinstance(value, dict)}
    columns = ("mean", "min", "p50", "p90", "p95", "p99", "max")
    print_table(
        ("", *columns),
        (
            (name, *(f"{value[c]:,.4g}" for c in columns))
            for name, value in spreads.items()
            if "p50" in value
        ),
        right=columns,
    )
    rates = document["rate_per_s"]
    if rates:
        console().print(
            f"requests per second: {rates['mean']}, in the busiest minute {rates['busiest_minute']}"
        )
    for name in shares:
        value = document[name]
        text = "unknown: not in the log" if value is None else f"{value:.1%}"
        console().print(f"{name.replace('_', ' ')}: {text}", markup=False)
