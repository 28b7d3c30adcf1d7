"""NVMe devices fail at any moment: every invariant holds after each of many random steps."""

from __future__ import annotations

import random

import pytest

from kvpool.blocks.layout import Layout, Namespace
from kvpool.blocks.tier import Tier
from tiers.store.arena_allocator import ArenaAllocator
from tiers.store.blocks import Migration
from tiers.store.fp8 import Encoding
from tiers.store.slab_allocator import Place, SlabAllocator
from tiers.store.store import Store, StoreConfig

PAGE = 4096
SLAB = 16 * PAGE
DEVICES = 3
SPACES = [
    Namespace("a", "r", Layout("bfloat16", 1, 2, 16, 64, tp_size=2)),
    Namespace("b", "r", Layout("bfloat16", 2, 1, 64, 64)),
]


class Story:
    """Random calls on one store; `now` moves on with each."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        dtype: Encoding = self.random.choice(("as_is", "fp8"))
        self.store = Store(
            SlabAllocator(6 * SLAB, SLAB),
            ArenaAllocator(
                [SlabAllocator(3 * SLAB, SLAB, number) for number in range(DEVICES)], "spread"
            ),
            StoreConfig(
                write_through=self.random.random() < 0.5,
                grace_s=0.0,
                migration_retry_s=1.0,
                nvme_dtype=dtype,
            ),
        )
        self.migrations: list[Migration] = []
        self.lost: set[int] = set()
        self.closed: set[int] = set()
        self.leases: list[int] = []
        self.on_disk: set[tuple[bytes, bytes]] = set()  # as reported to the index
        for i, space in enumerate(SPACES):
            self.store.namespaces.register(space)
            # Blocks from before a restart, some of them in the other encoding.
            for device in range(DEVICES):
                encoding: Encoding = self.random.choice(("as_is", "fp8"))
                for part in range(space.layout.tp_size):
                    place = Place(device, (i * SLAB) + part * 8 * PAGE)
                    name = self.name(space, device)
                    self.store.recovery.recover_part(
                        space.namespace_id, name, b"", part, place, 7, encoding
                    )
        self.store.recovery.discard_partial()

    def name(self, space: Namespace, number: int) -> bytes:
        return space.model.encode() + number.to_bytes(15, "big")

    def step(self) -> None:
        self.now += self.random.random()
        self.random.choice(
            (self.put, self.put, self.pin, self.pin, self.release, self.demote, self.finish)
            + (self.finish, self.finish, self.drop_failed, self.expire)
            + ((self.break_device,) if self.random.random() < 0.1 else ())
        )()
        self.listen()

    def put(self) -> None:
        space = self.random.choice(SPACES)
        first = self.random.randrange(30)
        names = [self.name(space, first + i) for i in range(self.random.randrange(1, 5))]
        parent = self.name(space, first - 1) if first % 5 else b""
        for part in range(space.layout.tp_size):
            granted = self.store.reserve(
                space.namespace_id, names, parent, part, "w", 9.0, self.now
            )
            if granted.reservation_id:
                sums = [1] * len(granted.places)
                self.store.commit(granted.reservation_id, sums, self.now)

    def pin(self) -> None:
        space = self.random.choice(SPACES)
        first = self.random.randrange(30)
        names = [self.name(space, first + i) for i in range(3)]
        result = self.store.pin(space.namespace_id, names, "c", 5.0, self.now)
        for migration in result.promote:
            assert migration.source.arena_id not in self.lost or len(self.store.failed_arenas)
        self.migrations += result.promote
        if result.lease_id:
            self.leases.append(result.lease_id)

    def release(self) -> None:
        if self.leases:
            self.store.leases.release(self.leases.pop())

    def demote(self) -> None:
        migrations = self.store.migrations.plan_demotions(3, self.now, (Tier.DRAM,)).migrations
        for migration in migrations:
            assert migration.target.arena_id not in self.lost | self.closed
        self.migrations += migrations

    def finish(self) -> None:
        if self.migrations:
            migration = self.migrations.pop(self.random.randrange(len(self.migrations)))
            is_ok = self.random.random() < 0.8
            self.store.finish_migration(
                migration.migration_id, is_ok, self.now, self.random.choice((None, 5))
            )

    def break_device(self) -> None:
        device = self.random.randrange(DEVICES)
        if self.random.random() < 0.5:
            self.store.failed_arenas.close(Tier.NVME, device)
            self.closed.add(device)
        else:
            self.store.failed_arenas.fail(Tier.NVME, device)
            self.lost.add(device)

    def drop_failed(self) -> None:
        self.store.failed_arenas.drop_some(self.random.randrange(1, 8))

    def expire(self) -> None:
        self.store.expire(self.now)

    def listen(self) -> None:
        for event in self.store.take_events():
            if event.tier == Tier.NVME:
                known = (event.namespace_id, event.block_hash)
                (self.on_disk.add if event.kind == "stored" else self.on_disk.discard)(known)

    def check(self) -> None:
        self.store.check_integrity()
        told = {
            (s, name) for s, tier, name in self.store.inspection.snapshot() if tier == Tier.NVME
        }
        assert told == self.on_disk
        if not len(self.store.failed_arenas):
            for space in self.store._table.spaces.values():
                for copy in space.visible[Tier.NVME].values():
                    assert self.lost.isdisjoint(place.arena_id for place in copy.whole_places)


@pytest.mark.parametrize("seed", range(40))
def test_devices_that_fail_at_any_moment_break_no_invariant(seed: int) -> None:
    story = Story(seed)
    story.listen()
    for _ in range(250):
        story.step()
        story.check()
    while story.migrations:
        story.finish()
    for device in range(DEVICES):
        story.store.failed_arenas.fail(Tier.NVME, device)
        story.lost.add(device)
    while story.store.failed_arenas.drop_some(5):
        story.listen()
        story.check()
    story.listen()
    story.check()
    assert story.on_disk == set()
    [nvme] = [usage for usage in story.store.inspection.tiers() if usage.tier == Tier.NVME]
    assert nvme.capacity_bytes == nvme.committed_bytes == nvme.reserved_bytes == 0


def two_devices() -> Store:
    """Room for two blocks of the second namespace on each device."""
    store = Store(
        SlabAllocator(6 * SLAB, SLAB),
        ArenaAllocator([SlabAllocator(SLAB, SLAB, number) for number in range(2)], "spread"),
        StoreConfig(write_through=True, grace_s=0.0),
    )
    for space in SPACES:
        store.namespaces.register(space)
    return store


def put(store: Store, names: list[bytes]) -> None:
    granted = store.reserve(SPACES[1].namespace_id, names, b"", 0, "w", 9.0, 0.0)
    store.commit(granted.reservation_id, [1] * len(names), 0.0)


def test_a_chain_that_ends_on_a_closed_device_still_gives_way() -> None:
    store, space_id = two_devices(), SPACES[1].namespace_id
    old, new = ([tag + bytes([i]) * 15 for i in range(4)] for tag in (b"o", b"n"))
    for i, (parent, name) in enumerate(zip([b"", *old], old, strict=False)):
        place = Place(i % 2, i // 2 * 8 * PAGE)
        assert store.recovery.recover_part(space_id, name, parent, 0, place, 7)
    assert store.inspection.tiers()[1].free_bytes == 0
    store.failed_arenas.close(Tier.NVME, 1)
    put(store, new)
    migrations = store.migrations.plan_demotions(4, 0.0).migrations
    assert [migration.target.arena_id for migration in migrations] == [0, 0]
    store.check_integrity()


def test_parts_in_two_encodings_do_not_make_a_block() -> None:
    store = two_devices()
    space_id, name = SPACES[0].namespace_id, b"x" * 16
    assert store.recovery.recover_part(space_id, name, b"", 0, Place(0, 0), 7, "fp8")
    assert not store.recovery.recover_part(space_id, name, b"", 1, Place(1, 0), 7, "as_is")
    assert store.recovery.discard_partial() == [(space_id, name)]
    assert store.lookup(space_id, [name]) == []
    store.check_integrity()
