"""The HTTP server of every process: health, metrics, errors, authentication, uvicorn."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvpool.errors import KvpoolError, Overloaded, PortInUse, Unauthenticated, brief
from kvpool.security.authorization import CALLER, Authorizer, require
from kvpool.security.scopes import ROUTES
from kvpool.security.tls import ServerTls
from kvpool.serving.http_body import BODY_TIMEOUT_S, BodyLimit
from kvpool.serving.openapi import OBJECT, add_errors, responses
from kvpool.wire.principal import ANYBODY, NOBODY, Principal
from kvpool.wire.principal import Scope as TokenScope

MAX_MESSAGE = 1000  # characters of an error's text; quoted values are already cut shorter


def base_app(
    title: str,
    registry: CollectorRegistry,
    not_ready: Callable[[], str],
    *,
    max_body_bytes: int,
    body_timeout_s: float = BODY_TIMEOUT_S,
    notice: Callable[[], str] = lambda: "",
    authorizer: Authorizer | None = None,
) -> FastAPI:
    """A FastAPI app with `/healthz`, `/readyz`, `/metrics`, typed errors and a limit on bodies.

    Args:
        title: shown in the OpenAPI page.
        not_ready: returns why the process is not ready; "" if it is ready.
        max_body_bytes: a longer request body gets status 413.
        body_timeout_s: seconds for a body, as in `BodyLimit`; a slower one gets status 408.
        notice: returns a problem of a process that is ready; "" if there is none.
        authorizer: checks the token of every request; None: all callers may do everything.
    """
    app = FastAPI(title=title, docs_url="/docs", redoc_url=None)
    add_errors(app)

    _add_views(app, registry, not_ready, notice, authorizer)
    _add_error_handlers(app)

    def refuse_body(status: int, text: str) -> Response:
        return plain_error(status, "invalid_argument", text, {"Connection": "close"})

    app.add_middleware(
        BodyLimit, max_bytes=max_body_bytes, timeout_s=body_timeout_s, refuse=refuse_body
    )
    # Added last, so that it runs first: the body of a refused request is not read.
    app.add_middleware(
        Authentication, authorizer=authorizer or Authorizer(), routes=app.router.routes
    )
    return app


def _add_views(
    app: FastAPI,
    registry: CollectorRegistry,
    not_ready: Callable[[], str],
    notice: Callable[[], str],
    authorizer: Authorizer | None,
) -> None:
    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    # A process that is not ready answers with the same shape.
    ready = responses(application_json=OBJECT)

    @app.get("/readyz", responses=ready | {503: {**ready[200], "description": "Not ready"}})
    async def readyz() -> Response:
        reason = not_ready()
        notices = "; ".join(filter(None, (notice(), authorizer.notice if authorizer else "")))
        content = {"status": reason or "ready"} | ({"notice": notices} if notices else {})
        return JSONResponse(content, status_code=503 if reason else 200)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(KvpoolError)
    async def typed(_request: Request, error: KvpoolError) -> Response:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        message = f"{brief(where) or 'body'}: {brief(first['msg'])}"
        return plain_error(400, "invalid_argument", message)

    @app.exception_handler(HTTPException)
    async def http(_request: Request, error: HTTPException) -> Response:
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http")
        return plain_error(error.status_code, code, str(error.detail), dict(error.headers or {}))

    @app.exception_handler(Exception)  # uvicorn logs it; the client does not see its text
    async def unforeseen(_request: Request, error: Exception) -> Response:
        text = f"internal error ({type(error).__name__}); see the server's log"
        return plain_error(500, "internal", text)


class Authentication:
    """Sets the caller of each request (`CALLER`), and refuses a request whose token does not allow
    its route.

    Args:
        routes: the app's routes. Those that `kvpool.security.scopes` does not list need admin.
    """

    def __init__(self, app: ASGIApp, authorizer: Authorizer, routes: Sequence[BaseRoute]) -> None:
        self._app = app
        self._authorizer = authorizer
        self._routes = routes
        self._calls: dict[_Call, Principal] = {}  # requests that run, of callers with a token
        authorizer.on_change.append(self._send_away)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":  # no route serves websockets
                await send({"type": "websocket.close"})
            return
        try:
            caller = self._caller(scope)
        except KvpoolError as error:
            await error_response(error)(scope, receive, send)
            return
        CALLER.set(caller)
        if not caller.token_sha256:
            await self._app(scope, receive, send)
            return
        call = _Call(receive)
        self._calls[call] = caller
        try:
            await self._app(scope, call.receive, send)
        finally:
            del self._calls[call]

    def _send_away(self) -> None:
        """Disconnect callers whose token was revoked; their handlers see a client that left."""
        for call, caller in self._calls.items():
            if not self._authorizer.is_current(caller):
                call.is_over.set()

    def _caller(self, scope: Scope) -> Principal:
        if self._authorizer.tokens is None:
            return ANYBODY
        needed = self._needed(scope)
        if needed is None:
            return NOBODY
        given = dict(scope["headers"]).get(b"authorization", b"")
        caller = self._authorizer.authenticate_header(given.decode("latin-1"))
        require(needed, caller, f"{scope['method']} {scope['path']}")
        return caller

    def _needed(self, scope: Scope) -> TokenScope | None:
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        for route in self._routes:
            if route.matches(scope)[0] == Match.FULL:
                return ROUTES.get((method, getattr(route, "path", "")), TokenScope.ADMIN)
        return TokenScope.ADMIN


class _Call:
    """A running request, whose caller may be disconnected."""

    def __init__(self, receive: Receive) -> None:
        self.is_over = asyncio.Event()
        self._receive = receive

    async def receive(self) -> Message:
        """The next message of the client, or a disconnect once `is_over` is set."""
        said = asyncio.ensure_future(self._receive())
        over = asyncio.ensure_future(self.is_over.wait())
        try:
            await asyncio.wait((said, over), return_when=asyncio.FIRST_COMPLETED)
            return {"type": "http.disconnect"} if over.done() else said.result()
        finally:
            said.cancel()
            over.cancel()


def error_response(error: KvpoolError) -> Response:
    """A response with the error in OpenAI's format."""
    headers = {}
    if isinstance(error, Unauthenticated):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, Overloaded):
        headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
        if error.reason:
            headers["X-Kvpool-Reason"] = error.reason
    return plain_error(error.http_status, error.code, str(error), headers)


def plain_error(
    status: int, code: str, message: str, headers: dict[str, str] | None = None
) -> Response:
    """A response in OpenAI's format for an error that is not a `KvpoolError`."""
    # The text may quote a lone surrogate, which cannot be encoded.
    text = brief(message, MAX_MESSAGE).encode("utf-8", "replace").decode()
    body = {"error": {"message": text, "type": code, "code": code, "param": None}}
    return JSONResponse(body, status_code=status, headers=headers)


class HttpServer:
    """Runs an app with uvicorn in the caller's event loop. uvicorn installs no signal handlers.

    Args:
        tls: None: no encryption.

    Raises:
        PortInUse: the port is taken.
    """

    def __init__(self, app: FastAPI, host: str, port: int, tls: ServerTls | None = None) -> None:
        self._listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._listener.bind((host, port))
        except OSError as error:
            self._listener.close()
            raise PortInUse(
                f"cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}",
                hint="stop the process that has it, or choose another port",
            ) from error
        self.port: int = self._listener.getsockname()[1]
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            **(tls.for_uvicorn() if tls else {}),
        )
        self._server = _QuietServer(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start serving. Returns when requests are accepted."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        while not self._server.started:
            if self._task.done():
                await self._task
            await asyncio.sleep(0.005)

    async def close(self, grace_s: float = 2.0) -> None:
        """Stop. Running responses may end, for `grace_s` seconds at most."""
        self._server.should_exit = True
        if self._task is not None:
            _, pending = await asyncio.wait([self._task], timeout=grace_s)
            if pending:
                self._server.force_exit = True
                await asyncio.wait([self._task], timeout=1.0)
        self._listener.close()


class _QuietServer(uvicorn.Server):
    """uvicorn without its signal handlers."""

    def install_signal_handlers(self) -> None:  # older uvicorn
        return

    def capture_signals(self) -> Any:
        import contextlib

        return contextlib.nullcontext()
