"""What is the Redis index's own: several conductors, sessions, expiry.

The contract is tested elsewhere.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from conductor.index.contract import Holder
from conductor.redis.client import RedisClient, RedisTarget
from conductor.redis.index import RedisIndex, _NodeSession
from kvpool.blocks.tier import Tier
from kvpool.errors import StaleEpoch, Unavailable
from tests.conductor.index.test_conformance import ALL, CHAIN, NS, NS2, event, stored
from tests.support import valkey

TTL_S = 1000


@pytest.fixture
async def client() -> AsyncIterator[RedisClient]:
    client = RedisClient(valkey.standalone(), timeout_s=5.0)
    yield client
    await client.close()


@pytest.fixture
def two(client: RedisClient) -> tuple[RedisIndex, RedisIndex]:
    """The indexes of two conductors of one pool."""
    pool = valkey.new_pool()
    return RedisIndex(client, pool, ttl_s=TTL_S), RedisIndex(client, pool, ttl_s=TTL_S)


async def test_blocks_reported_to_one_conductor_are_found_by_the_other(
    two: tuple[RedisIndex, RedisIndex],
) -> None:
    a, b = two
    await a.apply("node-a", 1, stored(CHAIN))
    await b.apply("node-b", 1, stored(CHAIN[:2]))
    for index in two:
        assert len(await index.holders(NS, CHAIN)) == len(CHAIN)
        assert (await index.holders(NS, CHAIN))[0] == (
            Holder("node-a", Tier.DRAM),
            Holder("node-b", Tier.DRAM),
        )


async def test_a_conductor_that_was_stopped_cannot_undo_another_ones_changes(
    two: tuple[RedisIndex, RedisIndex],
) -> None:
    a, b = two
    await a.begin_snapshot("node-a", 1)
    await a.apply("node-a", 1, stored(CHAIN))
    await a.end_snapshot("node-a")
    await b.begin_snapshot("node-a", 1)  # the node has turned to the other one
    await b.apply("node-a", 1, stored(CHAIN[:3]))
    for late in ([event("removed", CHAIN[:1], Tier.DRAM)], stored(CHAIN), stored(CHAIN, ns=NS2)):
        with pytest.raises(StaleEpoch):
            await _as_of(a, 1).apply("node-a", 1, late)
    with pytest.raises(StaleEpoch):
        await _as_of(a, 1, is_reporting=True).end_snapshot("node-a")
    await _as_of(a, 1).remove_node("node-a", ALL)
    assert await b.end_snapshot("node-a")
    assert len(await b.holders(NS, CHAIN)) == 3
    assert len(await b.holders(NS2, CHAIN)) == 0


def _as_of(index: RedisIndex, number: int, *, is_reporting: bool = False) -> RedisIndex:
    """The index, with this as the node's session."""
    index._sessions["node-a"] = _NodeSession(1, number, {NS}, is_reporting)
    return index


async def test_blocks_that_a_dead_conductor_left_to_reclaim_are_found(
    two: tuple[RedisIndex, RedisIndex],
) -> None:
    a, b = two
    await a.apply("node-a", 1, stored(CHAIN))
    assert not await a.remove_node("node-a", 0)
    assert await b.reclaim(ALL)  # it knows of nothing
    await b.touch(NS)
    assert b.blocks() == len(CHAIN)
    assert await b.reclaim(ALL)
    assert b.blocks() == 0


async def test_every_key_expires(client: RedisClient, two: tuple[RedisIndex, RedisIndex]) -> None:
    index, _ = two
    await index.begin_snapshot("node-a", 1)
    await index.apply("node-a", 1, stored(CHAIN) + stored(CHAIN, Tier.NVME))
    await index.end_snapshot("node-a")
    await index.begin_snapshot("node-a", 2)
    keys = await client.command("KEYS", b"*" + index._pool + b"*")
    assert len(keys) >= 7
    for key in keys:
        assert 0 < await client.command("TTL", key) <= TTL_S, key


async def test_nothing_is_left_of_a_namespace_whose_nodes_are_gone(
    client: RedisClient, two: tuple[RedisIndex, RedisIndex]
) -> None:
    index, _ = two
    for life in range(5):
        await index.apply(f"node-{life}", 1, stored(CHAIN))
        assert await index.remove_node(f"node-{life}", ALL)
    kinds = {
        key.rpartition(b":")[2] for key in await client.command("KEYS", b"*" + index._pool + b"*")
    }
    # The counter and the fences of their epochs remain.
    assert kinds == {b"ids", *(f"node-{life}".encode() for life in range(5))}


async def test_a_call_ends_at_its_deadline_and_later_ones_at_once(client: RedisClient) -> None:
    server = valkey.start()
    try:
        slow = RedisClient(RedisTarget(f"redis://127.0.0.1:{server.port}"), timeout_s=0.2)
        index = RedisIndex(slow, valkey.new_pool())
        await index.apply("node-a", 1, stored(CHAIN))
        await client.command("PING")
        other = RedisClient(RedisTarget(f"redis://127.0.0.1:{server.port}"), timeout_s=5)
        await other.command("CLIENT", "PAUSE", 600, "ALL")
        for _ in range(2):
            with pytest.raises(Unavailable):
                len(await index.holders(NS, CHAIN))
        assert slow.failures == 1  # the second was not sent
        assert not slow.is_up
        while not await slow.probe():
            pass
        assert len(await index.holders(NS, CHAIN)) == len(CHAIN)
        await slow.close()
        await other.close()
    finally:
        server.stop()
