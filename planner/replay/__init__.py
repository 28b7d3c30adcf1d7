"""Generates traces, describes them, and replays them against the node's own eviction policies."""

from planner.replay.belady import belady_hits
from planner.replay.compact_trace import CompactTrace, compact, load_trace
from planner.replay.replay import OF_REQUESTS, REPLAYABLE, Replay, TierSize, over_time, replay
from planner.traces import EmptyTrace, TraceReport, TraceRequest, read_trace

__all__ = [
    "OF_REQUESTS",
    "REPLAYABLE",
    "CompactTrace",
    "EmptyTrace",
    "Replay",
    "TierSize",
    "TraceReport",
    "TraceRequest",
    "belady_hits",
    "compact",
    "load_trace",
    "over_time",
    "read_trace",
    "replay",
]
