"""Numbers that look random and follow from a seed and names alone, on every machine and in every process."""

from __future__ import annotations

import xxhash


def lot(seed: int, *names: str) -> float:
    """A number in (0, 1), uniform over requests and workers."""
    text = "\x1f".join((str(seed), *names)).encode("utf-8", "surrogatepass")
    return ((xxhash.xxh3_64_intdigest(text) >> 11) + 0.5) / (1 << 53)
