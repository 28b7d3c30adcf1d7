"""Records that members of a pool keep or report, and that messages carry.

They are array-like msgspec structs: the order of the fields is the format, so only append fields, with defaults.
"""

from __future__ import annotations

import msgspec

from kvpool.blocks.tier import Tier


class Record(msgspec.Struct, array_like=True, frozen=True):
    """Base of all records."""


class BlockStatus:
    """Values of `ReserveReply.statuses`."""

    GRANTED = 0
    EXISTS = 1
    IN_PROGRESS = 2
    NO_ROOM = 3


class TierUsage(Record, frozen=True):
    """Accounting of one tier, in bytes; the states add up to `capacity_bytes` (invariant 7)."""

    tier: Tier
    capacity_bytes: int
    free_bytes: int
    reserved_bytes: int
    committed_bytes: int
    pinned_bytes: int
    quarantined_bytes: int
    blocks: int
    retained_bytes: int = 0  # of protected blocks, here or not; not one of the states
    read_bytes_per_s: float = 0.0  # measured while the tier is used; 0: unknown
    write_bytes_per_s: float = 0.0
    queued_read_bytes: int = 0  # of promotions that run or wait
    note: str = ""  # a remark for people


class NamespaceUsage(Record, frozen=True):
    """One namespace of a node, without its secrets. `resident`: whole blocks by tier."""

    namespace_id: bytes
    name: str
    model: str
    block_tokens: int
    tp_size: int
    blocks: int  # including those that are being written
    resident: dict[Tier, int]


class BlockInfo(Record, frozen=True):
    """One block of a node. `depth`: how many blocks before it were known when it was written; an estimate."""

    block_hash: bytes
    parent: bytes
    depth: int
    tiers: list[Tier]  # that have all its parts, fastest first; empty while it is written
    parts: int  # committed parts of its fullest copy
    size_bytes: int  # of its slots, in all tiers
    pins: int  # leases on it
    retained_s: float  # seconds of protection left; 0: for ever, -1: not protected
    idle_s: float  # since its last use, or the node's start if that is later; approximate


class BlockEvent(Record, frozen=True):
    """Blocks of one namespace that a node stored or removed: a packed run of hashes."""

    kind: str  # "stored", "removed", "cleared"
    namespace_id: bytes
    hashes: bytes
    tier: Tier | None  # of a "stored" event; None: every tier


class Segment(Record, frozen=True):
    """A run of a chain that one node holds: blocks [start, start + count)."""

    node_id: str
    start: int
    count: int
    tier: Tier  # the slowest that has some of the blocks
    ready: int = 0  # leading blocks that are in a faster tier


class WorkerLoad(Record, frozen=True):
    """A worker's load, as it reports it with each heartbeat."""

    running: int  # requests that it works on
    queued_prefill_tokens: int
    decode_sequences: int
    decode_context_tokens: int
    prefill_tokens_per_s: float  # measured; 0: unknown
    tpot_s: float  # measured, smoothed; 0: unknown
    fetch_bytes_per_s: float = 0.0
    places: int = 0  # requests that it accepts at once; 0: unknown
