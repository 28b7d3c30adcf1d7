"""Where a conductor keeps what it knows of the pool: in its own memory, or shared with others.

This module has the contract (`PoolState`) and the state of a single conductor (`LocalState`).
`conductor.redis.state` has the state of several conductors. Which members are alive is the business
of `conductor.members.membership` in both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from conductor.index.contract import BlockIndex, Holders
from conductor.members.membership import BatchAction, Member
from kvpool.blocks.layout import Namespace
from kvpool.blocks.records import BlockEvent

Kind = Literal["node", "worker"]

RECLAIM_BLOCKS = 8_000  # per sweep, at about 0.6 µs a block: at most 5 ms


@dataclass(slots=True, frozen=True)
class StateStatus:
    """A state as its operator sees it.

    Args:
        kind: "memory" or "redis".
        blocks: number of entries in the index that serves look-ups now.
        notice: a warning; "" if there is none.
        conductors: addresses of the conductors that share it.
    """

    kind: str
    blocks: int
    notice: str = ""
    counters: Mapping[str, float] = field(default_factory=dict)
    conductors: Sequence[str] = ()


class PoolState(Protocol):
    """The blocks of the pool, and what conductors tell each other about its members.

    A conductor changes its own memberships first and then calls these methods.
    """

    @property
    def own(self) -> LocalState:
        """The part that this conductor keeps for itself; the state itself, if it is alone."""

    async def register(self, namespace: Namespace) -> None:
        """Make a namespace known to all conductors.

        Raises:
            LayoutMismatch: another conductor knows its owner under another layout.
        """

    async def namespace(self, namespace_id: bytes) -> Namespace | None:
        """A namespace that another conductor knows; None if there is none."""

    async def node_joined(self, node_id: str, epoch: int) -> None:
        """Begin the full report of a node.

        Raises:
            StaleEpoch: a newer epoch of the node is known.
        """

    async def worker_joined(self, worker_id: str, epoch: int) -> None:
        """Tell other conductors that a worker reports here. Raises as `node_joined`."""

    async def take(
        self, node_id: str, epoch: int, action: BatchAction, events: Sequence[BlockEvent]
    ) -> None:
        """Apply a batch of a node's events, as `action` says.

        Raises:
            StaleEpoch: the node has joined again since, here or at another conductor.
            InvalidArgument: as of `BlockIndex.apply`.
        """

    async def node_draining(self, node_id: str, epoch: int) -> None:
        """Tell the conductor that the node reports to."""

    async def left(self, kind: Kind, member: Member[Any, Any]) -> None:
        """Remove what a member had that has left or died."""

    def must_rejoin(self, kind: Kind, member_id: str) -> bool:
        """Whether a member must join again, because other conductors missed a report of it."""

    async def holders(self, namespace_id: bytes, hashes: Sequence[bytes]) -> list[Holders]:
        """The holders of each leading block, up to the first block that nobody holds."""

    async def resident_holders(self, namespace_id: bytes, hashes: Sequence[bytes]) -> list[Holders]:
        """The holders of every block, also of those after a gap; none for a block without any."""

    def record_misses(
        self, node_id: str, namespace_id: bytes, hashes: Sequence[bytes], until: float
    ) -> None:
        """Leave copies whose pin failed out of look-ups until `until` (monotonic seconds)."""

    async def sweep(self, now: float) -> None:
        """Drop what has expired, and free memory in slices. Call it before members are swept."""

    def status(self) -> StateStatus: ...


class LocalState:
    """The state of a conductor that is alone: the blocks are in its memory."""

    def __init__(self, index: BlockIndex) -> None:
        self._index = index

    @property
    def own(self) -> LocalState:
        return self

    async def register(self, namespace: Namespace) -> None:
        pass

    async def namespace(self, namespace_id: bytes) -> Namespace | None:
        return None

    async def node_joined(self, node_id: str, epoch: int) -> None:
        await self._index.begin_snapshot(node_id, epoch)

    async def worker_joined(self, worker_id: str, epoch: int) -> None:
        pass

    async def take(
        self, node_id: str, epoch: int, action: BatchAction, events: Sequence[BlockEvent]
    ) -> None:
        await apply_batch(self._index, node_id, epoch, action, events)

    async def node_draining(self, node_id: str, epoch: int) -> None:
        pass

    async def left(self, kind: Kind, member: Member[Any, Any]) -> None:
        if kind == "node":
            await self._index.remove_node(member.member_id, RECLAIM_BLOCKS)

    def must_rejoin(self, kind: Kind, member_id: str) -> bool:
        return False

    async def holders(self, namespace_id: bytes, hashes: Sequence[bytes]) -> list[Holders]:
        return await self._index.holders(namespace_id, hashes)

    async def resident_holders(self, namespace_id: bytes, hashes: Sequence[bytes]) -> list[Holders]:
        return await self._index.resident_holders(namespace_id, hashes)

    def record_misses(
        self, node_id: str, namespace_id: bytes, hashes: Sequence[bytes], until: float
    ) -> None:
        for block_hash in hashes:
            self._index.record_miss(node_id, namespace_id, block_hash, until)

    async def sweep(self, now: float) -> None:
        self._index.expire_misses(now)
        await self._index.reclaim(RECLAIM_BLOCKS)

    def status(self) -> StateStatus:
        return StateStatus("memory", self._index.blocks())


async def apply_batch(
    index: BlockIndex,
    node_id: str,
    epoch: int,
    action: BatchAction,
    events: Sequence[BlockEvent],
) -> None:
    """Carry out `action` in an index, in its order. Raises as `BlockIndex.apply`."""
    if action.begin_snapshot:
        await index.begin_snapshot(node_id, epoch)
    if action.apply and events:
        await index.apply(node_id, epoch, events)
    if action.end_snapshot:
        await index.end_snapshot(node_id)
