"""Protected blocks and quotas in a real node, over the public client."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from kvpool import AsyncPool, Namespace, Pool
from kvpool.blocks.hashing import pack_hashes
from kvpool.errors import InvalidArgument, NoRoom
from kvpool.wire import WireClient
from kvpool.wire import messages as m
from tests.support.process_cluster import LAYOUT, NAMESPACE, Cluster, chain

SIZE = LAYOUT.part_bytes
CAPACITY = 2 << 20
SLOTS = 2 * ((1 << 20) // SIZE)
TENANT = msgspec.structs.replace(NAMESPACE, tenant="guaranteed")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    running = Cluster(tmp_path_factory.mktemp("protection"))
    with running.supervisor:
        running.start_conductor()
        running.start_node(
            "small",
            f"node.dram_bytes={CAPACITY}",
            "node.quotas=guaranteed=0.25",
            "node.eviction=s3fifo",
        )
        running.wait_joined(nodes=1)
        yield running


@pytest.fixture
def pool(cluster: Cluster) -> Iterator[Pool]:
    with Pool(conductor=cluster.conductor["wire"], host_label="here") as made:
        yield made


def put_short_chains(pool: Pool, seed: int, count: int, namespace: Namespace = NAMESPACE) -> None:
    for i in range(0, count, 4):
        pool.put(namespace, chain(seed + i, 4, namespace), np.zeros((4, SIZE), np.uint8))


def on_node(cluster: Cluster, pool: Pool, hashes: list[bytes]) -> int:
    """Asked of the node itself: the index hears of evictions a little later."""
    with Pool(node=cluster.nodes["small"]["wire"], host_label="here") as direct:
        return direct.lookup(NAMESPACE, hashes).found


def retained_bytes(cluster: Cluster) -> int:
    dram = next(t for t in cluster.node_stats("small")["tiers"] if t["tier"] == "dram")
    return int(dram["retained_bytes"])


def test_a_protected_prompt_outlives_everything_else(cluster: Cluster, pool: Pool) -> None:
    system, other = chain(1, 8), chain(2, 8)
    for prompt in (system, other):
        pool.put(NAMESPACE, prompt, np.ones((8, SIZE), np.uint8))
    for ttl_s in (60.0, None):
        (count,) = pool.protect(NAMESPACE, system, ttl_s=ttl_s).values()
        assert count == 8
    assert retained_bytes(cluster) == 8 * SIZE
    put_short_chains(pool, 1000, 2 * SLOTS)
    assert on_node(cluster, pool, system) == 8
    assert on_node(cluster, pool, other) == 0
    (count,) = pool.unprotect(NAMESPACE, system).values()
    assert count == 8
    put_short_chains(pool, 3000, 2 * SLOTS)
    assert on_node(cluster, pool, system) == 0
    assert retained_bytes(cluster) == 0


def test_no_more_than_half_the_node_can_be_protected(cluster: Cluster, pool: Pool) -> None:
    long = chain(5, SLOTS // 2 + 4)
    pool.put(NAMESPACE, long, np.ones((len(long), SIZE), np.uint8))
    with pytest.raises(NoRoom, match="retained bytes"):
        pool.protect(NAMESPACE, long)
    assert retained_bytes(cluster) == 0
    for wrong in (0.0, -1.0, float("nan"), 1e12):
        with pytest.raises(InvalidArgument):
            pool.protect(NAMESPACE, long, ttl_s=wrong)
    with pytest.raises(InvalidArgument, match="from its start"):
        pool.protect(NAMESPACE, long[1:3])


def test_a_tenant_with_a_quota_keeps_its_share(cluster: Cluster, pool: Pool) -> None:
    put_short_chains(pool, 5000, 2 * SLOTS)
    mine = chain(6, SLOTS // 4 - 2, TENANT)
    pool.put(TENANT, mine, np.ones((len(mine), SIZE), np.uint8))
    put_short_chains(pool, 7000, 2 * SLOTS)
    with Pool(node=cluster.nodes["small"]["wire"], host_label="here") as direct:
        assert direct.lookup(TENANT, mine).found == len(mine)


async def test_the_wire_refuses_what_is_no_time(cluster: Cluster) -> None:
    async with AsyncPool(node=cluster.nodes["small"]["wire"], host_label="here") as pool:
        await pool.register(NAMESPACE)
    wire = WireClient(cluster.nodes["small"]["wire"], "tester")
    for ttl_s in (-1.0, float("nan"), float("inf")):
        request = m.Protect(NAMESPACE.namespace_id, pack_hashes(chain(8, 1)), ttl_s)
        with pytest.raises(InvalidArgument, match="ttl_s"):
            await wire.call(request, 5.0)
    await wire.close()
