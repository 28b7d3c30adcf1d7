"""The node's block state machine: what may be read, written, evicted and moved, and when (DESIGN §6).

    free -> reserved -> committed -> (pinned n times) -> evicted -> free

`Store` is the one entrance; slots (`residency`), leases, reservations and moves are behind it. It is pure: no
I/O, no asyncio, no clock (`now` is monotonic seconds and never goes back), and equal calls give equal
answers. Not thread-safe: one thread owns it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Literal

from kvpool.blocks.hashing import HASH_BYTES
from kvpool.blocks.layout import Namespace
from kvpool.blocks.tier import Tier
from kvpool.errors import InvalidArgument, LayoutMismatch, NoRoom, NotFound, UnknownNamespace
from kvpool.wire.messages import BlockInfo, NamespaceUsage, TierUsage
from tiers.store import inspection, integrity, recovery
from tiers.store.access_clock import AccessClock
from tiers.store.arena_allocator import ArenaAllocator, as_arena_allocator
from tiers.store.block_table import BlockTable
from tiers.store.blocks import Copy, Migration, PinResult, Reservation, Space, StoreEvent
from tiers.store.config import StoreConfig
from tiers.store.evacuation import EvacuationTable
from tiers.store.failed_arenas import FailedArenas
from tiers.store.fp8 import Encoding, encoding_of, stored_bytes
from tiers.store.leases import LeaseTable
from tiers.store.migrations import MigrationTable, whole_copy
from tiers.store.quotas import AccountUsage
from tiers.store.recovery import Access, Retention
from tiers.store.reservation_cursors import CommitCursor, ReserveCursor
from tiers.store.reservations import ReservationTable
from tiers.store.retention import RetentionTable
from tiers.store.slab_allocator import Place, SlabAllocator, StoreCorrupt

__all__ = [
    "Migration",
    "PinResult",
    "Reservation",
    "Store",
    "StoreConfig",
    "StoreCorrupt",
    "StoreEvent",
]

TENANTS_SHARE = 3  # namespaces of one tenant for each that is left to all
Cold = Literal["promote", "tell", "lease"]  # see `Store.pin`


class Store:
    """All blocks of one node, over its tiers.

    Args:
        dram: slots of the arenas that clients reach.
        nvme: slots of the slab files, or None.
        hbm: slots of the arena in device memory, or None; of the same slab size as dram.
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
        self._table = BlockTable(
            as_arena_allocator(dram),
            as_arena_allocator(nvme) if nvme is not None else None,
            as_arena_allocator(hbm) if hbm is not None else None,
            config,
        )
        self._leases = LeaseTable(self._table, config.grace_s, config.first_id)
        self._reservations = ReservationTable(self._table, config.quarantine_s, config.first_id)
        self._retention = RetentionTable(self._table, config.retention_share)
        self._migrations = MigrationTable(self._table, config.migration_retry_s)
        self._evacuations = EvacuationTable(self._table, self._migrations)
        self._failed_arenas = FailedArenas(self._table)
        self._access_clock = AccessClock()

    # ------------------------------------------------------------ namespaces

    def register_namespace(self, namespace: Namespace, now: float) -> bytes:
        """Make a namespace known; returns its 16-byte id. Known ones change nothing.

        Raises:
            LayoutMismatch: the same model, revision and tenant are known under another layout.
            BlockTooLarge: a part of it fits no slab.
            NoRoom: `max_namespaces` are known, or a tenant has three times as many as could still be: no
                tenant takes the room of all others.
        """
        spaces = self._table.spaces
        namespace_id = namespace.namespace_id
        if namespace_id in spaces:
            return namespace_id
        of_tenant = 0
        for space in spaces.values():
            of_tenant += space.namespace.tenant == namespace.tenant
            if _owner(space.namespace) == _owner(namespace):
                differences = space.namespace.layout.differences(namespace.layout)
                if differences:
                    raise LayoutMismatch(
                        f"{namespace.name} is known here with another layout: {', '.join(differences)}",
                        hint="blocks of two layouts never mix; use equal settings on every engine, or"
                        " read with as_rank= where tp_size alone differs",
                    )
        left = self.config.max_namespaces - len(spaces)
        if left <= 0:
            raise NoRoom(f"{len(spaces)} namespaces are known", hint="raise max_namespaces")
        if namespace.tenant and of_tenant >= TENANTS_SHARE * left:
            raise NoRoom(
                f"tenant {namespace.tenant} has {of_tenant} of {len(spaces)} namespaces",
                hint="use fewer salts and revisions, or raise max_namespaces",
            )
        layout = namespace.layout
        on_disk = encoding_of(layout, self.config.nvme_dtype)
        sizes = {Tier.NVME: stored_bytes(layout, on_disk)}
        slot_bytes = tuple(
            tier.allocator.slot_size(sizes.get(index, layout.part_bytes)) if tier else 0
            for index, tier in ((i, self._table.tiers.get(i)) for i in Tier)
        )
        account = self._table.accounts.number_of(namespace)
        spaces[namespace_id] = Space(namespace, slot_bytes, account, on_disk)
        return namespace_id

    def forget_idle_namespace(self, tenant: str) -> bool:
        """Make room for another namespace: forget the oldest one of which nothing is here.

        One of this tenant before one of others; who still uses it registers it again. False: there is none.
        """
        held = {block.space for block in self._table.detached}  # dropped, and still read
        idle = [
            (space.namespace.tenant != tenant, number, namespace_id)
            for number, (namespace_id, space) in enumerate(self._table.spaces.items())
            if space.is_idle and space not in held
        ]
        if not idle:
            return False
        is_others, _, namespace_id = min(idle)
        if is_others and len(self._table.spaces) < self.config.max_namespaces:
            return False  # it is the tenant that has too many
        del self._table.spaces[namespace_id]
        self._table.counters["namespaces_forgotten"] += 1
        return True

    def namespaces(self) -> list[Namespace]:
        """The namespaces known, in the order of their registration."""
        return [space.namespace for space in self._table.spaces.values()]

    def part_bytes(self, namespace_id: bytes) -> int:
        """Bytes of one block part of a namespace.

        Raises:
            UnknownNamespace.
        """
        return self._space(namespace_id, 0).part_bytes

    def namespace(self, namespace_id: bytes) -> Namespace:
        """The definition of a namespace.

        Raises:
            UnknownNamespace.
        """
        return self._space(namespace_id, 0).namespace

    def find_namespace(self, namespace_id: bytes) -> Namespace | None:
        """The definition of a namespace, if it is known."""
        space = self._table.spaces.get(namespace_id)
        return space.namespace if space is not None else None

    def parents(self, namespace_id: bytes) -> dict[bytes, bytes]:
        """Parent of every visible block of a namespace, in whatever tier it stands.

        Raises:
            UnknownNamespace.
        """
        visible = self._space(namespace_id, 0).visible
        return {name: copy.block.parent for names in visible for name, copy in names.items()}

    @property
    def tiers(self) -> list[Tier]:
        """The tiers that this node has, fastest first."""
        return sorted(self._table.tiers)

    # ------------------------------------------------------------ reading

    def lookup(self, namespace_id: bytes, hashes: Sequence[bytes]) -> list[Tier]:
        """Fastest tier of each leading block that is visible. Takes no lease, counts as no use.

        Raises:
            UnknownNamespace, InvalidArgument: too many hashes.
        """
        hbm, dram, nvme = self._space(namespace_id, len(hashes)).visible
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
        visible = self._space(namespace_id, 1).visible
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
        *,
        cold: Cold = "promote",
    ) -> PinResult:
        """Lease the longest leading run that is here and whole; see `PinResult` for what comes back.

        Where the run stands only where the caller cannot read, nothing is leased and the moves to make come
        in `promote`: carry them out, report each by `finish_migration`, and pin again.

        Args:
            ttl_s: seconds, cut to `max_lease_s`; `ttl_s` of the result is what was given.
            parts: tensor-parallel parts whose places are wanted; None or empty for all.
            tier: the fastest that the caller can read. DRAM: every place is in DRAM. HBM: each place is in
                HBM or DRAM, and the lease holds that copy alone.
            cold: what to do about blocks that stand elsewhere: "tell" only says "promoting" and does
                nothing, "lease" says it, too, and leases what comes before the first of them.

        Raises:
            UnknownNamespace, InvalidArgument: too many hashes, a ttl that is not positive, or parts or a
                tier that do not exist.
        """
        space = self._space(namespace_id, len(hashes))
        ttl_s = _ttl(ttl_s, self.config.max_lease_s)
        wanted = self._wanted_parts(space, parts)
        is_device_wanted = _checked_memory_tier(tier) == Tier.HBM
        readable = (Tier.HBM, Tier.DRAM) if is_device_wanted else (Tier.DRAM,)
        find: Callable[[bytes], Copy | None] = space.visible[Tier.DRAM].get
        if is_device_wanted:
            find = partial(whole_copy, space, readable)
        copies: list[Copy] = []
        for name in hashes:
            copy = find(name)
            if copy is None:
                break
            copies.append(copy)
        reason = ""
        if len(copies) < len(hashes):
            if any(hashes[len(copies)] in names for names in space.visible):
                if cold == "tell":
                    return PinResult(0, 0, [], [], [], 0.0, "promoting", [])
                reason = "promoting"
            if reason and cold == "promote":
                self.expire(now)
                copies, promote, reason = self._migrations.promote_run(
                    space, hashes, readable, Tier.DRAM
                )
                if reason == "promoting":
                    return PinResult(0, 0, [], [], [], 0.0, reason, promote)
            reason = reason or self._miss_reason(space, hashes, len(copies))
            counters = self._table.counters
            counters["misses"] += len(hashes) - len(copies)
            if reason and reason != "promoting":
                counters[f"miss:{reason}"] += 1
        if not copies:
            return PinResult(0, 0, [], [], [], 0.0, reason, [])
        self._table.counters["hits"] += len(copies)
        lease_id = self._leases.grant(space, copies, holder_id, now + ttl_s)
        if wanted is None:
            places = [place for copy in copies for place in copy.whole_places]
            checksums = [checksum for copy in copies for checksum in copy.whole_checksums]
        else:
            places = [copy.whole_places[part] for copy in copies for part in wanted]
            checksums = [copy.whole_checksums[part] for copy in copies for part in wanted]
        tiers = [Tier.DRAM] * len(copies)
        if is_device_wanted:
            tiers = [copy.tier for copy in copies]
        return PinResult(lease_id, len(copies), places, checksums, tiers, ttl_s, reason, [])

    def promote(
        self, namespace_id: bytes, hashes: Sequence[bytes], now: float, tier: Tier = Tier.DRAM
    ) -> tuple[list[Migration], str]:
        """Start bringing what the leading run has not in `tier` there, without a lease.

        Returns the moves to carry out (see `finish_migration`), and "no_room" when not even the first block
        that needs room could have it, or the node has no such tier.

        Raises:
            UnknownNamespace, InvalidArgument: too many hashes, or NVME.
        """
        space = self._space(namespace_id, len(hashes))
        target = _checked_memory_tier(tier)
        if target not in self._table.tiers:
            return [], "no_room"
        self.expire(now)
        _, migrations, reason = self._migrations.promote_run(space, hashes, (target,), target)
        return migrations, "no_room" if reason == "no_room" else ""

    def holder_of(self, lease_id: int) -> str | None:
        """Who holds a lease; None when there is none."""
        return self._leases.holder_of(lease_id)

    def renew(self, lease_id: int, ttl_s: float, now: float) -> float:
        """Prolong a lease; returns the seconds from now that it has.

        Raises:
            LeaseExpired: its deadline has passed. InvalidArgument: the ttl is not positive.
        """
        return self._leases.renew(lease_id, _ttl(ttl_s, self.config.max_lease_s), now)

    def release(self, lease_id: int, now: float) -> None:
        """End a lease whose holder reads no more; unknown ones are ignored."""
        self._leases.release(lease_id)

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
        """Reserve slots for one part of the blocks of a run that are not here, evicting when needed.

        Args:
            hashes: a run of one chain.
            parent: hash of the block before the first, b"" at the start of a chain.
            ttl_s: seconds, cut to `max_reservation_s`.
            tier: HBM asks for slots in device memory, and grants what finds no room there
                in dram: the places say which.

        Raises:
            UnknownNamespace, InvalidArgument: too many hashes, not 16 bytes each, no such part or tier, or
                a ttl that is not positive.
        """
        cursor = self.begin_reserve(namespace_id, hashes, parent, part, writer_id, ttl_s, now, tier)
        self.reserve_some(cursor, len(hashes), now)
        return self.reserved(cursor)

    def begin_reserve(
        self,
        namespace_id: bytes,
        hashes: Sequence[bytes],
        parent: bytes,
        part: int,
        writer_id: str,
        ttl_s: float,
        now: float,
        tier: Tier = Tier.DRAM,
    ) -> ReserveCursor:
        """As `reserve`, for a run so long that others shall be served in between.

        Call `reserve_some` until it `is_done`, then `reserved`; or `cancel_reserve`.

        Raises: as `reserve`.
        """
        space = self._space(namespace_id, len(hashes))
        ttl_s = _ttl(ttl_s, self.config.max_reservation_s)
        if not 0 <= part < space.tp_size:
            raise InvalidArgument(f"part {part} of {space.tp_size}")
        if len(parent) not in (0, HASH_BYTES) or any(len(name) != HASH_BYTES for name in hashes):
            raise InvalidArgument(f"block hashes have {HASH_BYTES} bytes each")
        return self._reservations.begin_reserve(
            space, hashes, parent, part, writer_id, ttl_s, now + ttl_s, _checked_memory_tier(tier)
        )

    def reserve_some(self, cursor: ReserveCursor, count: int, now: float) -> None:
        """Go on with up to `count` blocks of a run.

        Raises:
            ReservationGone: it ended meanwhile, with its writer or its time.
        """
        self.expire(now)
        self._reservations.reserve_some(cursor, count)

    def reserved(self, cursor: ReserveCursor) -> Reservation:
        """What became of a run that is done."""
        reservation_id = cursor.grant.reservation_id if cursor.grant is not None else 0
        slot_bytes = cursor.space.slot_bytes[Tier.DRAM]
        return Reservation(
            reservation_id,
            cursor.statuses,
            cursor.places,
            slot_bytes,
            cursor.ttl_s,
            cursor.deadline,
        )

    def cancel_reserve(self, cursor: ReserveCursor, now: float) -> None:
        """Give up a run of which nobody was told: what it holds is free at once."""
        if cursor.grant is not None:
            self.abort(cursor.grant.reservation_id, True, now)

    def writer_of(self, reservation_id: int) -> str | None:
        """Whose a reservation is, or was while its slots are in quarantine; None when it is wholly over."""
        return self._reservations.writer_of(reservation_id)

    def renew_reservation(self, reservation_id: int, ttl_s: float, now: float) -> float:
        """Prolong a reservation; returns the seconds from now that it has.

        Raises:
            ReservationGone: it is over. InvalidArgument: the ttl is not positive.
        """
        return self._reservations.renew(
            reservation_id, _ttl(ttl_s, self.config.max_reservation_s), now
        )

    def commit(
        self,
        reservation_id: int,
        checksums: Sequence[int],
        now: float,
        indices: Sequence[int] | None = None,
    ) -> list[bytes]:
        """Commit granted blocks, all or nothing; returns the hashes that became visible by it.

        Args:
            checksums: xxh3-64 of each part's bytes, in the order of `indices`.
            indices: into the granted blocks; None for every one of them.

        Raises:
            ReservationGone: it is over, or an index was committed before.
            InvalidArgument: an index does not exist or comes twice, or the checksums are not one for each.
        """
        cursor = self.begin_commit(reservation_id, checksums, now, indices)
        self.commit_some(cursor, len(checksums))
        return cursor.visible

    def begin_commit(
        self,
        reservation_id: int,
        checksums: Sequence[int],
        now: float,
        indices: Sequence[int] | None = None,
    ) -> CommitCursor:
        """As `commit`, for so many that others shall be served in between: call `commit_some` until it `is_done`.

        From here on it cannot fail, whatever becomes of the reservation and its writer.

        Raises: as `commit`.
        """
        cursor = self._reservations.begin_commit(reservation_id, checksums, indices, now)
        self._table.counters["committed"] += len(checksums)
        return cursor

    def commit_some(self, cursor: CommitCursor, count: int) -> None:
        """Commit the next `count` blocks of a run; they become visible in order."""
        self._reservations.commit_some(cursor, count)

    def abort(self, reservation_id: int, writer_stopped: bool, now: float) -> None:
        """Give a reservation back: its slots are free if the writer stopped, else in quarantine.

        A later call with `writer_stopped` frees those in quarantine. Unknown ones are ignored.
        """
        self._reservations.abort(reservation_id, writer_stopped=writer_stopped, now=now)

    # ------------------------------------------------------------ ends

    def client_gone(self, client_id: str, now: float) -> None:
        """A client went away: its leases run into their grace, its reservations into quarantine."""
        self._leases.holder_gone(client_id, now)
        self._reservations.writer_gone(client_id, now)
        self.expire(now)

    def expire(self, now: float) -> int:
        """End every lease, reservation, quarantined slot and protection that is past its time.

        Returns how many.
        """
        self._access_clock.note(self._table.tick, now)
        ended = self._leases.expire(now) + self._reservations.expire(now)
        return ended + self._retention.expire(now)

    def drop(self, namespace_id: bytes, block_hash: bytes, reason: str, now: float) -> bool:
        """Remove a block from all tiers; what is pinned or moving is hidden now and freed later.

        A block of which nothing is committed stays: the report is about an older one. Returns whether a
        block was dropped. With the reason "checksum" later pins say so.

        Raises:
            UnknownNamespace.
        """
        block = self._space(namespace_id, 1).blocks.get(block_hash)
        if block is None or not any(copy and copy.committed for copy in block.copies):
            return False
        self._table.detach(block, reason)
        return True

    # ------------------------------------------------------------ protection

    def retain(
        self, namespace_id: bytes, hashes: Sequence[bytes], until: float | None, now: float
    ) -> int:
        """Keep those of `hashes` that stand here: to the last (`until`), or for ever (None).

        A softly protected block is evicted only when nothing else can be, a hard one never; dropping a
        corrupt block ends both. Returns how many of `hashes` are protected so now. All or none.

        Args:
            hashes: a chain from its start; those that are not here are passed over.
            until: monotonic seconds. Protecting again may prolong, never shortens.

        Raises:
            UnknownNamespace, InvalidArgument: too many hashes, a time that is over, or a chain without its
                head. NoRoom: more than `retention_share` of a tier would be promised.
        """
        space = self._space(namespace_id, len(hashes))
        self.expire(now)
        return self._retention.retain(space, hashes, until, now)

    def end_retention(self, namespace_id: bytes, hashes: Sequence[bytes], now: float) -> int:
        """End the protection of a chain; returns how many blocks had one and lost it.

        What another protected chain builds on stays protected.

        Raises:
            UnknownNamespace, InvalidArgument: too many hashes.
        """
        space = self._space(namespace_id, len(hashes))
        self.expire(now)
        return self._retention.end_retention(space, hashes)

    # ------------------------------------------------------------ moves

    def plan_demotions(
        self, max_blocks: int, now: float, sources: Collection[Tier] = (Tier.HBM, Tier.DRAM)
    ) -> list[Migration]:
        """Moves that give the coldest blocks of hbm a copy in dram, and those of dram one in nvme.

        At most `max_blocks` of each; every move must be ended by `finish_migration`.

        Apply the nvme "removed" events of `take_events` before writing to the targets: their slots may
        have held those blocks until now.
        """
        return self._migrations.plan_demotions(max_blocks, now, sources)

    @property
    def has_more_demotions(self) -> bool:
        """The last plan was cut after blocks that all found no room: go on with another."""
        return self._migrations.has_more

    def finish_migration(
        self, migration_id: int, ok: bool, now: float, checksum: int | None = None
    ) -> None:
        """The bytes of a move are in place (`ok`), or will never be.

        Args:
            checksum: of the bytes as they are now; None where they are those that were read. A part that is
                encoded on its way has another one at its target.

        Raises:
            InvalidArgument: no such move is under way.
        """
        self._finish(migration_id, ok, now, checksum)

    def cancel_migrations(self, migrations: Sequence[Migration], now: float) -> None:
        """Give up moves that were not begun; their targets are free at once.

        Raises:
            InvalidArgument: one of them is not under way.
        """
        for migration in migrations:
            self._finish(migration.migration_id, None, now)

    # ------------------------------------------------------------ arenas

    def add_arena(self, tier: Tier, allocator: SlabAllocator, now: float) -> None:
        """Take in one more arena of a tier; slots come from it at once.

        Raises:
            NotFound: there is no such tier. InvalidArgument: its id is known in this tier or, as clients see
                ids alone, in the other of dram and hbm; or its slabs are not like those of the tier.
        """
        if tier not in self._table.tiers:
            raise NotFound(f"this node has no {tier}")
        for other in self._table.tiers.values():
            ids = [arena.arena_id for arena in other.allocator.arenas]
            if Tier.NVME not in (tier, other.index) and allocator.arena_id in ids:
                raise InvalidArgument(f"arena {allocator.arena_id} is one of {other.name}")
        self._table.tiers[tier].allocator.add(allocator)
        self._table.resized(tier)

    def evacuate_arena(self, arena_id: int, now: float) -> None:
        """Begin to empty a dram arena: nothing is allocated there from now on.

        Call `plan_evacuation` until `take_evacuated` gives it back. Retiring it again changes nothing.

        Raises:
            NotFound: no such arena. InvalidArgument: it is the last one.
        """
        self._evacuations.retire(arena_id)

    def plan_evacuation(
        self, max_blocks: int, now: float, *, may_demote: bool = True
    ) -> list[Migration]:
        """Take up to `max_blocks` blocks out of the retired arenas; what is leased or written stays.

        Returns moves from dram to dram or nvme, each to be ended by `finish_migration`; the rest was evicted, which
        `evacuating` shows. A call takes 5 ms at most.

        Args:
            may_demote: nvme takes blocks; without it what finds no room in dram is evicted.
        """
        self.expire(now)
        return self._evacuations.plan(max_blocks, may_demote=may_demote)

    def arena_bytes(self) -> dict[int, int]:
        """Bytes in slots of each dram arena, by arena id."""
        arenas = self._table.tiers[Tier.DRAM].allocator.arenas
        return {arena.arena_id: arena.used_bytes for arena in arenas}

    def evacuating(self) -> dict[int, int]:
        """Bytes that are still in slots of each retired dram arena, by arena id."""
        return self._evacuations.evacuating()

    def take_evacuated(self) -> list[int]:
        """Forget the retired arenas that are empty, and return their ids: they may be unmapped."""
        return self._evacuations.take_empty()

    # ------------------------------------------------------------ recovery

    def recover(
        self,
        namespace_id: bytes,
        block_hash: bytes,
        parent: bytes,
        part: int,
        place: Place,
        checksum: int,
        now: float,
        encoding: Encoding = "as_is",
    ) -> bool:
        """Take in one part found in nvme at start; False when it cannot be (taken, misplaced, known).

        Args:
            checksum: of the bytes on disk.
            encoding: how they encode the part.

        Raises:
            UnknownNamespace.
        """
        space = self._space(namespace_id, 1)
        return recovery.recover_part(
            self._table, space, block_hash, parent, part, place, checksum, encoding
        )

    def finish_recovery(self, now: float) -> list[tuple[bytes, bytes]]:
        """Free the blocks recovered in part only; returns (namespace id, hash) of each."""
        return recovery.discard_partial(self._table)

    def restore_accesses(self, accesses: Sequence[Access], now: float) -> None:
        """Order what was recovered by its last use in an earlier life; what is not named was written after that.

        Policies that go by anything but recency begin anew.
        """
        recovery.restore_accesses(self._table, accesses)

    def restore_retentions(self, retentions: Sequence[Retention], now: float) -> int:
        """Protect again those that stand here; returns how many could not be (`retention_share` is smaller)."""
        return recovery.restore_retentions(self._retention, self._table, retentions, now)

    def accesses(self, count: int) -> Iterator[list[tuple[int, Access]]]:
        """(nvme device, last use) of every block there, `count` blocks at a time; changes in between do no harm."""
        return recovery.accesses(self._table, count)

    @property
    def tick(self) -> int:
        """Grows with every use of a block and with every new one."""
        return self._table.tick

    def retentions(self) -> list[Retention]:
        """All protected blocks."""
        return [
            Retention(block.space.namespace_id, block.name, block.retained_until)
            for block in self._retention.values()
        ]

    @property
    def retention_changes(self) -> int:
        """Grows with every protection that begins, is prolonged or ends."""
        return self._retention.changes

    # ------------------------------------------------------------ failing devices

    def close_device(self, number: int, now: float) -> None:
        """Plan no more writes to an nvme device; what stands there can still be read.

        Raises:
            NotFound: there is no such device.
        """
        self._failed_arenas.close(Tier.NVME, number)

    def rest_devices(self, numbers: Iterable[int]) -> None:
        """Plan no writes to these nvme devices until the next call, which names others or none."""
        if Tier.NVME in self._table.tiers:
            self._table.tiers[Tier.NVME].allocator.rest(numbers)

    def fail_device(self, number: int, now: float) -> None:
        """An nvme device cannot be read any more: plan nothing there, and give up its blocks.

        Call `drop_failed` until it returns 0.

        Raises:
            NotFound: there is no such device.
        """
        self._failed_arenas.fail(Tier.NVME, number)

    def drop_failed(self, max_slots: int, now: float) -> int:
        """Hide blocks that were lost with their device, and free their slots; returns how many slots are left.

        Blocks that stand elsewhere as well lose a copy. Later pins of the others say "disk_failed".
        """
        return self._failed_arenas.step(max_slots, "disk_failed")

    # ------------------------------------------------------------ reports

    def take_events(self) -> list[StoreEvent]:
        """What happened to whole copies since the last call, in order.

        At most `max_pending_events` wait; where more were missed, the counter "events_lost" has grown,
        and only a full report (`snapshot`) is right again.
        """
        return self._table.take_events()

    def snapshot(self) -> Iterator[tuple[bytes, Tier, bytes]]:
        """(namespace id, tier, hash) of every whole copy, as of this call."""
        slices = [
            (space.namespace_id, tier.index, list(space.visible[tier.index]))
            for space in self._table.spaces.values()
            for tier in self._table.tiers.values()
        ]
        return ((space_id, tier, name) for space_id, tier, names in slices for name in names)

    def usages(self) -> list[NamespaceUsage]:
        """What stands of each namespace."""
        return inspection.usages(self._table)

    def blocks(self, namespace_id: bytes, offset: int, limit: int, now: float) -> list[BlockInfo]:
        """A page of a namespace's blocks, in the order in which they came here; no look is a use.

        Raises:
            UnknownNamespace. InvalidArgument: the offset is negative, or the limit not in 1 to `MAX_PAGE`.
        """
        space = self._space(namespace_id, 0)
        if offset < 0 or not 1 <= limit <= inspection.MAX_PAGE:
            raise InvalidArgument(
                f"offset {offset}, limit {limit}", hint=f"at most {inspection.MAX_PAGE} at a time"
            )
        self._access_clock.note(self._table.tick, now)
        return inspection.page(space, offset, limit, self._access_clock, now)

    def usage(self) -> list[TierUsage]:
        """Bytes by state of each tier; free + reserved + committed + quarantined = capacity.

        Pinned bytes are of the committed ones; targets of moves count as reserved.
        """
        spaces = self._table.spaces.values()
        return [
            TierUsage(
                tier.index,
                tier.allocator.capacity_bytes,
                tier.free_bytes,
                tier.reserved_bytes,
                tier.committed_bytes,
                tier.pinned_bytes,
                tier.quarantined_bytes,
                sum(len(space.visible[tier.index]) for space in spaces),
                tier.retained_bytes,
            )
            for tier in self._table.tiers.values()
        ]

    def accounts(self) -> list[AccountUsage]:
        """What each tenant or namespace with a quota, and all others together, use of each tier."""
        return [
            AccountUsage(
                name, tier.index, tier.quota_table.quotas[number], tier.quota_table.used[number]
            )
            for tier in self._table.tiers.values()
            for number, name in enumerate(self._table.accounts.names)
        ]

    @property
    def counters(self) -> dict[str, float]:
        """Totals since start: hits, misses, miss:<reason>, evicted, evicted:<tier>, lost, promoted, ..."""
        return dict(self._table.counters)

    @property
    def lease_count(self) -> int:
        """Leases in force or in grace."""
        return len(self._leases)

    @property
    def reservation_count(self) -> int:
        """Reservations in force."""
        return len(self._reservations)

    @property
    def migration_count(self) -> int:
        """Moves under way."""
        return len(self._migrations) + len(self._evacuations)

    def check_integrity(self) -> None:
        """Recompute every invariant that the state can show from scratch; slow.

        Raises:
            StoreCorrupt: one does not hold.
        """
        integrity.check(
            self._table,
            self._leases,
            self._reservations,
            self._migrations,
            self._evacuations,
            self._retention,
        )

    # ------------------------------------------------------------ within

    def _space(self, namespace_id: bytes, count: int) -> Space:
        space = self._table.spaces.get(namespace_id)
        if space is None:
            raise UnknownNamespace(
                f"namespace {bytes(namespace_id).hex()} is not registered here",
                hint="register it first; this node may have restarted",
            )
        if count > self.config.max_blocks_per_call:
            raise InvalidArgument(
                f"{count} blocks in one call", hint=f"at most {self.config.max_blocks_per_call}"
            )
        return space

    def _finish(
        self, migration_id: int, ok: bool | None, now: float, checksum: int | None = None
    ) -> None:
        if migration_id in self._evacuations:
            self._evacuations.finish(migration_id, ok)
        else:
            self._migrations.finish(migration_id, ok, now, checksum)

    def _wanted_parts(self, space: Space, parts: Sequence[int] | None) -> Sequence[int] | None:
        if not parts:
            return None
        if len(set(parts)) != len(parts) or not all(0 <= part < space.tp_size for part in parts):
            raise InvalidArgument(f"parts {list(parts)} of {space.tp_size}")
        return parts

    def _miss_reason(self, space: Space, hashes: Sequence[bytes], found: int) -> str:
        if found == len(hashes):
            return ""
        name = hashes[found]
        if name in space.blocks:
            return "in_progress"
        for ghosts in (self._table.dropped, self._table.evicted):
            reason = ghosts.reason(space.namespace_id, name)
            if reason:
                return reason
        return "never_stored"


def _checked_memory_tier(tier: Tier) -> Tier:
    if tier == Tier.NVME:
        raise InvalidArgument("clients do not read or write nvme", hint="dram or hbm")
    return tier


def _owner(namespace: Namespace) -> tuple[str, str, str, str]:
    return namespace.model, namespace.revision, namespace.tenant, namespace.salt


def _ttl(ttl_s: float, limit_s: float) -> float:
    if not ttl_s > 0:  # NaN included
        raise InvalidArgument(f"ttl_s={ttl_s} must be positive")
    return min(ttl_s, limit_s)
