"""The node's block state machine: what may be read, written, evicted and migrated.

    free -> reserved -> committed -> (pinned n times) -> evicted -> free

`Store` holds the calls that touch several of its parts. Each part has its own file: `leases`,
`reservations`, `migrations`, `evacuation`, `retention`, `failed_arenas`, `namespaces`, `recovery`,
`inspection`.

Equal calls give equal results: `now` is an argument, in monotonic seconds that never go back. Not
thread-safe.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.blocks.tier import Tier
from kvpool.errors import InvalidArgument, NotFound
from tiers.store import integrity
from tiers.store.arena_allocator import ArenaAllocator, as_arena_allocator
from tiers.store.block_table import BlockTable
from tiers.store.blocks import (
    Migration,
    PinResult,
    Reservation,
    Space,
    StoreEvent,
    check_memory_tier,
)
from tiers.store.config import StoreConfig
from tiers.store.evacuation import EvacuationTable
from tiers.store.failed_arenas import FailedArenas
from tiers.store.inspection import Inspection
from tiers.store.leases import LeaseTable
from tiers.store.migrations import MigrationTable
from tiers.store.namespaces import NamespaceTable
from tiers.store.readable_run import ReadableRun, readable_run
from tiers.store.recovery import Recovery
from tiers.store.reservation_cursors import ReserveCursor
from tiers.store.reservations import ReservationTable
from tiers.store.retention import RetentionTable
from tiers.store.slab_allocator import SlabAllocator, StoreCorrupt

__all__ = [
    "Migration",
    "PinResult",
    "Reservation",
    "Store",
    "StoreConfig",
    "StoreCorrupt",
    "StoreEvent",
]

PROMOTING = "promoting"  # the reason of a pin that has to wait for blocks of a slower tier


class Store:
    """All blocks of one node, in all its tiers.

    Args:
        dram: allocates in the arenas that clients reach.
        nvme: allocates in the slab files; None for a node without a disk tier.
        hbm: allocates in the arena in device memory, with the same slab size as dram; None for a
            node without.
        config: limits and times.
    """

    def __init__(
        self,
        dram: SlabAllocator | ArenaAllocator,
        nvme: SlabAllocator | ArenaAllocator | None = None,
        config: StoreConfig | None = None,
        *,
        hbm: SlabAllocator | ArenaAllocator | None = None,
    ) -> None:
        self.config = config = config or StoreConfig()
        self._table = table = BlockTable(
            as_arena_allocator(dram),
            as_arena_allocator(nvme) if nvme is not None else None,
            as_arena_allocator(hbm) if hbm is not None else None,
            config,
        )
        self.namespaces = NamespaceTable(table, config)
        self.leases = LeaseTable(table, config)
        self.reservations = ReservationTable(table, self.namespaces, config)
        self.migrations = MigrationTable(table, config.migration_retry_s)
        self.evacuations = EvacuationTable(table, self.migrations)
        self.retention = RetentionTable(table, self.namespaces, config.retention_share)
        self.failed_arenas = FailedArenas(table)
        self.recovery = Recovery(table, self.namespaces, self.retention)
        self.inspection = Inspection(table, self.namespaces)

    @property
    def tiers(self) -> list[Tier]:
        """The tiers of this node, fastest first."""
        return sorted(self._table.tiers)

    # ------------------------------------------------------------ reading

    def lookup(self, namespace_id: bytes, hashes: Sequence[bytes]) -> list[Tier]:
        """The fastest tier of each leading visible block. Takes no lease and counts as no use.

        Raises:
            UnknownNamespace, InvalidArgument: too many hashes.
        """
        hbm, dram, nvme = self.namespaces.space(namespace_id, len(hashes)).visible
        found: list[Tier] = []
        for name in hashes:
            if name in hbm:
                found.append(Tier.HBM)
            elif name in dram:
                found.append(Tier.DRAM)
            elif name in nvme:
                found.append(Tier.NVME)
            else:
                break
        return found

    def resident_tiers(self, namespace_id: bytes, block_hash: bytes) -> list[Tier]:
        """All tiers in which a block is visible, fastest first.

        Raises:
            UnknownNamespace.
        """
        visible = self.namespaces.space(namespace_id).visible
        return [tier for tier in Tier if block_hash in visible[tier]]

    def pin(
        self,
        namespace_id: bytes,
        hashes: Sequence[bytes],
        holder_id: str,
        ttl_s: float,
        now: float,
        parts: Sequence[int] | None = None,
        tier: Tier = Tier.DRAM,
    ) -> PinResult:
        """Lease the longest leading run of whole blocks that the caller can read.

        If blocks of the run are only in tiers that the caller cannot read, nothing is leased and
        `promote` of the result has the migrations to carry out. Report each by `finish_migration`,
        then pin again.

        Args:
            ttl_s: seconds, cut to `max_lease_s`; the result says what was granted.
            parts: tensor-parallel parts whose places are wanted; None or empty for all.
            tier: the fastest tier that the caller can read. With DRAM every place is in DRAM. With
                HBM each place is in HBM or DRAM, and the lease holds that copy only.

        Raises:
            UnknownNamespace.
            InvalidArgument: too many hashes, a `ttl_s` that is not positive, or a part or tier that
                does not exist.
        """
        run = self._readable_run(namespace_id, hashes, ttl_s, parts, tier)
        reason = ""
        if run.is_cold_next:
            self.expire(now)
            run.copies, promote, reason = self.migrations.promote_run(
                run.space, hashes, run.tiers, Tier.DRAM
            )
            if reason == PROMOTING:
                return _nothing_pinned(reason, promote)
        return self._lease(run, holder_id, now, reason)

    def pin_unless_cold(
        self,
        namespace_id: bytes,
        hashes: Sequence[bytes],
        holder_id: str,
        ttl_s: float,
        now: float,
        parts: Sequence[int] | None = None,
        tier: Tier = Tier.DRAM,
    ) -> PinResult:
        """As `pin`, but change nothing if it would promote: the result only says "promoting"."""
        run = self._readable_run(namespace_id, hashes, ttl_s, parts, tier)
        if run.is_cold_next:
            return _nothing_pinned(PROMOTING)
        return self._lease(run, holder_id, now)

    def pin_until_cold(
        self,
        namespace_id: bytes,
        hashes: Sequence[bytes],
        holder_id: str,
        ttl_s: float,
        now: float,
        parts: Sequence[int] | None = None,
        tier: Tier = Tier.DRAM,
    ) -> PinResult:
        """As `pin`, but lease the blocks before the first that it would promote."""
        run = self._readable_run(namespace_id, hashes, ttl_s, parts, tier)
        return self._lease(run, holder_id, now, PROMOTING if run.is_cold_next else "")

    def _readable_run(
        self,
        namespace_id: bytes,
        hashes: Sequence[bytes],
        ttl_s: float,
        parts: Sequence[int] | None,
        tier: Tier,
    ) -> ReadableRun:
        space = self.namespaces.space(namespace_id, len(hashes))
        return readable_run(space, hashes, self.config.lease_ttl(ttl_s), parts, tier)

    def _lease(self, run: ReadableRun, holder_id: str, now: float, reason: str = "") -> PinResult:
        """Lease a run's copies. `reason` says why it ends, if that is known."""
        copies, counters = run.copies, self._table.counters
        if len(copies) < len(run.hashes):
            reason = reason or _miss_reason(self._table, run.space, run.hashes, len(copies))
            counters["misses"] += len(run.hashes) - len(copies)
            if reason and reason != PROMOTING:
                counters[f"miss:{reason}"] += 1
        if not copies:
            return _nothing_pinned(reason)
        counters["hits"] += len(copies)
        lease_id = self.leases.grant(run.space, copies, holder_id, now + run.ttl_s)
        if run.parts is None:
            places = [place for copy in copies for place in copy.whole_places]
            checksums = [checksum for copy in copies for checksum in copy.whole_checksums]
        else:
            places = [copy.whole_places[part] for copy in copies for part in run.parts]
            checksums = [copy.whole_checksums[part] for copy in copies for part in run.parts]
        tiers = [Tier.DRAM] * len(copies)
        if Tier.HBM in run.tiers:
            tiers = [copy.tier for copy in copies]
        return PinResult(lease_id, len(copies), places, checksums, tiers, run.ttl_s, reason, [])

    def promote(
        self, namespace_id: bytes, hashes: Sequence[bytes], now: float, tier: Tier = Tier.DRAM
    ) -> tuple[list[Migration], str]:
        """Begin to copy the blocks of the leading run that `tier` lacks into it, without a lease.

        Returns the migrations to carry out, and "no_room" if not even the first block that needs a
        slot gets one or the node has no such tier, else "".

        Raises:
            UnknownNamespace, InvalidArgument: too many hashes, or NVMe.
        """
        space = self.namespaces.space(namespace_id, len(hashes))
        target = check_memory_tier(tier)
        if target not in self._table.tiers:
            return [], "no_room"
        self.expire(now)
        _, migrations, reason = self.migrations.promote_run(space, hashes, (target,), target)
        return migrations, "no_room" if reason == "no_room" else ""

    # ------------------------------------------------------------ writing

    def reserve(
        self,
        namespace_id: bytes,
        hashes: Sequence[bytes],
        parent: bytes,
        part: int,
        writer_id: str,
        ttl_s: float,
        now: float,
        tier: Tier = Tier.DRAM,
    ) -> Reservation:
        """Reserve slots for one part of those blocks of a run that are not here; evicts if it must.

        Args:
            hashes: a run of one chain.
            parent: hash of the block before the first, b"" at the start of a chain.
            ttl_s: seconds, cut to `max_reservation_s`.
            tier: with HBM, blocks that find no room in device memory are granted in DRAM; the
                places say which.

        Raises:
            UnknownNamespace.
            InvalidArgument: too many hashes, hashes that are not 16 bytes long, a part or tier that
                does not exist, or a `ttl_s` that is not positive.
        """
        cursor = self.reservations.begin_reserve(
            namespace_id, hashes, parent, part, writer_id, ttl_s, now, tier
        )
        self.reserve_some(cursor, len(hashes), now)
        return cursor.result()

    def reserve_some(self, cursor: ReserveCursor, count: int, now: float) -> None:
        """Go on with up to `count` blocks of a run that `reservations.begin_reserve` began.

        Raises:
            ReservationGone: it ended in between: its client left or its time has passed.
        """
        self.expire(now)
        self.reservations.reserve_some(cursor, count)

    def commit(
        self,
        reservation_id: int,
        checksums: Sequence[int],
        now: float,
        indices: Sequence[int] | None = None,
    ) -> list[bytes]:
        """Commit granted blocks, all or none; returns the hashes of the blocks that became visible.

        Args:
            checksums: xxh3-64 of each part's bytes, in the order of `indices`.
            indices: into the granted blocks; None for all of them.

        Raises:
            ReservationGone: it is over, or an index was committed before.
            InvalidArgument: an index does not exist or comes twice, or there is not one checksum
                for each.
        """
        cursor = self.reservations.begin_commit(reservation_id, checksums, now, indices)
        self.reservations.commit_some(cursor, len(checksums))
        return cursor.visible

    # ------------------------------------------------------------ ends

    def client_gone(self, client_id: str, now: float) -> None:
        """A client left: the grace of its leases begins, and its reservations go to quarantine."""
        self.leases.holder_gone(client_id, now)
        self.reservations.writer_gone(client_id, now)
        self.expire(now)

    def expire(self, now: float) -> int:
        """End overdue leases, reservations, quarantines and retentions; returns how many."""
        self._table.access_clock.sample(now)
        ended = self.leases.expire(now) + self.reservations.expire(now)
        return ended + self.retention.expire(now)

    def drop(self, namespace_id: bytes, block_hash: bytes, reason: str, now: float) -> bool:
        """Remove a block from all tiers; pinned and migrating copies are hidden now, freed later.

        A block with no committed part stays: the report is about an older one. Returns whether a
        block was dropped. Later pins report `reason`.

        Raises:
            UnknownNamespace.
        """
        block = self.namespaces.space(namespace_id).blocks.get(block_hash)
        if block is None or not any(copy and copy.committed for copy in block.copies):
            return False
        self._table.detach(block, reason)
        return True

    # ------------------------------------------------------------ migrations

    def finish_migration(
        self, migration_id: int, ok: bool, now: float, checksum: int | None = None
    ) -> None:
        """The bytes of a migration are in place (`ok`), or never will be.

        Args:
            checksum: of the bytes as they were written; None if they are the bytes that were read.
                A part that is encoded on its way has another checksum at its target.

        Raises:
            InvalidArgument: no such migration is in flight.
        """
        self._finish(migration_id, ok, now, checksum)

    def cancel_migrations(self, migrations: Sequence[Migration], now: float) -> None:
        """Give up migrations that were not begun; their targets are free at once.

        Raises:
            InvalidArgument: one of them is not in flight.
        """
        for migration in migrations:
            self._finish(migration.migration_id, None, now)

    @property
    def migration_count(self) -> int:
        """Migrations in flight."""
        return len(self.migrations) + len(self.evacuations)

    # ------------------------------------------------------------ arenas

    def add_arena(self, tier: Tier, allocator: SlabAllocator, now: float) -> None:
        """Add an arena to a tier; slots come from it at once.

        Raises:
            NotFound: there is no such tier.
            InvalidArgument: its id is taken in this tier or in the other one of DRAM and HBM
                (clients see ids only), or its slabs differ from those of the tier.
        """
        if tier not in self._table.tiers:
            raise NotFound(f"this node has no {tier}")
        for other in self._table.tiers.values():
            ids = [arena.arena_id for arena in other.allocator.arenas]
            if Tier.NVME not in (tier, other.index) and allocator.arena_id in ids:
                raise InvalidArgument(f"arena {allocator.arena_id} belongs to {other.name}")
        self._table.tiers[tier].allocator.add(allocator)
        self._table.resized(tier)

    def plan_evacuation(
        self, max_blocks: int, now: float, *, may_demote: bool = True
    ) -> list[Migration]:
        """Take up to `max_blocks` blocks out of the arenas that are being evacuated.

        Returns migrations from DRAM to DRAM or NVMe. Other blocks are evicted, and leased or
        reserved ones stay. A call takes 5 ms at most.

        Args:
            may_demote: NVMe takes blocks; without it, blocks that find no room in DRAM are evicted.
        """
        self.expire(now)
        return self.evacuations.plan(max_blocks, may_demote=may_demote)

    # ------------------------------------------------------------ reports

    def take_events(self) -> list[StoreEvent]:
        """What happened to whole copies since the last call, in order.

        At most `max_pending_events` are kept. If more happened, the counter "events_lost" has
        grown, and only `inspection.snapshot` is right again.
        """
        return self._table.events.take()

    @property
    def counters(self) -> dict[str, float]:
        """Totals since start: hits, misses, miss:<reason>, evicted, evicted:<tier>, lost, ..."""
        return dict(self._table.counters)

    def check_integrity(self) -> None:
        """Recompute every invariant that the state can show; slow.

        Raises:
            StoreCorrupt: one does not hold.
        """
        integrity.check(
            self._table,
            self.leases,
            self.reservations,
            self.migrations,
            self.evacuations,
            self.retention,
        )

    # ------------------------------------------------------------ within

    def _finish(
        self, migration_id: int, ok: bool | None, now: float, checksum: int | None = None
    ) -> None:
        if migration_id in self.evacuations:
            self.evacuations.finish(migration_id, ok)
        else:
            self.migrations.finish(migration_id, ok, now, checksum)


def _miss_reason(table: BlockTable, space: Space, hashes: Sequence[bytes], found: int) -> str:
    if found == len(hashes):
        return ""
    name = hashes[found]
    if name in space.blocks:
        return "in_progress"
    for ghosts in (table.dropped, table.evicted):
        reason = ghosts.reason(space.namespace_id, name)
        if reason:
            return reason
    return "never_stored"


def _nothing_pinned(reason: str, promote: Sequence[Migration] = ()) -> PinResult:
    return PinResult(0, 0, [], [], [], 0.0, reason, list(promote))
