"""The directory of a client's nodes: what becomes of links whose node left."""

from __future__ import annotations

import asyncio

import pytest

from kvpool.client import AsyncPool
from kvpool.client.node.node_link import NodeLink
from kvpool.errors import Unavailable
from kvpool.wire import messages as m


def node(node_id: str) -> m.NodeDescriptor:
    return m.NodeDescriptor(node_id, 1, "host", "127.0.0.1:1")


async def test_close_waits_for_every_link_that_was_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_close = asyncio.Event()
    closed: list[str] = []

    async def close(link: NodeLink) -> None:
        await may_close.wait()
        closed.append(link.node.node_id)

    monkeypatch.setattr(NodeLink, "close", close)
    pool = AsyncPool(conductor="127.0.0.1:1")
    for node_id in ("a", "b"):
        pool.directory.link_to(node(node_id))
        pool.directory.forget_node(node_id, Unavailable("gone"))
    closing = asyncio.ensure_future(pool.close())
    await asyncio.sleep(0.01)
    assert not closing.done()
    may_close.set()
    await closing
    assert sorted(closed) == ["a", "b"]
    assert not pool.directory._closing


async def test_a_call_may_drop_a_link_while_the_client_closes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = AsyncPool(conductor="127.0.0.1:1")
    closed: list[str] = []

    async def close(link: NodeLink) -> None:
        closed.append(link.node.node_id)
        pool.directory.forget_node("b", Unavailable("gone"))

    monkeypatch.setattr(NodeLink, "close", close)
    for node_id in ("a", "b"):
        pool.directory.link_to(node(node_id))
    await pool.close()
    assert set(closed) == {"a", "b"}
    assert not pool.directory._closing
