"""An independent model of a store: who may use which page, and what each page holds.

It sees only the results of calls. From these it keeps its own records of leases, reservations,
quarantine and migrations, and simulates the memory with writers that write late. It raises
`Violation` if the store hands out a page that somebody may still use, or places that do not hold
the block.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvpool.blocks.layout import Layout, Namespace
from kvpool.blocks.records import BlockStatus
from kvpool.blocks.tier import Tier
from kvpool.errors import InvalidArgument, LeaseExpired, NoRoom, ReservationGone
from tiers.store.blocks import Migration
from tiers.store.slab_allocator import Place, SlabAllocator
from tiers.store.store import Store, StoreConfig

PAGE = 4096
SLAB = 4 * PAGE
SMALL = Namespace("small", "r1", Layout("float16", 1, 1, 16, 64))  # parts of one page
LARGE = Namespace("large", "r1", Layout("float16", 1, 2, 32, 64, tp_size=2))  # 2 parts of two pages
CONFIG = StoreConfig(
    grace_s=2.0,
    max_lease_s=10.0,
    max_reservation_s=10.0,
    quarantine_s=5.0,
    dram_high_watermark=0.5,
    dram_low_watermark=0.25,
    hbm_high_watermark=0.5,
    hbm_low_watermark=0.25,
    migration_retry_s=1.0,
    ghost_hashes=8,
)
NAMESPACES = (SMALL, LARGE)
HBM_ARENA = 9
Block = tuple[bytes, bytes]  # namespace id, hash
Page = tuple[Tier, int, int]  # tier, arena, page number


class Violation(AssertionError):
    """The store broke an invariant."""


def chains(namespace: Namespace) -> list[list[bytes]]:
    """Three chains of seven blocks; the second shares two blocks with the first."""
    tag = namespace.model[:1].encode()

    def run(chain: int, start: int = 0) -> list[bytes]:
        return [tag + bytes([chain, i]) + bytes(13) for i in range(start, 7)]

    first = run(0)
    return [first, first[:2] + run(1, 2), run(2)]


@dataclass
class Claim:
    """Pages that somebody may read or write until `until`; None: until a later call ends it."""

    pages: list[Page]
    until: float | None
    is_reader: bool = False


@dataclass
class Grant:
    """A reservation as its writer sees it; `open` has the indices that are not committed."""

    namespace: Namespace
    part: int
    blocks: list[bytes]
    places: list[Place]
    tiers: list[Tier]
    deadline: float
    writer: str
    open: set[int] = field(default_factory=set)


@dataclass
class Lease:
    """A lease as its reader sees it."""

    expected: list[tuple[Page, object]]
    deadline: float
    holder: str
    blocks: list[Block] = field(default_factory=list)


class ModelledStore:
    """A store and the model beside it; the verbs drive both and compare."""

    def __init__(
        self,
        config: StoreConfig = CONFIG,
        dram_slabs: int = 4,
        nvme_slabs: int = 4,
        hbm_slabs: int = 3,
    ) -> None:
        self.store = Store(
            SlabAllocator(dram_slabs * SLAB, SLAB),
            SlabAllocator(nvme_slabs * SLAB, SLAB) if nvme_slabs else None,
            config,
            hbm=SlabAllocator(hbm_slabs * SLAB, SLAB, HBM_ARENA) if hbm_slabs else None,
        )
        self.config = config
        self.now = 0.0
        self.memory: dict[Page, object] = {}
        self.claims: dict[object, Claim] = {}
        self.grants: dict[int, Grant] = {}
        self.leases: dict[int, Lease] = {}
        self.migrations: dict[int, Migration] = {}
        self.committed: dict[Block, set[int]] = {}
        self.part_tiers: dict[tuple[Block, int], Tier] = {}  # of parts granted last
        self.lost_from_hbm = 0
        self.residents: set[tuple[Tier, Block]] = set()
        self.parents: dict[Block, bytes] = {}
        self.live_parts: dict[tuple[Block, int], int] = {}  # granted and open -> reservation
        self.retained: dict[Block, float] = {}  # until when, in any tier
        self.paid: dict[str, int] = {}  # by account, dram bytes before the call under way
        self.arenas = {0: dram_slabs * SLAB}  # bytes by id, with arenas that are being evacuated
        self.next_arena = HBM_ARENA
        self.ids = {ns.model: self.store.namespaces.register(ns) for ns in NAMESPACES}
        for namespace in NAMESPACES:
            for chain in chains(namespace):
                for parent, block in zip([b"", *chain], chain, strict=False):
                    self.parents[self.ids[namespace.model], block] = parent

    # ------------------------------------------------------------ verbs

    def reserve(
        self,
        namespace: Namespace,
        chain: int,
        start: int,
        count: int,
        part: int,
        writer: str,
        ttl: float,
        tier: Tier = Tier.DRAM,
    ) -> int:
        whole = chains(namespace)[chain]
        run = whole[start : start + count]
        part %= namespace.layout.tp_size
        space = self.ids[namespace.model]
        parent = whole[start - 1] if start else b""
        self._expire_own()
        self._note_accounts()
        result = self.store.reserve(space, run, parent, part, writer, ttl, self.now, tier)
        tiers = [_tier_of(place) for place in result.places]
        granted = [b for b, s in zip(run, result.statuses, strict=True) if s == BlockStatus.GRANTED]
        self._require(len(granted) == len(result.places), "one place for each granted block")
        self._require(
            bool(granted) == bool(result.reservation_id), "a number when something is granted"
        )
        for block in granted:
            self._require(
                ((space, block), part) not in self.live_parts,
                f"{block!r} part {part} granted twice",
            )
        for index, place in enumerate(result.places):
            self._grant(
                ("res", result.reservation_id, index),
                tiers[index],
                place,
                namespace,
                result.deadline,
            )
        if granted:
            grant = Grant(namespace, part, granted, result.places, tiers, result.deadline, writer)
            grant.open = set(range(len(granted)))
            self.grants[result.reservation_id] = grant
            for block, granted_tier in zip(granted, tiers, strict=True):
                is_asked = tier == Tier.HBM or granted_tier == Tier.DRAM
                self._require(is_asked, f"{block!r} was granted in {granted_tier}")
                self.live_parts[(space, block), part] = result.reservation_id
                self.part_tiers[(space, block), part] = granted_tier
        self._after(asking=namespace, needed=whole[: start + count])
        return result.reservation_id

    def commit(self, reservation: int, indices: list[int] | None) -> None:
        grant = self.grants[reservation]
        space = self.ids[grant.namespace.model]
        chosen = list(range(len(grant.blocks))) if indices is None else indices
        if self._may_write(reservation):
            for index in chosen:
                if index in grant.open:
                    self._write_part(grant, index)
        is_possible = self.now < grant.deadline and set(chosen) <= grant.open
        try:
            visible = self.store.commit(reservation, [i + 1 for i in chosen], self.now, indices)
        except ReservationGone:
            self._require(not is_possible, "a live reservation can be committed")
            self._expire_own()
            self._after()
            return
        self._require(is_possible, "what is over cannot be committed")
        for index in chosen:
            block = (space, grant.blocks[index])
            grant.open.discard(index)
            del self.claims["res", reservation, index]
            if self.live_parts.get((block, grant.part)) == reservation:
                del self.live_parts[block, grant.part]
                self.committed.setdefault(block, set()).add(grant.part)
        for name in visible:
            self._require_whole((space, name))
            parts = range(grant.namespace.layout.tp_size)
            tiers = {self.part_tiers[(space, name), part] for part in parts}
            self._require(len(tiers) == 1, f"parts of {name!r} are in {tiers}")
        if not grant.open:
            del self.grants[reservation]
        self._after()

    def abort(self, reservation: int, writer_stopped: bool) -> None:
        self._expire_own()
        self.store.reservations.abort(reservation, writer_stopped, self.now)
        if reservation in self.grants:
            self._end_grant(reservation, self.now, is_stopped=writer_stopped)
        elif writer_stopped:  # it expired just now, and is confirmed all the same
            for key in [
                k for k in self.claims if isinstance(k, tuple) and k[2:3] == (reservation,)
            ]:
                del self.claims[key]
        self._after()

    def confirm_stopped(self, which: int) -> None:
        """A writer confirms that it stopped: the slots of its ended reservation are free."""
        self.store.expire(self.now)
        self._expire_own()
        late = [k for k in self.claims if isinstance(k, tuple) and k[0] == "late"]
        if late:
            _, writer, reservation, _ = late[which % len(late)]
            self.store.reservations.abort(reservation, True, self.now)
            for key in [k for k in late if k[1:3] == (writer, reservation)]:
                del self.claims[key]
        self._after()

    def late_write(self, which: int) -> None:
        """A write of an ended reservation arrives now."""
        late = [k for k in self.claims if isinstance(k, tuple) and k[0] == "late"]
        if late:
            key = late[which % len(late)]
            for page in self.claims[key].pages:
                self.memory[page] = ("garbage", key, self.now)
        self._after()

    def pin(
        self,
        namespace: Namespace,
        chain: int,
        count: int,
        holder: str,
        ttl: float,
        tier: Tier = Tier.DRAM,
    ) -> None:
        run = chains(namespace)[chain][:count]
        space = self.ids[namespace.model]
        tiers = self.store.lookup(space, run)
        for name in run[: len(tiers)]:
            self._require_whole((space, name))
        self._note_accounts()
        result = self.store.pin(space, run, holder, ttl, self.now, None, tier)
        self._take_migrations(result.promote)
        self._require(result.found <= len(tiers), "a pin finds no more than a lookup")
        tp_size = namespace.layout.tp_size
        self._require(len(result.places) == result.found * tp_size, "a place for each part")
        if result.found:
            expected: list[tuple[Page, object]] = []
            pages: list[Page] = []
            for position, place in enumerate(result.places):
                block, part = run[position // tp_size], position % tp_size
                where = _tier_of(place)
                self._require(where == result.tiers[position // tp_size], "tiers tell the places")
                best = tiers[position // tp_size] if tier == Tier.HBM else Tier.DRAM
                self._require(where == best or best == Tier.NVME, f"handed out {where}, not {best}")
                for i, page in enumerate(self._pages(where, place, namespace)):
                    expected.append((page, (space, block, part, i)))
                    pages.append(page)
            deadline = self.now + result.ttl_s
            leased = [(space, name) for name in run[: result.found]]
            self.leases[result.lease_id] = Lease(expected, deadline, holder, leased)
            self.claims["lease", result.lease_id] = Claim(
                pages, deadline + self.config.grace_s, is_reader=True
            )
        elif result.miss_reason != "promoting" and run:
            self._require(bool(result.miss_reason), "every miss has a reason")
        self._after(asking=namespace, needed=run)

    def promote(self, namespace: Namespace, chain: int, count: int, tier: Tier) -> None:
        run = chains(namespace)[chain][:count]
        self._note_accounts()
        migrations, _ = self.store.promote(self.ids[namespace.model], run, self.now, tier)
        self._require(
            all(migration.target_tier == tier for migration in migrations),
            "migrations end in the tier that was asked for",
        )
        self._take_migrations(migrations)
        self._after(asking=namespace, needed=run)

    def renew(self, lease: int, ttl: float) -> None:
        known = self.leases[lease]
        try:
            left = self.store.leases.renew(lease, ttl, self.now)
        except LeaseExpired:
            self._require(self.now >= known.deadline, "a lease in force can be renewed")
        else:
            self._require(self.now < known.deadline, "a lease past its deadline cannot be renewed")
            known.deadline = self.now + left
            self.claims["lease", lease].until = known.deadline + self.config.grace_s
        self._after()

    def release(self, lease: int) -> None:
        self.store.leases.release(lease)
        del self.leases[lease]
        self.claims.pop(("lease", lease), None)
        self._after()

    def client_gone(self, client: str) -> None:
        self._expire_own()
        self.store.client_gone(client, self.now)
        for number, lease in self.leases.items():
            claim = self.claims.get(("lease", number))
            if lease.holder == client and claim is not None:
                lease.deadline = min(lease.deadline, self.now)
                claim.until = lease.deadline + self.config.grace_s
        for reservation in [r for r, g in self.grants.items() if g.writer == client]:
            self._end_grant(reservation, self.now, is_stopped=False)
        self._after()

    def advance(self, seconds: float, *, sweeps: bool) -> None:
        self.now += seconds
        if sweeps:
            self.store.expire(self.now)
        self._expire_own()
        self._after()

    def drop(self, namespace: Namespace, chain: int, position: int, reason: str) -> None:
        space = self.ids[namespace.model]
        name = chains(namespace)[chain][position]
        if self.store.drop(space, name, reason, self.now):
            self.committed.pop((space, name), None)
            self.retained.pop((space, name), None)
            for part in range(namespace.layout.tp_size):
                self.live_parts.pop(((space, name), part), None)
            self._require(not self.store.lookup(space, [name]), "a dropped block is not found")
        self._after(dropped=(space, name))

    def retain(self, namespace: Namespace, chain: int, count: int, ttl: float | None) -> None:
        """Retain `count` blocks from the head of a chain; a `ttl` of None is a hard pin."""
        run = chains(namespace)[chain][:count]
        space = self.ids[namespace.model]
        until = math.inf if ttl is None else self.now + ttl
        self.retained = {block: end for block, end in self.retained.items() if end > self.now}
        resident = [(space, n) for n in run if self._is_resident((space, n))]
        sizes = [
            n.layout.block_bytes
            for n in NAMESPACES
            for b in self.retained
            if b[0] == self.ids[n.model]
        ]
        fresh = [block for block in resident if block not in self.retained]
        promised = sum(sizes) + len(fresh) * namespace.layout.block_bytes
        nvme = [u.capacity_bytes for u in self.store.inspection.tiers() if u.tier == Tier.NVME]
        is_room = promised <= self.config.retention_share * min([self._open_bytes(), *nvme])
        try:
            count = self.store.retention.retain(
                space, run, None if ttl is None else until, self.now
            )
        except NoRoom:
            self._require(bool(fresh) and not is_room, "within the share retention is granted")
        else:
            self._require(is_room or not fresh, "no more than the share is retained")
            self._require(count == len(resident), f"{count} retained of {len(resident)}")
            for block in resident:
                self.retained[block] = max(until, self.retained.get(block, 0.0))
        self._after()

    def end_retention(self, namespace: Namespace, chain: int, count: int) -> None:
        space = self.ids[namespace.model]
        self.retained = {block: end for block, end in self.retained.items() if end > self.now}
        ended = 0
        run = chains(namespace)[chain][:count]
        for name in reversed(run):
            builds_on = [b for b in self.retained if b[0] == space and self.parents[b] == name]
            if (space, name) in self.retained and not builds_on:
                del self.retained[space, name]
                ended += 1
        count = self.store.retention.end(space, run, self.now)
        self._require(count == ended, f"{count} retentions ended instead of {ended}")
        self._after()

    def plan_demotions(self, count: int) -> None:
        self._take_migrations(self.store.migrations.plan_demotions(count, self.now).migrations)
        self._after()

    def finish_migration(self, which: int, ok: bool | None) -> None:
        """Finish one migration; an `ok` of None cancels it before it began."""
        if not self.migrations:
            return
        migration = self.migrations.pop(sorted(self.migrations)[which % len(self.migrations)])
        source = self.claims.pop(("source", migration.migration_id)).pages
        target = self.claims.pop(("target", migration.migration_id)).pages
        for i, (old, new) in enumerate(zip(source, target, strict=True)):
            content = self.memory.get(old)
            expected = (migration.namespace_id, migration.block_hash, migration.part, i)
            self._require(
                content == expected, f"source of a migration holds {content}, not {expected}"
            )
            if ok is not None:
                self.memory[new] = content if ok else ("torn", migration.migration_id)
        if ok is None:
            self.store.cancel_migrations([migration], self.now)
        else:
            self.store.finish_migration(migration.migration_id, ok, self.now)
        self._after()

    def add_arena(self, slabs: int) -> None:
        self.next_arena += 1
        self.arenas[self.next_arena] = slabs * SLAB
        allocator = SlabAllocator(slabs * SLAB, SLAB, self.next_arena)
        self.store.add_arena(Tier.DRAM, allocator, self.now)
        self._after()

    def evacuate_arena(self, which: int) -> None:
        arena_id = sorted(self.arenas)[which % len(self.arenas)]
        is_last = not set(self.arenas) - self.store.evacuations.bytes_left().keys() - {arena_id}
        try:
            self.store.evacuations.begin(arena_id)
        except InvalidArgument:
            self._require(is_last, "any arena but the last can be evacuated")
        self._after()

    def plan_evacuation(self, count: int) -> None:
        self._expire_own()
        events = len(self.migrations)
        self._take_migrations(self.store.plan_evacuation(count, self.now))
        self._require(len(self.migrations) - events <= 2 * count, "more migrations than asked for")
        self._after()

    def take_evacuated(self) -> None:
        """Nobody may use an arena that is gone; an arena that comes later is another one."""
        for arena_id in self.store.evacuations.take_empty():
            del self.arenas[arena_id]
            for key, claim in self.claims.items():
                is_over = claim.until is not None and self.now >= claim.until
                is_there = any(page[:2] == (Tier.DRAM, arena_id) for page in claim.pages)
                self._require(is_over or not is_there, f"{key} lost its arena {arena_id}")
            for page in [page for page in self.memory if page[:2] == (Tier.DRAM, arena_id)]:
                self.memory[page] = "unmapped"
        self._after()

    def settle(self) -> None:
        """End everything; only committed blocks may be left, and after dropping them nothing."""
        while self.migrations:
            self.finish_migration(0, False)
        for lease in list(self.leases):
            self.release(lease)
        for reservation in list(self.grants):
            self.abort(reservation, False)
        self.advance(1000.0, sweeps=True)  # quarantine begins when the expiry is noticed
        self.advance(1000.0, sweeps=True)
        self._settle_evacuation()
        for usage in self.store.inspection.tiers():
            held = usage.reserved_bytes + usage.pinned_bytes + usage.quarantined_bytes
            self._require(held == 0, f"{usage.tier}: {held} bytes are held by nobody")
        for namespace in NAMESPACES:
            for chain in range(3):
                for position in range(7):
                    self.drop(namespace, chain, position, "test")
        for usage in self.store.inspection.tiers():
            self._require(usage.free_bytes == usage.capacity_bytes, f"{usage.tier} leaked")

    def _settle_evacuation(self) -> None:
        """With no holders left, all evacuations end, unless hard pinned blocks keep an arena."""
        is_kept = any(math.isinf(end) for end in self.retained.values())
        for _ in range(200):
            self.take_evacuated()
            if not self.store.evacuations.bytes_left():
                return
            self.plan_evacuation(4)
            while self.migrations:
                self.finish_migration(0, True)
        self._require(is_kept, f"arenas never came free: {self.store.evacuations.bytes_left()}")

    # ------------------------------------------------------------ the model's own view

    def check(self) -> None:
        """Compare the store with the model."""
        self.store.check_integrity()
        for lease in self.leases.values():
            if self.now < lease.deadline:
                for page, expected in lease.expected:
                    content = self.memory.get(page)
                    self._require(content == expected, f"a reader sees {content}, not {expected}")
        for usage in self.store.inspection.tiers():
            states = usage.free_bytes + usage.reserved_bytes
            states += usage.committed_bytes + usage.quarantined_bytes
            self._require(states == usage.capacity_bytes, f"{usage.tier}: {states} bytes")
            self._require(usage.free_bytes >= 0, f"{usage.tier}: less than nothing is free")
            self._require(usage.pinned_bytes <= usage.committed_bytes, "pinned is of committed")
        dram = next(usage for usage in self.store.inspection.tiers() if usage.tier == Tier.DRAM)
        arenas = self._open_bytes() + sum(self.store.evacuations.bytes_left().values())
        self._require(dram.capacity_bytes == arenas, "dram is what its arenas are")
        reported = {(tier, (space, name)) for space, tier, name in self.store.inspection.snapshot()}
        self._require(reported == self.residents, "events and the full report agree")

    def _after(
        self,
        dropped: Block | None = None,
        asking: Namespace | None = None,
        needed: Sequence[bytes] = (),
    ) -> None:
        """Compare after a call; `needed` are the blocks that the call must not evict."""
        removed: list[tuple[Tier, Block]] = []
        for event in self.store.take_events():
            block = (event.namespace_id, event.block_hash)
            resident = (event.tier, block)
            if event.kind == "stored":
                self._require(resident not in self.residents, "stored once")
                self._require_whole(block)
                self.residents.add(resident)
                continue
            self._require(resident in self.residents, "removed once")
            self.residents.discard(resident)
            if block != dropped and event.tier == Tier.HBM and not self._is_resident(block):
                self.lost_from_hbm += 1
                refused = self.store.counters.get("demotion_refused", 0)
                self._require(self.lost_from_hbm <= refused, f"{block!r} had room below hbm")
            if block != dropped:
                self._require_no_descendant(event.tier, block)
                removed.append(resident)
        self._require_retention(removed, asking, needed)
        self._require_quotas(removed, asking)
        self.retained = {
            block: end for block, end in self.retained.items() if self._is_resident(block)
        }
        self.check()

    def _require_retention(
        self, removed: list[tuple[Tier, Block]], asking: Namespace | None, needed: Sequence[bytes]
    ) -> None:
        for tier, block in removed:
            until = self.retained.get(block, 0.0)
            if tier == Tier.HBM:  # it is demoted from there
                has_left = not self._is_resident(block) and (Tier.DRAM, block) not in removed
                self._require(until <= self.now or not has_left, f"{block[1]!r} left, retained")
                continue
            self._require(until < math.inf, f"{block[1]!r} left {tier}, hard pinned")
            if until <= self.now:
                continue
            self._require(tier == Tier.DRAM, f"{block[1]!r} left nvme, retained until {until}")
            # Of the other namespace, the model sees no half written copies, and of neither the
            # arenas.
            if asking is SMALL and not self.store.evacuations.bytes_left():
                others = self._unretained_leaves(needed, {b for _, b in removed})
                self._require(not others, f"{block[1]!r} left, retained, and {others} stayed")

    def _unretained_leaves(self, needed: Sequence[bytes], removed: set[Block]) -> list[Block]:
        """The blocks of SMALL that the call could have evicted from DRAM instead."""
        space = self.ids[SMALL.model]
        busy = {
            block
            for number, lease in self.leases.items()
            for block in lease.blocks
            if ("lease", number) in self.claims
        }
        busy |= {
            (migration.namespace_id, migration.block_hash) for migration in self.migrations.values()
        }
        arriving = {block for block, _ in self.live_parts} | busy | removed
        here = {block for tier, block in self.residents if tier == Tier.DRAM}
        parents = {(b[0], self.parents[b]) for b in here | arriving}
        return [
            block
            for block in sorted(here - busy - parents)
            if block[0] == space
            and block[1] not in needed
            and self.retained.get(block, 0) <= self.now
        ]

    def _note_accounts(self) -> None:
        if self.config.quotas:
            self.store.expire(self.now)
            self.paid = {
                u.account: u.used_bytes
                for u in self.store.inspection.accounts()
                if u.tier == Tier.DRAM
            }

    def _require_quotas(self, removed: list[tuple[Tier, Block]], asking: Namespace | None) -> None:
        """No account above its quota takes from one below; every namespace has its own account."""
        if not self.config.quotas or asking is None:
            return
        quota = {
            u.account: u.quota_bytes
            for u in self.store.inspection.accounts()
            if u.tier == Tier.DRAM
        }
        left, me = self.paid, self.ids[asking.model].hex()
        sizes = {self.ids[n.model].hex(): n.layout.block_bytes for n in NAMESPACES}
        for tier, (space, name) in removed:
            other = space.hex()
            if tier != Tier.DRAM:
                continue
            is_fair = left[other] > quota[other] or left[me] + asking.layout.part_bytes <= quota[me]
            self._require(other == me or is_fair, f"{name!r} was taken from one below its quota")
            left[other] -= sizes[other]

    def _open_bytes(self) -> int:
        evacuating = self.store.evacuations.bytes_left()
        return sum(size for arena_id, size in self.arenas.items() if arena_id not in evacuating)

    def _is_resident(self, block: Block) -> bool:
        return any((tier, block) in self.residents for tier in Tier)

    def _require_no_descendant(self, tier: Tier, block: Block) -> None:
        space, name = block
        for child_tier, (child_space, child) in self.residents:
            if (child_tier, child_space) == (tier, space) and self.parents[
                child_space, child
            ] == name:
                raise Violation(f"{name!r} left {tier} before {child!r}")
        for (child_block, part), reservation in self.live_parts.items():
            is_child = child_block[0] == space and self.parents[child_block] == name
            if is_child and self.part_tiers[child_block, part] == tier:
                raise Violation(f"{name!r} left before reserved {child_block}: {reservation}")

    def _require_whole(self, block: Block) -> None:
        tp_size = next(n for n in NAMESPACES if self.ids[n.model] == block[0]).layout.tp_size
        parts = self.committed.get(block, set())
        self._require(len(parts) == tp_size, f"{block[1]!r} is visible with parts {parts}")

    def _take_migrations(self, migrations: list[Migration]) -> None:
        for migration in migrations:
            namespace = next(n for n in NAMESPACES if self.ids[n.model] == migration.namespace_id)
            self.migrations[migration.migration_id] = migration
            source = self._pages(migration.source_tier, migration.source, namespace)
            self._grant(
                ("target", migration.migration_id),
                migration.target_tier,
                migration.target,
                namespace,
                None,
            )
            self.claims["source", migration.migration_id] = Claim(source, None, is_reader=True)

    def _grant(
        self, key: object, tier: Tier, place: Place, namespace: Namespace, until: float | None
    ) -> None:
        """Somebody may write here from now on, so nobody else may use it."""
        pages = self._pages(tier, place, namespace)
        for other, claim in self.claims.items():
            is_over = claim.until is not None and self.now >= claim.until
            if not is_over and not set(pages).isdisjoint(claim.pages):
                raise Violation(f"{tier} {place} was granted to {key} while {other} may use it")
        self.claims[key] = Claim(pages, until)

    def _pages(self, tier: Tier, place: Place, namespace: Namespace) -> list[Page]:
        first = place.offset // PAGE
        return [
            (tier, place.arena_id, first + i) for i in range(namespace.layout.part_bytes // PAGE)
        ]

    def _may_write(self, reservation: int) -> bool:
        return reservation in self.grants and self.now < self.grants[reservation].deadline

    def _write_part(self, grant: Grant, index: int) -> None:
        space = self.ids[grant.namespace.model]
        pages = self._pages(grant.tiers[index], grant.places[index], grant.namespace)
        for i, page in enumerate(pages):
            self.memory[page] = (space, grant.blocks[index], grant.part, i)

    def _end_grant(self, reservation: int, at: float, *, is_stopped: bool) -> None:
        grant = self.grants.pop(reservation)
        space = self.ids[grant.namespace.model]
        for index in grant.open:
            claim = self.claims.pop(("res", reservation, index))
            key = ((space, grant.blocks[index]), grant.part)
            if self.live_parts.get(key) == reservation:
                del self.live_parts[key]
            if not is_stopped:
                claim.until = at + self.config.quarantine_s
                self.claims["late", grant.writer, reservation, index] = claim

    def _expire_own(self) -> None:
        for reservation in [r for r, g in self.grants.items() if self.now >= g.deadline]:
            self._end_grant(reservation, self.grants[reservation].deadline, is_stopped=False)
        for key, claim in list(self.claims.items()):
            is_late = isinstance(key, tuple) and key[0] in ("late", "lease")
            if is_late and claim.until is not None and self.now >= claim.until:
                del self.claims[key]

    @staticmethod
    def _require(holds: bool, message: str) -> None:
        if not holds:
            raise Violation(message)


def _tier_of(place: Place) -> Tier:
    return Tier.HBM if place.arena_id == HBM_ARENA else Tier.DRAM


def random_walk(
    seed: int, steps: int, config: StoreConfig = CONFIG, nvme_slabs: int = 4, hbm_slabs: int = 3
) -> ModelledStore:
    """Drive a modelled store through random steps; deterministic in `seed`."""
    rng = random.Random(seed)
    model = ModelledStore(config, nvme_slabs=nvme_slabs, hbm_slabs=hbm_slabs)
    verbs = (
        ["reserve"] * 6
        + ["commit"] * 8
        + ["pin"] * 6
        + ["release"] * 3
        + ["finish_migration"] * 6
        + ["advance", "late_write", "late_write", "plan_demotions", "plan_demotions"]
        + ["abort", "confirm_stopped", "renew", "client_gone", "drop"]
        + ["retain", "retain", "end_retention", "promote", "promote"]
        + ["add_arena", "evacuate_arena", "take_evacuated"]
        + ["plan_evacuation"] * 3
    )
    for _ in range(steps):
        step(model, rng.choice(verbs), rng)
    return model


def step(model: ModelledStore, verb: str, rng: random.Random) -> None:
    """One random step of the given kind; does nothing if there is nothing to act on."""
    namespace = rng.choice(NAMESPACES)
    who = f"client{rng.randrange(3)}"
    if verb == "reserve":
        start = rng.choice((0, 0, 0, rng.randrange(6)))
        part, ttl = rng.randrange(2), rng.uniform(0.1, 12)
        chain, count = rng.randrange(3), rng.randrange(1, 8)
        tier = rng.choice((Tier.DRAM, Tier.DRAM, Tier.HBM, Tier.HBM))
        reservation = model.reserve(namespace, chain, start, count, part, who, ttl, tier)
        if reservation and rng.random() < 0.6:
            model.commit(reservation, None)
    elif verb in ("commit", "abort") and model.grants:
        reservation = rng.choice(sorted(model.grants))
        grant = model.grants[reservation]
        if verb == "abort":
            model.abort(reservation, rng.random() < 0.5)
        else:
            count = len(grant.blocks)
            model.commit(reservation, rng.sample(range(count), rng.randrange(1, count + 1)))
    elif verb == "pin":
        chain, count, ttl = rng.randrange(3), rng.randrange(1, 8), rng.uniform(0.1, 12)
        model.pin(namespace, chain, count, who, ttl, rng.choice((Tier.DRAM, Tier.HBM)))
    elif verb == "promote":
        tier = rng.choice((Tier.DRAM, Tier.HBM))
        model.promote(namespace, rng.randrange(3), rng.randrange(1, 8), tier)
    elif verb in ("release", "renew") and model.leases:
        lease = rng.choice(sorted(model.leases))
        if verb == "release":
            model.release(lease)
        else:
            model.renew(lease, rng.uniform(0.1, 12))
    elif verb == "finish_migration":
        model.finish_migration(rng.randrange(8), rng.choice((True, True, True, False, None)))
    elif verb == "advance":
        model.advance(rng.choice((0.01, 0.5, 2.0, 4.0, 20.0)), sweeps=rng.random() < 0.5)
    elif verb == "late_write":
        model.late_write(rng.randrange(8))
    elif verb == "plan_demotions":
        model.plan_demotions(rng.randrange(1, 5))
    elif verb == "add_arena" and len(model.arenas) < 4:
        model.add_arena(rng.randrange(1, 5))
    elif verb == "evacuate_arena" and rng.random() < 0.5:
        model.evacuate_arena(rng.randrange(4))
    elif verb == "take_evacuated":
        model.take_evacuated()
    elif verb == "plan_evacuation":
        model.plan_evacuation(rng.randrange(1, 5))
    elif verb == "confirm_stopped":
        model.confirm_stopped(rng.randrange(8))
    elif verb == "client_gone":
        model.client_gone(who)
    elif verb == "retain":
        retained_for = rng.choice((None, rng.uniform(0.1, 30.0), rng.uniform(0.1, 30.0)))
        model.retain(namespace, rng.randrange(3), rng.randrange(1, 4), retained_for)
    elif verb == "end_retention":
        model.end_retention(namespace, rng.randrange(3), rng.randrange(1, 8))
    elif verb == "drop":
        model.drop(namespace, rng.randrange(3), rng.randrange(7), rng.choice(("checksum", "test")))
