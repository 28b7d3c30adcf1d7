"""A scripted server with OpenAI's API, like `vllm serve`, on a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from kvpool.serving.http import HttpServer

ENTRY = {
    "model": "m",
    "revision": "r",
    "layers": 2,
    "kv_heads": 2,
    "head_dim": 8,
    "block_tokens": 4,  # as tests.support.scripted.NAMESPACE
}


class Died(Exception):
    """What the server raises to break a connection."""


class ScriptedServer:
    """Answers `/v1/completions` with `text`, one letter per token, `pause_s` apart.

    While `hangs` is set it sends nothing. With `hangs_at` it sets `hangs` before that token.

    Args:
        on_prefill: told of every prompt that comes with max_tokens=1, as a connector would store
            its KV.
    """

    def __init__(self, on_prefill: Callable[[list[int]], None] = lambda _tokens: None) -> None:
        self.text = "abcdefgh"
        self.pause_s = 0.0
        self.cached = 0
        self.with_ids = True
        self.health = 200
        self.model = "m"
        self.context: int | None = 4096
        self.metrics = ""
        self.api_key = ""
        self.fails_with: tuple[int, Any] | None = None  # status and body of completions
        self.dies_after: int | None = None  # tokens; 0: before the first
        self.breaks_off = False  # ends streams without their last event
        self.hangs = False
        self.hangs_at: int | None = None
        self.seen: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.running = 0
        self.left = 0  # readers that left in mid-stream
        self._on_prefill = on_prefill
        self._server: HttpServer | None = None

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.port}"

    def entry(self, **changes: Any) -> dict[str, Any]:
        return {"url": self.url, **ENTRY, **changes}

    @property
    def worker_id(self) -> str:
        return f"engine-{self.url.removeprefix('http://')}"

    async def start(self) -> None:
        self._server = HttpServer(self._app(), "127.0.0.1", 0)
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.close(0.1)

    def _app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/health")
        async def health() -> Response:
            return Response(status_code=self.health)

        @app.get("/v1/models")
        async def models(request: Request) -> Response:
            if self.api_key and request.headers.get("authorization") != f"Bearer {self.api_key}":
                return JSONResponse({"error": "who are you?"}, 401)
            model = {"id": self.model, "object": "model", "max_model_len": self.context}
            return JSONResponse({"object": "list", "data": [model]})

        @app.get("/metrics")
        async def metrics() -> Response:
            return Response(self.metrics, media_type="text/plain")

        @app.post("/v1/completions", response_model=None)
        async def completions(request: Request) -> Response:
            body = json.loads(await request.body())
            self.seen.append(body)
            self.headers.append(dict(request.headers))
            if self.fails_with is not None:
                return JSONResponse(self.fails_with[1], self.fails_with[0])
            if body.get("stream"):
                return StreamingResponse(self._events(body), media_type="text/event-stream")
            return await self._whole(body, request)

        return app

    async def _whole(self, body: dict[str, Any], request: Request) -> Response:
        self.running += 1
        try:
            while self.hangs:
                if await request.is_disconnected():
                    self.left += 1
                    return Response(status_code=499)
                await asyncio.sleep(0.01)
            if self.dies_after is not None:
                return StreamingResponse(_dying(), media_type="application/json")
            self._on_prefill(body["prompt"])
            choice = {"index": 0, "text": self.text[0], "finish_reason": "length"}
            return JSONResponse({"choices": [choice], "usage": self._usage(body, 1)})
        finally:
            self.running -= 1

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[str]:
        self.running += 1
        is_over = False
        try:
            letters = self.text[: body["max_tokens"]]
            for at, letter in enumerate(letters):
                if at == self.dies_after:
                    is_over = True
                    raise Died
                self.hangs = self.hangs or at == self.hangs_at
                while self.hangs:  # noqa: ASYNC110 - a test sets it
                    await asyncio.sleep(0.01)
                choice: dict[str, Any] = {"index": 0, "text": letter, "finish_reason": None}
                if self.with_ids:
                    choice["token_ids"] = [ord(letter)]
                yield _event({"choices": [choice], "usage": None})
                await asyncio.sleep(self.pause_s)
            is_over = True
            if self.breaks_off:
                return
            last = {"index": 0, "text": "", "token_ids": [], "finish_reason": "length"}
            yield _event({"choices": [last], "usage": None})
            yield _event({"choices": [], "usage": self._usage(body, len(letters))})
            yield "data: [DONE]\n\n"
        finally:
            self.running -= 1
            self.left += not is_over

    def _usage(self, body: dict[str, Any], completion: int) -> dict[str, Any]:
        return {
            "prompt_tokens": len(body["prompt"]),
            "completion_tokens": completion,
            "total_tokens": len(body["prompt"]) + completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


@contextlib.asynccontextmanager
async def engine_servers(*servers: ScriptedServer) -> AsyncIterator[None]:
    """Run these servers until the block ends."""
    for server in servers:
        await server.start()
    try:
        yield
    finally:
        for server in servers:
            await server.stop()


async def _dying() -> AsyncIterator[str]:
    yield "{"
    raise Died


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"
