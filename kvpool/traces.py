"""Request traces in Mooncake's format, read line by line: when, how long, and which blocks of prompt.

One JSON object a line: `timestamp` (ms), `input_length` and `output_length` (tokens), `hash_ids` (one for
each `block_tokens` tokens of the prompt, the last one perhaps partly filled; equal ids mean an equal prefix
up to there). It reads and checks; it neither replays nor generates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from kvpool.errors import ConfigError

TRACE_BLOCK_TOKENS = 512  # of Mooncake's published traces
MAX_TOKENS = 1 << 31
SHOWN_PROBLEMS = 20


class _Line(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


@dataclass(slots=True, frozen=True)
class TraceRequest:
    """One request. `timestamp_ms` counts from wherever the trace began; `hash_ids` name its blocks."""

    timestamp_ms: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]


@dataclass(slots=True)
class TraceProblems:
    """What was wrong with a trace: how many lines were skipped, and the first of them by number."""

    skipped: int = 0
    shown: list[str] = field(default_factory=list)
    unsorted: int = 0  # lines earlier than their predecessor; kept, for the reader to sort

    def add(self, text: str) -> None:
        self.skipped += 1
        if len(self.shown) < SHOWN_PROBLEMS:
            self.shown.append(text)


def parse_trace(
    lines: Iterable[str | bytes],
    source: str,
    problems: TraceProblems,
    *,
    is_strict: bool = False,
    block_tokens: int = TRACE_BLOCK_TOKENS,
) -> Iterator[TraceRequest]:
    """The requests of a trace, in its order; `problems` is filled on the way.

    Raises:
        ConfigError: a line is wrong and `is_strict`. It names the line.
    """
    decoder = msgspec.json.Decoder(_Line)
    last_ms = float("-inf")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = decoder.decode(line)
            reason = _reason(row, block_tokens)
        except (msgspec.DecodeError, UnicodeError) as error:
            reason = str(error)
        if not reason and row.timestamp < last_ms:
            problems.unsorted += 1
            if is_strict:
                reason = f"timestamp {row.timestamp:g} is earlier than the one before"
        if reason:
            text = f"{source}:{number}: {reason}"
            if is_strict:
                raise ConfigError(text, hint="without --strict such lines are skipped and counted")
            problems.add(text)
            continue
        last_ms = max(last_ms, row.timestamp)
        yield TraceRequest(row.timestamp, row.input_length, row.output_length, row.hash_ids)


def read_trace(
    path: Path,
    *,
    is_strict: bool = False,
    block_tokens: int = TRACE_BLOCK_TOKENS,
    limit: int | None = None,
) -> tuple[list[TraceRequest], TraceProblems]:
    """The first `limit` requests of a file, by time.

    Raises:
        ConfigError: it cannot be read, holds no usable request, or a line is wrong and `is_strict`.
    """
    problems = TraceProblems()
    found: list[TraceRequest] = []
    try:
        with path.open("rb") as lines:
            for request in parse_trace(
                lines, str(path), problems, is_strict=is_strict, block_tokens=block_tokens
            ):
                found.append(request)
                if limit is not None and len(found) >= limit:
                    break
    except OSError as error:
        raise ConfigError(f"cannot read trace {path}: {error.strerror or error}") from None
    if not found:
        why = f"; first problem: {problems.shown[0]}" if problems.shown else ""
        raise ConfigError(f"trace {path} holds no request{why}")
    found.sort(key=lambda request: request.timestamp_ms)
    return found, problems


def _reason(row: _Line, block_tokens: int) -> str:
    """What is wrong with a line; "" when nothing is."""
    if not 0 <= row.timestamp < float("inf"):
        return f"timestamp is {row.timestamp}"
    if not 0 < row.input_length < MAX_TOKENS:
        return f"input_length is {row.input_length}"
    if not 0 <= row.output_length < MAX_TOKENS:
        return f"output_length is {row.output_length}"
    implied = -(-row.input_length // block_tokens)
    if row.hash_ids and len(row.hash_ids) != implied:
        return (
            f"{len(row.hash_ids)} hash_ids, but input_length {row.input_length} implies {implied} "
            f"of {block_tokens} tokens"
        )
    return ""
