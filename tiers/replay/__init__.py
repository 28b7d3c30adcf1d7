"""Traces of requests: read, made up, described, and replayed against the node's eviction policies.

No node, no wire, no clock: the real policies on recorded requests.
"""

from kvpool.traces import EmptyTrace, TraceReport, TraceRequest, read_trace
from tiers.replay.belady import belady_hits
from tiers.replay.compact import CompactTrace, compact, load_trace
from tiers.replay.replay import OF_REQUESTS, REPLAYABLE, Replay, TierSize, over_time, replay

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
