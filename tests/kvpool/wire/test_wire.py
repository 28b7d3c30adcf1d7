"""The wire protocol: limits, bad frames, deadlines, streams, lost connections."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvpool.blocks.layout import Layout, Namespace
from kvpool.blocks.tier import Tier
from kvpool.errors import (
    DeadlineExceeded,
    InvalidArgument,
    KvpoolError,
    Overloaded,
    PortInUse,
    ProtocolError,
    StaleEpoch,
    Unavailable,
)
from kvpool.wire import Final, Session, WireClient, WireServer
from kvpool.wire import messages as m
from kvpool.wire import server as wire_server
from kvpool.wire.framing import (
    HEADER,
    FrameReader,
    Kind,
    decode_error,
    decode_request,
    encode_frame,
)
from tests.support import waiting

until = partial(waiting.until, timeout_s=5.0)

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
    assert time.monotonic() - started < 10
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
    with pytest.raises(InvalidArgument, match="does not serve PoolStats"):
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


async def test_the_end_of_a_connection_is_reported_once(served: Served) -> None:
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
    assert time.monotonic() - started < 4.5
    for nonsense in ("nowhere", "host:", ":80", ""):
        with pytest.raises(Unavailable, match="not an address"):
            await WireClient(nonsense, "c").call(m.Ping(), 1)


# ---------------------------------------------------------------- bad frames


async def send_raw(served: Served, data: bytes) -> bytes:
    """The server's reply to raw bytes, until it closes or is silent for a moment."""
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


NAMESPACE = Namespace("model", "revision", Layout("bfloat16", 2, 2, 8))


def impossible_namespace(request_id: int, kind: Kind) -> bytes:
    """A well-formed RegisterNamespace whose layout has minus three layers."""
    body = bytes(encode_frame(0, kind, m.RegisterNamespace(NAMESPACE)))[HEADER.size :]
    tag, namespace, *rest = msgspec.msgpack.decode(body)
    namespace["layout"]["layers"] = -3
    changed = msgspec.msgpack.encode([tag, namespace, *rest])
    return HEADER.pack(len(changed), request_id, kind) + changed


HELLO = bytes(encode_frame(1, Kind.REQUEST, m.Hello(m.PROTOCOL_VERSION, "raw", "client")))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (HEADER.pack(4097, 1, 0), b"limit is 4096"),
        (HELLO + HEADER.pack(FRAME_LIMIT + 1, 1, 0), b"limit is 65536"),
        (HEADER.pack(4, 1, 99) + b"abcd", b"unknown frame kind"),
        (HEADER.pack(4, 1, Kind.REPLY) + b"abcd", b"accepts no frames"),
        (HEADER.pack(4, 1, Kind.REQUEST) + b"\xff\xff\xff\xff", b"bad message"),
        (bytes(encode_frame(1, Kind.REQUEST, m.Ping())), b"must be Hello"),
        (
            bytes(encode_frame(1, Kind.REQUEST, m.Hello(99, "x", "client"))),
            b"protocol 99 is not supported",
        ),
        (bytes(encode_frame(1, Kind.REQUEST, m.Hello(1, "", "client"))), b"1 to 64"),
        (HELLO + HELLO, b"sent twice"),
        (impossible_namespace(2, Kind.REQUEST), b"must be Hello"),
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
    """20,000 mutated and random bodies raise only two kinds of errors."""
    source = random.Random(5)
    seeds = [
        m.NodeLookup(b"n" * 16, b"h" * 64),
        m.Reserve(b"n" * 16, b"h" * 32, b"", 0, 1.0, "w"),
        m.NodeEvents("n", 1, 2, [m.BlockEvent("stored", b"n", b"h" * 16, Tier.DRAM)]),
        m.RegisterNamespace(NAMESPACE),
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
        except (ProtocolError, InvalidArgument):
            refused += 1
    assert 1_000 < refused < 20_000


def test_a_reader_buffers_nothing_of_a_frame_that_is_too_long() -> None:
    reader = FrameReader(max_frame_bytes=1000)
    with pytest.raises(ProtocolError, match="1001 bytes"):
        list(reader.feed(struct.pack("<IIB", 1001, 1, 0)))


def test_a_long_frame_costs_no_more_in_small_pieces_than_collecting_them() -> None:
    piece = bytes(1024)
    count = 4096
    reader = FrameReader()
    began = time.thread_time()
    plain = bytearray()
    for _ in range(count):
        plain += piece
    plain_s = time.thread_time() - began
    began = time.thread_time()
    frames = list(reader.feed(HEADER.pack(count * len(piece), 1, 0)))
    for _ in range(count):
        frames += reader.feed(piece)
    # Copying the whole buffer for each piece took over a hundred times as long.
    assert time.thread_time() - began < 30 * plain_s
    assert [(request_id, len(body)) for request_id, _, body in frames] == [(1, len(plain))]


def test_a_body_that_is_still_held_does_not_hinder_what_arrives() -> None:
    stream = b"".join(bytes(encode_frame(i, Kind.REQUEST, m.Ping())) for i in range(3))
    reader = FrameReader()
    held = [*reader.feed(stream[:5]), *reader.feed(stream[5:-3]), *reader.feed(stream[-3:])]
    assert [decode_request(body) for _, _, body in held] == [m.Ping()] * 3


# ---------------------------------------------------------------- hostile or clumsy peers


@contextlib.asynccontextmanager
async def raw_connection(
    served: Served,
) -> AsyncIterator[tuple[asyncio.StreamWriter, Callable[[], Any]]]:
    """A connection after Hello: its writer, and a function for the next (id, kind, body)."""
    incoming, writer = await asyncio.open_connection("127.0.0.1", served.port)
    frames = FrameReader()

    async def next_frame() -> tuple[int, int, bytes]:
        async with asyncio.timeout(5):
            while (frame := frames.next_frame()) is None:
                data = await incoming.read(1 << 20)
                if not data:
                    raise Unavailable("closed")
                frames.push(data)
        return frame[0], frame[1], bytes(frame[2])

    writer.write(HELLO)
    assert (await next_frame())[:2] == (1, Kind.REPLY)
    try:
        yield writer, next_frame
    finally:
        writer.close()


@pytest.fixture
async def loop_errors() -> AsyncIterator[list[str]]:
    """Errors in the event loop's exception handler; there must be none at the end."""
    seen: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, c: seen.append(str(c)))
    yield seen
    assert seen == []


def frame(request_id: int, kind: Kind, request: m.Message | None) -> bytes:
    return bytes(encode_frame(request_id, kind, request))


async def test_calls_cancelled_before_they_began_leave_nothing_behind(
    served: Served, recwarn: pytest.WarningsRecorder
) -> None:
    data = b""
    for number in range(2, 2 + wire_server.MAX_IN_FLIGHT + 100):
        request = generate(5) if number % 2 else m.Describe()
        data += frame(number, Kind.REQUEST, request) + frame(number, Kind.CANCEL, None)
    async with raw_connection(served) as (writer, next_frame):
        writer.write(data + frame(9999, Kind.REQUEST, m.Ping()))
        assert (await next_frame())[:2] == (9999, Kind.REPLY)
        [connection] = served.server.connections
        await until(lambda: not connection._tasks)
    gc.collect()
    assert [str(w.message) for w in recwarn if "never awaited" in str(w.message)] == []


@pytest.mark.parametrize("drips", [False, True])
async def test_a_peer_without_hello_in_time_gets_an_error_and_is_closed(
    served: Served, drips: bool
) -> None:
    served.server.hello_timeout_s = 0.3
    polite = served.client()
    await polite.call(m.Ping(), 2)
    incoming, writer = await asyncio.open_connection("127.0.0.1", served.port)
    answer = b""
    drops = iter(HEADER.pack(4000, 1, Kind.REQUEST) + bytes(3000) if drips else b"")
    was_reset = False  # a drop that arrives after the close resets the connection
    async with asyncio.timeout(60):
        while not (incoming.at_eof() or was_reset):
            try:
                async with asyncio.timeout(0.02):
                    answer += await incoming.read(65536)
            except TimeoutError:
                pass
            except ConnectionError:
                was_reset = True
            if (drop := next(drops, None)) is not None and not incoming.at_eof():
                writer.write(bytes([drop]))
    writer.close()
    assert b"no Hello within 0.3 s" in answer or (drips and was_reset)
    assert polite.is_connected
    assert len(served.server.connections) == 1


async def test_an_id_can_be_used_again_as_soon_as_its_answer_was_read(served: Served) -> None:
    may_end = asyncio.Event()

    async def lingering(_request: Any, _session: Session) -> AsyncIterator[Any]:
        yield Final(m.GenerateReply("length", 0, 0, 0, "", {}, {}, 0))
        await may_end.wait()

    served.server.handle(m.Generate, lingering)
    async with raw_connection(served) as (writer, next_frame):
        for _ in range(3):
            writer.write(frame(2, Kind.REQUEST, generate(1)))
            assert (await next_frame())[:2] == (2, Kind.REPLY)
        [connection] = served.server.connections
        assert len(connection.tasks()) == 3  # over for the peer, still running here
        may_end.set()
        await until(lambda: not connection.tasks())


async def test_a_peer_that_does_not_read_has_no_more_of_its_requests_served(
    served: Served,
) -> None:
    asked, handled = 600, 0

    def big(_request: Any, _session: Session) -> m.Reply:
        nonlocal handled
        handled += 1
        return m.NodeLookupReply(handled, bytes(128 * 1024))

    served.server.handle(m.NodeLookup, big)
    other = served.client()
    await other.call(m.Ping(), 2)
    async with raw_connection(served) as (writer, next_frame):
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        request = m.NodeLookup(b"", b"")
        writer.write(b"".join(frame(2 + n, Kind.REQUEST, request) for n in range(asked)))
        await until(lambda: any(not c._can_write.is_set() for c in served.server.connections))
        for _ in range(20):
            await other.call(m.Ping(), 2)
        assert handled < asked // 2
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert [(await next_frame())[0] for _ in range(asked)] == [2 + n for n in range(asked)]
        writer.write(frame(9999, Kind.REQUEST, m.Ping()))
        assert (await next_frame())[0] == 9999


async def test_many_requests_at_once_leave_others_their_turn(served: Served) -> None:
    loop = asyncio.get_running_loop()
    turns = [0]
    is_over = False

    def count_turn() -> None:
        turns.append(0)
        if not is_over:
            loop.call_soon(count_turn)

    def lookup(_request: Any, _session: Session) -> m.Reply:
        turns[-1] += 1
        return m.NodeLookupReply(0, b"")

    served.server.handle(m.NodeLookup, lookup)
    try:
        async with asyncio.timeout(20), raw_connection(served) as (writer, next_frame):
            count_turn()
            request = m.NodeLookup(b"", b"")
            writer.write(b"".join(frame(2 + n, Kind.REQUEST, request) for n in range(2000)))
            assert [(await next_frame())[0] for _ in range(2000)] == list(range(2, 2002))
    finally:
        is_over = True  # it fills memory as long as it spins
    assert sum(turns) == 2000
    assert max(turns) <= wire_server.MAX_FRAMES_PER_TURN


async def test_one_way_calls_run_side_by_side_and_only_so_many(
    served: Served,
    monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder,
) -> None:
    monkeypatch.setattr(wire_server, "MAX_ONE_WAY", 3)
    client = served.client()
    for _ in range(5):
        await client.send(m.Describe())
    assert (await client.call(m.NodeLookup(b"", b"h" * 16), 2)).found == 1
    [connection] = served.server.connections
    assert len(connection._one_way) == 3
    assert not connection._tasks
    await client.close()
    await until(lambda: served.cancelled == 3 and not connection._one_way)
    gc.collect()
    assert [str(w.message) for w in recwarn if "never awaited" in str(w.message)] == []


async def test_impossible_content_is_the_error_of_its_call_alone(
    served: Served, loop_errors: list[str]
) -> None:
    async with raw_connection(served) as (writer, next_frame):
        writer.write(impossible_namespace(0, Kind.ONE_WAY))
        writer.write(impossible_namespace(2, Kind.REQUEST))
        writer.write(frame(3, Kind.REQUEST, m.Ping()))
        request_id, kind, body = await next_frame()
        assert (request_id, kind) == (2, Kind.ERROR)
        error = decode_error(body)
        assert type(error) is InvalidArgument
        assert "layout.layers" in str(error)
        assert (await next_frame())[:2] == (3, Kind.REPLY)


async def test_a_reply_that_cannot_be_written_is_an_error_of_its_call_alone(
    served: Served, loop_errors: list[str]
) -> None:
    served.server.handle(m.NodeLookup, lambda _r, _s: m.NodeLookupReply(1 << 70, b""))
    client = served.client()
    with pytest.raises(KvpoolError, match="OverflowError"):
        await client.call(m.NodeLookup(b"", b""), 2)
    await client.call(m.Ping(), 2)
    assert len(served.server.connections) == 1


async def test_a_failing_welcome_closes_the_connection_with_a_reason(
    served: Served, loop_errors: list[str]
) -> None:
    def unwelcome(_session: Session) -> None:
        raise KeyError("nobody")

    served.server.on_hello = unwelcome
    with pytest.raises(KvpoolError, match="KeyError"):
        await served.client().call(m.Ping(), 2)
    await until(lambda: not served.server.connections)


# ---------------------------------------------------------------- the client's side


async def test_a_server_of_another_epoch_is_refused_and_its_connection_closed(
    served: Served,
) -> None:
    client = served.client(expected_epoch=7)
    await client.call(m.Ping(), 2)
    served.server.identity = m.HelloReply(m.PROTOCOL_VERSION, "node", "node-1", 8)
    for connection in list(served.server.connections):
        connection.abort()
    await until(lambda: not client.is_connected)
    for _ in range(2):
        with pytest.raises(StaleEpoch, match="has epoch 8, not 7"):
            await client.call(m.Ping(), 2)
        assert not client.is_connected
        assert not client.send_nowait(m.Ping())
        await until(lambda: not served.server.connections)


class Forged(m.Reply, frozen=True):
    """A NamespacesReply that an honest server cannot make."""

    namespaces: list[dict[str, Any]]


async def test_an_unreadable_answer_fails_its_call_alone(
    served: Served, loop_errors: list[str]
) -> None:
    good: dict[str, Any] = msgspec.to_builtins(NAMESPACE)

    async def wrong_items(_request: Any, _session: Session) -> AsyncIterator[Any]:
        yield m.Ok()
        await asyncio.sleep(60)

    served.server.handle(m.NodeLookup, lambda _r, _s: m.Ok())
    served.server.handle(m.Namespaces, lambda _r, _s: Forged([{**good, "revision": ""}]))
    served.server.handle(m.Generate, wrong_items)
    client = served.client()
    neighbour = asyncio.create_task(client.call(m.Describe(), 10))
    for request in (m.NodeLookup(b"", b""), m.Namespaces()):
        with pytest.raises(ProtocolError, match=r"127\.0\.0\.1.*bad reply"):
            await client.call(request, 2)
    with pytest.raises(ProtocolError, match="bad reply"):
        async for _ in client.stream(generate(1), 2):
            pass
    await client.call(m.Ping(), 2)
    [connection] = served.server.connections
    await until(lambda: len(connection._tasks) == 1)  # the stream was cancelled
    assert not neighbour.done()
    neighbour.cancel()


@pytest.mark.parametrize(
    "answer",
    [
        HEADER.pack(4, 0, Kind.ERROR) + b"\xff\xff\xff\xff",
        HEADER.pack(4, 1, 99) + b"abcd",
        HEADER.pack((64 << 20) + 1, 1, Kind.REPLY),
    ],
)
async def test_a_peer_that_talks_nonsense_fails_the_calls_and_not_the_loop(
    answer: bytes, loop_errors: list[str]
) -> None:
    async def nonsense(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)

    server = await asyncio.start_server(nonsense, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = WireClient(f"127.0.0.1:{port}", "c")
    with pytest.raises(ProtocolError, match=f"127.0.0.1:{port}"):
        await client.call(m.Ping(), 5)
    await client.close()
    server.close()


async def test_a_server_that_does_not_answer_hello_is_left() -> None:
    is_left = asyncio.Event()

    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(65536):
            pass
        is_left.set()
        writer.close()

    server = await asyncio.start_server(mute, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = WireClient(f"127.0.0.1:{port}", "c", connect_timeout_s=0.1)
    with pytest.raises(Unavailable):
        await client.call(m.Ping(), 5)
    async with asyncio.timeout(5):
        await is_left.wait()
    server.close()


async def test_close_waits_for_the_calls_in_work(served: Served) -> None:
    client = served.client()
    call = asyncio.create_task(client.call(m.Describe(), 10))
    await until(lambda: any(c.tasks() for c in served.server.connections))
    await served.server.close()
    assert served.cancelled == 1  # the handler has ended, not only been told to
    with pytest.raises(Unavailable):
        await call
