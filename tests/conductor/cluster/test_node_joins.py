"""No namespace that a node reports keeps the node and its other blocks out of the pool."""

from __future__ import annotations

import msgspec
import pytest

from benchmarks.local_cluster import local_cluster
from conductor.index.memory import complete
from kvpool.blocks.hashing import pack_hashes
from kvpool.blocks.tier import Tier
from kvpool.errors import UnknownNamespace
from kvpool.wire import messages as m
from tests.support.process_cluster import LAYOUT, NAMESPACE

HASHES = pack_hashes([bytes([i]) * 16 for i in range(3)])
OTHER_LAYOUT = msgspec.structs.replace(LAYOUT, layers=LAYOUT.layers + 1)


def test_a_namespace_of_another_layout_keeps_no_node_out() -> None:
    """Any client with read scope can register one at a node, for its own tenant."""
    cluster = local_cluster()
    complete(cluster.namespaces.register(m.RegisterNamespace(NAMESPACE)))
    contradicts = msgspec.structs.replace(NAMESPACE, layout=OTHER_LAYOUT)
    innocent = msgspec.structs.replace(NAMESPACE, model="tests/other")
    descriptor = m.NodeDescriptor("n", 1, "h", "h:1")
    joined = complete(cluster.node_reports.join(m.NodeJoin(descriptor, [contradicts, innocent])))
    assert not joined.resync
    stored = [
        m.BlockEvent("stored", namespace.namespace_id, HASHES, Tier.DRAM)
        for namespace in (contradicts, innocent)
    ]
    assert not complete(
        cluster.node_reports.events(m.NodeEvents("n", 1, 1, stored, True, True))
    ).resync
    assert complete(cluster.lookups.lookup(m.Lookup(innocent.namespace_id, HASHES))).found == 3
    with pytest.raises(UnknownNamespace):
        complete(cluster.lookups.lookup(m.Lookup(contradicts.namespace_id, HASHES)))
    assert complete(cluster.lookups.lookup(m.Lookup(NAMESPACE.namespace_id, HASHES))).found == 0
    assert cluster.counters["layout_mismatches"] == 1
