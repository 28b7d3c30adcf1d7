"""The block index: which node holds which block in which tier, as the nodes reported it. Pure.

This module has the contract (`BlockIndex`), its values, and the algorithm that all backends share
(`cover_run`). `conductor.index.memory` and `conductor.redis.index` are the backends.

The index is soft state: it may be stale. A stale hit costs one failed pin and never returns wrong
bytes. Liveness and sequence numbers are the business of `conductor.members.membership`. The index
does fence epochs, so that a late message from before a node's restart cannot bring back blocks of
that time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

from kvpool.blocks.hashing import HASH_BYTES, unpack_hashes
from kvpool.blocks.records import BlockEvent, Segment
from kvpool.blocks.tier import Tier
from kvpool.errors import InvalidArgument

V = TypeVar("V")


class Holder(NamedTuple):
    """One copy of a block."""

    node_id: str
    tier: Tier


Holders = tuple[Holder, ...]  # all copies of one block, by tier (fastest first), then by node id


class Found(NamedTuple):
    """The part of a chain that the pool had when it was looked up.

    Args:
        holders: of each leading block, in order.
        hosts: node id -> host of the nodes that could be read then.
    """

    holders: Sequence[Holders]
    hosts: Mapping[str, str]

    def segments(self, host: str) -> list[Segment]:
        """The leading run as it is best read from `host`, by `cover_run`."""
        return cover_run(self.holders, self.hosts, host)


class BlockIndex(Protocol):
    """Soft state about blocks, keyed by (namespace_id, hash).

    The work per call is bounded by the size of the call, not by the size of the index. Removing a
    node, clearing a namespace and ending a snapshot hide blocks at once; `reclaim` frees their
    memory later, in slices.

    The calls of a backend outside this process may raise `Unavailable`. It is then unknown whether
    a change was made, and the node must send a full report.
    """

    async def apply(self, node_id: str, epoch: int, events: Sequence[BlockEvent]) -> None:
        """Apply a node's events, in order; on an error, apply none.

        "stored" adds copies and drops their recorded misses, "removed" removes copies, "cleared"
        removes all copies of the namespace on that node. For the last two, no tier means every
        tier. An epoch newer than the known one removes everything that the node reported before.

        Raises:
            StaleEpoch: a newer epoch of the node is known.
            InvalidArgument: an unknown kind, "stored" without a tier, or hashes of a wrong length.
        """

    async def holders(self, namespace_id: bytes, hashes: Sequence[bytes]) -> list[Holders]:
        """The holders of each leading block, up to the first block that nobody holds.

        Copies with recorded misses are left out.
        """

    async def resident_holders(self, namespace_id: bytes, hashes: Sequence[bytes]) -> list[Holders]:
        """The holders of every block, also of those after a gap.

        An empty tuple for a block without any. Copies with recorded misses are left out.
        """

    async def begin_snapshot(self, node_id: str, epoch: int) -> None:
        """Begin a full report of the node. Earlier blocks stay visible until `end_snapshot`.

        An earlier snapshot that has not ended is dropped.

        Raises:
            StaleEpoch: a newer epoch of the node is known.
        """

    async def end_snapshot(self, node_id: str) -> bool:
        """Remove the node's blocks that were not stored since `begin_snapshot`.

        Return False if no snapshot was begun.
        """

    async def remove_node(self, node_id: str, max_blocks: int) -> bool:
        """Hide all copies on the node at once, and free about `max_blocks` entries.

        Call it once, then `reclaim` until nothing is left: the node may have joined again in
        between.

        Returns:
            Whether nothing is left to reclaim.
        """

    async def reclaim(self, max_blocks: int) -> bool:
        """Free about `max_blocks` entries of hidden blocks.

        Return whether nothing is left to reclaim.
        """

    def record_miss(
        self, node_id: str, namespace_id: bytes, block_hash: bytes, until: float
    ) -> None:
        """Leave a copy whose pin failed out of look-ups until `until` (monotonic seconds).

        A new "stored" event for the copy ends this earlier.
        """

    def expire_misses(self, now: float) -> int:
        """Drop the recorded misses whose time has passed; return how many."""

    def blocks(self) -> int:
        """The number of entries, including hidden ones that wait for `reclaim`."""


def checked_hashes(event: BlockEvent) -> list[bytes]:
    """Validate an event and return its hashes.

    Raises:
        InvalidArgument: an unknown kind, "stored" without a tier, or hashes or a namespace id of a
            wrong length.
    """
    if event.kind not in ("stored", "removed", "cleared"):
        raise InvalidArgument(f"unknown kind of block event {event.kind!r}")
    if event.tier is None and event.kind == "stored":
        raise InvalidArgument("a block event of kind stored needs a tier")
    if len(event.namespace_id) != HASH_BYTES:
        raise InvalidArgument(f"a namespace id must have {HASH_BYTES} bytes")
    return unpack_hashes(event.hashes)


def cover_run(
    holders: Sequence[Holders], hosts: Mapping[str, str], prefer_host: str = ""
) -> list[Segment]:
    """Cover the leading blocks that readable nodes hold with as few segments as locality allows.

    Every block that is on `prefer_host` is read there: an additional pin costs less than moving a
    block between hosts. Among blocks of equal locality the longest run is taken at each step, which
    gives the fewest segments. Among runs of equal length the faster tier is taken, then the smaller
    node id.

    Args:
        holders: of each leading block, in order. It is fastest if equal neighbours are one object.
        hosts: node id -> host of the nodes that may be read.

    Returns:
        Consecutive segments from block 0. `tier` is the slowest tier within the segment. `ready` is
        how many of its leading blocks are in a faster tier.
    """
    choices: list[dict[str, Tier]] = []
    counts: list[int] = []
    for copies, count in runs_of(holders):
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


def runs_of(values: Sequence[V]) -> list[tuple[V, int]]:
    """Count equal neighbours. It is fastest if they are one object."""
    if values and values.count(values[0]) == len(values):  # mostly so, and counted in C
        return [(values[0], len(values))]
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


def _nearest(copies: Holders, hosts: Mapping[str, str], prefer_host: str) -> dict[str, Tier]:
    """The readable nodes of the best locality, each with its fastest tier that holds the block."""
    near: dict[str, Tier] = {}
    far: dict[str, Tier] = {}
    for node_id, tier in copies:
        host = hosts.get(node_id)
        if host is None:
            continue
        side = near if prefer_host and host == prefer_host else far
        side[node_id] = min(tier, side.get(node_id, tier))
    return near or far
