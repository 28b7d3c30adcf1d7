"""Namespaces of which nothing is here make room for others; those in use never do."""

from __future__ import annotations

import os
from dataclasses import replace

import msgspec
import pytest

from kvpool.blocks.layout import Layout, Namespace
from kvpool.blocks.tier import Tier
from kvpool.errors import NoRoom, ReservationGone, UnknownNamespace
from kvpool.wire import messages as m
from tiers.service.migrator import Migrator
from tiers.service.service import NodeService
from tiers.store.slab_allocator import SlabAllocator
from tiers.store.store import Store, StoreConfig

LAYOUT = Layout("bfloat16", 1, 1, 8, block_tokens=32)


def namespace(number: int, tenant: str = "") -> Namespace:
    return Namespace("m", "r", LAYOUT, tenant, str(number))


class Full:
    """A node that takes four namespaces, and has taken those of numbers 0 to 3."""

    def __init__(self, tenant: str = "") -> None:
        config = replace(StoreConfig(), max_namespaces=4)
        self.store = Store(SlabAllocator(1 << 20, 1 << 18, 0), None, config)
        migrator = Migrator(self.store, [], None)
        self.service = NodeService(self.store, [], migrator, clock=lambda: 1.0)
        self.ids = [self.register(namespace(n, tenant if n else "")) for n in range(4)]

    def register(self, wanted: Namespace) -> bytes:
        return self.service.register_namespace(m.RegisterNamespace(wanted)).namespace_id

    def put(self, namespace_id: bytes) -> bytes:
        name = os.urandom(16)
        granted = self.store.reserve(namespace_id, [name], b"", 0, "w", 30.0, 1.0)
        self.store.commit(granted.reservation_id, [1], 1.0)
        return name


def test_the_oldest_of_which_nothing_is_here_makes_room_and_comes_back_when_asked_for() -> None:
    node = Full()
    name = node.put(node.ids[0])
    fresh = node.register(namespace(4))
    assert [n.salt for n in node.store.namespaces] == ["0", "2", "3", "4"]
    with pytest.raises(UnknownNamespace):
        node.put(node.ids[1])
    assert node.register(namespace(1)) == node.ids[1]
    node.put(node.ids[1])
    node.put(fresh)
    assert node.store.lookup(node.ids[0], [name]) == [Tier.DRAM]
    assert node.store.counters["namespaces_forgotten"] == 2
    node.store.check_integrity()


@pytest.mark.parametrize("use", ["committed", "reserved", "read after it was dropped"])
def test_what_is_in_use_is_not_forgotten(use: str) -> None:
    node = Full()
    for namespace_id in node.ids:
        if use == "reserved":
            node.store.reserve(namespace_id, [os.urandom(16)], b"", 0, "w", 30.0, 1.0)
            continue
        name = node.put(namespace_id)
        if use != "committed":
            node.store.pin(namespace_id, [name], "r", 30.0, 1.0)
            node.store.drop(namespace_id, name, "test", 1.0)
    with pytest.raises(NoRoom):
        node.register(namespace(4))
    assert len(list(node.store.namespaces)) == 4
    node.store.check_integrity()


def test_a_run_of_a_namespace_that_was_forgotten_before_it_had_anything_goes_no_further() -> None:
    node = Full()
    run = node.store.reservations.begin_reserve(
        node.ids[0], [os.urandom(16)], b"", 0, "w", 30.0, 1.0
    )
    node.register(namespace(4))
    with pytest.raises(ReservationGone):
        node.store.reserve_some(run, 1, 1.0)
    node.store.check_integrity()


def test_who_has_more_than_its_share_gives_up_its_own() -> None:
    node = Full()
    busy = msgspec.structs.replace(namespace(9), tenant="t")
    held = node.put(node.ids[0])
    node.register(busy)  # in place of number 1
    for number in range(10, 20):
        node.register(namespace(number, "t"))
    tenants = [n.tenant for n in node.store.namespaces]
    assert len(tenants) == 4
    assert node.store.lookup(node.ids[0], [held]) == [Tier.DRAM]
    assert tenants.count("") == 3  # the others' stay: a tenant replaces its own
