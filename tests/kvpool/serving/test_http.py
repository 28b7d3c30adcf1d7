"""The HTTP server: limits on the size and the speed of bodies, errors in one format."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI, Request

from kvpool.errors import InvalidArgument
from kvpool.serving.http import HttpServer, base_app
from kvpool.serving.metrics import new_registry

LIMIT = 4096


@contextlib.asynccontextmanager
async def served(body_timeout_s: float = 10.0) -> AsyncIterator[tuple[FastAPI, int]]:
    app = base_app(
        "test", new_registry(), lambda: "", max_body_bytes=LIMIT, body_timeout_s=body_timeout_s
    )

    @app.post("/size")
    async def size(request: Request) -> dict[str, int]:
        return {"size": len(await request.body())}

    @app.post("/fail")
    async def fail() -> None:
        raise RuntimeError("secret")

    @app.post("/refuse")
    async def refuse() -> None:
        raise InvalidArgument("\ud800" + "x" * 100_000)

    server = HttpServer(app, "127.0.0.1", 0)
    await server.start()
    try:
        yield app, server.port
    finally:
        await server.close(0.2)


async def raw(port: int, head: str, body: bytes = b"") -> str:
    """Send raw bytes, keep the connection open, and return the response."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.replace("\n", "\r\n").encode() + b"\r\n" + body)
    try:
        return (await asyncio.wait_for(reader.read(), 5)).decode()
    finally:
        writer.close()


async def test_bodies_up_to_the_limit_are_taken_announced_or_in_chunks() -> None:
    async def chunks(size: int) -> AsyncIterator[bytes]:
        for _ in range(size // 1024):
            yield b"x" * 1024

    async with served() as (_, port), httpx.AsyncClient() as client:
        url = f"http://127.0.0.1:{port}/size"
        for content in (b"x" * LIMIT, chunks(LIMIT)):
            assert (await client.post(url, content=content)).json() == {"size": LIMIT}
        for content in (b"x" * (LIMIT + 1), chunks(2 * LIMIT)):
            response = await client.post(url, content=content)
            assert (response.status_code, response.json()["error"]["type"]) == (
                413,
                "invalid_argument",
            )
        assert (await client.post(url)).json() == {"size": 0}


@pytest.mark.parametrize("body", [b"", b"abc"])
async def test_a_body_that_never_ends_is_answered_and_its_connection_closed(body: bytes) -> None:
    async with served(body_timeout_s=0.2) as (_, port):
        answer = await raw(port, "POST /size HTTP/1.1\nHost: x\nContent-Length: 100\n", body)
    assert answer.startswith("HTTP/1.1 408")
    assert "too slowly" in answer


async def test_chunks_that_never_end_are_answered_as_well() -> None:
    async with served(body_timeout_s=0.2) as (_, port):
        head = "POST /size HTTP/1.1\nHost: x\nTransfer-Encoding: chunked\n"
        answer = await raw(port, head, b"3\r\nabc\r\n")
    assert answer.startswith("HTTP/1.1 408")


async def test_an_unforeseen_error_keeps_its_text_and_the_shape() -> None:
    async with served() as (_, port), httpx.AsyncClient() as client:
        response = await client.post(f"http://127.0.0.1:{port}/fail")
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal"
    assert "secret" not in response.text


async def test_a_long_message_is_cut_and_what_is_no_text_replaced() -> None:
    async with served() as (_, port), httpx.AsyncClient() as client:
        response = await client.post(f"http://127.0.0.1:{port}/refuse")
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("?xxx")
    assert len(response.text) < 1200
