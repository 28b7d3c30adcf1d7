"""Calls to servers that do not answer end when their callers were told that they would."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from kvpool import AsyncPool
from kvpool.errors import DeadlineExceeded
from kvpool.wire import WireServer
from kvpool.wire import messages as m

CALLS: list[Callable[[AsyncPool], Awaitable[object]]] = [
    lambda pool: pool.resize("some-node", 1 << 20, timeout_s=0.2),
    lambda pool: pool.drain("some-node", timeout_s=0.2),
]


async def _never(_request: m.Nodes, _session: object) -> m.NodesReply:
    await asyncio.Event().wait()
    return m.NodesReply([])


@pytest.mark.parametrize("call", CALLS, ids=["resize", "drain"])
async def test_finding_the_node_is_part_of_the_deadline(
    call: Callable[[AsyncPool], Awaitable[object]],
) -> None:
    server = WireServer("conductor", "silent", 1)
    server.handle(m.Nodes, _never)
    port = await server.listen("127.0.0.1", 0)
    started = time.monotonic()
    async with AsyncPool(conductor=f"127.0.0.1:{port}", timeout_s=30) as pool:
        with pytest.raises(DeadlineExceeded):
            await call(pool)
    assert time.monotonic() - started < 10  # drain's own margin is 5 s
    await server.close()
