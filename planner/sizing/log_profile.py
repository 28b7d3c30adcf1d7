"""Profiles a request log before disaggregating: lengths, turns, RAG, streaming, latencies.

It reads JSON lines with the usual fields of Mooncake's traces and of vLLM's and OpenAI's logs. What
a log does not contain is reported as unknown, not guessed.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain, islice
from typing import Any

import numpy as np

from kvpool.errors import ConfigError, InvalidArgument
from planner.traces import (
    ROWS_TO_TELL_BY,
    EmptyTrace,
    TraceReport,
    block_tokens_of,
    check_ids,
    why_empty,
)

TIME = ("timestamp", "arrival_time", "created_at", "created", "time", "ts")
INPUT = ("input_length", "prompt_tokens", "input_tokens", "num_prompt_tokens", "prompt_len")
OUTPUT = ("output_length", "completion_tokens", "output_tokens", "num_output_tokens", "output_len")
TTFT = ("ttft", "time_to_first_token", "first_token_time")
TPOT = ("tpot", "time_per_output_token", "itl", "inter_token_latency")
TOTAL = ("latency", "e2e_latency", "request_time", "duration", "total_time")
SESSION = ("session_id", "conversation_id", "chat_id", "session")
CHARS_A_TOKEN = 4  # of text without a count of its tokens
MOST_SESSIONS = 1_000_000


@dataclass(slots=True, frozen=True)
class RagRule:
    """What counts as retrieval-augmented: a long prompt with a short output, named documents, or a pattern.

    Args:
        min_input, min_ratio: tokens of the prompt, and prompt over output; a request must reach
            both.
        pattern: regular expression searched in the prompt's text; "": none.

    Raises:
        ConfigError: the pattern is invalid, or a bound is negative.
    """

    min_input: int = 2000
    min_ratio: float = 10.0
    pattern: str = (
        r"(?i)<(context|documents?|sources?)>|\bcontext:\s|\bretrieved (passages|documents)"
    )

    def __post_init__(self) -> None:
        if self.min_input < 0 or self.min_ratio < 0:
            raise ConfigError("a RAG rule's bounds must not be negative")
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ConfigError(f"RAG pattern {self.pattern!r}: {error}") from None

    def takes(self, row: Mapping[str, Any], text: str, prompt: int, output: int) -> bool:
        if row.get("documents") or row.get("retrieved"):
            return True
        if self.pattern and text and re.search(self.pattern, text):
            return True
        return prompt >= self.min_input and prompt >= self.min_ratio * max(1, output)


@dataclass(slots=True)
class LogProfile:
    """Counts over a log. `profile_log` fills it, and `report` makes figures of it."""

    rule: RagRule
    source: str = "log"
    read: TraceReport = field(default_factory=TraceReport)
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    streaming: Counter[bool] = field(default_factory=Counter)
    rag: int = 0
    blocks: int = 0
    blocks_seen: int = 0
    _known_blocks: set[int] = field(default_factory=set)
    _last_turns: dict[int, int] = field(default_factory=dict)  # last full block -> turn
    _sessions: Counter[str] = field(default_factory=Counter)

    def add(self, row: Mapping[str, Any]) -> float | None:
        """Count one request. Returns its time in seconds, or None.

        Raises:
            ConfigError, InvalidArgument: a field is invalid; nothing was counted.
        """
        for inner in ("body", "request", "usage", "response"):
            value = row.get(inner)
            if isinstance(value, Mapping):
                row = {**value, **row}
        text = _text(row)
        prompt = _tokens(row, INPUT)
        if prompt is None:
            prompt = _listed(row) or -(-len(text) // CHARS_A_TOKEN)
        if prompt < 1:
            raise ConfigError("there is no prompt and no count of its tokens")
        output = _tokens(row, OUTPUT)
        at_s = _time(row)
        ids = row.get("hash_ids")
        if ids is not None and not (isinstance(ids, list) and all(type(i) is int for i in ids)):
            raise ConfigError("hash_ids is not a list of numbers")
        if ids is not None:
            check_ids(prompt, len(ids), self.read.block_tokens)
        ttft, tpot, total = (_seconds(row, names) for names in (TTFT, TPOT, TOTAL))
        if tpot is None and None not in (ttft, total, output) and output and output > 1:
            tpot = max(0.0, (total or 0.0) - (ttft or 0.0)) / (output - 1)
        self.inputs.append(prompt)
        self.outputs.append(output if output is not None else -1)
        for known, values in ((at_s, self.times), (ttft, self.ttft), (tpot, self.tpot)):
            if known is not None:
                values.append(known)
        self.turns.append(self._turn(row, ids or (), prompt))
        if isinstance(row.get("stream"), bool):
            self.streaming[row["stream"]] += 1
        self.rag += self.rule.takes(row, text, prompt, output or 0)
        return at_s

    def _turn(self, row: Mapping[str, Any], ids: Sequence[int], prompt: int) -> int:
        """The number of the turn in its conversation; 0 if unknown."""
        turn = 0
        if ids:
            self.blocks += len(ids)
            leading = 0
            for block in ids:
                if block not in self._known_blocks:
                    break
                leading += 1
            self.blocks_seen += leading
            self._known_blocks.update(ids)
            # The next turn begins with all full blocks of the one before it, as in `kvpool trace
            # stats`. Prompts that share less are conversations of their own.
            before = next((b for b in reversed(ids[:leading]) if b in self._last_turns), None)
            turn = 1 + (0 if before is None else self._last_turns.pop(before))
            full = min(len(ids), prompt // self.read.block_tokens)
            if full > 1:  # many conversations share the first block
                self._last_turns[ids[full - 1]] = turn
        session = next((str(row[name]) for name in SESSION if row.get(name)), "")
        if session and len(self._sessions) < MOST_SESSIONS:
            self._sessions[session] += 1
            return self._sessions[session]
        messages = row.get("messages")
        if isinstance(messages, list):
            return sum(isinstance(m, Mapping) and m.get("role") == "user" for m in messages)
        return turn


def profile_log(
    lines: Iterable[str | bytes],
    source: str,
    rule: RagRule | None = None,
    *,
    is_strict: bool = False,
) -> LogProfile:
    """Read a log. Bad lines and lines out of order are counted; bad lines are skipped.

    A trace's `hash_ids` must be as many as its `input_length` implies.

    Raises:
        ConfigError: no request is usable, or a line is bad or out of order and `is_strict`.
    """
    found = LogProfile(rule or RagRule(), source)
    rows = _rows(lines, found.read, source, is_strict)
    head = list(islice(rows, ROWS_TO_TELL_BY))
    found.read.block_tokens = block_tokens_of(
        [
            (row["input_length"], len(row["hash_ids"]))
            for _, row in head
            if type(row.get("input_length")) is int and isinstance(row.get("hash_ids"), list)
        ]
    )
    latest_s = -math.inf
    for number, row in chain(head, rows):
        try:
            at_s = found.add(row)
        except (ConfigError, InvalidArgument) as error:
            found.read.refuse(source, number, str(error), is_strict)
            continue
        if at_s is not None and at_s < latest_s:
            found.read.note_unsorted(source, number, at_s, is_strict)
        latest_s = max(latest_s, -math.inf if at_s is None else at_s)
    if not found.inputs:
        raise EmptyTrace(f"{source} holds no request{why_empty(found.read)}")
    return found


def _rows(
    lines: Iterable[str | bytes], read: TraceReport, source: str, is_strict: bool
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Lines that hold an object, with their numbers from 1."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            read.refuse(source, number, f"not JSON: {error}", is_strict)
            continue
        if isinstance(row, dict):
            yield number, row
        else:
            read.refuse(source, number, "not a JSON object", is_strict)


def report(profile: LogProfile) -> dict[str, Any]:
    """The profile as figures; None: the log does not say."""
    count = len(profile.inputs)
    inputs = np.array(profile.inputs, float)
    outputs = np.array([o for o in profile.outputs if o >= 0], float)
    pairs = [(i, o) for i, o in zip(profile.inputs, profile.outputs, strict=True) if o > 0]
    turns = [turn for turn in profile.turns if turn]
    streamed = sum(profile.streaming.values())
    return {
        "log": profile.source,
        "requests": count,
        "skipped_lines": profile.read.skipped,
        "unsorted_lines": profile.read.unsorted,
        "problems": profile.read.first,
        "input_tokens": _spread(inputs),
        "output_tokens": _spread(outputs),
        "prompt_to_output": _spread(np.array([i / o for i, o in pairs])),
        "total_prompt_to_output": round(float(inputs.sum()) / max(1.0, float(outputs.sum())), 3)
        if outputs.size
        else None,
        "rag_share": round(profile.rag / count, 4),
        "turns": _spread(np.array(turns, float)),
        "multi_turn_share": round(sum(t > 1 for t in turns) / len(turns), 4) if turns else None,
        "streaming_share": round(profile.streaming[True] / streamed, 4) if streamed else None,
        "prefix_reuse": round(profile.blocks_seen / profile.blocks, 4) if profile.blocks else None,
        "rate_per_s": _rates(profile.times),
        "ttft_s": _spread(np.array(profile.ttft)),
        "tpot_s": _spread(np.array(profile.tpot)),
    }


def _spread(values: Any) -> dict[str, float] | None:
    if not len(values):
        return None
    figures = np.percentile(values, (50, 90, 95, 99))
    found = {"mean": float(values.mean()), "min": float(values.min())}
    found |= {n: float(v) for n, v in zip(("p50", "p90", "p95", "p99"), figures, strict=True)}
    return {name: round(value, 6) for name, value in (found | {"max": float(values.max())}).items()}


def _rates(times: Sequence[float]) -> dict[str, float] | None:
    """The mean rate, and the rate in the busiest minute."""
    if len(times) < 2:
        return None
    array = np.sort(np.array(times))
    span = float(array[-1] - array[0])
    if span <= 0:
        return None
    window = min(60.0, span)
    starts = np.arange(len(array))
    ends = np.searchsorted(array, array + window, side="left")
    return {
        "mean": round(len(array) / span, 4),
        "busiest_minute": round(float((ends - starts).max()) / window, 4),
    }


def _tokens(row: Mapping[str, Any], names: Sequence[str]) -> int | None:
    for name in names:
        value = row.get(name)
        if value is None or isinstance(value, (list, str)):
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
            raise ConfigError(f"{name} is {value!r}")
        return value
    return None


def _seconds(row: Mapping[str, Any], names: Sequence[str]) -> float | None:
    """A duration under any of the names, in seconds; with the suffix `_ms` in milliseconds."""
    for name in names:
        for key, unit in ((name, 1.0), (f"{name}_s", 1.0), (f"{name}_ms", 1e-3)):
            value = row.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ConfigError(f"{key} is {value!r}")
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{key} is {value!r}")
            return float(value) * unit
    return None


def _time(row: Mapping[str, Any]) -> float | None:
    value = next((row[name] for name in TIME if row.get(name) is not None), None)
    if value is None:
        return None
    if isinstance(value, str):
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            raise ConfigError(f"{value[:40]!r} is not a time") from None
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(f"{value!r} is not a time")
    # Mooncake's traces count milliseconds. So do numbers too large for seconds since 1970.
    return float(value) / (1e3 if "hash_ids" in row or value > 1e11 else 1.0)


def _listed(row: Mapping[str, Any]) -> int:
    """Tokens of a prompt given as token ids."""
    for name in ("prompt_token_ids", "token_ids", "input_ids", "prompt"):
        value = row.get(name)
        if isinstance(value, list) and value and all(type(item) is int for item in value):
            return len(value)
    return 0


def _text(row: Mapping[str, Any]) -> str:
    messages = row.get("messages")
    if isinstance(messages, list):
        parts = [m.get("content") for m in messages if isinstance(m, Mapping)]
        return "\n".join(p if isinstance(p, str) else json.dumps(p) for p in parts if p)
    found = next((row[n] for n in ("prompt", "input", "text") if isinstance(row.get(n), str)), "")
    return str(found)
