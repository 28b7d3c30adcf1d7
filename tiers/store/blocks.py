"""Records of the store: blocks, their copies in tiers, and what its calls return.

A `Block` is one prefix hash of one namespace. It has at most one `Copy` per tier, and a copy has
one slot per tensor-parallel part. Slots are reserved first (`filling`) and then committed. A copy
is whole, and therefore visible, when all its parts are committed (invariant 4).
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass
from typing import NamedTuple

from kvpool.blocks.layout import Namespace
from kvpool.blocks.tier import Tier
from kvpool.bounded import BoundedDict
from kvpool.errors import InvalidArgument
from tiers.policies.cost import prefill_cost
from tiers.store.fp8 import Encoding
from tiers.store.slab_allocator import Place

NEVER_USED = -1
NEVER = -math.inf  # `Block.retained_until` of a block that is not retained
FOREVER = math.inf  # of a block with a hard pin


class Copy:
    """One block in one tier.

    A part with no place is absent; a part with a place but no checksum is reserved.
    """

    __slots__ = (
        "block",
        "checksums",
        "committed",
        "encoding",
        "filling",
        "pins",
        "places",
        "reading",
        "refused_use",
        "slot_bytes",
        "tier",
        "whole_checksums",
        "whole_places",
    )

    def __init__(
        self, block: Block, tier: Tier, encoding: Encoding | None = None, slot_bytes: int = 0
    ) -> None:
        space = block.space
        tp_size = space.tp_size
        self.block = block
        self.tier = tier
        # Copies on disk may be older than a change of settings, and their slots of another size.
        if encoding is None:
            encoding = space.nvme_encoding if tier == Tier.NVME else "as_is"
        self.encoding: Encoding = encoding
        self.slot_bytes = slot_bytes or space.slot_bytes[tier]
        self.places: list[Place | None] = [None] * tp_size
        self.checksums: list[int | None] = [None] * tp_size
        self.committed = 0  # parts
        self.filling = 0  # parts reserved by a writer or by a move into this copy
        self.reading = 0  # migrations that read from this copy
        self.pins = 0  # leases on this copy
        # Of a whole copy, by part: a pin hands these out as they are.
        self.whole_places: tuple[Place, ...] = ()
        self.whole_checksums: tuple[int, ...] = ()
        # The block's last use when the tier below had no room for it (`eviction.is_spared`).
        self.refused_use = NEVER_USED

    @property
    def is_whole(self) -> bool:
        """Every part is committed (invariant 4)."""
        return self.committed == len(self.places)

    def hand_out(self) -> None:
        """The places or checksums of a whole copy have changed: pins hand out the new ones."""
        self.whole_places = tuple(place for place in self.places if place is not None)
        self.whole_checksums = tuple(c for c in self.checksums if c is not None)

    # What an eviction policy asks (`policies.Candidate`).

    @property
    def ident(self) -> tuple[bytes, bytes]:
        """Namespace id and prefix hash."""
        return self.block.space.namespace_id, self.block.name

    @property
    def last_use(self) -> int:
        """Tick of the block's last pin or commit, in any tier."""
        return self.block.last_use

    @property
    def size_bytes(self) -> int:
        """Bytes of its slots, all parts."""
        return self.slot_bytes * len(self.places)

    @property
    def cost(self) -> float:
        """Prefill time that a hit saves, in units of one token without context."""
        return prefill_cost(self.block.depth, self.block.space.block_tokens)


class Block:
    """One prefix hash of one namespace, and its copies."""

    __slots__ = (
        "copies",
        "depth",
        "is_detached",
        "is_shielded",
        "last_use",
        "name",
        "parent",
        "retained_until",
        "space",
    )

    def __init__(
        self, space: Space, name: bytes, parent: bytes, last_use: int, depth: int = 0
    ) -> None:
        self.space = space
        self.name = name  # the prefix hash
        self.parent = parent  # prefix hash of the block before, b"" at the start
        self.last_use = last_use  # tick of the last pin or commit; unique, larger is more recent
        self.depth = depth  # known blocks before it when it arrived; an estimate for policies
        self.retained_until = NEVER  # monotonic seconds: a soft pin; FOREVER: a hard pin
        self.is_shielded = False  # needed by the current call, which must not evict it
        self.copies: list[Copy | None] = [None] * len(Tier)  # by tier
        self.is_detached = False  # dropped, while some slot is still read or written


class Space:
    """The blocks of one namespace."""

    __slots__ = (
        "account",
        "block_tokens",
        "blocks",
        "children",
        "namespace",
        "namespace_id",
        "nvme_encoding",
        "part_bytes",
        "retained_children",
        "slot_bytes",
        "tp_size",
        "visible",
    )

    def __init__(
        self,
        namespace: Namespace,
        slot_bytes: tuple[int, ...],
        account: int = 0,
        nvme_encoding: Encoding = "as_is",
    ) -> None:
        self.namespace = namespace
        self.namespace_id = namespace.namespace_id
        self.tp_size = namespace.layout.tp_size
        self.part_bytes = namespace.layout.part_bytes
        self.block_tokens = namespace.layout.block_tokens
        self.slot_bytes = slot_bytes  # by tier; 0 for a tier that the node lacks
        self.nvme_encoding = nvme_encoding  # of parts that are written from now on
        self.account = account  # its slots count against the quota of this account
        self.blocks: dict[bytes, Block] = {}
        self.visible: tuple[dict[bytes, Copy], ...] = tuple({} for _ in Tier)  # whole ones
        # By tier: parent hash -> how many of its children have a copy there (invariant 6). Counted
        # also while the parent is elsewhere, so that the number is right when the parent arrives.
        self.children: tuple[dict[bytes, int], ...] = tuple({} for _ in Tier)
        self.retained_children: dict[
            bytes, int
        ] = {}  # parent hash -> how many of them are retained

    @property
    def is_idle(self) -> bool:
        """No block of it is here or on its way here."""
        return not self.blocks and not self.retained_children and not any(self.children)

    def has_children(self, name: bytes) -> bool:
        """Some block with this parent has a copy."""
        return any(name in children for children in self.children)

    def descends(self, name: bytes, ancestor: bytes) -> bool:
        """The known parents of `name` lead to `ancestor`."""
        while name and name != ancestor:
            block = self.blocks.get(name)
            name = block.parent if block is not None else b""
        return name == ancestor and bool(name)


class StoreEvent(NamedTuple):
    """A whole copy appeared in a tier ("stored") or left it ("removed")."""

    kind: str
    namespace_id: bytes
    block_hash: bytes
    tier: Tier


class EventLog:
    """Events since the last report; if too many wait, the oldest are lost and counted."""

    def __init__(self, limit: int, counters: Counter[str]) -> None:
        self._events: deque[StoreEvent] = deque(maxlen=limit)
        self._counters = counters

    def note(self, kind: str, copy: Copy) -> None:
        """Add an event of a whole copy."""
        if len(self._events) == self._events.maxlen:
            self._counters["events_lost"] += 1
        space = copy.block.space
        self._events.append(StoreEvent(kind, space.namespace_id, copy.block.name, copy.tier))

    def take(self) -> list[StoreEvent]:
        """All events since the last call, in order."""
        events = list(self._events)
        self._events.clear()
        return events


class Migration(NamedTuple):
    """One part to be copied to another slot; both slots are held until `Store.finish_migration`."""

    migration_id: int
    namespace_id: bytes
    block_hash: bytes
    part: int
    source_tier: Tier
    source: Place
    target_tier: Tier
    target: Place
    length: int  # bytes of the part, not of the slot
    checksum: int
    parent: bytes
    # Of the part on NVMe; the checksum of a part that is read there is of the encoded bytes.
    encoding: Encoding = "as_is"


@dataclass(slots=True, frozen=True)
class Reservation:
    """Result of `reserve`: a `BlockStatus` for each block, and places of the granted ones."""

    reservation_id: int  # 0: nothing was granted
    statuses: list[int]
    places: list[Place]
    slot_bytes: int
    ttl_s: float
    deadline: float  # monotonic seconds


@dataclass(slots=True, frozen=True)
class PinResult:
    """Result of `pin`: places and checksums by block, and within a block by part as asked.

    `miss_reason` says why block number `found` could not be leased: "never_stored", "evicted",
    "in_progress", "no_room", the reason of a drop ("checksum", say), or "promoting". The last means
    that blocks of the run are only in tiers that the caller cannot read: carry out `promote` (empty
    if others' migrations are in flight already), then pin again.
    """

    lease_id: int  # 0: nothing is leased
    found: int
    places: list[Place]
    checksums: list[int]
    tiers: list[Tier]
    ttl_s: float
    miss_reason: str
    promote: list[Migration]


class Ghosts:
    """Why blocks are gone. Bounded: the oldest are forgotten first."""

    def __init__(self, limit: int) -> None:
        self._reasons: BoundedDict[tuple[bytes, bytes], str] = BoundedDict(limit)

    def remember(self, block: Block, reason: str) -> None:
        """Record that `block` left the store."""
        self._reasons[block.space.namespace_id, block.name] = reason

    def reason(self, namespace_id: bytes, name: bytes) -> str:
        """The recorded reason, or "" if there is none."""
        return self._reasons.get((namespace_id, name), "")

    def __len__(self) -> int:
        return len(self._reasons)


def check_memory_tier(tier: Tier) -> Tier:
    """The tier, which must be one that clients read and write.

    Raises:
        InvalidArgument: it is NVMe.
    """
    if tier == Tier.NVME:
        raise InvalidArgument("clients do not read or write nvme", hint="dram or hbm")
    return tier
