"""How commands print: tables and short units for people, one JSON document for programs.

Results go to stdout, errors and progress to stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def console() -> Console:
    """A console on stdout. It is made anew for each call, so a redirected stdout is respected."""
    return Console(highlight=False, soft_wrap=not sys.stdout.isatty())


def error_console() -> Console:
    """A console on stderr."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """Print `value` as one JSON document, indented by two spaces.

    It may hold anything that msgspec can encode, such as dataclasses and Structs. All else becomes
    its `str`.
    """
    encoded = msgspec.json.encode(value, enc_hook=str)
    sys.stdout.write(msgspec.json.format(encoded, indent=2).decode() + "\n")


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    title: str = "",
    right: Sequence[str] = (),
    styles: Mapping[str, str] | None = None,
) -> None:
    """Print a table without borders.

    Args:
        right: names of the columns to align on the right.
        styles: the colour of a cell by its text, e.g. `{"fail": "red"}`.
    """
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell), style=(styles or {}).get(str(cell), "")) for cell in row))
    out = Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=200)
    out.print(table)


def print_error(message: str) -> None:
    """Print one red line on stderr."""
    error_console().print(Text(f"error: {' '.join(message.split())}", style="red"))


def format_bytes(count: float) -> str:
    """A size in binary units with three significant digits: "1.50 GiB"; below 1 KiB "17 B"."""
    if abs(count) < 1024:
        return f"{count:.0f} B"
    exponent = 1
    while abs(count) >= 1023.5 * 1024**exponent and exponent < 4:
        exponent += 1
    return f"{_three_digits(count / 1024**exponent)} {('KiB', 'MiB', 'GiB', 'TiB')[exponent - 1]}"


def format_seconds(seconds: float) -> str:
    """A duration with three significant digits: "41.0 µs", "3.20 ms", "1.50 s", "2 min 05 s"."""
    if abs(seconds) >= 99.95:
        minutes, rest = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
    if abs(seconds) >= 0.9995:
        return f"{_three_digits(seconds)} s"
    if abs(seconds) >= 0.9995e-3:
        return f"{_three_digits(seconds * 1e3)} ms"
    return f"{_three_digits(seconds * 1e6)} µs"


def format_rate(bytes_moved: float, seconds: float) -> str:
    """A bandwidth in decimal GB/s, the unit of the literature; "-" if no time passed."""
    return f"{bytes_moved / seconds / 1e9:.2f} GB/s" if seconds > 0 else "-"


def _three_digits(value: float) -> str:
    size = abs(value)
    return f"{value:.{2 if size < 9.995 else 1 if size < 99.95 else 0}f}"
