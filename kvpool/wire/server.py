"""The serving side of the wire protocol: connections, dispatch, limits. Knows no business.

Handlers are plain callables registered by message type. A synchronous one answers from within
`data_received`, without a task: that is the hot lane. A coroutine gets a task; an async generator
streams items and ends with its reply.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import structlog

from kvpool.errors import InvalidArgument, KvpoolError, PortInUse, ProtocolError
from kvpool.wire.framing import (
    DEFAULT_MAX_FRAME_BYTES,
    FrameReader,
    Kind,
    decode_request,
    encode_frame,
    error_body,
)
from kvpool.wire.messages import (
    PROTOCOL_VERSION,
    Hello,
    HelloReply,
    Message,
    Ok,
    Ping,
    Reply,
)

log = structlog.get_logger(__name__)

MAX_IN_FLIGHT = 1024
WRITE_HIGH_WATER = 8 << 20


@dataclass(slots=True, eq=False)
class Session:
    """What a server knows of one connection."""

    peer: str
    client_id: str = ""
    kind: str = ""
    epoch: int = 0
    closing: list[Callable[[], None]] = field(default_factory=list)  # run when the connection ends


class Final:
    """Wraps the reply that ends a stream, as the last thing an async generator yields."""

    __slots__ = ("reply",)

    def __init__(self, reply: Reply) -> None:
        self.reply = reply


Handler = Callable[[Any, Session], Reply | Awaitable[Reply] | AsyncIterator[Any]]


class WireServer:
    """Serves handlers on TCP or Unix sockets.

    Args:
        kind: what this server is ("node", "conductor", "worker"); told in the hello.
        server_id, epoch: identity; told in the hello.
        max_frame_bytes: larger frames close their connection.
    """

    def __init__(
        self,
        kind: str,
        server_id: str,
        epoch: int,
        *,
        max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES,
    ) -> None:
        self.identity = HelloReply(PROTOCOL_VERSION, kind, server_id, epoch)
        self.max_frame_bytes = max_frame_bytes
        self.handlers: dict[type[Message], Handler] = {Ping: lambda _request, _session: Ok()}
        self.connections: set[_Connection] = set()
        self.on_hello: Callable[[Session], None] = lambda _session: None
        self._servers: list[asyncio.Server] = []

    def handle(self, message: type[Message], handler: Handler) -> None:
        """Answer `message` with `handler(request, session)`."""
        self.handlers[message] = handler

    async def listen(self, host: str, port: int) -> int:
        """Listen on TCP; port 0 picks a free one. Returns the port.

        Raises:
            PortInUse: another process has it.
        """
        loop = asyncio.get_running_loop()
        try:
            server = await loop.create_server(lambda: _Connection(self), host, port)
        except OSError as error:
            raise PortInUse(
                f"cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}",
                hint="stop the process that has it, or choose another port",
            ) from error
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    async def listen_unix(self, path: str) -> None:
        """Listen on a Unix socket as well; a stale one of a dead process is replaced."""
        loop = asyncio.get_running_loop()
        remove_stale_socket(path)
        self._servers.append(await loop.create_unix_server(lambda: _Connection(self), path))

    async def close(self) -> None:
        """Stop listening and end every connection."""
        for server in self._servers:
            server.close()
        for connection in list(self.connections):
            connection.abort()
        await asyncio.sleep(0)


def remove_stale_socket(path: str) -> None:
    """Delete the Unix socket `path` if nobody listens on it.

    Raises:
        PortInUse: somebody does.
    """
    if not os.path.exists(path):
        return
    probe = socket.socket(socket.AF_UNIX)
    try:
        probe.settimeout(0.5)
        probe.connect(path)
    except OSError:
        os.unlink(path)
        return
    finally:
        probe.close()
    raise PortInUse(f"another process listens on {path}", hint="choose another runtime directory")


class _Connection(asyncio.Protocol):
    """One accepted connection."""

    def __init__(self, server: WireServer) -> None:
        self._server = server
        self._reader = FrameReader(server.max_frame_bytes)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._transport: asyncio.Transport | None = None
        self._can_write = asyncio.Event()
        self._can_write.set()
        self.session = Session(peer="")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._transport.set_write_buffer_limits(high=WRITE_HIGH_WATER)  # type: ignore[union-attr]
        raw = transport.get_extra_info("socket")
        if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.session.peer = str(transport.get_extra_info("peername") or "unix")
        self._server.connections.add(self)

    def data_received(self, data: bytes) -> None:
        try:
            for request_id, kind, body in self._reader.feed(data):
                if kind == Kind.CANCEL:
                    task = self._tasks.get(request_id)
                    if task is not None:
                        task.cancel()
                    continue
                if kind not in (Kind.REQUEST, Kind.ONE_WAY):
                    raise ProtocolError(f"a server takes no frames of kind {kind}")
                self._dispatch(request_id, kind == Kind.ONE_WAY, decode_request(body))
        except ProtocolError as error:
            log.warning(
                "bad frame, closing the connection",
                peer=self.session.peer,
                error=str(error),
            )
            self._write(encode_frame(0, Kind.ERROR, error_body(error)))
            if self._transport is not None:
                self._transport.close()

    def _dispatch(self, request_id: int, one_way: bool, request: Message) -> None:
        if isinstance(request, Hello):
            self._hello(request_id, request)
            return
        if not self.session.client_id:
            raise ProtocolError("the first frame must be Hello")
        handler = self._server.handlers.get(type(request))
        if handler is None:
            kind = self._server.identity.kind
            error = InvalidArgument(
                f"a {kind} does not answer {type(request).__name__}",
                hint="check which address belongs to which kind of process",
            )
            self._answer(request_id, one_way, Kind.ERROR, error_body(error))
            return
        try:
            result = handler(request, self.session)
        except KvpoolError as error:
            self._answer(request_id, one_way, Kind.ERROR, error_body(error))
            return
        except Exception as error:
            log.exception("handler failed", message=type(request).__name__)
            self._answer(request_id, one_way, Kind.ERROR, error_body(error))
            return
        if isinstance(result, Reply):
            self._answer(request_id, one_way, Kind.REPLY, result)
            return
        if len(self._tasks) >= MAX_IN_FLIGHT or request_id in self._tasks:
            if inspect.iscoroutine(result):
                result.close()
            raise ProtocolError(f"more than {MAX_IN_FLIGHT} calls in flight, or an id used twice")
        self._tasks[request_id] = asyncio.get_running_loop().create_task(
            self._finish(request_id, one_way, result)
        )

    def _hello(self, request_id: int, hello: Hello) -> None:
        if self.session.client_id:
            raise ProtocolError("Hello was said already")
        if hello.protocol != PROTOCOL_VERSION:
            raise ProtocolError(
                f"protocol {hello.protocol} is not spoken here",
                hint=f"this side speaks {PROTOCOL_VERSION}; install the same kvpool on both sides",
            )
        if not hello.client_id or len(hello.client_id) > 64:
            raise ProtocolError("Hello.client_id must be 1 to 64 characters")
        self.session.client_id = hello.client_id
        self.session.kind = hello.kind
        self.session.epoch = hello.epoch
        self._server.on_hello(self.session)
        self._answer(request_id, False, Kind.REPLY, self._server.identity)

    async def _finish(self, request_id: int, one_way: bool, result: Any) -> None:
        try:
            if inspect.isasyncgen(result):
                item: Any
                async for item in result:
                    if isinstance(item, Final):
                        self._answer(request_id, one_way, Kind.REPLY, item.reply)
                    else:
                        self._answer(request_id, one_way, Kind.ITEM, item)
                        await self._can_write.wait()
            else:
                self._answer(request_id, one_way, Kind.REPLY, await result)
        except KvpoolError as error:
            self._answer(request_id, one_way, Kind.ERROR, error_body(error))
        except Exception as error:
            log.exception("handler failed")
            self._answer(request_id, one_way, Kind.ERROR, error_body(error))
        finally:
            self._tasks.pop(request_id, None)

    def _answer(self, request_id: int, one_way: bool, kind: Kind, body: Reply) -> None:
        if not one_way:
            self._write(encode_frame(request_id, kind, body))

    def _write(self, frame: bytearray) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)

    def pause_writing(self) -> None:
        # A peer that does not read gets no more of its requests read.
        self._can_write.clear()
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._can_write.set()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        self._can_write.set()
        for task in list(self._tasks.values()):
            task.cancel()
        for callback in self.session.closing:
            callback()
        self._transport = None

    def abort(self) -> None:
        """Drop the connection at once."""
        if self._transport is not None:
            self._transport.abort()
