"""Messages to the conductor, from nodes, workers and clients."""

from __future__ import annotations

from kvpool.blocks.hash_check import HashProof
from kvpool.blocks.layout import Namespace
from kvpool.blocks.records import BlockEvent, Segment, WorkerLoad
from kvpool.wire.messages.node import NodeDescriptor, NodeStatsReply
from kvpool.wire.messages.types import Message, Reply


class NodeJoin(Message, frozen=True):
    """A node joins. It sends its full block report next, in slices of `NodeEvents`."""

    descriptor: NodeDescriptor
    namespaces: list[Namespace]


class NodeEvents(Message, frozen=True):
    """A batch of events, numbered without a gap from 1 in each epoch.

    `snapshot`: a slice of the full report.
    """

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
    """`resync`: join again and send the full report (after a gap or a conductor's restart)."""

    resync: bool
    heartbeat_s: float


class NodeLeave(Message, frozen=True):
    node_id: str
    epoch: int


class NodeDraining(Message, frozen=True):
    """The node is about to stop. Give it no new blocks; its blocks can be read until it leaves."""

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
    may_change_role: bool = True  # the conductor may move it between prefill and decode


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


class Lookup(Message, frozen=True):
    """How many leading blocks of a chain the pool has, and where, preferring nodes on `host`.

    `exclude`: ids of nodes to leave out, because they have just failed the caller.
    """

    namespace_id: bytes
    hashes: bytes
    host: str = ""
    exclude: list[str] = []


class LookupReply(Reply, frozen=True):
    """`wait_s`: as in `NodeLookupReply`, from what the nodes last reported."""

    found: int
    segments: list[Segment]
    wait_s: float = 0.0


class ReportMiss(Message, frozen=True):
    """A pin or read of these blocks at this node failed: do not name it for them for a while."""

    node_id: str
    namespace_id: bytes
    hashes: bytes


class CountCopies(Message, frozen=True):
    """How many live nodes have each block. Unlike `Lookup`, it does not end at the first gap.

    Draining nodes do not count, since their blocks will soon be gone.
    """

    namespace_id: bytes
    hashes: bytes
    exclude: list[str] = []


class CopyCounts(Reply, frozen=True):
    """`copies` has one byte per block: the number of nodes, 255 at most."""

    copies: bytes


class Nodes(Message, frozen=True):
    pass


class NodeInfo(Reply, frozen=True):
    descriptor: NodeDescriptor
    state: str  # "live", "suspect", "draining"
    free_bytes: int
    capacity_bytes: int
    age_s: float = float("inf")  # since it started or joined, whichever was earlier


class NodesReply(Reply, frozen=True):
    nodes: list[NodeInfo]


class Namespaces(Message, frozen=True):
    """A page of the known namespaces, oldest first; one shorter than `limit` is the last."""

    offset: int = 0
    limit: int = 1000


class NamespacesReply(Reply, frozen=True):
    namespaces: list[Namespace]


class Tokenize(Message, frozen=True):
    """Tokenize a text with the tokenizer of the conductor's model.

    `is_system_prompt`: return the ids with which every conversation under this system prompt
    begins.
    """

    text: str
    is_system_prompt: bool = False


class TokenizeReply(Reply, frozen=True):
    token_ids: bytes  # packed uint32


class WorkerInfo(Reply, frozen=True):
    descriptor: WorkerDescriptor
    state: str
    load: WorkerLoad


class RulesChange(Message, frozen=True):
    """Change the routing rules: "replace" (by YAML `text`), "rollback", "resume", "" (show)."""

    action: str = ""
    text: str = ""


class RulesReply(Reply, frozen=True):
    """The rules in force. `error`: why the file's present content is not in force."""

    text: str
    is_rolled_back: bool
    error: str = ""


class RulesExplain(Message, frozen=True):
    """Ask what the routing rules would choose for such a request in the pool's present state."""

    model: str = ""
    tenant: str = ""
    endpoint: str = ""
    key: str = ""
    prompt_tokens: int = 0
    found_tokens: int = 0
    output_tokens: int = 0


class RulesCheck(Reply, frozen=True):
    """One threshold as it was applied."""

    what: str
    value: float
    threshold: float
    holds: bool


class RulesExplanation(Reply, frozen=True):
    """`mode`: "local", "disaggregated", or "" (by cost).

    `rule`: name of the rule that matched, or "".
    """

    mode: str
    rule: str
    reason: str
    checks: list[RulesCheck]


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
    notice: str = ""  # for operators, e.g. that Redis is down
    conductors: list[str] = []  # addresses of all that share this pool; empty with the memory index
