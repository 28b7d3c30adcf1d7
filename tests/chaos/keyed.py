"""Blocks whose every byte follows from their key, so that a reader knows what it must read.

A slot that was reused, torn, moved to the wrong place or read too late cannot pass for the right one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from kvpool import Layout, Namespace, hash_chain

# 24 KiB a block: whole tests move many blocks and few bytes.
LAYOUT = Layout("bfloat16", layers=3, kv_heads=2, head_dim=32, block_tokens=32)
NAMESPACE = Namespace("tests/chaos", "revision-1", LAYOUT)
SIZE = LAYOUT.part_bytes


def prompt(number: int, blocks: int) -> list[bytes]:
    """The chain of prompt `number`: the same in every process."""
    tokens = np.random.default_rng(number).integers(0, 50_000, blocks * LAYOUT.block_tokens)
    return hash_chain(NAMESPACE, tokens)


def content(block_hash: bytes) -> bytes:
    """The bytes of a block."""
    return hashlib.shake_128(block_hash).digest(SIZE)


def contents(hashes: Sequence[bytes]) -> np.ndarray:
    """The bytes of several blocks, a row each."""
    joined = bytearray().join(content(block_hash) for block_hash in hashes)
    return np.frombuffer(joined, dtype=np.uint8).reshape(len(hashes), SIZE)


def wrong_blocks(hashes: Sequence[bytes], rows: np.ndarray) -> list[str]:
    """Those of `hashes` whose row is not what they must be, byte by byte."""
    return [
        block_hash.hex()
        for block_hash, row in zip(hashes, rows, strict=True)
        if row.tobytes() != content(block_hash)
    ]
