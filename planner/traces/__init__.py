"""Reads and checks traces of requests: arrival times, lengths, and the blocks of each prompt."""

from planner.traces.reader import (
    MOONCAKE_BLOCK_TOKENS,
    ROWS_TO_TELL_BY,
    EmptyTrace,
    TraceReport,
    TraceRequest,
    block_tokens_of,
    check_ids,
    load_requests,
    open_trace,
    read_trace,
    why_empty,
)
from planner.traces.request_log import Tokenize

__all__ = [
    "MOONCAKE_BLOCK_TOKENS",
    "ROWS_TO_TELL_BY",
    "EmptyTrace",
    "Tokenize",
    "TraceReport",
    "TraceRequest",
    "block_tokens_of",
    "check_ids",
    "load_requests",
    "open_trace",
    "read_trace",
    "why_empty",
]
