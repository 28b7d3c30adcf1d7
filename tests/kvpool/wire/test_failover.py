"""A client of several equal servers: none of its calls is lost while one of them lives."""

from __future__ import annotations

import asyncio
import time

import pytest

from kvpool.errors import ConfigError, DeadlineExceeded, StaleEpoch, Unavailable
from kvpool.wire import FailoverClient, WireServer, split_addresses
from kvpool.wire import messages as m


async def serve(name: str, reply: object = None) -> tuple[WireServer, str]:
    server = WireServer("conductor", name, 1)

    async def count_copies(_request: m.CountCopies, _session: object) -> m.CopyCounts:
        if isinstance(reply, Exception):
            raise reply
        if reply == "hangs":
            await asyncio.Event().wait()
        return m.CopyCounts(name.encode())

    server.handle(m.CountCopies, count_copies)
    return server, f"127.0.0.1:{await server.listen('127.0.0.1', 0)}"


ASK = m.CountCopies(b"", b"")


async def test_calls_go_to_the_first_and_stay_there() -> None:
    a, at_a = await serve("a")
    b, at_b = await serve("b")
    client = FailoverClient(f"{at_a}, {at_b}", "c")
    assert [(await client.call(ASK, 2)).copies for _ in range(3)] == [b"a"] * 3
    for part in (client, a, b):
        await part.close()


async def test_a_server_that_dies_costs_no_call_and_is_not_asked_again() -> None:
    a, at_a = await serve("a")
    b, at_b = await serve("b")
    client = FailoverClient(f"{at_a},{at_b}", "c")
    await client.call(ASK, 2)
    await a.close()
    assert (await client.call(ASK, 2)).copies == b"b"
    assert client.address == at_b
    for part in (client, b):
        await part.close()


async def test_a_call_in_flight_at_a_dying_server_is_asked_of_the_next() -> None:
    a, at_a = await serve("a", "hangs")
    b, at_b = await serve("b")
    client = FailoverClient(f"{at_a},{at_b}", "c")
    calls = [asyncio.create_task(client.call(ASK, 30)) for _ in range(5)]
    deadline = time.monotonic() + 5
    while not any(connection.tasks() for connection in a.connections):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    started = time.monotonic()
    await a.close()
    assert [reply.copies for reply in await asyncio.gather(*calls)] == [b"b"] * 5
    assert time.monotonic() - started < 10  # at once, not after the deadline
    for part in (client, b):
        await part.close()


async def test_a_silent_server_is_left_within_the_calls_own_deadline() -> None:
    a, at_a = await serve("a", "hangs")
    b, at_b = await serve("b")
    client = FailoverClient(f"{at_a},{at_b}", "c")
    assert (await client.call(ASK, 0.6)).copies == b"b"
    for part in (client, a, b):
        await part.close()


async def test_when_nobody_answers_the_call_ends_in_time_with_a_typed_error() -> None:
    a, at_a = await serve("a", "hangs")
    b, at_b = await serve("b", "hangs")
    client = FailoverClient(f"{at_a},{at_b}", "c")
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        await client.call(ASK, 0.4)
    assert time.monotonic() - started < 10
    await a.close()
    await b.close()
    with pytest.raises(Unavailable):
        await client.call(ASK, 0.4)
    await client.close()


async def test_what_a_server_says_is_believed_and_not_asked_elsewhere() -> None:
    a, at_a = await serve("a", StaleEpoch("a later process uses this id"))
    b, at_b = await serve("b")
    client = FailoverClient(f"{at_a},{at_b}", "c")
    with pytest.raises(StaleEpoch):
        await client.call(ASK, 2)
    assert client.address == at_a
    for part in (client, a, b):
        await part.close()


def test_no_address_is_an_error() -> None:
    assert split_addresses(" a:1 ,b:2,") == ["a:1", "b:2"]
    with pytest.raises(ConfigError):
        split_addresses(" , ")
