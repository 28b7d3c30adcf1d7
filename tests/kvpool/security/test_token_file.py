"""Tokens revoked on a running server: calls are refused, connections and streams end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import Response
from fastapi.responses import StreamingResponse

from kvpool.errors import KvpoolError, Unauthenticated
from kvpool.security.authorization import Authorizer
from kvpool.security.scopes import ROUTES
from kvpool.security.token_file import TokenFile
from kvpool.security.tokens import read_tokens, token_line
from kvpool.serving.http import HttpServer, base_app
from kvpool.serving.metrics import new_registry
from kvpool.wire import WireClient, WireServer
from kvpool.wire import messages as m
from kvpool.wire.credentials import Credentials
from kvpool.wire.principal import EVERY_TENANT, Scope

ADMIN = [Scope.ADMIN]


class Served:
    """A file of tokens, and the authorizer that uses it."""

    def __init__(self, directory: Path, *names: str) -> None:
        self.path = directory / "tokens.yaml"
        self.lines: dict[str, str] = {}
        for name in names:
            self.add(name)
        self.write()
        self.authorizer = Authorizer(read_tokens(self.path))
        self.file = TokenFile(self.path, self.authorizer)

    def add(self, name: str, secret: str = "", **kind: Any) -> None:
        tenant, scopes = kind.pop("tenant", EVERY_TENANT), kind.pop("scopes", ADMIN)
        self.lines[name] = token_line(secret or f"kvp_{name}", name, tenant, scopes, **kind)

    def write(self) -> None:
        """Replace the file, as editors do."""
        fresh = self.path.with_suffix(".new")
        fresh.write_text("\n".join(self.lines.values()) + "\n")
        fresh.replace(self.path)

    async def change(self) -> None:
        self.write()
        await self.file.reload_if_changed()

    def is_known(self, secret: str) -> bool:
        try:
            self.authorizer.authenticate(secret)
        except Unauthenticated:
            return False
        return True


async def test_a_token_that_is_taken_back_is_refused_and_a_new_one_accepted(tmp_path: Path) -> None:
    served = Served(tmp_path, "a", "b")
    del served.lines["b"]
    served.add("c")
    served.write()
    assert served.is_known("kvp_b")
    await served.file.reload_if_changed()
    assert [served.is_known(f"kvp_{name}") for name in "abc"] == [True, False, True]


@pytest.mark.parametrize("text", ["", "- {name: x}\n", "no: list\n", "\t"])
async def test_a_file_that_is_not_valid_changes_nothing_and_says_so(
    tmp_path: Path, text: str
) -> None:
    served = Served(tmp_path, "a")
    served.path.write_text(text)
    await served.file.reload_if_changed()
    assert served.is_known("kvp_a")
    assert "not in force" in served.authorizer.notice
    served.path.unlink()
    await served.file.reload_if_changed()
    assert served.is_known("kvp_a")
    await served.change()
    assert served.authorizer.notice == ""


async def test_who_is_isolated_cannot_change_and_stays_so_without_a_token(tmp_path: Path) -> None:
    served = Served(tmp_path, "a")
    both = [Scope.READ, Scope.WRITE]

    def has_notice() -> bool:
        return bool(served.authorizer.notice)

    served.add("vault", tenant="vault", scopes=both, is_isolated=True)
    await served.change()
    assert has_notice()
    assert not served.is_known("kvp_vault")
    served.authorizer = Authorizer(read_tokens(served.path))  # a server that starts with it
    served.file = TokenFile(served.path, served.authorizer)
    del served.lines["vault"]
    await served.change()
    assert not has_notice()
    assert not served.is_known("kvp_vault")
    assert served.authorizer.tokens is not None
    assert served.authorizer.tokens.isolated_tenants == {"vault"}
    served.add("vault", tenant="vault", scopes=both)
    await served.change()
    assert has_notice()
    assert not served.is_known("kvp_vault")


@pytest.mark.parametrize("change", ["removed", "rotated", "other scopes"])
async def test_the_open_connection_of_a_token_that_is_taken_back_ends_and_what_it_has_in_work(
    tmp_path: Path, change: str
) -> None:
    served = Served(tmp_path, "a", "b")
    cancelled: list[str] = []
    begun = asyncio.Event()

    async def hang() -> m.Ok:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append("hang")
        return m.Ok()

    server = WireServer("node", "n", 1, authorizer=served.authorizer)
    server.handle(m.Ping, lambda _r, _s: m.Ok())
    server.handle(m.Release, lambda _r, _s: hang())
    address = f"127.0.0.1:{await server.listen('127.0.0.1', 0)}"
    a, b = (WireClient(address, name, credentials=Credentials(f"kvp_{name}")) for name in "ab")
    for client in (a, b):
        await client.call(m.Ping(), 5.0)
    in_work = asyncio.create_task(b.call(m.Release([]), 10.0))
    await asyncio.wait_for(begun.wait(), 5)
    assert len(server.connections) == 2
    if change == "removed":
        del served.lines["b"]
    elif change == "rotated":
        served.add("b", "kvp_fresh")
    else:
        served.add("b", tenant="t", scopes=[Scope.READ])
    await served.change()
    with pytest.raises(KvpoolError):
        await asyncio.wait_for(in_work, 5)
    assert cancelled == ["hang"]
    if change != "other scopes":
        with pytest.raises(Unauthenticated):
            await b.call(m.Ping(), 5.0)
    await a.call(m.Ping(), 5.0)
    assert [c.session.principal.name for c in server.connections] == ["a"]
    for client in (a, b):
        await client.close()
    await server.close()


async def _drain(pieces: AsyncIterator[str]) -> None:
    async for _ in pieces:
        pass


async def test_a_stream_over_http_ends_when_its_token_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served(tmp_path, "a", "b")
    app = base_app(
        "t", new_registry(), lambda: "", max_body_bytes=1000, authorizer=served.authorizer
    )
    monkeypatch.setitem(ROUTES, ("GET", "/endless"), Scope.READ)
    ended: list[str] = []

    @app.get("/endless")
    async def endless() -> Response:
        async def events() -> AsyncIterator[str]:
            try:
                while True:
                    yield "data: x\n\n"
                    await asyncio.sleep(0.01)
            finally:
                ended.append("stream")

        return StreamingResponse(events())

    server = HttpServer(app, "127.0.0.1", 0)
    await server.start()
    url = f"http://127.0.0.1:{server.port}"
    async with httpx.AsyncClient(base_url=url, timeout=10) as client:
        b = {"Authorization": "Bearer kvp_b"}
        async with client.stream("GET", "/endless", headers=b) as answer:
            assert answer.status_code == 200
            pieces = answer.aiter_text()
            assert await anext(pieces)
            del served.lines["b"]
            await served.change()
            with pytest.raises(httpx.RemoteProtocolError):
                await asyncio.wait_for(_drain(pieces), 5)
        assert ended == ["stream"]
        assert (await client.get("/endless", headers=b)).status_code == 401
        async with client.stream(
            "GET", "/endless", headers={"Authorization": "Bearer kvp_a"}
        ) as answer:
            assert answer.status_code == 200
        served.path.write_text("nonsense")
        await served.file.reload_if_changed()
        ready = (await client.get("/readyz")).json()
        assert "not in force" in ready["notice"]
    await server.close()
