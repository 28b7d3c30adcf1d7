"""What the node itself holds is no tenant's, whatever tenants are called."""

from __future__ import annotations

import pytest

from kvpool.errors import LeaseExpired, ReservationGone
from kvpool.wire import messages as m
from kvpool.wire.principal import Principal, Scope
from tests.support.process_cluster import LAYOUT, NAMESPACE
from tiers.service.inline_blocks import OURSELVES
from tiers.service.migrator import Migrator
from tiers.service.replication import WRITER
from tiers.service.service import NodeService
from tiers.store.slab_allocator import SlabAllocator
from tiers.store.store import Store

HASH = bytes(range(16))


@pytest.mark.parametrize("tenant", ["", "replication", "node"])
def test_no_tenant_can_renew_end_or_commit_what_the_node_holds(tenant: str) -> None:
    store = Store(SlabAllocator(1 << 20, 1 << 20, 0))
    service = NodeService(store, [], Migrator(store, [], None), clock=lambda: 1.0)
    space = store.namespaces.register(NAMESPACE)
    stranger = Principal("x", tenant, frozenset(Scope))
    copy = store.reserve(space, [HASH], b"", 0, WRITER, 60.0, 1.0)
    assert copy.slot_bytes >= LAYOUT.part_bytes
    with pytest.raises(ReservationGone):
        service.renew_reservation(m.RenewReservation(copy.reservation_id, 5.0), stranger)
    with pytest.raises(ReservationGone):
        service.commit(m.Commit(copy.reservation_id, bytes(8)), stranger)
    service.abort(m.Abort(copy.reservation_id, True), stranger)
    assert store.commit(copy.reservation_id, [0], 1.0) == [HASH]
    lease = store.pin(space, [HASH], OURSELVES, 60.0, 1.0)
    service.release(m.Release([lease.lease_id]), stranger)
    with pytest.raises(LeaseExpired):
        service.renew(m.Renew(lease.lease_id, 5.0), stranger)
    assert len(store.leases) == 1
