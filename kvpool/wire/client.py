"""The client of the wire protocol: one pipelined connection that reconnects by itself.

Every call has a deadline. If the connection breaks before the reply, the call fails with
`Unavailable`. It is not repeated here, since only the caller knows whether that is safe.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import ssl
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, cast

from kvpool.bounded import BoundedDict
from kvpool.errors import (
    DeadlineExceeded,
    KvpoolError,
    ProtocolError,
    StaleEpoch,
    Unavailable,
)
from kvpool.wire.credentials import NO_CREDENTIALS, Credentials
from kvpool.wire.framing import (
    DEFAULT_MAX_FRAME_BYTES,
    FrameReader,
    Kind,
    decode_error,
    decode_reply,
    decoder_for,
    encode_frame,
)
from kvpool.wire.messages import (
    PROTOCOL_VERSION,
    REPLIES,
    STREAM_ITEMS,
    Hello,
    HelloReply,
    Message,
    Reply,
)

CONNECT_BACKOFF_S = 0.2  # after a refused connection, fail fast for this long
MAX_UNDO = 1024  # abandoned calls whose late replies can still be undone
Undo = Callable[[Any], Message | None]


class WireClient:
    """A connection to one server. It opens on first use, and again after it broke.

    Args:
        address: "host:port" or "unix:/path".
        client_id: UUID of this process's client; servers tie leases and reservations to it.
        kind: "client", "node", "worker" or "conductor".
        expected_epoch: the epoch that the server must have; None: any. Each call to a server with
            another epoch fails with `StaleEpoch`.
        connect_timeout_s: limit for connecting and Hello.
        credentials: token and TLS.
    """

    def __init__(
        self,
        address: str,
        client_id: str,
        *,
        kind: str = "client",
        epoch: int = 0,
        expected_epoch: int | None = None,
        connect_timeout_s: float = 2.0,
        max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES,
        credentials: Credentials = NO_CREDENTIALS,
    ) -> None:
        self.address = address
        self.server: HelloReply | None = None
        self._hello = Hello(PROTOCOL_VERSION, client_id, kind, epoch, credentials.token)
        self._credentials = credentials
        self._expected_epoch = expected_epoch
        self._connect_timeout_s = connect_timeout_s
        self._max_frame_bytes = max_frame_bytes
        self._protocol: _Protocol | None = None
        self._connecting: asyncio.Lock = asyncio.Lock()
        self._refused_until = 0.0
        self._closed = False

    @property
    def is_connected(self) -> bool:
        """Whether a connection is open now."""
        return self._protocol is not None and self._protocol.is_open

    async def call(self, request: Message, timeout_s: float, undo: Undo | None = None) -> Any:
        """Send `request` and return its reply (the type that `REPLIES` names).

        Args:
            undo: makes the message that undoes a reply. It is sent if the reply arrives after the
                call was abandoned, since no caller holds what the reply grants.

        Raises:
            DeadlineExceeded: no reply within `timeout_s`.
            Unavailable: there is no connection, or it broke before the reply.
            Unauthenticated: the server does not accept the token.
            StaleEpoch: the server does not have the expected epoch.
            ProtocolError: the reply cannot be read.
            KvpoolError: the error that the server raised.
        """
        protocol = self._protocol
        if protocol is None or not protocol.is_open:
            protocol = await self._connect(timeout_s)
        return await protocol.call(request, timeout_s, undo)

    async def send(self, request: Message) -> None:
        """Send one-way: no reply, no guarantee. Opens a connection if there is none."""
        protocol = self._protocol
        if protocol is None or not protocol.is_open:
            protocol = await self._connect(self._connect_timeout_s)
        protocol.write(0, Kind.ONE_WAY, request)

    def send_nowait(self, request: Message) -> bool:
        """Send one-way over an open connection. Returns False if there is none."""
        if self._protocol is None or not self._protocol.is_open:
            return False
        self._protocol.write(0, Kind.ONE_WAY, request)
        return True

    async def stream(self, request: Message, timeout_s: float) -> AsyncGenerator[Any, None]:
        """Send `request`; yield its items, then its reply as the last one.

        If the iteration ends early, the call is cancelled at the server. `timeout_s` is the limit
        for each item.
        """
        protocol = self._protocol
        if protocol is None or not protocol.is_open:
            protocol = await self._connect(timeout_s)
        async for item in protocol.stream(request, timeout_s):
            yield item

    async def _connect(self, timeout_s: float) -> _Protocol:
        if self._closed:
            raise Unavailable(f"the client of {self.address} is closed")
        async with self._connecting:
            if self._protocol is not None and self._protocol.is_open:
                return self._protocol
            if time.monotonic() < self._refused_until:
                raise Unavailable(
                    f"no connection to {self.address}", hint="the last attempt was refused just now"
                )
            limit = min(timeout_s, self._connect_timeout_s)
            try:
                async with asyncio.timeout(limit):
                    protocol = await self._open()
                    server = await self._greet(protocol, limit)
            except (OSError, TimeoutError, DeadlineExceeded) as error:
                self._refused_until = time.monotonic() + CONNECT_BACKOFF_S
                reason = str(error) or f"no answer within {limit:g} s"
                raise Unavailable(
                    f"cannot connect to {self.address}: {reason}",
                    hint="is the process running, and is the address right?",
                ) from error
            self.server = server
            self._protocol = protocol
            return protocol

    async def _greet(self, protocol: _Protocol, limit: float) -> HelloReply:
        """Send Hello on a new connection. Closes it if the server refuses or has another epoch."""
        is_welcome = False
        try:
            server: HelloReply = await protocol.call(self._hello, limit)
            if self._closed:
                raise Unavailable(f"the client of {self.address} is closed")
            if self._expected_epoch is not None and server.epoch != self._expected_epoch:
                raise StaleEpoch(
                    f"{self.address} has epoch {server.epoch}, not {self._expected_epoch}",
                    hint="it was restarted, and its leases and reservations are void",
                )
            is_welcome = True
            return server
        finally:
            if not is_welcome:
                protocol.close()

    async def _open(self) -> _Protocol:
        loop = asyncio.get_running_loop()

        def factory() -> _Protocol:
            return _Protocol(self.address, self._max_frame_bytes)

        if self.address.startswith("unix:"):
            _, protocol = await loop.create_unix_connection(factory, self.address[5:])
        else:
            host, _, port = self.address.rpartition(":")
            if not host or not port.isdigit():
                raise Unavailable(
                    f"{self.address!r} is not an address",
                    hint='use "host:port" or "unix:/path"',
                )
            tls = self._credentials.tls
            _, protocol = await loop.create_connection(
                factory, host.strip("[]"), int(port), ssl=tls
            )
        return protocol

    async def close(self) -> None:
        """Close the connection. Calls that run fail with `Unavailable`."""
        self._closed = True
        if self._protocol is not None:
            self._protocol.close()
            self._protocol = None


class _Protocol(asyncio.Protocol):
    """One open connection."""

    def __init__(self, address: str, max_frame_bytes: int) -> None:
        self._address = address
        self._reader = FrameReader(max_frame_bytes)
        self._ids = itertools.count(1)
        self._calls: dict[int, tuple[asyncio.Future[Any], Any]] = {}
        self._streams: dict[int, tuple[asyncio.Queue[Any], Any, Any]] = {}
        # Abandoned calls, with decoders; one that the server cancelled gets no reply.
        self._undo: BoundedDict[int, tuple[Any, Undo]] = BoundedDict(MAX_UNDO)
        self._transport: asyncio.Transport | None = None
        self.is_open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        raw = transport.get_extra_info("socket")
        if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.is_open = True

    def write(self, request_id: int, kind: Kind, request: Message | None) -> None:
        if self._transport is None or self._transport.is_closing():
            raise Unavailable(f"the connection to {self._address} is closed")
        self._transport.write(encode_frame(request_id, kind, request))

    async def call(self, request: Message, timeout_s: float, undo: Undo | None = None) -> Any:
        loop = asyncio.get_running_loop()
        request_id = next(self._ids) & 0xFFFF_FFFF
        future: asyncio.Future[Any] = loop.create_future()
        decoder = decoder_for(REPLIES[type(request)])
        self.write(request_id, Kind.REQUEST, request)
        self._calls[request_id] = (future, decoder)
        timer = loop.call_later(
            timeout_s, self._expire, request_id, type(request).__name__, timeout_s, undo
        )
        try:
            return await future
        except asyncio.CancelledError:
            if future.cancelled():
                self._give_up(request_id, decoder, undo)
            elif undo is not None and future.exception() is None:
                self._take_back(undo, future.result())  # it arrived in the same turn of the loop
            raise
        finally:
            timer.cancel()
            self._calls.pop(request_id, None)

    def _expire(self, request_id: int, name: str, timeout_s: float, undo: Undo | None) -> None:
        future, decoder = self._calls.pop(request_id, (None, None))
        if future is not None and not future.done():
            future.set_exception(
                DeadlineExceeded(f"{self._address} did not answer {name} within {timeout_s:g} s")
            )
            self._give_up(request_id, decoder, undo)

    def _give_up(self, request_id: int, decoder: Any, undo: Undo | None) -> None:
        if undo is not None:
            self._undo[request_id] = (decoder, undo)
        self._cancel(request_id)

    def _cancel(self, request_id: int) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode_frame(request_id, Kind.CANCEL, None))

    async def stream(self, request: Message, timeout_s: float) -> AsyncGenerator[Any, None]:
        request_id = next(self._ids) & 0xFFFF_FFFF
        queue: asyncio.Queue[Any] = asyncio.Queue()
        item_decoder = decoder_for(STREAM_ITEMS[type(request)])
        final_decoder = decoder_for(REPLIES[type(request)])
        self.write(request_id, Kind.REQUEST, request)
        self._streams[request_id] = (queue, item_decoder, final_decoder)
        is_over = False
        try:
            while not is_over:
                try:
                    async with asyncio.timeout(timeout_s):
                        is_over, item = await queue.get()
                except TimeoutError:
                    raise DeadlineExceeded(
                        f"{self._address} sent nothing for {timeout_s:g} s"
                    ) from None
                if isinstance(item, KvpoolError):
                    raise item
                yield item
        finally:
            self._streams.pop(request_id, None)
            if not is_over:
                self._cancel(request_id)

    def data_received(self, data: bytes) -> None:
        try:
            for request_id, kind, body in self._reader.feed(data):
                self._frame(request_id, kind, body)
        except ProtocolError as error:
            self._fail(ProtocolError(f"{self._address} sent a bad frame: {error}"))
            self.close()

    def _frame(self, request_id: int, kind: int, body: memoryview) -> None:
        entry = self._calls.get(request_id)
        if entry is not None:
            future, decoder = entry
            if not future.done():
                answer = self._decode(kind, body, decoder)
                if isinstance(answer, KvpoolError):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)
            return
        stream = self._streams.get(request_id)
        if stream is not None:
            queue, item_decoder, final_decoder = stream
            is_item = kind == Kind.ITEM
            answer = self._decode(kind, body, item_decoder if is_item else final_decoder)
            queue.put_nowait((not is_item, answer))
        elif request_id == 0 and kind == Kind.ERROR:
            self._fail(self._decode(kind, body, None))
        elif request_id in self._undo:  # the reply to an abandoned call
            decoder, undo = self._undo.pop(request_id)
            self._take_back(undo, self._decode(kind, body, decoder))

    def _take_back(self, undo: Undo, answer: Any) -> None:
        """Undo a reply that no caller waits for."""
        message = undo(answer) if isinstance(answer, Reply) else None
        if message is not None and self.is_open:
            self.write(0, Kind.ONE_WAY, message)

    def _decode(self, kind: int, body: memoryview, decoder: Any) -> Any:
        """The content of a frame. If it cannot be read, that is the error of its call alone."""
        try:
            return decode_error(body) if kind == Kind.ERROR else decode_reply(decoder, body)
        except ProtocolError as error:
            return ProtocolError(f"{self._address}: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        reason = f": {exc}" if isinstance(exc, ssl.SSLError) else ""
        self._fail(Unavailable(f"{self._address} closed the connection{reason}"))
        self._transport = None

    def _fail(self, error: KvpoolError) -> None:
        for future, _ in self._calls.values():
            if not future.done():
                future.set_exception(error)
        for queue, _, _ in self._streams.values():
            queue.put_nowait((True, error))

    def close(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.close()
