"""A reply that comes after its call was given up: the client gives back at once what it grants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvpool.client.node.grants import undo_pin, undo_reserve
from kvpool.errors import DeadlineExceeded, Draining
from kvpool.wire import Session, WireClient, WireServer
from kvpool.wire import client as wire_client
from kvpool.wire import messages as m
from tests.support.waiting import until

RESERVE = m.Reserve(b"n" * 16, b"h" * 16, b"", 0, 30.0)
PIN = m.Pin(b"n" * 16, b"h" * 16, 30.0)


class Slow:
    """A node that answers when it is let, also those who left: it could not know in time."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.taken_back: list[Any] = []
        self.server = WireServer("node", "n", 1)
        self.server.handle(m.Reserve, lambda _r, s: self._late(s, self._reserved()))
        self.server.handle(
            m.Pin, lambda _r, s: self._late(s, m.PinReply(7, 1, b"", b"", b"", 30.0))
        )
        self.server.handle(m.Abort, lambda r, _s: self._took(r))
        self.server.handle(m.Release, lambda r, _s: self._took(r))

    @staticmethod
    def _reserved() -> m.ReserveReply:
        return m.ReserveReply(5, b"\0", bytes(16), 512, 30.0)

    async def _late(self, _session: Session, reply: m.Reply) -> m.Reply:
        while not self.may_answer.is_set():
            try:
                await self.may_answer.wait()
            except asyncio.CancelledError:
                continue  # the answer was on its way
        return reply

    def _took(self, request: Any) -> m.Ok:
        self.taken_back.append(request)
        return m.Ok()


@pytest.fixture
async def slow() -> AsyncIterator[tuple[Slow, WireClient]]:
    node = Slow()
    client = WireClient(f"127.0.0.1:{await node.server.listen('127.0.0.1', 0)}", "c")
    await client.call(m.Ping(), 5)
    yield node, client
    node.may_answer.set()
    await client.close()
    await node.server.close()


@pytest.mark.parametrize("way", ["too late", "cancelled"])
@pytest.mark.parametrize(
    ("request_", "undo", "expected"),
    [(RESERVE, undo_reserve, m.Abort(5, True)), (PIN, undo_pin, m.Release([7]))],
)
async def test_what_a_late_answer_grants_is_given_back(
    slow: tuple[Slow, WireClient], way: str, request_: Any, undo: Any, expected: m.Message
) -> None:
    node, client = slow
    if way == "too late":
        with pytest.raises(DeadlineExceeded):
            await client.call(request_, 0.05, undo)
    else:
        task = asyncio.create_task(client.call(request_, 5.0, undo))
        await asyncio.sleep(0)
        await client.call(m.Ping(), 5)  # it is there
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert node.taken_back == []
    node.may_answer.set()
    await until(lambda: node.taken_back, "it is given back", 5)
    assert node.taken_back == [expected]


async def test_an_answer_in_time_is_kept_and_the_late_ones_remembered_are_few(
    slow: tuple[Slow, WireClient],
) -> None:
    node, client = slow
    await client.call(m.Ping(), 5)
    assert client._protocol is not None
    assert client._protocol._undo.capacity == wire_client.MAX_UNDO
    client._protocol._undo.capacity = 8
    for _ in range(30):
        with pytest.raises(DeadlineExceeded):
            await client.call(RESERVE, 0.001, undo_reserve)
    assert len(client._protocol._undo) == 8
    node.may_answer.set()
    reply = await client.call(PIN, 5.0, undo_pin)
    assert reply.lease_id == 7
    await client.call(m.Ping(), 5)
    assert m.Release([7]) not in node.taken_back


async def test_a_call_that_was_answered_with_an_error_leaves_nothing_behind() -> None:
    def refuse(_request: m.Reserve, _session: Session) -> m.ReserveReply:
        raise Draining("this node is being drained")

    server = WireServer("node", "n", 1)
    server.handle(m.Reserve, refuse)
    client = WireClient(f"127.0.0.1:{await server.listen('127.0.0.1', 0)}", "c")
    try:
        for _ in range(3):
            with pytest.raises(Draining):
                await client.call(RESERVE, 5.0, undo_reserve)
        assert client._protocol is not None
        assert not client._protocol._undo
    finally:
        await client.close()
        await server.close()
