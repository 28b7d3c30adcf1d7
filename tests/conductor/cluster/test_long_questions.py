"""Messages with more hashes than any prompt are refused or cut."""

from __future__ import annotations

import pytest

from benchmarks.local_cluster import local_cluster
from conductor.cluster.cluster import Cluster
from conductor.cluster.lookups import MAX_COUNTED, MAX_MISSES
from conductor.index.memory import complete
from kvpool.blocks.hashing import MAX_HASHES, pack_hashes
from kvpool.blocks.tier import Tier
from kvpool.errors import InvalidArgument
from kvpool.wire import messages as m
from tests.support.process_cluster import NAMESPACE

SPACE = NAMESPACE.namespace_id


def hashes(count: int) -> list[bytes]:
    return [number.to_bytes(16, "little") for number in range(count)]


def cluster_with(held: list[bytes]) -> Cluster:
    cluster = local_cluster()
    complete(
        cluster.node_reports.join(m.NodeJoin(m.NodeDescriptor("n", 1, "h", "h:1"), [NAMESPACE]))
    )
    stored = m.BlockEvent("stored", SPACE, pack_hashes(held), Tier.DRAM)
    complete(
        cluster.node_reports.events(
            m.NodeEvents("n", 1, 1, [stored], snapshot=True, snapshot_end=True)
        )
    )
    return cluster


def test_a_question_about_more_blocks_than_a_message_may_name_is_refused() -> None:
    cluster = cluster_with([])
    with pytest.raises(InvalidArgument, match="at most"):
        complete(cluster.lookups.lookup(m.Lookup(SPACE, bytes(16 * (MAX_HASHES + 1)))))
    with pytest.raises(InvalidArgument, match="at most"):
        complete(cluster.lookups.count_copies(m.CountCopies(SPACE, bytes(16 * (MAX_COUNTED + 1)))))
    assert complete(
        cluster.lookups.count_copies(m.CountCopies(SPACE, bytes(16 * MAX_COUNTED)))
    ).copies == bytes(MAX_COUNTED)


def test_of_a_long_report_of_misses_the_head_is_believed() -> None:
    held = hashes(MAX_MISSES + 10)
    cluster = cluster_with(held)
    assert complete(cluster.lookups.lookup(m.Lookup(SPACE, pack_hashes(held)))).found == len(held)
    cluster.lookups.report_miss(m.ReportMiss("n", SPACE, pack_hashes(held)))
    assert cluster.counters["reported_misses"] == MAX_MISSES
    assert complete(cluster.lookups.lookup(m.Lookup(SPACE, pack_hashes(held)))).found == 0
    assert (
        complete(cluster.lookups.lookup(m.Lookup(SPACE, pack_hashes(held[MAX_MISSES:])))).found
        == 10
    )
