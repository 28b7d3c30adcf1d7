"""`kvpool replay`: the hit ratios of eviction policies and cache sizes on a recorded trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpool.cli.output import AsJson, console, print_json, print_table
from kvpool.config.settings import parse_bytes
from kvpool.errors import ConfigError, did_you_mean
from planner.cli.plots import check_plot, save
from planner.cli.read_trace import BlockTokens, Strict, TimeUnit, Tokenizer, load

if TYPE_CHECKING:
    from planner.replay import CompactTrace, Replay, TierSize

WINDOWS = 60  # that a trace is divided into by default


def replay(
    trace: Annotated[str, typer.Argument(help="JSON-lines file, also as .gz; - reads stdin.")],
    policy: Annotated[
        str, typer.Option(help="Eviction policies, separated by commas, or all.")
    ] = "prefix-lru,lru",
    capacity: Annotated[
        str, typer.Option(help="Cache sizes in blocks, separated by commas.")
    ] = "1000,3000,10000,30000,50000",
    tiers: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=SIZE,...",
            help="Tiers, fastest first, instead of --capacity: in blocks (dram=1000,nvme=9000), or in"
            " bytes (dram=64GiB) together with --block-bytes.",
        ),
    ] = None,
    block_bytes: Annotated[
        str | None, typer.Option(help="Bytes per block, for tiers given in bytes.")
    ] = None,
    block_tokens: BlockTokens = None,
    time_unit: TimeUnit = "auto",
    window: Annotated[
        float | None, typer.Option(help="Seconds per point of the hit ratio over time.")
    ] = None,
    as_node: Annotated[
        bool,
        typer.Option(
            "--as-node", help="Keep a block while its children are cached, as pool nodes do."
        ),
    ] = False,
    tokenizer: Tokenizer = None,
    strict: Strict = False,
    as_json: AsJson = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw hit ratios by capacity to this image file.")
    ] = None,
) -> None:
    """Replay a trace against eviction policies, and compare them with Belady's optimum.

    The hit ratio counts prefixes: the leading blocks found, divided by all blocks.
    """
    from planner.replay import belady_hits
    from planner.replay import replay as replay_one

    levels = _tiers(tiers, block_bytes)
    policies = _policies(policy, bool(levels) or as_node)
    capacities = [sum(level.capacity_blocks for level in levels)] if levels else _sizes(capacity)
    if window is not None and not window > 0:
        raise ConfigError(f"--window {window} is out of range", hint="give seconds above 0")
    if plot is not None:
        check_plot(plot)
    loaded, report = load(trace, block_tokens, time_unit, strict, tokenizer)
    rows: list[dict[str, Any]] = []
    with loaded:
        first, last = loaded.span_s
        window_s = window or max((last - first) / WINDOWS, 1e-3)
        for size in capacities:
            ceiling = sum(belady_hits(loaded, size)) / max(1, loaded.blocks)
            for name in policies:
                result = replay_one(loaded, name, size, is_as_node=as_node, tiers=levels)
                rows.append(_row(loaded, result, ceiling, levels, window_s))
        document = {
            "trace": trace,
            "requests": loaded.requests,
            "blocks": loaded.blocks,
            "block_tokens": loaded.block_tokens,
            "skipped_lines": report.skipped,
            "unsorted_lines": report.unsorted,
            "problems": report.first,
            "window_s": window_s,
            "rows": rows,
        }
    if plot is not None:
        _draw(rows, plot, trace)
    if as_json:
        print_json(document)
    else:
        _show(document)


def _policies(text: str, is_in_parts: bool) -> list[str]:
    from planner.replay import OF_REQUESTS, REPLAYABLE

    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError("--policy names no policy", hint=f"use {', '.join(REPLAYABLE)}, or all")
    for name in names:
        if name not in (*REPLAYABLE, "all"):
            hint = did_you_mean(name, (*REPLAYABLE, "all"))
            raise ConfigError(f"unknown eviction policy {name!r}", hint=hint)
    if "all" in names:
        return [name for name in REPLAYABLE if not (is_in_parts and name in OF_REQUESTS)]
    return list(dict.fromkeys(names))


def _sizes(text: str) -> list[int]:
    return list(dict.fromkeys(_size(piece) for piece in text.split(",")))


def _size(text: str) -> int:
    digits = text.strip().replace("_", "")
    if not (digits.isascii() and digits.isdigit()) or not 0 < int(digits[:19]) < 1 << 48:
        raise ConfigError(
            f"{text.strip()!r} is not a capacity", hint="give a whole number of blocks above 0"
        )
    return int(digits)


def _tiers(text: str | None, block_bytes: str | None) -> list[TierSize]:
    from planner.replay import TierSize

    levels: list[TierSize] = []
    for piece in text.split(",") if text is not None else ():
        name, equals, size = (part.strip() for part in piece.partition("="))
        if not name or not equals or any(level.name == name for level in levels):
            raise ConfigError(f"{piece.strip()!r} is not a tier", hint="write dram=1000,nvme=9000")
        if size.isdigit():
            levels.append(TierSize(name, _size(size)))
            continue
        if block_bytes is None:
            raise ConfigError(f"tier {name} is given in bytes: {size!r}", hint="add --block-bytes")
        try:
            blocks = parse_bytes(size) // max(1, parse_bytes(block_bytes))
        except ValueError as error:
            raise ConfigError(f"tier {name}={size}, blocks of {block_bytes}: {error}") from error
        levels.append(TierSize(name, _size(str(blocks))))
    return levels


def _row(
    trace: CompactTrace, result: Replay, ceiling: float, levels: list[TierSize], window_s: float
) -> dict[str, Any]:
    from planner.replay import over_time

    row: dict[str, Any] = {
        "policy": result.policy,
        "capacity_blocks": result.capacity_blocks,
        "hit_ratio": result.hit_ratio,
        "token_hit_ratio": result.token_hit_ratio,
        "belady_hit_ratio": ceiling,
        "ops_per_s": result.ops_per_s,
    }
    if levels:
        row["tiers"] = [
            {
                "tier": level.name,
                "capacity_blocks": level.capacity_blocks,
                "hit_ratio": result.tier_hits[level.name] / max(1, result.blocks),
            }
            for level in levels
        ]
    row["over_time"] = over_time(trace, result.found, window_s)
    return row


def _show(document: dict[str, Any]) -> None:
    rows = document["rows"]
    names = [level["tier"] for level in rows[0].get("tiers", ())]
    columns = ("policy", "blocks", "hit ratio", *names, "of tokens", "optimum", "M lookups/s")
    cells = [
        [
            row["policy"],
            f"{row['capacity_blocks']:,}",
            f"{row['hit_ratio']:.4f}",
            *(f"{level['hit_ratio']:.4f}" for level in row.get("tiers", ())),
            f"{row['token_hit_ratio']:.4f}",
            f"{row['belady_hit_ratio']:.4f}",
            f"{row['ops_per_s'] / 1e6:.2f}",
        ]
        for row in rows
    ]
    console().print(
        f"{document['requests']:,} requests, {document['blocks']:,} blocks of"
        f" {document['block_tokens']} tokens"
    )
    print_table(columns, cells, right=columns[1:])


def _draw(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    ceiling = sorted({(row["capacity_blocks"], row["belady_hit_ratio"]) for row in rows})
    axes.plot(*zip(*ceiling, strict=True), "k--", marker=".", label="Belady's optimum")
    for name in dict.fromkeys(row["policy"] for row in rows):
        line = sorted((r["capacity_blocks"], r["hit_ratio"]) for r in rows if r["policy"] == name)
        axes.plot(*zip(*line, strict=True), marker="o", label=name)
    axes.set(xscale="log", xlabel="capacity in blocks", ylabel="prefix hit ratio", title=title)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    save(figure, path)
