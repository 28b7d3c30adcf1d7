"""A node's garbage collector looks only at new objects, and the node leaves it no cycles."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator

import pytest

from kvpool.blocks.hashing import pack_hashes
from kvpool.errors import KvpoolError
from kvpool.wire import WireClient, WireServer
from kvpool.wire import messages as m
from tests.support.waiting import until
from tests.tiers.service.test_long_runs import Room, chain
from tiers.service.gc_tuning import freeze_survivors, keep_collections_short
from tiers.service.migrator import Migrator
from tiers.service.service import NodeService


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.set_debug(0)
    gc.garbage.clear()
    gc.unfreeze()


class Cycle:
    def __init__(self) -> None:
        self.me = self


async def test_resident_blocks_are_looked_at_once_and_garbage_goes() -> None:
    room = Room(4_000)
    room.put(chain(4_000))
    Cycle()
    task = asyncio.create_task(keep_collections_short())
    await asyncio.sleep(0)
    tracked = gc.get_objects()
    alive = sum(isinstance(one, Cycle) for one in tracked)
    blocks = sum(type(one).__name__ in ("Block", "Copy") for one in tracked)
    task.cancel()
    assert (alive, blocks) == (0, 0)
    assert gc.get_freeze_count() > 8_000
    assert len(room.store.lookup(room.space, [])) == 0  # still whole
    room.store.check_integrity()


async def test_what_comes_and_goes_in_a_node_forms_no_cycle() -> None:
    room = Room(1_000)
    service = NodeService(room.store, [], Migrator(room.store, [], None))
    server = WireServer("node", "n", 1, service.handlers(), on_hello=service.client_connected)
    address = f"127.0.0.1:{await server.listen('127.0.0.1', 0)}"
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    for number in range(6):  # each more than half of what there is room for: blocks are evicted
        client = WireClient(address, f"c{number}")
        hashes = chain(600)
        reserve = m.Reserve(room.space, pack_hashes(hashes), b"", 0, 60.0)
        granted = await client.call(reserve, 10)
        await client.call(m.Commit(granted.reservation_id, bytes(8 * 600)), 10)
        pinned = await client.call(m.Pin(room.space, pack_hashes(hashes), 5.0), 10)
        assert pinned.found == 600
        await client.call(m.Release([pinned.lease_id]), 10)
        await client.call(reserve, 10)
        freeze_survivors()  # later collections skip the objects so far
        with pytest.raises(KvpoolError):
            await client.call(m.Commit(999, b""), 10)
        await client.close()
        await until(lambda: not server.connections, "the server has noticed")
    await server.close()
    gc.unfreeze()
    gc.collect()
    ours = Counter(
        type(one).__name__
        for one in gc.garbage
        if type(one).__module__.startswith(("tiers", "kvpool.wire.server"))
    )
    assert not ours
