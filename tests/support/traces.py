"""Traces for tests: small ones made here, and Mooncake's public one where it lies beside the project."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from planner.replay import CompactTrace, TraceRequest, compact

TRACE_DIR = Path(os.environ.get("KVPOOL_TRACE_DIR", Path(__file__).parents[3] / "shared/traces"))
CONVERSATION = TRACE_DIR / "conversation_trace.jsonl"
needs_conversation = pytest.mark.skipif(
    not CONVERSATION.exists(),
    reason=f"Mooncake's conversation_trace.jsonl is not in {TRACE_DIR} (set KVPOOL_TRACE_DIR)",
)


def of_chains(chains: Iterable[Sequence[int]], gap_s: float = 1.0) -> CompactTrace:
    """A trace of these prompts, each block whole."""
    return compact(
        TraceRequest(gap_s * at, 512 * len(chain), 100, list(chain))
        for at, chain in enumerate(chains)
    )


def row(time_ms: float, tokens: int, ids: Sequence[int], output: int = 10) -> dict[str, Any]:
    """A line of Mooncake's format."""
    return {
        "timestamp": time_ms,
        "input_length": tokens,
        "output_length": output,
        "hash_ids": list(ids),
    }


def encode(rows: Iterable[Any]) -> list[bytes]:
    """Lines of a file: objects as JSON, bytes as they are."""
    return [r if isinstance(r, bytes) else json.dumps(r).encode() + b"\n" for r in rows]
