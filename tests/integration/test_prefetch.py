"""Prefetch brings blocks from NVMe into DRAM ahead of a read, and says why where it does not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvpool import Pool, hash_chain
from kvpool.blocks.hashing import pack_hashes
from kvpool.errors import InvalidArgument
from kvpool.wire import WireClient
from kvpool.wire import messages as m
from tests.support.process_cluster import LAYOUT, NAMESPACE, Cluster, chain, wait_until

SIZE = LAYOUT.part_bytes
BLOCKS = 20


HASHES = chain(1, BLOCKS)
DATA = np.random.default_rng(1).integers(0, 256, (BLOCKS, SIZE), dtype=np.uint8)


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A node that was killed and came back: all its blocks are on NVMe alone."""
    running = Cluster(tmp_path)
    settings = (
        "node.node_id=a",
        f"node.nvme_directories={tmp_path / 'nvme'}",
        "node.nvme_bytes=16MiB",
        *getattr(request, "param", ()),
    )
    with running.supervisor:
        running.start_conductor(
            "conductor.advanced.heartbeat_s=0.2", "conductor.advanced.suspect_after_s=1"
        )
        running.start_node("a", *settings)
        running.wait_joined(nodes=1)
        with Pool(node=running.nodes["a"]["wire"], host_label="here") as pool:
            pool.put(NAMESPACE, HASHES, DATA)
        wait_until(lambda: blocks_in(running, "nvme") == BLOCKS, "written through")
        running.kill("a")
        running.supervisor.members.remove(running.member("a"))
        running.start_node("a", *settings)
        running.wait_joined(nodes=1)
        yield running


def blocks_in(cluster: Cluster, tier: str) -> int:
    return sum(t["blocks"] for t in cluster.node_stats("a")["tiers"] if t["tier"] == tier)


def counters(cluster: Cluster) -> dict[str, float]:
    found: dict[str, float] = cluster.node_stats("a")["counters"]
    return found


def client(cluster: Cluster) -> Pool:
    return Pool(conductor=cluster.conductor["wire"], host_label="here")


def test_prefetched_blocks_wait_in_dram(cluster: Cluster) -> None:
    assert (blocks_in(cluster, "dram"), blocks_in(cluster, "nvme")) == (0, BLOCKS)
    with client(cluster) as pool:
        wait_until(lambda: pool.lookup(NAMESPACE, HASHES).found == BLOCKS, "recovered")
        result = pool.prefetch(NAMESPACE, HASHES)
        assert (result.accepted, result.declined, result.reasons) == (BLOCKS, 0, {})
        wait_until(lambda: blocks_in(cluster, "dram") == BLOCKS, "promoted")
        before = counters(cluster)
        assert before["prefetched"] == BLOCKS
        out = np.zeros_like(DATA)
        assert pool.get(NAMESPACE, HASHES, out).found == BLOCKS
        assert (out == DATA).all()
        assert (
            counters(cluster)["promoted"] == before["promoted"]
        )  # the read had nothing to wait for
        again = pool.prefetch(NAMESPACE, HASHES)
        assert (again.accepted, again.resident) == (0, BLOCKS)
    assert cluster.node_stats("a")["leases"] == 0


@pytest.mark.parametrize("cluster", [("node.advanced.max_prefetch_blocks=8",)], indirect=True)
def test_a_full_queue_declines_with_its_reason_and_may_be_asked_again(cluster: Cluster) -> None:
    with client(cluster) as pool:
        wait_until(lambda: pool.lookup(NAMESPACE, HASHES).found == BLOCKS, "recovered")
        result = pool.prefetch(NAMESPACE, HASHES)
        assert (result.accepted, result.declined) == (8, BLOCKS - 8)
        assert result.reasons == {"queue_full": BLOCKS - 8}
        assert counters(cluster)["prefetch_declined:queue_full"] == BLOCKS - 8
        wait_until(
            lambda: pool.prefetch(NAMESPACE, HASHES).resident == BLOCKS, "asked until all is there"
        )


def test_what_is_not_there_is_declined_as_such(cluster: Cluster) -> None:
    more = hash_chain(NAMESPACE, np.arange(2 * LAYOUT.block_tokens))
    with client(cluster) as pool:
        wait_until(lambda: pool.lookup(NAMESPACE, HASHES).found == BLOCKS, "recovered")
        result = pool.prefetch(NAMESPACE, [*HASHES, *more])
        assert (result.accepted, result.reasons) == (BLOCKS, {"not_in_index": 2})
    with Pool(node=cluster.nodes["a"]["wire"]) as pool:
        wait_until(lambda: blocks_in(cluster, "dram") == BLOCKS, "promoted")
        assert pool.prefetch(NAMESPACE, more).reasons == {"not_in_index": 2}


async def test_the_node_itself_says_what_it_has_not_got(cluster: Cluster) -> None:
    link = WireClient(cluster.nodes["a"]["wire"], "stranger")
    space = NAMESPACE.namespace_id
    request = m.Prefetch(space, pack_hashes([*HASHES[:3], b"x" * 16, *HASHES[3:]]))
    reply = await link.call(request, 5)
    assert (reply.accepted, reply.declined, reply.reason) == (3, BLOCKS - 2, "not_here")
    for bad in (m.Prefetch(space, b"x" * 15), m.Prefetch(b"n" * 16, b"x" * 16)):
        with pytest.raises(InvalidArgument):
            await link.call(bad, 5)
    await link.close()
    wait_until(lambda: blocks_in(cluster, "dram") == 3, "promoted")


def test_wrong_bytes_on_the_disk_are_dropped_and_counted(cluster: Cluster, tmp_path: Path) -> None:
    slabs = tmp_path / "nvme" / "slabs"
    content = slabs.read_bytes()
    at = content.index(DATA[5].tobytes()[:64])
    with slabs.open("r+b") as file:
        file.seek(at)
        file.write(bytes([content[at] ^ 0xFF]))
    with client(cluster) as pool:
        wait_until(lambda: pool.lookup(NAMESPACE, HASHES).found == BLOCKS, "recovered")
        assert pool.prefetch(NAMESPACE, HASHES).accepted == BLOCKS
        wait_until(lambda: blocks_in(cluster, "dram") == BLOCKS - 1, "promoted but for one")
        wait_until(lambda: counters(cluster).get("prefetch_declined:lost", 0) > 0, "counted")
        wait_until(lambda: pool.lookup(NAMESPACE, HASHES).found == 5, "the index hears of it")
