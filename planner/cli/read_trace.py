"""The options of commands that read a trace, reading it, and reporting its bad lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from kvpool.cli.output import error_console
from kvpool.errors import ConfigError, KvpoolError
from planner.traces import TraceReport

if TYPE_CHECKING:
    from planner.replay import CompactTrace

TIME_UNITS = {"auto": None, "ms": 1e-3, "s": 1.0}

BlockTokens = Annotated[
    int | None, typer.Option(help="Tokens per block; default: derived from the trace.")
]
TimeUnit = Annotated[str, typer.Option(help="Unit of the timestamps: ms, s or auto.")]
Tokenizer = Annotated[
    str | None,
    typer.Option(help="Tokenizer directory, for traces with text; default: 4 bytes per token."),
]
Strict = Annotated[bool, typer.Option("--strict", help="Fail at the first bad line.")]


def load(
    path: str, block_tokens: int | None, time_unit: str, is_strict: bool, tokenizer: str | None
) -> tuple[CompactTrace, TraceReport]:
    """The trace and a report on its lines. Bad lines cause a warning on stderr.

    Raises:
        ConfigError: the trace cannot be read or is empty, or a line is bad and `is_strict` is set.
    """
    from planner.replay import load_trace

    if time_unit not in TIME_UNITS:
        raise ConfigError(
            f"unknown unit of time {time_unit!r}", hint=f"use {', '.join(TIME_UNITS)}"
        )
    if block_tokens is not None and not 1 <= block_tokens <= 65_536:
        raise ConfigError(f"--block-tokens {block_tokens} is out of range", hint="1 to 65,536")
    trace, report = load_trace(
        path,
        block_tokens=block_tokens,
        time_unit_s=TIME_UNITS[time_unit],
        is_strict=is_strict,
        tokenize=None if tokenizer is None else _tokenize(tokenizer),
    )
    warn_of_bad_lines(path, report, "sorted")
    return trace, report


def warn_of_bad_lines(path: str, report: TraceReport, unsorted_were: str) -> None:
    """Print a warning on stderr if lines were bad or out of order: how many, and the first ones by number.

    Args:
        unsorted_were: what was done with lines out of order, e.g. "sorted".
    """
    count = report.skipped + report.unsorted
    if not count:
        return
    more = f"; and {count - len(report.first):,} more" if count > len(report.first) else ""
    error_console().print(
        f"{path}: {report.skipped:,} lines skipped, {report.unsorted:,} out of order and {unsorted_were}:"
        f" {'; '.join(report.first)}{more}",
        style="yellow",
        markup=False,
    )


def _tokenize(path: str) -> Callable[[str], Sequence[int]]:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise KvpoolError(
            "--tokenizer needs the package transformers", hint="pip install 'kvpool[demo]'"
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"no tokenizer in {path}: {str(error).splitlines()[0]}") from error

    def tokenize(text: str) -> Sequence[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    return tokenize
