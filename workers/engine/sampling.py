"""Draws one token from logits: greedy, or nucleus sampling with a seed for each position.

The draw depends on logits, sampling and position alone, so a request that moves to another worker
in the middle of its text continues with the same tokens.
"""

from __future__ import annotations

import struct

import torch
import xxhash

from kvpool.errors import InvalidArgument
from kvpool.wire.messages import Sampling

GREEDY_BELOW = 1e-5  # a smaller temperature is 0 in effect, and may be 0 in float32


def draw(logits: torch.Tensor, sampling: Sampling, *, position: int) -> int:
    """The token that `sampling` picks.

    Args:
        logits: one float32 score per token of the vocabulary, on the CPU.
        position: of the token to be drawn, counted from the start of the prompt.

    Raises:
        InvalidArgument: temperature is negative or not finite, or top_p is not in (0, 1].
    """
    if not 0.0 <= sampling.temperature < float("inf"):
        raise InvalidArgument(f"temperature is {sampling.temperature}", hint="0 or more")
    if not 0.0 < sampling.top_p <= 1.0:
        raise InvalidArgument(f"top_p is {sampling.top_p}", hint="above 0 and at most 1")
    if sampling.temperature < GREEDY_BELOW:
        return int(logits.argmax())
    # subtracting the maximum first keeps a small temperature from overflowing
    scaled = (logits - logits.max()) / sampling.temperature
    chances, tokens = torch.softmax(scaled, dim=-1).sort(descending=True, stable=True)
    # The fewest tokens that reach top_p together: keep a token while those before it do not reach
    # top_p.
    before = chances.cumsum(dim=-1) - chances
    is_kept = before < sampling.top_p
    is_kept[0] = True  # also where top_p is 0 in float32
    chances = torch.where(is_kept, chances, 0.0)
    generator = torch.Generator().manual_seed(_seed(sampling.seed, position))
    return int(tokens[torch.multinomial(chances, 1, generator=generator)])


def _seed(seed: int, position: int) -> int:
    # torch's CPU generator uses the low 32 bits only, so these must depend on all bits of both
    # numbers.
    mixed = struct.pack("<QQ", seed & 0xFFFF_FFFF_FFFF_FFFF, position)
    return xxhash.xxh3_64_intdigest(mixed) >> 1
