"""Requests from a file, one JSON object a line: Mooncake's trace format, or a log of requests.

Mooncake: `timestamp` (ms), `input_length`, `output_length` (tokens), `hash_ids` (one id per block, equal ids
mean an equal prefix up to there). A line without `hash_ids` is read as a logged request (`request_log`), or, where
the caller can do without them, as a prompt that shares nothing.

Streaming: one line at a time, whatever the file's size. Lines that are wrong are skipped and counted by kind,
or end the reading where it is strict.
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
ROWS_TO_TELL_BY = 32  # how many tokens a block of this trace has
_MOST_TOKENS = 1 << 40
# Without ids, where no list of them holds a length to what a line can carry.
_MOST_PLAIN_TOKENS = 1 << 27
_SHOWN = 5


@dataclass(slots=True, frozen=True)
class TraceRequest:
    """One request: the blocks of its prompt in order, by 64-bit ids that name all tokens up to there."""

    time_s: float
    input_tokens: int
    output_tokens: int
    block_ids: list[int]


@dataclass(slots=True)
class TraceReport:
    """What became known of a trace while it was read."""

    block_tokens: int = MOONCAKE_BLOCK_TOKENS
    skipped: int = 0  # lines
    unsorted: int = 0  # lines earlier than the one before; they are replayed in the order of time
    first: list[str] = field(default_factory=list)  # "line 7: …", the first few of them

    def note(self, line: int, what: str) -> None:
        """Remember what was wrong with a line, if it is one of the first."""
        if len(self.first) < _SHOWN:
            self.first.append(f"line {line}: {what}")

    def refuse(self, name: str, line: int, what: str, is_strict: bool) -> None:
        """Skip a line and count it. Raises ConfigError: `is_strict`."""
        what = brief(what)
        if is_strict:
            hint = "without --strict such lines are skipped and counted"
            raise ConfigError(f"{name}, line {line}: {what}", hint=hint)
        self.skipped += 1
        self.note(line, what)

    def note_unsorted(self, name: str, line: int, time_s: float, is_strict: bool) -> None:
        """Count a line earlier than one above it. Raises ConfigError: `is_strict`."""
        what = f"its time, {time_s:.10g} s, lies before that of a line above it"
        if is_strict:
            hint = "without --strict such lines are counted"
            raise ConfigError(f"{name}, line {line}: {what}", hint=hint)
        self.unsorted += 1
        self.note(line, what)


class EmptyTrace(ConfigError):
    """No line of the trace holds a request."""

    code = "empty_trace"


class _Row(msgspec.Struct):
    """Mooncake's; ids are 64-bit so that a compact trace holds them as they are."""

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
        lines: see `open_trace`.
        report: filled on the way.
        name: of the file, for messages.
        block_tokens: tokens of a block; None: 512 as in Mooncake's traces, or another usual size where all
            of the first lines imply it.
        time_unit_s: seconds that a `timestamp` of 1 stands for; None: Mooncake's milliseconds, and in a
            request log what `RequestLog` makes of it.
        is_strict: the first wrong line ends it.
        tokenize: of the texts of a request log.
        needs_ids: a line of lengths alone is wrong; else it is a request without `block_ids`.

    Raises:
        ConfigError: a line is wrong and `is_strict`.
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
                raise InvalidArgument("a prompt of no tokens")
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
    """The first `limit` requests of a file, by time, all in memory; see `read_trace`.

    Raises:
        ConfigError: it cannot be read, holds no request, or a line is wrong and `is_strict`.
    """
    report = TraceReport()
    lines = open_trace(path)
    requests = read_trace(lines, report, name=path, is_strict=is_strict, needs_ids=needs_ids)
    found = sorted(islice(requests, limit), key=lambda request: request.time_s)
    if not found:
        raise EmptyTrace(f"{path} holds no request{why_empty(report)}")
    return found, report


def why_empty(report: TraceReport) -> str:
    """The end of the sentence that says so: what was wrong with the first line."""
    return f"; {report.skipped} lines were skipped, {report.first[0]}" if report.first else ""


def open_trace(path: str) -> Iterator[bytes]:
    """The lines of a file, of a gzipped one (`.gz`), or of standard input (`-`).

    Raises:
        ConfigError: it cannot be read.
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
        raise InvalidArgument(f"timestamp {row.timestamp}")
    for what, count in (("input_length", row.input_length), ("output_length", row.output_length)):
        if not 0 <= count < _MOST_TOKENS:
            raise InvalidArgument(f"{what} {count}")


def _check(row: _Row, block_tokens: int) -> None:
    _check_sizes(row)
    check_ids(row.input_length, len(row.hash_ids), block_tokens)


def check_ids(input_length: int, ids: int, block_tokens: int) -> None:
    """Raises InvalidArgument: more or fewer ids than a prompt of that length has blocks."""
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
        raise InvalidArgument(f"input_length {plain.input_length}")
    return TraceRequest(plain.timestamp * time_unit_s, plain.input_length, plain.output_length, [])


def _implies(input_length: int, ids: int, block_tokens: int) -> bool:
    """As many ids as blocks, the last one, partly filled, named or not."""
    full, rest = divmod(input_length, block_tokens)
    return full <= ids <= full + (rest > 0)


def block_tokens_of(prompts: Sequence[tuple[int, int]]) -> int:
    """Tokens of a block, told from `input_length` and the number of `hash_ids` of a trace's first lines."""
    # One line alone may as well be wrong: it takes several of one mind to leave the usual size.
    telling = [prompt for prompt in prompts if prompt[1] > 1]
    if len(telling) >= 8 and not any(_implies(*p, MOONCAKE_BLOCK_TOKENS) for p in telling):
        for size in OTHER_BLOCK_TOKENS:
            if all(_implies(*prompt, size) for prompt in telling):
                return size
    return MOONCAKE_BLOCK_TOKENS
