"""Every message of the wire protocol, in one place.

A request is a tagged msgspec struct (array-like: field order is the format; only ever append fields with
defaults). `REPLIES` names the reply of each request, which has no tag of its own. Lists of hashes travel
packed (16 bytes each), lists of places as packed int64 pairs (arena id, byte offset), checksums as packed
uint64, all little-endian, so that a frame of 256 blocks costs four small objects and not a thousand.
"""

from __future__ import annotations

import msgspec

from kvpool.blocks.hash_check import HashProof
from kvpool.blocks.layout import Namespace

PROTOCOL_VERSION = 1


class Message(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Base of all requests."""


class Reply(msgspec.Struct, array_like=True, frozen=True):
    """Base of all replies and of the records inside messages."""


# ---------------------------------------------------------------- every server


class Hello(Message, frozen=True):
    """First frame on a connection. `client_id` is a UUID (never an address); `epoch` its start."""

    protocol: int
    client_id: str
    kind: str  # "client", "node", "worker", "conductor"
    epoch: int = 0
    token: str = ""


class HelloReply(Reply, frozen=True):
    protocol: int
    kind: str
    server_id: str
    epoch: int


class Ok(Reply, frozen=True):
    """Nothing to say but that it is done."""


class Ping(Message, frozen=True):
    pass


# ---------------------------------------------------------------- pool node


class Arena(Reply, frozen=True):
    """One registered memory region of a node; `base` is its address there, for one-sided access.

    Only those of tier "dram" are handed out as file descriptors.
    """

    arena_id: int
    size_bytes: int
    base: int
    kind: str = "dram"  # of the memory: "vram" on device `device_id`
    device_id: int = 0
    tier: str = "dram"


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
    tier: str = ""  # "hbm" asks for device memory, and grants in dram what finds no room there
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
    tier_preference: str = ""  # "hbm": the caller can read device memory; else places lie in dram
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
    tiers: bytes  # one byte a block: where it was found (see `TIERS`)
    ttl_s: float
    miss_reason: str = ""  # why block number `found` was not here, or is not given: see `DECLINED`
    wait_s: float = 0.0
    waited_s: float = 0.0


# Reasons of a `Pin` for blocks that are here: waiting for them is not worth it, or would end too late.
DECLINED_COST = "declined_cost"
DECLINED_DEADLINE = "declined_deadline"
DECLINED = frozenset((DECLINED_COST, DECLINED_DEADLINE))

TIERS = ("hbm", "dram", "nvme")


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
    tier: str


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

    tier: str
    capacity_bytes: int
    free_bytes: int
    reserved_bytes: int
    committed_bytes: int
    pinned_bytes: int
    quarantined_bytes: int
    blocks: int
    protected_bytes: int = 0  # promised to protected blocks, here or not; no state of its own
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
    standing: dict[str, int]


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
    tiers: list[str]  # where it stands whole, best first; empty while it is written
    parts: int  # committed, of the fullest copy
    size_bytes: int  # of its slots, in all tiers
    pins: int  # leases on it
    protected_s: float  # seconds left; 0: for ever, -1: not protected
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
    tier: str = ""  # "hbm"; default: dram


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
    """`retiring_bytes`: of arenas that are being emptied, and stay for as long as somebody holds blocks there."""

    before_bytes: int
    capacity_bytes: int
    retiring_bytes: int


class ArenaUsage(Reply, frozen=True):
    """One arena of DRAM: what it is made of, and how full it is."""

    arena_id: int
    size_bytes: int
    used_bytes: int  # in slots
    is_retiring: bool
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


# ---------------------------------------------------------------- conductor: membership and index


class BlockEvent(Reply, frozen=True):
    """What happened to blocks of one namespace on a node: a packed run of hashes per event."""

    kind: str  # "stored", "removed", "cleared"
    namespace_id: bytes
    hashes: bytes
    tier: str


class NodeJoin(Message, frozen=True):
    """A node announces itself; it sends its full block report next, in slices of `NodeEvents`."""

    descriptor: NodeDescriptor
    namespaces: list[Namespace]


class NodeEvents(Message, frozen=True):
    """Batch of events, numbered without a gap from 1 within an epoch. `snapshot`: a slice of the full report."""

    node_id: str
    epoch: int
    sequence: int
    events: list[BlockEvent]
    snapshot: bool = False
    snapshot_end: bool = False


class NodeHeartbeat(Message, frozen=True):
    node_id: str
    epoch: int
    sequence: int  # of the last event batch sent
    stats: NodeStatsReply


class MemberReply(Reply, frozen=True):
    """`resync`: join again and send the full report (unknown member, gap, or restarted conductor)."""

    resync: bool
    heartbeat_s: float


class NodeLeave(Message, frozen=True):
    node_id: str
    epoch: int


class NodeDraining(Message, frozen=True):
    """The node is about to stop: give it no new blocks. What it holds can be read until it leaves."""

    node_id: str
    epoch: int


class WorkerDescriptor(Reply, frozen=True):
    worker_id: str
    epoch: int
    role: str  # "prefill", "decode", "both"
    host: str
    address: str
    namespace: Namespace
    model: str
    max_model_tokens: int
    http_address: str = ""
    kv_events: str = ""  # where its engine publishes KV events (ZMQ), e.g. "tcp://10.0.0.5:5557"
    kv_replay: str = ""  # where it replays them
    may_change_role: bool = True  # the conductor may have it prefill instead of decode, and back


class WorkerLoad(Reply, frozen=True):
    """What a worker says of itself with each heartbeat."""

    running: int  # requests in work
    queued_prefill_tokens: int
    decode_sequences: int
    decode_context_tokens: int
    prefill_tokens_per_s: float  # measured; 0 when unknown
    tpot_s: float  # measured, smoothed; 0 when unknown
    fetch_bytes_per_s: float = 0.0
    places: int = 0  # requests that it takes at once; 0: unknown


class WorkerJoin(Message, frozen=True):
    """`proof`: as in `RegisterNamespace`, of the descriptor's namespace."""

    descriptor: WorkerDescriptor
    proof: HashProof | None = None


class WorkerHeartbeat(Message, frozen=True):
    worker_id: str
    epoch: int
    load: WorkerLoad


class WorkerLeave(Message, frozen=True):
    worker_id: str
    epoch: int


# ---------------------------------------------------------------- conductor: clients


class Segment(Reply, frozen=True):
    """A run of a chain that one node holds: blocks [start, start + count)."""

    node_id: str
    start: int
    count: int
    tier: str  # the slowest in which some of it stands
    ready: int = 0  # leading blocks of it that stand in a faster one


class Lookup(Message, frozen=True):
    """Leading blocks of a chain that the pool has, and where, preferring nodes on `host`.

    `exclude`: ids of nodes that count as if they held nothing (they failed the caller just now).
    """

    namespace_id: bytes
    hashes: bytes
    host: str = ""
    exclude: list[str] = []


class LookupReply(Reply, frozen=True):
    """`wait_s`: as in `NodeLookupReply`; a conductor goes by what nodes last reported."""

    found: int
    segments: list[Segment]
    wait_s: float = 0.0


class ReportMiss(Message, frozen=True):
    """A planned pin or read of these blocks at this node failed: do not plan it again for a while."""

    node_id: str
    namespace_id: bytes
    hashes: bytes


class Standing(Message, frozen=True):
    """On how many live nodes each block stands; unlike `Lookup` it does not end at the first gap.

    Nodes that drain do not count, for what stands there is about to go.
    """

    namespace_id: bytes
    hashes: bytes
    exclude: list[str] = []


class StandingReply(Reply, frozen=True):
    """`copies` has one byte a block: how many nodes, 255 at most."""

    copies: bytes


class Nodes(Message, frozen=True):
    pass


class NodeInfo(Reply, frozen=True):
    descriptor: NodeDescriptor
    state: str  # "live", "suspect", "draining"
    free_bytes: int
    capacity_bytes: int
    age_s: float = float("inf")  # since it started or joined, whichever is longer ago


class NodesReply(Reply, frozen=True):
    nodes: list[NodeInfo]


class Namespaces(Message, frozen=True):
    """A page of the known namespaces, oldest first; one shorter than `limit` is the last."""

    offset: int = 0
    limit: int = 1000


class NamespacesReply(Reply, frozen=True):
    namespaces: list[Namespace]


class Tokenize(Message, frozen=True):
    """Token ids of a text as this conductor's model reads it.

    `is_system_prompt`: the ids with which every conversation under this system prompt begins.
    """

    text: str
    is_system_prompt: bool = False


class TokenizeReply(Reply, frozen=True):
    token_ids: bytes  # packed uint32


class WorkerInfo(Reply, frozen=True):
    descriptor: WorkerDescriptor
    state: str
    load: WorkerLoad


class PolicyChange(Message, frozen=True):
    """Change the routing policy: "replace" (by the YAML in `text`), "rollback", "resume", or "" (only ask)."""

    action: str = ""
    text: str = ""


class PolicyReply(Reply, frozen=True):
    """The policy in force. `error`: why the file's present content is not."""

    text: str
    is_rolled_back: bool
    error: str = ""


class PolicyExplain(Message, frozen=True):
    """What would the policy say of such a request, with the pool as it is now?"""

    model: str = ""
    tenant: str = ""
    endpoint: str = ""
    key: str = ""
    prompt_tokens: int = 0
    found_tokens: int = 0
    output_tokens: int = 0


class PolicyCheck(Reply, frozen=True):
    """One threshold as it was applied."""

    what: str
    value: float
    threshold: float
    holds: bool


class PolicyVerdict(Reply, frozen=True):
    """`mode`: "local", "disaggregated", or "" (by cost). `rule`: the one that took it, or ""."""

    mode: str
    rule: str
    reason: str
    checks: list[PolicyCheck]


class PoolStats(Message, frozen=True):
    pass


class PoolStatsReply(Reply, frozen=True):
    conductor_id: str
    epoch: int
    uptime_s: float
    nodes: list[NodeStatsReply]
    node_states: dict[str, str]
    workers: list[WorkerInfo]
    index_blocks: int
    counters: dict[str, float]
    index: str = "memory"  # or "redis"
    notice: str = ""  # what an operator should know, such as that Redis is down
    conductors: list[
        str
    ] = []  # addresses of those that share this pool; empty with the memory index


# ---------------------------------------------------------------- workers


class SetRole(Message, frozen=True):
    """Have a worker take another role: "prefill", "decode" or "both". What it has in work goes on."""

    role: str


class Sampling(Reply, frozen=True):
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False


class Grant(Reply, frozen=True):
    """Slots that the conductor reserved for a prefill: blocks `indices` (packed uint32) of the chain.

    The reservation's `ttl_s` counts from `age_s` before this was sent. What the message takes on its way, the
    node's quarantine covers (invariant 2).
    """

    node: NodeDescriptor
    reservation: ReserveReply
    indices: bytes
    age_s: float = 0.0


class Prefill(Message, frozen=True):
    """Compute a prompt's KV; read `segments` from the pool first, write the granted blocks layer by layer."""

    request_id: str
    namespace_id: bytes
    token_ids: bytes  # packed uint32
    hashes: bytes
    segments: list[Segment]
    nodes: list[NodeDescriptor]
    grant: Grant | None
    deadline_s: float  # from now
    max_wait_s: float = 0.0  # for a slow tier, before computing is faster; 0: no limit


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

    `use_pool` false: compute everything here. `local_prefix`: reuse this engine's own prefix cache, cut
    to `local_prefix_tokens` when that is not 0.
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


class GenerateChunk(Reply, frozen=True):
    """One item of the stream. `so_far`, with the first token: the report as it would be now.

    A caller that leaves before the end (a stop string was found) has no other. `text`: of these tokens, where
    the engine has made it; None: whoever reads the ids makes it.
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
    fallback_reason: str  # "" when all went as planned
    phases: dict[str, float]
    bytes_read: dict[str, int]
    verified_blocks: int  # blocks whose checksum was compared after the read
    bytes_written: dict[str, int] = {}
    tokens_by_tier: dict[str, int] = {}  # as in `PrefillReply`


REPLIES: dict[type[Message], type[Reply]] = {
    Hello: HelloReply,
    Ping: Ok,
    Describe: NodeDescriptor,
    RegisterNamespace: NamespaceReply,
    Reserve: ReserveReply,
    Commit: CommitReply,
    Abort: Ok,
    Pin: PinReply,
    Renew: RenewReply,
    Release: Ok,
    RenewReservation: RenewReply,
    ReportCorrupt: Ok,
    NodeLookup: NodeLookupReply,
    PutInline: PutInlineReply,
    GetInline: GetInlineReply,
    Replicate: ReplicateReply,
    Drain: DrainReply,
    ResizeDram: ResizeDramReply,
    Prefetch: PrefetchReply,
    NodeStats: NodeStatsReply,
    Protect: ProtectReply,
    DropBlocks: DropBlocksReply,
    ListNamespaces: ListNamespacesReply,
    ListBlocks: ListBlocksReply,
    NodeJoin: MemberReply,
    NodeEvents: MemberReply,
    NodeHeartbeat: MemberReply,
    NodeLeave: Ok,
    NodeDraining: Ok,
    WorkerJoin: MemberReply,
    WorkerHeartbeat: MemberReply,
    WorkerLeave: Ok,
    Lookup: LookupReply,
    ReportMiss: Ok,
    Standing: StandingReply,
    Nodes: NodesReply,
    Namespaces: NamespacesReply,
    Tokenize: TokenizeReply,
    PolicyChange: PolicyReply,
    PolicyExplain: PolicyVerdict,
    PoolStats: PoolStatsReply,
    SetRole: Ok,
    Prefill: PrefillReply,
    Generate: GenerateReply,
}
STREAM_ITEMS: dict[type[Message], type[Reply]] = {Generate: GenerateChunk}
