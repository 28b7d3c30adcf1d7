"""Making room costs no more in a large store than in a small one: steps are counted, not timed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from tests.support.pool_model import CONFIG, PAGE, SLAB, SMALL
from tests.tiers.store.test_store import OTHER, A, names
from tiers.policies import POLICIES
from tiers.store import eviction, victims
from tiers.store.slab_allocator import Place, SlabAllocator
from tiers.store.store import Store


def big_store(pages: int, policy: str) -> Store:
    quotas = {A.hex(): 0.5, "idle": 0.25}
    s = Store(
        SlabAllocator(pages * PAGE, SLAB),
        None,
        replace(CONFIG, eviction=policy, quotas=quotas, max_lease_s=1e6),
    )
    s.namespaces.register(SMALL)
    s.namespaces.register(OTHER)
    return s


def put(s: Store, run: list[bytes], space: bytes = A) -> None:
    granted = s.reserve(space, run, b"", 0, "w", 5.0, 0.0)
    s.commit(granted.reservation_id, [1] * len(granted.places), 0.0)


@pytest.mark.parametrize("policy", POLICIES)
def test_an_eviction_asks_a_bounded_number_of_copies(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains of eight blocks; a quarter is leased, an eighth retained, and the tier is full."""
    asked: Counter[str] = Counter()
    is_takable = eviction.is_takable

    def counted(copy: Any) -> bool:
        asked["copies"] += 1
        return is_takable(copy)

    monkeypatch.setattr(eviction, "is_takable", counted)

    def asked_per_eviction(pages: int) -> float:
        s = big_store(pages, policy)
        for number in range(pages // 8):
            run = [b"c" + number.to_bytes(14, "big") + bytes([i]) for i in range(8)]
            put(s, run)
            if number % 4 == 0:
                s.pin(A, run, "reader", 1e6, 0.0)
            if number % 8 == 1:
                s.retention.retain(A, run, 1e6, 0.0)
        asked.clear()
        evicted = s.counters.get("evicted", 0.0)
        for number in range(pages // 4):
            put(s, [b"n" + number.to_bytes(15, "big")])
        return asked["copies"] / (s.counters["evicted"] - evicted)

    small, large = asked_per_eviction(256), asked_per_eviction(4096)
    assert large < 12
    assert large < 1.5 * small + 1


def test_a_look_for_slabs_is_bounded_and_continues_where_it_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(victims, "SLABS_AT_MOST", 8)
    looked_at: list[int] = []
    slots = SlabAllocator(32 * SLAB, SLAB)
    places_in = slots.places_in

    def noted(index: int) -> list[Place]:
        looked_at.append(index)
        return places_in(index)

    monkeypatch.setattr(slots, "places_in", noted)
    s = Store(slots, None, replace(CONFIG, max_lease_s=1e6))
    s.namespaces.register(SMALL)
    s.namespaces.register(OTHER)
    for number in range(32 * SLAB // PAGE):
        put(s, [number.to_bytes(16, "big")])
    leases = [
        s.pin(A, [number.to_bytes(16, "big")], "reader", 1e6, 0.0).lease_id
        for number in range(0, 32 * SLAB // PAGE, 4)
    ]
    s.leases.release(leases[29])  # the only slab that can be emptied is the 30th
    refusals = 0
    while not s.reserve(OTHER.namespace_id, names(1), b"", 0, "w", 5.0, 0.0).reservation_id:
        assert len(looked_at) <= 2 * 8
        looked_at.clear()
        refusals += 1
        assert refusals < 8
    assert refusals > 0
    s.check_integrity()
