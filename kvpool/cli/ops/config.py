"""`kvpool config`: show the effective settings with the source of each, or check a file."""

from __future__ import annotations

from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Annotated, Any

import typer

from kvpool.cli.context import invocation
from kvpool.cli.output import AsJson, console, format_bytes, print_json, print_table
from kvpool.config.loader import DEFAULT_SOURCE, load_settings, shown

app = typer.Typer(help="Show or check the configuration.", no_args_is_help=True)


@app.command()
def show(
    ctx: typer.Context,
    as_json: AsJson = False,
) -> None:
    """Show every effective setting and its source. Secrets are shown as ***."""
    loaded = invocation(ctx).load()
    values: Any = shown(loaded.settings)
    if as_json:
        print_json({"settings": values, "sources": loaded.provenance})
        return
    print_table(
        ("setting", "value", "from"),
        (
            (key, _text(key, reduce(getitem, key.split("."), values)), source)
            for key, source in loaded.provenance.items()
        ),
        styles={DEFAULT_SOURCE: "dim"},
    )


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="YAML file to check.")],
    as_json: AsJson = False,
) -> None:
    """Check a file alone, without the environment and flags.

    The exit status is 2 if it has an error.
    """
    loaded = load_settings(file, {})
    given = sorted(key for key, source in loaded.provenance.items() if source != DEFAULT_SOURCE)
    if as_json:
        print_json({"file": file, "ok": True, "settings": given})
    else:
        console().print(f"{file}: ok, {len(given)} settings", markup=False)


def _text(key: str, value: object) -> str:
    if isinstance(value, int) and key.endswith("_bytes") and value:
        return f"{value} ({format_bytes(value)})"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, bool):
        return str(value).lower()
    return "-" if value is None or value == "" else str(value)
