"""`kvpool trace`: describe a trace, or generate one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from kvpool.cli.output import AsJson, console, print_json, print_table
from kvpool.errors import ConfigError
from planner.cli.read_trace import BlockTokens, Strict, TimeUnit, Tokenizer, load

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Describe or generate traces.")


@app.callback()
def _group() -> None:
    """Describe or generate traces of requests."""


@app.command()
def stats(
    trace: Annotated[str, typer.Argument(help="JSON-lines file, also as .gz; - reads stdin.")],
    block_tokens: BlockTokens = None,
    time_unit: TimeUnit = "auto",
    tokenizer: Tokenizer = None,
    strict: Strict = False,
    as_json: AsJson = False,
) -> None:
    """Print lengths, turns, sessions, and the reuse distances of blocks."""
    from planner.replay.trace_stats import trace_stats

    loaded, report = load(trace, block_tokens, time_unit, strict, tokenizer)
    with loaded:
        found = msgspec.to_builtins(trace_stats(loaded))
    if as_json:
        print_json({"trace": trace, "skipped_lines": report.skipped, **found})
        return
    distributions = {name: value for name, value in found.items() if isinstance(value, dict)}
    for name, value in found.items():
        if name not in distributions:
            shown = f"{value:,}" if isinstance(value, int) else f"{value:,.4f}"
            console().print(f"{name.replace('_', ' ')}: {shown}")
    columns = ("", "mean", "p50", "p90", "p99", "max")
    rows = [
        [name.replace("_", " "), *(f"{value[c]:,.1f}" if value else "-" for c in columns[1:])]
        for name, value in distributions.items()
    ]
    print_table(columns, rows, right=columns[1:])


@app.command()
def generate(
    kind: Annotated[
        str, typer.Option(help="Kind of load: chat, agents, documents, scan, shift or mixed.")
    ] = "chat",
    requests: Annotated[int, typer.Option(help="Number of requests.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Seed of the random numbers.")] = 0,
    sessions_per_s: Annotated[float, typer.Option(help="New sessions per second.")] = 2.0,
    out: Annotated[Path | None, typer.Option(help="File to write; default: stdout.")] = None,
) -> None:
    """Generate a trace in Mooncake's format."""
    from planner.replay.generate import generate as generated

    lines = (
        _line(request)
        for request in generated(kind, requests, seed=seed, sessions_per_s=sessions_per_s)
    )
    try:
        if out is None:
            sys.stdout.buffer.writelines(lines)
        else:
            with out.open("wb") as file:
                file.writelines(lines)
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror or error}") from error


def _line(request: Any) -> bytes:
    row = {
        "timestamp": round(request.time_s * 1000),
        "input_length": request.input_tokens,
        "output_length": request.output_tokens,
        "hash_ids": request.block_ids,
    }
    return msgspec.json.encode(row) + b"\n"
