"""Limit the size and the duration of request bodies, as ASGI middleware.

The middleware reads the whole body before the application starts, so a body that is too long or
never ends reaches no handler. After that the application has the server's own `receive`, and learns
at once when the client leaves. (Starlette's `BaseHTTPMiddleware` hides that.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

BODY_TIMEOUT_S = 30.0
MIN_BYTES_PER_S = 64 << 10  # a faster body may take longer than the timeout
LINGER_S = 1.0  # if the client still writes, a reset may destroy the response


class BodyLimit:
    """Responds with 413, 408 or 400 instead of the application.

    Args:
        max_bytes: limit of a body, with a Content-Length or in chunks.
        timeout_s: seconds for the whole body, plus one for each `MIN_BYTES_PER_S` bytes received.
        refuse: builds the response from status and text.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        max_bytes: int,
        timeout_s: float,
        refuse: Callable[[int, str], ASGIApp],
    ) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        length = headers.get("content-length")
        if length is None and "transfer-encoding" not in headers:
            await self._app(scope, receive, send)
            return
        problem: tuple[int, str] | None = None
        body: bytes | None = b""
        if length is not None and not (length.isascii() and length.isdigit()):
            problem = (400, "Content-Length is not a number")
        elif length is not None and int(length[:20]) > self._max_bytes:
            problem = (413, f"body over {self._max_bytes} bytes")
        else:
            try:
                body = await self._read(receive)
            except _TooLong:
                problem = (413, f"body over {self._max_bytes} bytes")
            except TimeoutError:
                problem = (408, "the body arrived too slowly")
        if problem is not None:
            if "expect" not in headers and problem[0] == 413:
                await _discard(receive)
            await self._refuse(*problem)(scope, receive, send)
        elif body is not None:
            await self._app(scope, _replay(body, receive), send)

    async def _read(self, receive: Receive) -> bytes | None:
        """The body; None if the client left before its end."""
        body = bytearray()
        started = asyncio.get_running_loop().time()
        async with asyncio.timeout_at(started + self._timeout_s) as limit:
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    return None
                body += message.get("body", b"")
                if len(body) > self._max_bytes:
                    raise _TooLong
                if not message.get("more_body", False):
                    return bytes(body)
                limit.reschedule(started + self._timeout_s + len(body) / MIN_BYTES_PER_S)


class _TooLong(Exception):
    """The body is longer than the limit."""


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns `body` first, then the server's messages."""
    is_given = False

    async def replay() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


async def _discard(receive: Receive) -> None:
    """Read and drop the body for a moment, so that the client finishes writing first."""
    try:
        async with asyncio.timeout(LINGER_S):
            while True:
                message = await receive()
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return
