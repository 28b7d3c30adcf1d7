"""The block index: which node holds which block in which tier, as the nodes have told it.

This module is the contract (`Index`), the values it speaks in, and the one algorithm that all backends
share (`cover_run`). It is not a backend; see `conductor.index.memory`. The index is soft state: it may be
stale, and a stale answer costs one failed pin, never a wrong byte. It knows nothing of liveness or of
sequence numbers (`conductor.members.membership`); it does fence epochs, so that a late message of an earlier life
of a node cannot bring back what that life held.

Pure: no I/O, no clock, no randomness.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

from kvpool.blocks.hashing import HASH_BYTES, unpack_hashes
from kvpool.blocks.tier import Tier
from kvpool.errors import InvalidArgument
from kvpool.wire.messages import BlockEvent, Segment

V = TypeVar("V")


class Holder(NamedTuple):
    """One copy of a block."""

    node_id: str
    tier: Tier


Holders = tuple[Holder, ...]  # of one block; fastest tier first, then by node id


class Found(NamedTuple):
    """What the pool had of a chain when it was looked up, to be read from any host.

    Args:
        holders: of the leading blocks, in order.
        hosts: node id -> host, of the nodes that might be read then.
    """

    holders: Sequence[Holders]
    hosts: Mapping[str, str]

    def segments(self, host: str) -> list[Segment]:
        """The leading run as it is best read from `host`; see `cover_run`."""
        return cover_run(self.holders, self.hosts, host)


class Index(Protocol):
    """Soft state about blocks, keyed by (namespace_id, hash).

    Work per call is bounded by the size of the call, never by the size of the index: whatever could be
    long (a node that died, a namespace that was cleared, the end of a snapshot) hides its blocks at once
    and leaves their memory to `reclaim`, in slices.
    """

    def apply(self, node_id: str, epoch: int, events: Sequence[BlockEvent]) -> None:
        """Record what a node says happened, in order; all of it or, on an error, nothing.

        "stored" adds (and ends any suspicion of that copy), "removed" takes away, "cleared" takes away
        all of the namespace on that node. For the last two no tier means every tier. An epoch newer
        than the known one voids all that the node said before.

        Raises:
            StaleEpoch: the epoch is over.
            InvalidArgument: an unknown kind, "stored" without a tier, or hashes of a wrong length.
        """

    def holders(self, namespace_id: bytes, hashes: Sequence[bytes]) -> list[Holders]:
        """Who holds each block of the leading run; as long as `leading_run` says."""

    def segments(
        self,
        namespace_id: bytes,
        hashes: Sequence[bytes],
        hosts: Mapping[str, str],
        prefer_host: str = "",
    ) -> list[Segment]:
        """Cover the leading run with segments; see `cover_run`.

        Args:
            hosts: node id -> host of the nodes that may be read; others are as if they held nothing, so
                the cover may be shorter than `leading_run`.
        """

    def begin_snapshot(self, node_id: str, epoch: int) -> None:
        """A full report of the node follows. What was known stays visible until `end_snapshot`.

        A snapshot begun before and not ended is thrown away.

        Raises:
            StaleEpoch: the epoch is over.
        """

    def end_snapshot(self, node_id: str) -> bool:
        """What was not named since `begin_snapshot` is gone. False when none was begun."""

    def remove_node(self, node_id: str, max_blocks: int) -> bool:
        """Hide all that the node holds, at once, and free about `max_blocks` entries.

        Call it once, then `reclaim` until done: the node may have come back in between.

        Returns:
            True when nothing is left to reclaim.
        """

    def reclaim(self, max_blocks: int) -> bool:
        """Free about `max_blocks` entries of hidden blocks; True when nothing is left to reclaim."""

    def record_miss(
        self, node_id: str, namespace_id: bytes, block_hash: bytes, until: float
    ) -> None:
        """Do not answer this copy before `until` (monotonic seconds): a pin of it has just failed.

        A new "stored" event for the copy ends the suspicion earlier.
        """

    def expire_misses(self, now: float) -> int:
        """End the suspicions whose time has passed; returns how many."""

    def blocks(self) -> int:
        """Entries kept, the hidden ones that wait for `reclaim` included."""


class SharedIndex(Protocol):
    """The contract of `Index` for a backend outside of this process: the same calls, to be awaited.

    In addition every call may raise `Unavailable`. What it was to change is then in doubt, and the node has
    to report again.
    """

    async def apply(self, node_id: str, epoch: int, events: Sequence[BlockEvent]) -> None: ...

    async def holders(self, namespace_id: bytes, hashes: Sequence[bytes]) -> list[Holders]: ...

    async def segments(
        self,
        namespace_id: bytes,
        hashes: Sequence[bytes],
        hosts: Mapping[str, str],
        prefer_host: str = "",
    ) -> list[Segment]: ...

    async def begin_snapshot(self, node_id: str, epoch: int) -> None: ...

    async def end_snapshot(self, node_id: str) -> bool: ...

    async def remove_node(self, node_id: str, max_blocks: int) -> bool: ...

    async def reclaim(self, max_blocks: int) -> bool: ...

    def record_miss(
        self, node_id: str, namespace_id: bytes, block_hash: bytes, until: float
    ) -> None: ...

    def expire_misses(self, now: float) -> int: ...

    def blocks(self) -> int: ...


def checked_hashes(event: BlockEvent) -> list[bytes]:
    """The hashes of an event.

    Raises:
        InvalidArgument: an unknown kind, "stored" without a tier, or hashes or a namespace id of a wrong length.
    """
    if event.kind not in ("stored", "removed", "cleared"):
        raise InvalidArgument(f"unknown kind of block event {event.kind!r}")
    if event.tier is None and event.kind == "stored":
        raise InvalidArgument("a stored block event without a tier")
    if len(event.namespace_id) != HASH_BYTES:
        raise InvalidArgument(f"a namespace id has {HASH_BYTES} bytes")
    return unpack_hashes(event.hashes)


def cover_run(
    holders: Sequence[Holders], hosts: Mapping[str, str], prefer_host: str = ""
) -> list[Segment]:
    """Cover the leading blocks that readable nodes hold with as few segments as locality allows.

    Every block that stands on `prefer_host` is read there: one more pin costs less than moving a block
    between hosts. Within a stretch of equal locality the longest run wins at each step, which gives the
    fewest segments. Among equally long runs: the faster tier, then the smaller node id.

    Args:
        holders: of the leading blocks, in order. Equal neighbours that are one object are cheapest.
        hosts: node id -> host, of the nodes that may be read.

    Returns:
        Segments that follow on each other from block 0. `tier` is the slowest tier within the segment,
        `ready` how many of its leading blocks stand in a faster one.
    """
    return cover_runs(runs_of(holders), hosts, prefer_host)


def runs_of(values: Sequence[V]) -> list[tuple[V, int]]:
    """Equal neighbours as one, with their number; cheapest where they are one object."""
    runs: list[tuple[V, int]] = []
    start, previous = 0, values[0] if values else None
    for at, value in enumerate(values):
        if value is not previous:
            if value != previous:
                runs.append((values[start], at - start))
                start = at
            previous = value
    if values:
        runs.append((values[start], len(values) - start))
    return runs


def cover_runs(
    runs: Sequence[tuple[Holders, int]], hosts: Mapping[str, str], prefer_host: str = ""
) -> list[Segment]:
    """As `cover_run`, of runs of blocks that have the same holders."""
    choices: list[dict[str, Tier]] = []
    counts: list[int] = []
    for copies, count in runs:
        choice = _nearest(copies, hosts, prefer_host)
        if not choice:
            break
        choices.append(choice)
        counts.append(count)

    segments: list[Segment] = []
    first, start = 0, 0
    while first < len(choices):
        candidates = choices[first]  # node id -> slowest tier so far
        end = first + 1
        while end < len(choices):
            choice = choices[end]
            both = {n: max(r, choice[n]) for n, r in candidates.items() if n in choice}
            if not both:
                break
            candidates = both
            end += 1
        tier, node_id = min((tier, node_id) for node_id, tier in candidates.items())
        count, ready, is_ready = 0, 0, True
        for choice, blocks in zip(choices[first:end], counts[first:end], strict=True):
            is_ready = is_ready and choice[node_id] < tier
            count += blocks
            ready += blocks if is_ready else 0
        segments.append(Segment(node_id, start, count, tier, ready))
        first, start = end, start + count
    return segments


def _nearest(copies: Holders, hosts: Mapping[str, str], prefer_host: str) -> dict[str, Tier]:
    """Readable nodes of the best locality, each with the fastest tier that holds the block."""
    near: dict[str, Tier] = {}
    far: dict[str, Tier] = {}
    for node_id, tier in copies:
        host = hosts.get(node_id)
        if host is None:
            continue
        side = near if prefer_host and host == prefer_host else far
        side[node_id] = min(tier, side.get(node_id, tier))
    return near or far
