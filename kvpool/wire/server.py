"""The server of the wire protocol: connections, dispatch, limits.

Handlers are registered by message type. A plain function answers within `data_received`, without a
task: that is the fast path. A coroutine gets a task. An async generator streams items and ends with
its reply.

The server is fair to its connections. If a peer does not read its replies, its next requests wait;
if it sends many requests at once, a few hundred are served in each turn of the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import structlog

from kvpool.errors import InvalidArgument, KvpoolError, PortInUse, ProtocolError, Unauthenticated
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
from kvpool.wire.principal import ANYBODY, NOBODY, Principal

log = structlog.get_logger(__name__)
M = TypeVar("M", bound=Message)

MAX_IN_FLIGHT = 1024
CLOSE_TIMEOUT_S = 5.0
MAX_ONE_WAY = 1024  # one-way calls of one connection that run at the same time
MAX_FRAMES_PER_TURN = 256  # of one connection, before the event loop serves others
MAX_FRAME_BYTES_BEFORE_HELLO = 4096
HELLO_TIMEOUT_S = 10.0
WRITE_HIGH_WATER = 8 << 20


@dataclass(slots=True, eq=False)
class Session:
    """One connection, as handlers see it."""

    peer: str
    client_id: str = ""
    kind: str = ""
    epoch: int = 0
    principal: Principal = NOBODY
    closing: list[Callable[[], None]] = field(default_factory=list)  # run when the connection ends


class CallAuthorizer(Protocol):
    """Checks the token of each connection and every request.

    `kvpool.security.authorization` has the one in use.
    """

    on_change: list[Callable[[], None]]

    def is_current(self, principal: Principal) -> bool: ...

    def authenticate(self, token: str) -> Principal: ...

    def authorize(self, request: M, principal: Principal) -> M: ...


class Final:
    """Wraps the reply that ends a stream, as the last thing an async generator yields."""

    __slots__ = ("reply",)

    def __init__(self, reply: Reply) -> None:
        self.reply = reply


Handler = Callable[[Any, Session], Reply | Awaitable[Reply] | AsyncIterator[Any]]


class WireServer:
    """Serves handlers on TCP or Unix sockets.

    Args:
        kind: "node", "conductor" or "worker"; sent in the reply to Hello.
        server_id, epoch: identity; sent in the reply to Hello.
        handlers: answer(request, session) by type of message; `handle` adds more.
        on_hello: called with each session once its Hello was accepted.
        max_frame_bytes: a larger frame closes its connection; before Hello the limit is 4 KiB.
        hello_timeout_s: seconds after which a connection without Hello is closed.
        authorizer: checks every call; None: all callers may do everything.
        tls: for TCP connections; None: no encryption.
    """

    def __init__(
        self,
        kind: str,
        server_id: str,
        epoch: int,
        handlers: Mapping[type[Message], Handler] | None = None,
        *,
        on_hello: Callable[[Session], None] = lambda _session: None,
        max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES,
        hello_timeout_s: float = HELLO_TIMEOUT_S,
        authorizer: CallAuthorizer | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.authorizer = authorizer
        self._tls = tls
        self.identity = HelloReply(PROTOCOL_VERSION, kind, server_id, epoch)
        self.max_frame_bytes = max_frame_bytes
        self.hello_timeout_s = hello_timeout_s
        self.handlers: dict[type[Message], Handler] = {
            Ping: lambda _request, _session: Ok(),
            **(handlers or {}),
        }
        self.connections: set[_Connection] = set()
        self.on_hello = on_hello
        self._servers: list[asyncio.Server] = []
        if authorizer is not None:
            authorizer.on_change.append(self._send_away)

    def _send_away(self) -> None:
        """Close the connections whose token is no longer accepted, or has other scopes now."""
        for connection in list(self.connections):
            connection.recheck()

    def handle(self, message: type[Message], handler: Handler) -> None:
        """Answer `message` with `handler(request, session)`."""
        self.handlers[message] = handler

    async def listen(self, host: str, port: int) -> int:
        """Listen on TCP; port 0 picks a free one. Returns the port.

        Raises:
            PortInUse: the port is taken.
        """
        loop = asyncio.get_running_loop()
        try:
            server = await loop.create_server(
                lambda: _Connection(self),
                host,
                port,
                ssl=self._tls,
                ssl_handshake_timeout=self.hello_timeout_s if self._tls else None,
            )
        except OSError as error:
            raise PortInUse(
                f"cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}",
                hint="stop the process that has it, or choose another port",
            ) from error
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    async def listen_unix(self, path: str) -> None:
        """Listen on a Unix socket as well. Replaces the socket of a dead process."""
        loop = asyncio.get_running_loop()
        remove_stale_socket(path)
        self._servers.append(await loop.create_unix_server(lambda: _Connection(self), path))

    async def close(self) -> None:
        """Stop listening, close all connections, and wait for the calls that run."""
        for server in self._servers:
            server.close()
        tasks = [task for connection in self.connections for task in connection.tasks()]
        for connection in list(self.connections):
            connection.abort()
        if tasks:
            # The abort cancelled them. What they use (an engine's thread, a pool) is closed after
            # this.
            await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_S)
        await asyncio.sleep(0)


def remove_stale_socket(path: str) -> None:
    """Delete the Unix socket `path` if no process listens on it.

    Raises:
        PortInUse: a process listens on it.
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
        self._reader = FrameReader(min(server.max_frame_bytes, MAX_FRAME_BYTES_BEFORE_HELLO))
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._one_way: set[asyncio.Task[None]] = set()  # without an id, so they cannot be cancelled
        # The peer has the reply and may use the id again.
        self._answered: set[asyncio.Task[None]] = set()
        self._has_dropped = False
        self._transport: asyncio.Transport | None = None
        self._can_write = asyncio.Event()
        self._can_write.set()
        self._next_turn: asyncio.Handle | None = None  # set: reading is paused until then
        self._hello_timer: asyncio.TimerHandle | None = None
        self.session = Session(peer="")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._transport.set_write_buffer_limits(high=WRITE_HIGH_WATER)  # type: ignore[union-attr]
        raw = transport.get_extra_info("socket")
        if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.session.peer = str(transport.get_extra_info("peername") or "unix")
        self._server.connections.add(self)
        self._hello_timer = asyncio.get_running_loop().call_later(
            self._server.hello_timeout_s, self._miss_hello
        )

    # ------------------------------------------------------------ requests

    def data_received(self, data: bytes) -> None:
        self._reader.push(data)
        if self._next_turn is None:
            self._serve()

    def _serve(self) -> None:
        """Serve frames that arrived, until the peer stops reading or others have their turn."""
        try:
            for _ in range(MAX_FRAMES_PER_TURN):
                if not self._can_write.is_set() or not self._is_open():
                    return
                frame = self._reader.next_frame()
                if frame is None:
                    return
                self._frame(*frame)
            self._serve_later()
        except ProtocolError as error:
            self._refuse(error)
        except Exception as error:
            log.exception("serving a frame failed", peer=self.session.peer)
            self._refuse(error)

    def _serve_later(self) -> None:
        """Continue in the next turn of the loop; pause reading until then."""
        if self._next_turn is None and self._transport is not None:
            self._transport.pause_reading()
            self._next_turn = asyncio.get_running_loop().call_soon(self._take_turn)

    def _take_turn(self) -> None:
        self._next_turn = None
        self._serve()
        if self._next_turn is None and self._can_write.is_set() and self._is_open():
            self._transport.resume_reading()  # type: ignore[union-attr]

    def _frame(self, request_id: int, kind: int, body: memoryview) -> None:
        if kind == Kind.CANCEL:
            task = self._tasks.get(request_id)
            if task is not None:
                task.cancel()
            return
        if kind not in (Kind.REQUEST, Kind.ONE_WAY):
            raise ProtocolError(f"a server accepts no frames of kind {kind}")
        one_way = kind == Kind.ONE_WAY
        try:
            request = decode_request(body)
        except ProtocolError:
            raise
        except KvpoolError as error:
            if not self.session.client_id:
                raise ProtocolError("the first frame must be Hello") from error
            # A well-formed frame with invalid content fails one call, not the connection.
            self._answer(request_id, one_way, Kind.ERROR, error_body(error))
            return
        self._dispatch(request_id, one_way, request)

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
                f"a {kind} does not serve {type(request).__name__}",
                hint="check which address belongs to which kind of process",
            )
            self._answer(request_id, one_way, Kind.ERROR, error_body(error))
            return
        try:
            if self._server.authorizer is not None:
                request = self._server.authorizer.authorize(request, self.session.principal)
            result = handler(request, self.session)
            if isinstance(result, Reply):
                self._answer(request_id, one_way, Kind.REPLY, result)
                return
        except KvpoolError as error:
            self._answer(request_id, one_way, Kind.ERROR, error_body(error))
            return
        except Exception as error:
            log.exception("handler failed", message=type(request).__name__)
            self._answer(request_id, one_way, Kind.ERROR, error_body(error))
            return
        self._start(request_id, one_way, result)

    def _hello(self, request_id: int, hello: Hello) -> None:
        if self.session.client_id:
            raise ProtocolError("Hello was sent twice")
        if hello.protocol != PROTOCOL_VERSION:
            raise ProtocolError(
                f"protocol {hello.protocol} is not supported",
                hint=f"this side has protocol {PROTOCOL_VERSION}; install the same kvpool on "
                "both sides",
            )
        if not hello.client_id or len(hello.client_id) > 64:
            raise ProtocolError("Hello.client_id must be 1 to 64 characters")
        authorizer = self._server.authorizer
        try:
            self.session.principal = authorizer.authenticate(hello.token) if authorizer else ANYBODY
        except Unauthenticated as error:
            self._refuse(error)
            return
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        self._reader.max_frame_bytes = self._server.max_frame_bytes
        self.session.client_id = hello.client_id
        self.session.kind = hello.kind
        self.session.epoch = hello.epoch
        self._server.on_hello(self.session)
        self._answer(request_id, False, Kind.REPLY, self._server.identity)

    def _miss_hello(self) -> None:
        self._refuse(ProtocolError(f"no Hello within {self._server.hello_timeout_s:g} s"))

    # ------------------------------------------------------------ tasks

    def _start(self, request_id: int, one_way: bool, result: Any) -> None:
        """Await or iterate the result of a handler in a new task."""
        if one_way:
            if len(self._one_way) >= MAX_ONE_WAY:  # one-way calls have no guarantee
                _discard(result)
                if not self._has_dropped:
                    log.warning("dropping one-way calls: too many run", peer=self.session.peer)
                self._has_dropped = True
                return
        elif len(self._tasks) + len(self._answered) >= MAX_IN_FLIGHT or request_id in self._tasks:
            _discard(result)
            raise ProtocolError(f"more than {MAX_IN_FLIGHT} calls in flight, or an id used twice")

        def ended(task: asyncio.Task[None]) -> None:
            # Not in `_finish`: a task that is cancelled before its first step runs none of its
            # code.
            self._one_way.discard(task)
            self._answered.discard(task)
            if self._tasks.get(request_id) is task:
                del self._tasks[request_id]
            _discard(result)

        task = asyncio.get_running_loop().create_task(self._finish(request_id, one_way, result))
        if one_way:
            self._one_way.add(task)
        else:
            self._tasks[request_id] = task
        task.add_done_callback(ended)

    async def _finish(self, request_id: int, one_way: bool, result: Any) -> None:
        item: Any
        try:
            if inspect.isasyncgen(result):
                async with contextlib.aclosing(result):
                    async for item in result:
                        if isinstance(item, Final):
                            self._end(request_id, one_way, Kind.REPLY, item.reply)
                        else:
                            self._answer(request_id, one_way, Kind.ITEM, item)
                            await self._can_write.wait()
            else:
                self._end(request_id, one_way, Kind.REPLY, await result)
        except KvpoolError as error:
            self._end(request_id, one_way, Kind.ERROR, error_body(error))
        except Exception as error:
            log.exception("handler failed")
            self._end(request_id, one_way, Kind.ERROR, error_body(error))

    def _end(self, request_id: int, one_way: bool, kind: Kind, body: Reply) -> None:
        """Send the last reply of a task. The peer may use its id again at once."""
        frame = encode_frame(
            request_id, kind, body
        )  # before the pop: if it fails, an error follows
        if not one_way:
            task = self._tasks.pop(request_id, None)
            if task is not None:
                self._answered.add(task)
            self._write(frame)

    # ------------------------------------------------------------ answers

    def _is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def _answer(self, request_id: int, one_way: bool, kind: Kind, body: Reply) -> None:
        if not one_way:
            self._write(encode_frame(request_id, kind, body))

    def _write(self, frame: bytearray) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)

    def _refuse(self, error: Exception) -> None:
        """Send the error and close the connection."""
        log.warning("closing the connection", peer=self.session.peer, error=str(error))
        self._write(encode_frame(0, Kind.ERROR, error_body(error)))
        if self._transport is not None:
            self._transport.close()

    def pause_writing(self) -> None:
        # While the peer does not read, its requests are neither read nor served.
        self._can_write.clear()
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._can_write.set()
        self._serve_later()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        self._can_write.set()
        for timer in (self._hello_timer, self._next_turn):
            if timer is not None:
                timer.cancel()
        for task in self.tasks():
            task.cancel()
        for callback in self.session.closing:
            callback()
        self.session.closing.clear()  # they refer to the session; this breaks the cycle
        self._transport = None

    def tasks(self) -> list[asyncio.Task[None]]:
        """The calls that run."""
        return [*self._tasks.values(), *self._answered, *self._one_way]

    def recheck(self) -> None:
        """Close the connection and cancel its calls if its token is no longer accepted."""
        authorizer = self._server.authorizer
        is_known = authorizer is not None and bool(self.session.client_id)
        if (
            is_known
            and authorizer is not None
            and not authorizer.is_current(self.session.principal)
        ):
            self._refuse(Unauthenticated("this token is no longer accepted"))

    def abort(self) -> None:
        """Drop the connection at once."""
        if self._transport is not None:
            self._transport.abort()


def _discard(result: Any) -> None:
    """Close the result of a handler if it never ran. Does nothing to one that has ended.

    An async generator needs no close: its body runs only when it is iterated.
    """
    if inspect.iscoroutine(result):
        result.close()
    elif isinstance(result, asyncio.Future):
        result.cancel()
