"""The wire protocol: limits, bad frames, deadlines, streams, lost connections."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from kvpool.errors import (
    DeadlineExceeded,
    InvalidArgument,
    KvpoolError,
    Overloaded,
    PortInUse,
    ProtocolError,
    Unavailable,
)
from kvpool.wire import Final, Session, WireClient, WireServer
from kvpool.wire import messages as m
from kvpool.wire.framing import HEADER, FrameReader, Kind, decode_request, encode_frame

FRAME_LIMIT = 64 * 1024


class Served:
    """A server with a handler of each kind, and clients of it."""

    def __init__(self) -> None:
        self.server = WireServer("node", "node-1", 7, max_frame_bytes=FRAME_LIMIT)
        self.server.handle(m.NodeLookup, lambda r, _s: m.NodeLookupReply(len(r.hashes) // 16, b""))
        self.server.handle(m.Describe, self.stuck)
        self.server.handle(m.Generate, self.count)
        self.server.handle(m.Renew, self.refuse)
        self.server.handle(m.Abort, self.break_down)
        self.cancelled = 0
        self.sessions: list[Session] = []
        self.server.on_hello = self.sessions.append
        self.port = 0
        self.clients: list[WireClient] = []

    async def stuck(self, _request: Any, _session: Session) -> m.Reply:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return m.Ok()

    async def count(self, request: m.Generate, _session: Session) -> AsyncIterator[Any]:
        for number in range(request.sampling.max_tokens):
            yield m.GenerateChunk([number])
            await asyncio.sleep(0)
        yield Final(m.GenerateReply("length", 0, 0, 0, "", {}, {}, 0))

    def refuse(self, _request: Any, _session: Session) -> m.Reply:
        raise Overloaded("not now", retry_after_s=3.5)

    def break_down(self, _request: Any, _session: Session) -> m.Reply:
        raise ZeroDivisionError("a secret that stays here")

    def client(self, **options: Any) -> WireClient:
        made = WireClient(f"127.0.0.1:{self.port}", f"client-{len(self.clients)}", **options)
        self.clients.append(made)
        return made


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    running = Served()
    running.port = await running.server.listen("127.0.0.1", 0)
    yield running
    for client in running.clients:
        await client.close()
    await running.server.close()


async def until(claim: Callable[[], Any]) -> None:
    """Wait until `claim()` holds, for five seconds at most."""
    async with asyncio.timeout(5):
        while not claim():  # noqa: ASYNC110 - the other side has no event to wait for
            await asyncio.sleep(0.01)


def generate(count: int) -> m.Generate:
    return m.Generate("r", b"n" * 16, b"", b"", [], [], m.Sampling(count), 10.0)


async def test_many_calls_on_one_connection_find_their_answers(served: Served) -> None:
    client = served.client()
    calls = [client.call(m.NodeLookup(b"", b"h" * 16 * n), 5) for n in range(200)]
    assert [reply.found for reply in await asyncio.gather(*calls)] == list(range(200))
    assert len(served.server.connections) == 1
    assert client.server == m.HelloReply(m.PROTOCOL_VERSION, "node", "node-1", 7)


async def test_a_unix_socket_serves_as_well_and_a_stale_one_is_replaced(
    served: Served, tmp_path: Path
) -> None:
    path = str(tmp_path / "wire.sock")
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(path)
    await served.server.listen_unix(path)
    client = WireClient(f"unix:{path}", "c")
    assert (await client.call(m.NodeLookup(b"", b""), 2)).found == 0
    await client.close()
    with pytest.raises(PortInUse):
        await served.server.listen_unix(path)


async def test_a_call_ends_at_its_deadline_and_is_cancelled_at_the_server(served: Served) -> None:
    client = served.client()
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="Describe"):
        await client.call(m.Describe(), 0.2)
    assert time.monotonic() - started < 2
    await until(lambda: served.cancelled)
    assert (await client.call(m.NodeLookup(b"", b"h" * 16), 2)).found == 1


async def test_errors_keep_their_type_and_unforeseen_ones_their_secret(served: Served) -> None:
    client = served.client()
    with pytest.raises(Overloaded, match="not now") as refused:
        await client.call(m.Renew(1, 1.0), 2)
    assert refused.value.retry_after_s == 3.5
    with pytest.raises(KvpoolError) as broken:
        await client.call(m.Abort(1, True), 2)
    assert "secret" not in str(broken.value)
    with pytest.raises(InvalidArgument, match="does not answer PoolStats"):
        await client.call(m.PoolStats(), 2)


async def test_a_stream_ends_with_its_reply_and_leaving_early_cancels(served: Served) -> None:
    client = served.client()
    items = [item async for item in client.stream(generate(3), 2)]
    assert [item.token_ids for item in items[:-1]] == [[0], [1], [2]]
    assert items[-1].finish_reason == "length"
    stream = client.stream(generate(1_000_000), 2)
    assert (await anext(stream)).token_ids == [0]
    await stream.aclose()
    [connection] = served.server.connections
    await until(lambda: not connection._tasks)


async def test_calls_in_flight_fail_when_the_connection_breaks_and_the_next_reconnects(
    served: Served,
) -> None:
    client = served.client()
    call = asyncio.create_task(client.call(m.Describe(), 10))
    await until(lambda: any(c._tasks for c in served.server.connections))
    for connection in list(served.server.connections):
        connection.abort()
    with pytest.raises(Unavailable):
        await call
    assert (await client.call(m.NodeLookup(b"", b"h" * 32), 2)).found == 2


async def test_the_end_of_a_connection_is_told_once(served: Served) -> None:
    client = served.client()
    await client.call(m.Ping(), 2)
    ended: list[str] = []
    [session] = served.sessions
    session.closing.append(lambda: ended.append(session.client_id))
    await client.close()
    await until(lambda: ended)
    assert ended == ["client-0"]


async def test_nobody_there_is_unavailable_at_once() -> None:
    client = WireClient("127.0.0.1:9", "c")
    started = time.monotonic()
    for _ in range(2):
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1:9"):
            await client.call(m.Ping(), 5)
    assert time.monotonic() - started < 2
    for nonsense in ("nowhere", "host:", ":80", ""):
        with pytest.raises(Unavailable, match="no address"):
            await WireClient(nonsense, "c").call(m.Ping(), 1)


# ---------------------------------------------------------------- bad frames


async def send_raw(served: Served, data: bytes) -> bytes:
    """What the server sends back to raw bytes, until it closes or is silent for a moment."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(data)
    answer = b""
    try:
        async with asyncio.timeout(1):
            while piece := await reader.read(65536):
                answer += piece
    except (TimeoutError, ConnectionError):
        pass
    writer.close()
    return answer


HELLO = bytes(encode_frame(1, Kind.REQUEST, m.Hello(m.PROTOCOL_VERSION, "raw", "client")))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (HEADER.pack(FRAME_LIMIT + 1, 1, 0), b"limit is"),
        (HEADER.pack(4, 1, 99) + b"abcd", b"unknown frame kind"),
        (HEADER.pack(4, 1, Kind.REPLY) + b"abcd", b"takes no frames"),
        (HEADER.pack(4, 1, Kind.REQUEST) + b"\xff\xff\xff\xff", b"bad message"),
        (bytes(encode_frame(1, Kind.REQUEST, m.Ping())), b"must be Hello"),
        (bytes(encode_frame(1, Kind.REQUEST, m.Hello(99, "x", "client"))), b"not spoken here"),
        (bytes(encode_frame(1, Kind.REQUEST, m.Hello(1, "", "client"))), b"1 to 64"),
        (HELLO + HELLO, b"said already"),
    ],
)
async def test_a_bad_frame_closes_its_connection_alone_with_a_reason(
    served: Served, data: bytes, words: bytes
) -> None:
    other = served.client()
    await other.call(m.Ping(), 2)
    assert words in await send_raw(served, data)
    assert (await other.call(m.NodeLookup(b"", b"h" * 16), 2)).found == 1
    assert len(served.server.connections) == 1


async def test_a_frame_cut_short_harms_nobody(served: Served) -> None:
    other = served.client()
    await other.call(m.Ping(), 2)
    whole = bytes(encode_frame(2, Kind.REQUEST, m.NodeLookup(b"n", b"h" * 160)))
    for length in range(0, len(whole), 7):
        _, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(HELLO + whole[:length])
        await writer.drain()
        writer.close()
    assert (await other.call(m.NodeLookup(b"", b"h" * 16), 2)).found == 1


@pytest.mark.parametrize("piece", [1, 2, 3, 8, 9, 10, 1000])
def test_frames_are_cut_the_same_however_they_arrive(piece: int) -> None:
    sent = [m.NodeLookup(b"n" * 16, os.urandom(16 * n)) for n in (0, 1, 5)]
    stream = b"".join(bytes(encode_frame(i, Kind.REQUEST, r)) for i, r in enumerate(sent))
    reader = FrameReader()
    seen = []
    for start in range(0, len(stream), piece):
        for request_id, kind, body in reader.feed(stream[start : start + piece]):
            seen.append((request_id, kind, decode_request(body)))
    assert seen == [(i, Kind.REQUEST, r) for i, r in enumerate(sent)]


def test_random_bodies_decode_or_are_refused_and_nothing_else() -> None:
    """20,000 mutated and random bodies; only ProtocolError may come out."""
    source = random.Random(5)
    seeds = [
        m.NodeLookup(b"n" * 16, b"h" * 64),
        m.Reserve(b"n" * 16, b"h" * 32, b"", 0, 1.0, "w"),
        m.NodeEvents("n", 1, 2, [m.BlockEvent("stored", b"n", b"h" * 16, "dram")]),
        generate(3),
    ]
    bodies = [bytes(encode_frame(0, Kind.REQUEST, s))[HEADER.size :] for s in seeds]
    refused = 0
    for _ in range(20_000):
        body = bytearray(source.choice(bodies))
        for _ in range(source.randint(1, 4)):
            body[source.randrange(len(body))] = source.randrange(256)
        cut = body[: source.randint(0, len(body))] if source.random() < 0.3 else body
        try:
            decode_request(memoryview(bytes(cut)))
        except ProtocolError:
            refused += 1
    assert 1_000 < refused < 20_000


def test_a_reader_buffers_nothing_of_a_frame_that_is_too_long() -> None:
    reader = FrameReader(max_frame_bytes=1000)
    with pytest.raises(ProtocolError, match="1001 bytes"):
        list(reader.feed(struct.pack("<IIB", 1001, 1, 0)))
