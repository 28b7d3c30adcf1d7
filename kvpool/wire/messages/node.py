"""Messages to a pool node, and the records inside them."""

from __future__ import annotations

import msgspec

from kvpool.blocks.hash_check import HashProof
from kvpool.blocks.layout import Namespace
from kvpool.blocks.records import BlockInfo, NamespaceUsage, TierUsage
from kvpool.blocks.tier import Tier
from kvpool.wire.messages.types import Message, Reply


class Arena(Reply, frozen=True):
    """One registered memory region of a node. `base` is its address there, for one-sided access.

    Only arenas of DRAM are handed out as file descriptors.
    """

    arena_id: int
    size_bytes: int
    base: int
    kind: str = "dram"  # kind of memory: "dram", or "vram" on device `device_id`
    device_id: int = 0
    tier: Tier = Tier.DRAM


class NodeDescriptor(Reply, frozen=True):
    """How to reach a node and its memory."""

    node_id: str
    epoch: int
    host: str  # label of the machine: equal labels mean that shared memory can be mapped
    address: str  # wire, "host:port" or "unix:/path"
    http_address: str = ""
    arenas: list[Arena] = []
    shm_path: str = ""  # Unix socket that hands out the arenas' file descriptors
    nixl_agent: str = ""
    nixl_metadata: bytes = b""
    transports: list[str] = []  # offered, best first, e.g. ["shm", "nixl", "inline"]
    tenant: str = ""  # the tenant that it serves alone; "": all that are not isolated
    ucx: list[str] = []  # UCX's transports there, as "transport/device"; empty: unknown


class Describe(Message, frozen=True):
    pass


class RegisterNamespace(Message, frozen=True):
    """Registers a namespace, before any call that names it.

    Refused if `proof` differs from the server's own.
    """

    namespace: Namespace
    proof: HashProof | None = None


class NamespaceReply(Reply, frozen=True):
    namespace_id: bytes


class Reserve(Message, frozen=True):
    """Reserve empty slots for one part of the blocks `hashes`, a run of one chain."""

    namespace_id: bytes
    hashes: bytes
    parent: bytes  # hash of the block before the first; b"" at the start of a chain
    part: int
    ttl_s: float
    writer_id: str = ""  # id of the writer; "": the connection's client
    tier: Tier = Tier.DRAM  # HBM: device memory, and DRAM for blocks that find no room there
    is_mapped: bool = False  # as in `Pin`


class ReserveReply(Reply, frozen=True):
    """`statuses` has one `BlockStatus` byte per block, `places` one place per granted block."""

    reservation_id: int  # 0: nothing was granted
    statuses: bytes
    places: bytes
    slot_bytes: int
    ttl_s: float


class Commit(Message, frozen=True):
    """Make granted blocks visible.

    `indices`: which of the granted blocks, packed uint32; empty: all. `checksums`: packed uint64,
    one xxh3-64 of the part's bytes for each committed block.
    """

    reservation_id: int
    checksums: bytes
    indices: bytes = b""


class CommitReply(Reply, frozen=True):
    visible: int  # blocks that became visible: all parts committed


class Abort(Message, frozen=True):
    """Give a reservation back. `writer_stopped`: no write can still arrive (invariant 2)."""

    reservation_id: int
    writer_stopped: bool


class Pin(Message, frozen=True):
    """Lookup and lease in one step: the longest leading run of `hashes` that is here and whole.

    Blocks in a slow tier are promoted first. `max_wait_s` is the longest wait that is worth it to
    the caller, `timeout_s` the longest that it can wait at all; 0: no limit. Blocks that are
    predicted to take longer are declined at once and not promoted.
    """

    namespace_id: bytes
    hashes: bytes
    ttl_s: float
    parts: list[int] = []  # empty: all
    tier_preference: Tier = Tier.DRAM  # HBM: the caller can read device memory as well
    max_wait_s: float = 0.0
    timeout_s: float = 0.0
    is_mapped: bool = False  # the caller copies by shared memory, so NIXL need not be polled


class PinReply(Reply, frozen=True):
    """Places and checksums are ordered block by block, and within a block by part as asked.

    `wait_s`: predicted seconds until the whole run that is here, declined blocks included, would be
    in DRAM; 0 if it was there, -1 if the node has not measured its disk yet. `waited_s`: seconds
    that this call waited.
    """

    lease_id: int  # 0: nothing found
    found: int
    places: bytes
    checksums: bytes
    tiers: bytes  # one byte per block: the tier in which it was found (see `Tier`)
    ttl_s: float
    miss_reason: str = ""  # why block number `found` is missing; one of `DECLINED` if it is here
    wait_s: float = 0.0
    waited_s: float = 0.0


# Why a `Pin` left out blocks that are here: waiting for them is not worth it, or would take too
# long.
DECLINED_COST = "declined_cost"
DECLINED_DEADLINE = "declined_deadline"
DECLINED = frozenset((DECLINED_COST, DECLINED_DEADLINE))


class Renew(Message, frozen=True):
    lease_id: int
    ttl_s: float


class RenewReply(Reply, frozen=True):
    ttl_s: float


class Release(Message, frozen=True):
    """End leases; unknown or ended ones are ignored. Usually sent one-way."""

    lease_ids: list[int]


class RenewReservation(Message, frozen=True):
    reservation_id: int
    ttl_s: float


class ReportCorrupt(Message, frozen=True):
    """A reader found bytes that differ from their checksum: drop the block everywhere."""

    namespace_id: bytes
    block_hash: bytes


class NodeLookup(Message, frozen=True):
    """How many leading blocks are here, and in which tier. Takes no lease and counts as no use."""

    namespace_id: bytes
    hashes: bytes


class NodeLookupReply(Reply, frozen=True):
    """`wait_s`: predicted seconds until all found blocks could be read.

    0 in DRAM, -1 if not known yet.
    """

    found: int
    tiers: bytes
    wait_s: float = 0.0


class PutInline(Message, frozen=True):
    """Reserve, write and commit one part of a block, whose bytes are in the message."""

    namespace_id: bytes
    block_hash: bytes
    parent: bytes
    part: int
    data: bytes


class PutInlineReply(Reply, frozen=True):
    status: int  # BlockStatus.GRANTED: stored; EXISTS: was here; IN_PROGRESS: being written


class GetInline(Message, frozen=True):
    namespace_id: bytes
    block_hash: bytes
    part: int = 0


class GetInlineReply(Reply, frozen=True):
    data: bytes
    checksum: int
    tier: Tier


class Protect(Message, frozen=True):
    """Protect the blocks of `hashes` (a chain from its start) that are here; `release` ends the
    protection.

    With a `ttl_s` they are evicted last, with 0 never.
    """

    namespace_id: bytes
    hashes: bytes
    ttl_s: float
    release: bool = False


class ProtectReply(Reply, frozen=True):
    count: int  # blocks that are protected now, or no longer


class DropBlocks(Message, frozen=True):
    """Remove blocks from all tiers of this node: their owner no longer needs them.

    Leased blocks are hidden now and freed when their leases end.
    """

    namespace_id: bytes
    hashes: bytes


class DropBlocksReply(Reply, frozen=True):
    """How many of them were there."""

    count: int


class ListNamespaces(Message, frozen=True):
    """A page of the node's namespaces that the caller may see, oldest first.

    One shorter than `limit` is the last.
    """

    offset: int = 0
    limit: int = 1000


class ListNamespacesReply(Reply, frozen=True):
    namespaces: list[NamespaceUsage]


class ListBlocks(Message, frozen=True):
    """A page of a namespace's blocks, oldest first; one shorter than `limit` is the last.

    Counts as no use.

    Blocks that come or go between two pages may be missing or listed twice.
    """

    namespace_id: bytes
    offset: int = 0
    limit: int = 1000


class ListBlocksReply(Reply, frozen=True):
    blocks: list[BlockInfo]


class Replicate(Message, frozen=True):
    """Copy a run of one chain from the node `source` to the node that gets this message.

    `deadline_s` counts from now. Blocks copied by then stay.
    """

    namespace_id: bytes
    hashes: bytes
    parent: bytes  # hash of the block before the first; b"" at the start of a chain
    source: NodeDescriptor
    deadline_s: float


class ReplicateReply(Reply, frozen=True):
    """What happened to the leading `stored + existing + in_progress` blocks, and why the rest was
    not copied.

    Blocks are copied in order, up to the first that cannot be copied, because a suffix is useless
    without its prefix. `reason` is "" if no block is left, otherwise "no_room" (here), "source:"
    with the source's reason, or the code of an error.
    """

    stored: int
    existing: int
    in_progress: int
    reason: str
    bytes_moved: dict[str, int]


class Drain(Message, frozen=True):
    """Empty the node and stop it: take no new blocks, move (or drop) those of no other node, wait
    for leases.

    The node stops within `deadline_s` from now in any case.
    """

    deadline_s: float
    drop: bool = False


class DrainReply(Reply, frozen=True):
    """`elsewhere`: blocks that another node had anyway.

    `lost`: blocks that only this node had, by reason.
    """

    moved: int
    elsewhere: int
    lost: dict[str, int]
    leases_left: int  # not ended when the node stopped waiting
    elapsed_s: float


class Prefetch(Message, frozen=True):
    """Bring the leading run of `hashes` into a tier ahead of a read.

    Takes no lease and promises nothing.
    """

    namespace_id: bytes
    hashes: bytes
    tier: Tier = Tier.DRAM  # or HBM


class PrefetchReply(Reply, frozen=True):
    """`resident` blocks were there.

    `declined` blocks were not taken, for `reason`; ask again if you like.
    """

    accepted: int
    resident: int
    declined: int
    reason: str


class ResizeDram(Message, frozen=True):
    """Make the node's DRAM this large, rounded down to slabs.

    The reply comes when new memory can be used.
    """

    target_bytes: int


class ResizeDramReply(Reply, frozen=True):
    """`evacuating_bytes`: of arenas that are being emptied.

    They stay while clients hold blocks there.
    """

    before_bytes: int
    capacity_bytes: int
    evacuating_bytes: int


class ArenaUsage(Reply, frozen=True):
    """One arena of DRAM: its pages, and how full it is."""

    arena_id: int
    size_bytes: int
    used_bytes: int  # in slots
    is_evacuating: bool
    page_bytes: int  # of the mapping
    huge_bytes: int  # in huge pages, as the kernel reported after all pages were touched
    numa_node: int = -1  # -1: the kernel's choice


class PeerRate(Reply, frozen=True):
    """Bytes moved between a process and one node.

    `fabric`: "rdma", "host", "tcp", or "" if unknown.
    """

    node_id: str
    transport: str
    fabric: str
    read_bytes: int
    written_bytes: int
    read_bytes_per_s: float  # measured recently; 0: unknown
    write_bytes_per_s: float


class NodeStats(Message, frozen=True):
    pass


class NodeStatsReply(Reply, frozen=True):
    node_id: str
    epoch: int
    host: str
    uptime_s: float
    tiers: list[TierUsage]
    leases: int
    reservations: int
    namespaces: int
    counters: dict[str, float]  # e.g. "hits", "misses", "evicted", "bytes_read:shm"
    arenas: list[ArenaUsage] = []
    ucx: list[str] = []  # as in `NodeDescriptor`
    peers: list[PeerRate] = []  # nodes that it copied from


def visible_stats(stats: NodeStatsReply, sees_all: bool) -> NodeStatsReply:
    """The statistics that a tenant may see: size and use, but no other tenant's activity."""
    if sees_all:
        return stats
    return msgspec.structs.replace(
        stats, leases=0, reservations=0, namespaces=0, counters={}, arenas=[], peers=[]
    )
