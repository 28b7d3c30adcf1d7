"""Messages to a prefill or decode worker."""

from __future__ import annotations

from typing import Any

from kvpool.blocks.records import Segment
from kvpool.wire.messages.node import NodeDescriptor, ReserveReply
from kvpool.wire.messages.types import Message, Reply


class SetRole(Message, frozen=True):
    """Change a worker's role to "prefill", "decode" or "both".

    Requests that it works on continue.
    """

    role: str


class Sampling(Reply, frozen=True):
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False


class Grant(Reply, frozen=True):
    """Slots that the conductor reserved for a prefill: blocks `indices` (packed uint32) of the
    chain.

    The reservation's `ttl_s` counts from `age_s` before this message was sent. The node's
    quarantine covers the time that the message takes (invariant 2).
    """

    node: NodeDescriptor
    reservation: ReserveReply
    indices: bytes
    age_s: float = 0.0


class Prefill(Message, frozen=True):
    """Compute a prompt's KV: read `segments`, compute the rest, write granted blocks by layer."""

    request_id: str
    namespace_id: bytes
    token_ids: bytes  # packed uint32
    hashes: bytes
    segments: list[Segment]
    nodes: list[NodeDescriptor]
    grant: Grant | None
    deadline_s: float  # from now
    max_wait_s: float = 0.0  # for a slow tier; beyond it, computing is faster; 0: no limit
    engine_fields: dict[str, Any] = {}  # of the caller's body, for an engine server


class PrefillReply(Reply, frozen=True):
    reused_tokens: int
    computed_tokens: int
    committed_blocks: int
    phases: dict[str, float]  # seconds
    bytes_read: dict[str, int]  # by transport
    bytes_written: dict[str, int]
    fallback_reason: str = ""  # why less was read than planned
    tokens_by_tier: dict[str, int] = {}  # reused ones: "hbm", "dram", "nvme", "engine"


class Generate(Message, frozen=True):
    """Decode: read what the pool has, compute the rest of the prompt, then stream tokens.

    `use_pool` false: compute everything here. `local_prefix`: reuse this engine's own prefix cache,
    at most `local_prefix_tokens` of it if that is not 0.
    """

    request_id: str
    namespace_id: bytes
    token_ids: bytes
    hashes: bytes
    segments: list[Segment]
    nodes: list[NodeDescriptor]
    sampling: Sampling
    deadline_s: float
    use_pool: bool = True
    local_prefix: bool = False
    local_prefix_tokens: int = 0
    store: bool = True  # write blocks computed here to the pool
    max_wait_s: float = 0.0  # as in `Prefill`
    engine_fields: dict[str, Any] = {}  # as in `Prefill`


class GenerateChunk(Reply, frozen=True):
    """One item of the stream.

    `so_far`: with the first token, the report up to now. A caller that leaves before the end (at a
    stop string) gets no other. `text`: text of these tokens if the engine has made it; None: the
    caller makes it from the ids.
    """

    token_ids: list[int]
    so_far: GenerateReply | None = None
    text: str | None = None


class GenerateReply(Reply, frozen=True):
    """Ends the stream."""

    finish_reason: str  # "stop", "length"
    pool_tokens: int
    local_tokens: int
    computed_tokens: int
    fallback_reason: str  # "" if all went as planned
    phases: dict[str, float]
    bytes_read: dict[str, int]
    verified_blocks: int  # blocks whose checksum was compared after the read
    bytes_written: dict[str, int] = {}
    tokens_by_tier: dict[str, int] = {}  # as in `PrefillReply`
