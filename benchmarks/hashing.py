"""Measures how long hashing a prompt's blocks takes, beside hashing all its bytes at once (the floor).

    python benchmarks/hashing.py [--tokens 131072]

The target is 10 ms for 128k tokens, less than 1 % of any time to first token of such a prompt.
"""

from __future__ import annotations

import argparse
import timeit
from collections.abc import Callable

import numpy as np
import xxhash

from kvpool.blocks.hashing import hash_chain
from kvpool.blocks.layout import Layout, Namespace

REPEATS = 15


def best_ms(action: Callable[[], object]) -> float:
    """Fastest of several runs, in milliseconds."""
    return 1e3 * min(timeit.repeat(action, number=1, repeat=REPEATS))


def main() -> None:
    """Measure and print a table with ratios to the floor of the same run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=131_072)
    tokens = parser.parse_args().tokens
    layout = Layout("bfloat16", layers=32, kv_heads=8, head_dim=128)
    fast = Namespace("m", "r", layout)
    strong = Namespace("m", "r", layout, hash_algorithm="sha256")
    packed = np.arange(tokens, dtype="<u4")
    listed = packed.tolist()
    raw = packed.tobytes()
    floor = best_ms(lambda: xxhash.xxh3_128_digest(raw))
    rows = {
        "one xxh3-128 over all bytes (floor)": floor,
        "hash_chain xxh3-128, array": best_ms(lambda: hash_chain(fast, packed)),
        "hash_chain xxh3-128, list": best_ms(lambda: hash_chain(fast, listed)),
        "hash_chain sha256, array": best_ms(lambda: hash_chain(strong, packed)),
        "hash_chain sha256, list": best_ms(lambda: hash_chain(strong, listed)),
    }
    print(f"{tokens} tokens, {tokens // layout.block_tokens} blocks, best of {REPEATS}")
    for name, took_ms in rows.items():
        print(f"{name:38} {took_ms:8.3f} ms {took_ms / floor:8.1f} x floor")


if __name__ == "__main__":
    main()
