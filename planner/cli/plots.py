"""Charts of simulations and crossovers. matplotlib is imported only when one is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvpool.errors import ConfigError

GREEN = "#2e9e5b"


def check_plot(path: Path) -> None:
    """Check that a chart can be drawn, before the work whose result it shows.

    Raises:
        ConfigError: matplotlib is not installed, or a chart cannot be written to `path`.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        hint = "pip install 'kvpool[plot]'"
        raise ConfigError("--plot needs matplotlib, which is not installed", hint=hint) from None
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"cannot write {path}: {path.absolute().parent} is not a directory")
    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix and path.suffix[1:].lower() not in known:
        hint = f"use .png or .{', .'.join(sorted(known.keys() - {'png'}))}"
        raise ConfigError(f"cannot draw {path}: {path.suffix} is not an image format", hint=hint)


def draw_simulation(document: dict[str, Any], path: Path) -> None:
    """Draw TTFT and goodput of each row; for a ratio sweep, TTFT, TPOT and the splits that meet both objectives.

    Raises:
        ConfigError: the file cannot be written.
    """
    rows = document["rows"]
    pyplot = _pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5))
    if document["sweep"] in ("ratio", "roles"):
        _ratio(left, right, document, rows)
    else:
        _bars(left, right, rows)
    figure.suptitle(f"{document['model']}, {document['requests']:,} requests, {document['trace']}")
    figure.tight_layout()
    save(figure, path)


def draw_crossover(document: dict[str, Any], path: Path) -> None:
    """Draw the time that transfers add and the interference that they remove, by prompt length.

    Raises:
        ConfigError: the file cannot be written.
    """
    rows = document["rows"]
    pyplot = _pyplot()
    figure, axis = pyplot.subplots(figsize=(7, 4.5))
    for link in dict.fromkeys(row["link"] for row in rows):
        points = [row for row in rows if row["link"] == link]
        lengths = [row["prompt_tokens"] for row in points]
        axis.plot(lengths, [row["transfer_s"] for row in points], label=f"transfer, {link}")
    first = [row for row in rows if row["link"] == rows[0]["link"]]
    axis.plot(
        [row["prompt_tokens"] for row in first],
        [max(row["interference_s"], 1e-6) for row in first],
        color="black",
        linestyle="--",
        label="interference removed",
    )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel("prompt, tokens")
    axis.set_ylabel("seconds of TTFT")
    axis.set_title(f"{document['model']} on {document['tp']} x {document['gpu']}")
    axis.legend()
    figure.tight_layout()
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    """Write a chart. Raises ConfigError if the file cannot be written."""
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write {path}: {error}") from None


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _bars(left: Any, right: Any, rows: list[dict[str, Any]]) -> None:
    where = range(len(rows))
    labels = [_label(row) for row in rows]
    for shift, name in enumerate(("mean", "p90", "p99")):
        heights = [row["ttft_s"][name] for row in rows]
        left.bar([x + 0.27 * (shift - 1) for x in where], heights, 0.25, label=f"TTFT {name}")
    left.set_yscale("log")
    left.set_ylabel("seconds")
    left.set_xticks(list(where), labels, rotation=20, ha="right", fontsize=8)
    left.legend()
    right.bar(list(where), [row["goodput_per_s"] for row in rows], 0.5, color=GREEN)
    right.set_ylabel("goodput, requests per second")
    right.set_xticks(list(where), labels, rotation=20, ha="right", fontsize=8)


def _ratio(left: Any, right: Any, document: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    fixed = [row for row in rows if row.get("roles", "fixed") == "fixed"]
    splits = [row["prefill"] for row in fixed]
    for axis, name, objective in (
        (left, "ttft_s", document["slo_ttft_s"]),
        (right, "tpot_s", document["slo_tpot_s"]),
    ):
        for figure in ("p50", "p90", "p99"):
            axis.plot(splits, [max(row[name][figure], 1e-4) for row in fixed], label=figure)
        axis.axhline(objective, color="black", linestyle=":", label="objective")
        for row in fixed:
            if row["meets_both"]:
                axis.axvspan(row["prefill"] - 0.5, row["prefill"] + 0.5, color=GREEN, alpha=0.2)
        for row in rows:
            if row.get("roles") == "dynamic":
                label = "dynamic roles, p90"
                axis.axhline(max(row[name]["p90"], 1e-4), color="red", label=label)
        axis.set_yscale("log")
        axis.set_xlabel(f"prefill instances of {splits[0] + fixed[0]['decode']}")
        axis.set_ylabel(f"{name.removesuffix('_s').upper()}, seconds")
        axis.legend()


def _label(row: dict[str, Any]) -> str:
    parts = [row["serving"], row["strategy"], row["admission"]]
    if row.get("link"):
        parts += [row["link"], "overlapped" if row["overlap"] else "not overlapped"]
    return "\n".join(part for part in parts if part != "none")
