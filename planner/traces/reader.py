"""Reads requests from a file with one JSON object per line: Mooncake's trace format, or a log of requests.

Mooncake: `timestamp` (ms), `input_length`, `output_length` (tokens), `hash_ids` (one id per block;
equal ids mean an equal prefix up to there). A line without `hash_ids` is read as a logged request
(`request_log`), or as a prompt that shares nothing if the caller does not need ids.

Lines are read one at a time. Bad lines are skipped and counted; with `is_strict` the first one ends
the reading.
"""

from __future__ import annotations

import gzip
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any

import msgspec

from kvpool.errors import ConfigError, InvalidArgument, brief
from planner.traces.request_log import RequestLog, Tokenize

MOONCAKE_BLOCK_TOKENS = 512
OTHER_BLOCK_TOKENS = (16, 32, 64, 128, 256, 1024)  # of other published traces
ROWS_TO_TELL_BY = 32  # the first rows, from which the tokens per block are derived
_MOST_TOKENS = 1 << 40
_MOST_PLAIN_TOKENS = 1 << 27  # of a line without ids, whose number would limit the length
_SHOWN = 5


@dataclass(slots=True, frozen=True)
class TraceRequest:
    """One request. Each 64-bit block id names all tokens of the prompt up to the block's end."""

    time_s: float
    input_tokens: int
    output_tokens: int
    block_ids: list[int]


@dataclass(slots=True)
class TraceReport:
    """Counts and problems found while a trace was read."""

    block_tokens: int = MOONCAKE_BLOCK_TOKENS
    skipped: int = 0  # lines
    unsorted: int = 0  # lines earlier than the one before; they are replayed in the order of time
    first: list[str] = field(default_factory=list)  # "line 7: …", the first few problems

    def note(self, line: int, what: str) -> None:
        """Remember the problem of a line, if it is one of the first."""
        if len(self.first) < _SHOWN:
            self.first.append(f"line {line}: {what}")

    def refuse(self, name: str, line: int, what: str, is_strict: bool) -> None:
        """Count a line that is skipped. Raises ConfigError if `is_strict`."""
        what = brief(what)
        if is_strict:
            hint = "without --strict such lines are skipped and counted"
            raise ConfigError(f"{name}, line {line}: {what}", hint=hint)
        self.skipped += 1
        self.note(line, what)

    def note_unsorted(self, name: str, line: int, time_s: float, is_strict: bool) -> None:
        """Count a line with an earlier time than a line above it. Raises ConfigError if `is_strict`."""
        what = f"its time, {time_s:.10g} s, is earlier than that of a line above it"
        if is_strict:
            hint = "without --strict such lines are counted"
            raise ConfigError(f"{name}, line {line}: {what}", hint=hint)
        self.unsorted += 1
        self.note(line, what)


class EmptyTrace(ConfigError):
    """No line of the trace holds a request."""

    code = "empty_trace"


class _Row(msgspec.Struct):
    """A line in Mooncake's format. Ids have 64 bits, so that a compact trace holds them as they are."""

    timestamp: float
    input_length: int
    hash_ids: list[Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]]
    output_length: int = 0


def read_trace(
    lines: Iterable[bytes],
    report: TraceReport,
    *,
    name: str = "trace",
    block_tokens: int | None = None,
    time_unit_s: float | None = None,
    is_strict: bool = False,
    tokenize: Tokenize | None = None,
    needs_ids: bool = True,
) -> Iterator[TraceRequest]:
    """The requests of a trace, in the order of its lines.

    Args:
        lines: e.g. from `open_trace`.
        report: is filled while lines are read.
        name: of the file, for messages.
        block_tokens: tokens per block; None: 512 as in Mooncake's traces, or another usual size if
            all of the first lines imply it.
        time_unit_s: the unit of `timestamp` in seconds; None: milliseconds in Mooncake's format,
            and in a request log as `RequestLog` decides.
        is_strict: end at the first bad line.
        tokenize: tokenizes the texts of a request log.
        needs_ids: a line with lengths alone is bad; otherwise it is a request without `block_ids`.

    Raises:
        ConfigError: a line is bad and `is_strict`.
    """
    rows = _rows(lines, report, name, is_strict)
    if block_tokens is None:
        head = list(islice(rows, ROWS_TO_TELL_BY))
        block_tokens = block_tokens_of(
            [(row.input_length, len(row.hash_ids)) for _, row in head if isinstance(row, _Row)]
        )
        rows = chain(head, rows)
    report.block_tokens = block_tokens
    log = RequestLog(block_tokens, time_unit_s, tokenize)
    latest_s = float("-inf")
    for number, row in rows:
        try:
            if isinstance(row, _Row):
                _check(row, block_tokens)
                time_s = row.timestamp * (time_unit_s or 1e-3)
                request = TraceRequest(time_s, row.input_length, row.output_length, row.hash_ids)
            elif not needs_ids and "input_length" in row:
                request = _without_ids(row, time_unit_s or 1e-3)
            else:
                request = TraceRequest(*log.read(row))
            if request.input_tokens < 1:
                raise InvalidArgument("the prompt has no tokens")
        except InvalidArgument as error:
            report.refuse(name, number, str(error), is_strict)
            continue
        if request.time_s < latest_s:
            report.note_unsorted(name, number, request.time_s, is_strict)
        latest_s = max(latest_s, request.time_s)
        yield request


def load_requests(
    path: str, *, is_strict: bool = False, needs_ids: bool = False, limit: int | None = None
) -> tuple[list[TraceRequest], TraceReport]:
    """The first `limit` requests of a file, sorted by time, all in memory.

    Raises:
        ConfigError: the file cannot be read or holds no request, or a line is bad and `is_strict`.
    """
    report = TraceReport()
    lines = open_trace(path)
    requests = read_trace(lines, report, name=path, is_strict=is_strict, needs_ids=needs_ids)
    found = sorted(islice(requests, limit), key=lambda request: request.time_s)
    if not found:
        raise EmptyTrace(f"{path} holds no request{why_empty(report)}")
    return found, report


def why_empty(report: TraceReport) -> str:
    """The end of an error message about an empty trace: the problem of the first line."""
    return f"; {report.skipped} lines were skipped, {report.first[0]}" if report.first else ""


def open_trace(path: str) -> Iterator[bytes]:
    """The lines of a file, also gzipped (`.gz`), or of standard input (`-`).

    Raises:
        ConfigError: the file cannot be read.
    """
    if path == "-":
        yield from sys.stdin.buffer
        return
    try:
        with gzip.open(path, "rb") if path.endswith(".gz") else Path(path).open("rb") as file:
            yield from file
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"cannot read the trace {path}: {reason}") from error


def _rows(
    lines: Iterable[bytes], report: TraceReport, name: str, is_strict: bool
) -> Iterator[tuple[int, _Row | dict[str, Any]]]:
    """Lines that hold an object, with their numbers from 1."""
    mooncake = msgspec.json.Decoder(_Row)
    anything = msgspec.json.Decoder()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield number, mooncake.decode(line)
            continue
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            what = f"not a request: {error}"
        try:
            row = anything.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            row, what = None, f"not JSON: {error}"
        if isinstance(row, dict) and "hash_ids" not in row:
            yield number, row
        else:
            report.refuse(name, number, what, is_strict)


def _check_sizes(row: _Row) -> None:
    if not abs(row.timestamp) < 1e18:
        raise InvalidArgument(f"timestamp {row.timestamp} is out of range")
    for what, count in (("input_length", row.input_length), ("output_length", row.output_length)):
        if not 0 <= count < _MOST_TOKENS:
            raise InvalidArgument(f"{what} {count} is out of range")


def _check(row: _Row, block_tokens: int) -> None:
    _check_sizes(row)
    check_ids(row.input_length, len(row.hash_ids), block_tokens)


def check_ids(input_length: int, ids: int, block_tokens: int) -> None:
    """Raises InvalidArgument if a prompt of that length does not have so many blocks."""
    if not _implies(input_length, ids, block_tokens):
        implied = -(-input_length // block_tokens)
        raise InvalidArgument(
            f"{ids} hash_ids, but input_length {input_length} implies {implied}"
            f" of {block_tokens} tokens"
        )


def _without_ids(row: dict[str, Any], time_unit_s: float) -> TraceRequest:
    try:
        plain = msgspec.convert({**row, "hash_ids": []}, _Row)
    except msgspec.ValidationError as error:
        raise InvalidArgument(str(error)) from None
    _check_sizes(plain)
    if plain.input_length > _MOST_PLAIN_TOKENS:
        raise InvalidArgument(f"input_length {plain.input_length} is out of range")
    return TraceRequest(plain.timestamp * time_unit_s, plain.input_length, plain.output_length, [])


def _implies(input_length: int, ids: int, block_tokens: int) -> bool:
    """Whether there are as many ids as blocks, with or without an id for a partly filled last one."""
    full, rest = divmod(input_length, block_tokens)
    return full <= ids <= full + (rest > 0)


def block_tokens_of(prompts: Sequence[tuple[int, int]]) -> int:
    """Tokens per block, derived from `input_length` and the number of `hash_ids` of a trace's first lines."""
    # A single line may be wrong, so another size than Mooncake's needs several lines that agree.
    telling = [prompt for prompt in prompts if prompt[1] > 1]
    if len(telling) >= 8 and not any(_implies(*p, MOONCAKE_BLOCK_TOKENS) for p in telling):
        for size in OTHER_BLOCK_TOKENS:
            if all(_implies(*prompt, size) for prompt in telling):
                return size
    return MOONCAKE_BLOCK_TOKENS
