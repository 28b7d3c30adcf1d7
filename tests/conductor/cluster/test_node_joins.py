"""No namespace that a node reports keeps the node and its other blocks out of the pool."""

from __future__ import annotations

import msgspec
import pytest

from conductor.cluster.cluster import Cluster
from conductor.index.memory import MemoryIndex
from conductor.members.membership import MembershipConfig
from conductor.scheduling.scheduler import SchedulerConfig
from kvpool.blocks.hashing import pack_hashes
from kvpool.blocks.tier import Tier
from kvpool.errors import UnknownNamespace
from kvpool.wire import messages as m
from tests.support.process_cluster import LAYOUT, NAMESPACE

HASHES = pack_hashes([bytes([i]) * 16 for i in range(3)])
OTHER_LAYOUT = msgspec.structs.replace(LAYOUT, layers=LAYOUT.layers + 1)


def test_a_namespace_of_another_layout_keeps_no_node_out() -> None:
    """Any client with read scope can register one at a node, for its own tenant."""
    cluster = Cluster("c", 1, MemoryIndex(), MembershipConfig(), SchedulerConfig())
    cluster.register_namespace(m.RegisterNamespace(NAMESPACE))
    contradicts = msgspec.structs.replace(NAMESPACE, layout=OTHER_LAYOUT)
    innocent = msgspec.structs.replace(NAMESPACE, model="tests/other")
    descriptor = m.NodeDescriptor("n", 1, "h", "h:1")
    joined = cluster.node_join(m.NodeJoin(descriptor, [contradicts, innocent]))
    assert not joined.resync
    stored = [
        m.BlockEvent("stored", namespace.namespace_id, HASHES, Tier.DRAM)
        for namespace in (contradicts, innocent)
    ]
    assert not cluster.node_events(m.NodeEvents("n", 1, 1, stored, True, True)).resync
    assert cluster.lookup(m.Lookup(innocent.namespace_id, HASHES)).found == 3
    with pytest.raises(UnknownNamespace):
        cluster.lookup(m.Lookup(contradicts.namespace_id, HASHES))
    assert cluster.lookup(m.Lookup(NAMESPACE.namespace_id, HASHES)).found == 0
    assert cluster.counters["layout_mismatches"] == 1
