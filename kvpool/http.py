"""The HTTP side that every process has: health, metrics, errors, limits, and running it in our own loop."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from kvpool.errors import KvpoolError, Overloaded, PortInUse


def base_app(
    title: str,
    registry: CollectorRegistry,
    not_ready: Callable[[], str],
    *,
    max_body_bytes: int,
) -> FastAPI:
    """A FastAPI app with `/healthz`, `/readyz`, `/metrics`, typed errors and a limit on bodies.

    Args:
        title: shown in the OpenAPI page.
        not_ready: returns why the process is not ready, or "" when it is.
        max_body_bytes: a longer request body is answered 413.
    """
    app = FastAPI(title=title, docs_url="/docs", redoc_url=None)

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz")
    async def readyz() -> Response:
        reason = not_ready()
        return JSONResponse({"status": reason or "ready"}, status_code=503 if reason else 200)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @app.exception_handler(KvpoolError)
    async def typed(_request: Request, error: KvpoolError) -> Response:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        return _error(400, "invalid_argument", f"{where or 'body'}: {first['msg']}", {})

    @app.middleware("http")
    async def limit_body(request: Request, call_next: Any) -> Any:
        length = request.headers.get("content-length", "0")
        if request.method in ("POST", "PUT") and "content-length" not in request.headers:
            return _error(411, "invalid_argument", "a Content-Length header is needed", {})
        if not length.isdigit() or int(length) > max_body_bytes:
            return _error(413, "invalid_argument", f"body over {max_body_bytes} bytes", {})
        return await call_next(request)

    return app


def error_response(error: KvpoolError) -> Response:
    """An error in the shape that OpenAI's clients understand."""
    headers = {}
    if isinstance(error, Overloaded):
        headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    return _error(error.http_status, error.code, str(error), headers)


def _error(status: int, code: str, message: str, headers: dict[str, str]) -> Response:
    body = {"error": {"message": message, "type": code, "code": code, "param": None}}
    return JSONResponse(body, status_code=status, headers=headers)


class HttpServer:
    """Runs an app with uvicorn inside the caller's event loop.

    Signals stay with the caller: uvicorn installs no handlers.
    """

    def __init__(self, app: FastAPI, host: str, port: int) -> None:
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
        config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off")
        self._server = _QuietServer(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to serve; returns when requests are accepted."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        while not self._server.started:
            if self._task.done():
                await self._task
            await asyncio.sleep(0.005)

    async def close(self, grace_s: float = 2.0) -> None:
        """Let answers under way end, for `grace_s` at most."""
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
