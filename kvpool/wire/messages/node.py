"""Messages to a pool node, and the records inside them."""

from __future__ import annotations

import msgspec

from kvpool.blocks.hash_check import HashProof
from kvpool.blocks.layout import Namespace
from kvpool.blocks.tier import Tier
from kvpool.wire.messages.types import Message, Reply


class Arena(Reply, frozen=True):
    """One registered memory region of a node; `base` is its address there, for one-sided access.

    Only those of DRAM are handed out as file descriptors.
    """

    arena_id: int
    size_bytes: int
    base: int
    kind: str = "dram"  # of the memory: "vram" on device `device_id`
    device_id: int = 0
    tier: Tier = Tier.DRAM


class NodeDescriptor(Reply, frozen=True):
    """How to reach a node, and how its memory can be reached from elsewhere."""

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
    tenant: str = ""  # whose memory it lends alone; "": that of all who are not isolated
    ucx: list[str] = []  # what UCX has there, as "transport/device"; empty: not told


class Describe(Message, frozen=True):
    pass


class RegisterNamespace(Message, frozen=True):
    """Makes a namespace known; must come before any call that names it. Refused where `proof` is another's."""

    namespace: Namespace
    proof: HashProof | None = None


class NamespaceReply(Reply, frozen=True):
    namespace_id: bytes


class Reserve(Message, frozen=True):
    """Ask for empty slots for the blocks `hashes` (a run of one chain) of one part."""

    namespace_id: bytes
    hashes: bytes
    parent: bytes  # hash of the block before the first; b"" at the start of a chain
    part: int
    ttl_s: float
    writer_id: str = ""  # who will write; default: the connection's client
    tier: Tier = (
        Tier.DRAM
    )  # HBM asks for device memory, and grants in DRAM what finds no room there
    is_mapped: bool = False  # as in `Pin`


class ReserveReply(Reply, frozen=True):
    """`statuses` has one byte a block (see `BlockStatus`); places follow for the granted ones only."""

    reservation_id: int  # 0: nothing was granted
    statuses: bytes
    places: bytes
    slot_bytes: int
    ttl_s: float


class BlockStatus:
    """Values of `ReserveReply.statuses`."""

    GRANTED = 0
    EXISTS = 1
    IN_PROGRESS = 2
    NO_ROOM = 3


class Commit(Message, frozen=True):
    """Make granted blocks visible. `indices` (packed uint32, into the granted ones) empty: all of them.

    `checksums`: packed uint64, one xxh3-64 of the part's bytes for each block committed.
    """

    reservation_id: int
    checksums: bytes
    indices: bytes = b""


class CommitReply(Reply, frozen=True):
    visible: int  # blocks that became visible: all parts committed


class Abort(Message, frozen=True):
    """Give a reservation back. `writer_stopped`: no write is in flight any more (invariant 2)."""

    reservation_id: int
    writer_stopped: bool


class Pin(Message, frozen=True):
    """Lookup and lease in one step: the longest leading run of `hashes` that is here and whole.

    What stands in a slow tier is waited for as long as `max_wait_s` (what the caller finds worth it) and
    `timeout_s` (what it can wait at all) allow; 0 is no limit. What is predicted to take longer is declined
    at once, and not promoted.
    """

    namespace_id: bytes
    hashes: bytes
    ttl_s: float
    parts: list[int] = []  # empty: all
    tier_preference: Tier = (
        Tier.DRAM
    )  # HBM: the caller can read device memory; DRAM: every place is in DRAM
    max_wait_s: float = 0.0
    timeout_s: float = 0.0
    is_mapped: bool = (
        False  # the caller copies through shared memory: no progress for one-sided transfers
    )


class PinReply(Reply, frozen=True):
    """Places and checksums are ordered block by block, and within a block by part as asked.

    `wait_s`: what bringing the whole run that is here into DRAM was predicted to take when asked, declined
    blocks included; 0 when it stood there, -1 while the node does not know its disk. `waited_s`: what
    this call did wait.
    """

    lease_id: int  # 0: nothing found
    found: int
    places: bytes
    checksums: bytes
    tiers: bytes  # one byte a block: where it was found (see `Tier`)
    ttl_s: float
    miss_reason: str = ""  # why block number `found` was not here, or is not given: see `DECLINED`
    wait_s: float = 0.0
    waited_s: float = 0.0


# Reasons of a `Pin` for blocks that are here: waiting for them is not worth it, or would end too late.
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
    """A reader found bytes that do not match their checksum: drop the block everywhere."""

    namespace_id: bytes
    block_hash: bytes


class NodeLookup(Message, frozen=True):
    """How many leading blocks stand here, and in which tier. Takes no lease, touches no order."""

    namespace_id: bytes
    hashes: bytes


class NodeLookupReply(Reply, frozen=True):
    """`wait_s`: until all that was found could be read; 0 when it stands in DRAM, -1 when not known yet."""

    found: int
    tiers: bytes
    wait_s: float = 0.0


class PutInline(Message, frozen=True):
    """Reserve, write and commit one block part whose bytes ride in the frame (for trying out)."""

    namespace_id: bytes
    block_hash: bytes
    parent: bytes
    part: int
    data: bytes


class PutInlineReply(Reply, frozen=True):
    status: int  # BlockStatus.GRANTED: stored; EXISTS: was here; IN_PROGRESS: someone writes it


class GetInline(Message, frozen=True):
    namespace_id: bytes
    block_hash: bytes
    part: int = 0


class GetInlineReply(Reply, frozen=True):
    data: bytes
    checksum: int
    tier: Tier


class Protect(Message, frozen=True):
    """Keep the blocks `hashes` (a chain from its start) that stand here; `release`: no longer.

    With a `ttl_s` they are evicted only when nothing else can be, with 0 never.
    """

    namespace_id: bytes
    hashes: bytes
    ttl_s: float
    release: bool = False


class ProtectReply(Reply, frozen=True):
    count: int  # blocks protected so now, or no longer


class DropBlocks(Message, frozen=True):
    """Remove blocks from this node, from all its tiers: their owner has no more use for them.

    What is leased is hidden now and freed when it is let go.
    """

    namespace_id: bytes
    hashes: bytes


class DropBlocksReply(Reply, frozen=True):
    """How many stood there."""

    count: int


class TierUsage(Reply, frozen=True):
    """Accounting of one tier, in bytes; the states add up to `capacity_bytes` (invariant 7)."""

    tier: Tier
    capacity_bytes: int
    free_bytes: int
    reserved_bytes: int
    committed_bytes: int
    pinned_bytes: int
    quarantined_bytes: int
    blocks: int
    retained_bytes: int = 0  # promised to protected blocks, here or not; no state of its own
    read_bytes_per_s: float = 0.0  # measured, while it works; 0 while unknown
    write_bytes_per_s: float = 0.0
    queued_read_bytes: int = 0  # promotions under way or waiting
    note: str = ""  # for people


class NamespaceUsage(Reply, frozen=True):
    """One namespace of a node, without what is secret of it; `standing`: whole blocks by tier."""

    namespace_id: bytes
    name: str
    model: str
    block_tokens: int
    tp_size: int
    blocks: int  # those that are being written, too
    standing: dict[Tier, int]


class ListNamespaces(Message, frozen=True):
    """The namespaces that a node knows, as far as the caller may know of them; see `Namespaces` for pages."""

    offset: int = 0
    limit: int = 1000


class ListNamespacesReply(Reply, frozen=True):
    namespaces: list[NamespaceUsage]


class BlockInfo(Reply, frozen=True):
    """One block of a node. `depth`: blocks before it that were known when it came; an estimate."""

    block_hash: bytes
    parent: bytes
    depth: int
    tiers: list[Tier]  # where it stands whole, best first; empty while it is written
    parts: int  # committed, of the fullest copy
    size_bytes: int  # of its slots, in all tiers
    pins: int  # leases on it
    retained_s: float  # seconds left; 0: for ever, -1: not protected
    idle_s: float  # since its last use, about; uses before the node's start count as of then


class ListBlocks(Message, frozen=True):
    """A page of a namespace's blocks, oldest first; one shorter than `limit` is the last. No look is a use.

    What comes or goes between two pages may be missing or come twice.
    """

    namespace_id: bytes
    offset: int = 0
    limit: int = 1000


class ListBlocksReply(Reply, frozen=True):
    blocks: list[BlockInfo]


class Replicate(Message, frozen=True):
    """Sent to the node that shall hold the copies: pull a run of one chain from the node `source`.

    `deadline_s` is from now; what was copied by then stays.
    """

    namespace_id: bytes
    hashes: bytes
    parent: bytes  # hash of the block before the first; b"" at the start of a chain
    source: NodeDescriptor
    deadline_s: float


class ReplicateReply(Reply, frozen=True):
    """What became of the leading `stored + existing + in_progress` blocks; the rest ended by `reason`.

    Blocks are copied in order and the copying ends at the first that cannot be: a suffix without its
    prefix is dead weight. `reason` is "" when all were dealt with, else "no_room" (here), "source:" and why
    the source had not got it, or the code of an error.
    """

    stored: int
    existing: int
    in_progress: int
    reason: str
    bytes_moved: dict[str, int]


class Drain(Message, frozen=True):
    """Empty the node and let it end: no new blocks, move (or drop) what stands nowhere else, wait for leases.

    It ends after `deadline_s` from now in any case.
    """

    deadline_s: float
    drop: bool = False


class DrainReply(Reply, frozen=True):
    """`elsewhere`: blocks that stood on another node anyway. `lost`: blocks that stood here alone, by reason."""

    moved: int
    elsewhere: int
    lost: dict[str, int]
    leases_left: int  # still in force when the node gave up waiting
    elapsed_s: float


class Prefetch(Message, frozen=True):
    """Bring the leading run of `hashes` into a tier ahead of a read. Takes no lease, promises nothing."""

    namespace_id: bytes
    hashes: bytes
    tier: Tier = Tier.DRAM  # or HBM


class PrefetchReply(Reply, frozen=True):
    """`declined` blocks were not taken for `reason` and may be asked again; `resident` needed nothing."""

    accepted: int
    resident: int
    declined: int
    reason: str


class ResizeDram(Message, frozen=True):
    """Make the node's DRAM this large, rounded down to slabs; answered when what is new can be used."""

    target_bytes: int


class ResizeDramReply(Reply, frozen=True):
    """`evacuating_bytes`: of arenas that are being emptied, and stay for as long as somebody holds blocks there."""

    before_bytes: int
    capacity_bytes: int
    evacuating_bytes: int


class ArenaUsage(Reply, frozen=True):
    """One arena of DRAM: what it is made of, and how full it is."""

    arena_id: int
    size_bytes: int
    used_bytes: int  # in slots
    is_evacuating: bool
    page_bytes: int  # of the mapping
    huge_bytes: int  # in huge pages, as the kernel said when all had been touched
    numa_node: int = -1  # -1: wherever the kernel liked


class PeerRate(Reply, frozen=True):
    """What moved between a process and one node. `fabric`: "rdma", "host", "tcp", or "" when unknown."""

    node_id: str
    transport: str
    fabric: str
    read_bytes: int
    written_bytes: int
    read_bytes_per_s: float  # measured lately; 0 while unknown
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
    """What one tenant is told of a node that many use: its room, and nothing of what others do there."""
    if sees_all:
        return stats
    return msgspec.structs.replace(
        stats, leases=0, reservations=0, namespaces=0, counters={}, arenas=[], peers=[]
    )
