"""The arriving requests: a trace scaled in time and cut into blocks, or a synthetic one from a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from kvpool.errors import ConfigError
from planner.traces import MOONCAKE_BLOCK_TOKENS, TraceRequest


@dataclass(slots=True, frozen=True)
class Arrival:
    """One request. `hashes` name the whole blocks of its prompt."""

    request_id: str
    at_s: float
    prompt_tokens: int
    output_tokens: int
    hashes: tuple[bytes, ...]


def arrivals(
    requests: Sequence[TraceRequest],
    *,
    speed: float = 1.0,
    block_tokens: int = MOONCAKE_BLOCK_TOKENS,
    trace_block_tokens: int = MOONCAKE_BLOCK_TOKENS,
    max_prompt_tokens: int = 0,
) -> list[Arrival]:
    """The requests of a trace, `speed` times as fast. Requests without `block_ids` share nothing.

    Args:
        block_tokens: of the pool; must divide the trace's blocks.
        max_prompt_tokens: longer prompts are cut; 0: no limit.

    Raises:
        ConfigError: the speed or the block size is invalid.
    """
    if not (speed > 0 and math.isfinite(speed)):
        raise ConfigError(f"speed {speed} is invalid", hint="1 is as recorded, 2 twice as fast")
    if block_tokens < 1 or trace_block_tokens % block_tokens:
        raise ConfigError(
            f"blocks of {block_tokens} tokens do not divide the trace's {trace_block_tokens}"
        )
    pieces = trace_block_tokens // block_tokens
    first_s = requests[0].time_s if requests else 0.0
    found = []
    for number, request in enumerate(requests):
        tokens = request.input_tokens
        if max_prompt_tokens:
            tokens = min(tokens, max_prompt_tokens)
        whole = tokens // block_tokens
        hashes = tuple(
            _block(request.block_ids, number, i // pieces, i % pieces) for i in range(whole)
        )
        at_s = (request.time_s - first_s) / speed
        found.append(Arrival(f"r{number}", at_s, tokens, max(1, request.output_tokens), hashes))
    return found


def _block(block_ids: Sequence[int], number: int, at: int, piece: int) -> bytes:
    """An artificial prefix hash for a piece of a block of the trace; a unique one if the block has no id."""
    if at >= len(block_ids):
        return b"\x01" + number.to_bytes(7, "little") + (at << 12 | piece).to_bytes(8, "little")
    return block_ids[at].to_bytes(12, "little", signed=True) + piece.to_bytes(4, "little")


@dataclass(slots=True, frozen=True)
class Shape:
    """A synthetic load: requests per second, mean lengths in tokens (exponentially distributed), duration."""

    rate: float
    prompt_tokens: float
    output_tokens: float
    seconds: float


def synthetic(
    shapes: Sequence[Shape], seed: int, *, shared_prefixes: int = 0
) -> list[TraceRequest]:
    """Poisson arrivals through one shape after another.

    Args:
        shared_prefixes: the number of prefixes, half as long as the mean prompt, of which each
            prompt begins with one; 0: none.

    Raises:
        ConfigError: a figure of a shape is not positive.
    """
    chance = random.Random(seed)
    found: list[TraceRequest] = []
    at_s = start_s = 0.0
    next_id = 1_000_000
    for shape in shapes:
        if min(shape.rate, shape.prompt_tokens, shape.output_tokens, shape.seconds) <= 0:
            raise ConfigError("rate, lengths and duration of a load must be positive")
        end_s = start_s + shape.seconds
        at_s = max(at_s, start_s)
        while True:
            at_s += chance.expovariate(shape.rate)
            if at_s >= end_s:
                break
            prompt = max(1, round(chance.expovariate(1 / shape.prompt_tokens)))
            blocks = -(-prompt // MOONCAKE_BLOCK_TOKENS)
            ids = list(range(next_id, next_id + blocks))
            next_id += blocks
            if shared_prefixes:
                length = round(shape.prompt_tokens / 2 / MOONCAKE_BLOCK_TOKENS)
                prefix = chance.randrange(shared_prefixes) * 1000
                ids[:length] = range(prefix, prefix + min(length, blocks))
            output = max(1, round(chance.expovariate(1 / shape.output_tokens)))
            found.append(TraceRequest(at_s, prompt, output, ids))
        start_s = end_s
    return found
