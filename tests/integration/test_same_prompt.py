"""The same prompt from many clients at once: one writes each block, nobody fails, nobody waits for the dead."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvpool import AsyncPool
from kvpool.client import PutResult
from tests.chaos.keyed import NAMESPACE, SIZE, contents, prompt, wrong_blocks
from tests.support.process_cluster import Cluster, wait_until

BLOCKS = 32
CLIENTS = 12
SOON_S = 3.0  # far less than the reservation and the quarantine below, with room for a busy machine

# Reserves a prompt for a minute, writes half of its bytes, says so, and hangs.
WINNER = """
import asyncio, sys, time, numpy as np
from kvpool import AsyncPool
from kvpool.transports import Pieces
from tests.chaos.keyed import NAMESPACE, SIZE, contents, prompt

async def main():
    hashes = prompt(int(sys.argv[3]), int(sys.argv[4]))
    pool = AsyncPool(node=sys.argv[1], host_label="here", transport=sys.argv[2])
    await pool.register(NAMESPACE)
    [info] = await pool.nodes()
    link = pool.directory.link_to(info.descriptor)
    granted = await link.reserve(NAMESPACE, hashes, parent=b"", part=0, ttl_s=60, timeout_s=10)
    rows = contents(hashes)
    half = Pieces(
        rows.ctypes.data + np.arange(len(hashes)) * SIZE,
        granted.places,
        np.full(len(hashes), SIZE // 2),
        rows,
    )
    await link.write(half, timeout_s=20, deadline=granted.deadline)
    print(len(granted.granted), flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    running = Cluster(tmp_path_factory.mktemp("same-prompt"))
    with running.supervisor:
        running.start_node("n0", "node.advanced.quarantine_s=30", "node.advanced.reservation_s=60")
        yield running


def pools(cluster: Cluster, count: int) -> list[AsyncPool]:
    address = cluster.nodes["n0"]["wire"]
    return [AsyncPool(node=address, host_label="here") for _ in range(count)]


def start_winner(cluster: Cluster, number: int, transport: str) -> subprocess.Popen[bytes]:
    arguments = (cluster.nodes["n0"]["wire"], transport, str(number), str(BLOCKS))
    return subprocess.Popen(
        [sys.executable, "-c", WINNER, *arguments],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )


async def close_all(clients: list[AsyncPool]) -> None:
    await asyncio.gather(*(client.close() for client in clients))


async def check_bytes(reader: AsyncPool, hashes: list[bytes]) -> None:
    out = np.zeros((len(hashes), SIZE), np.uint8)
    assert (await reader.get(NAMESPACE, hashes, out)).found == len(hashes)
    assert wrong_blocks(hashes, out) == []


async def test_each_block_is_written_once_by_whichever_client(cluster: Cluster) -> None:
    clients = pools(cluster, CLIENTS)
    await asyncio.gather(*(client.connect() for client in clients))
    hashes = prompt(1, BLOCKS)
    # Some come with the whole prompt, some with its beginning.
    lengths = [BLOCKS if number % 3 else BLOCKS // 2 for number in range(CLIENTS)]
    results: list[PutResult] = await asyncio.gather(
        *(
            client.put(NAMESPACE, hashes[:length], contents(hashes[:length]))
            for client, length in zip(clients, lengths, strict=True)
        )
    )
    assert sum(result.stored for result in results) == BLOCKS
    for result, length in zip(results, lengths, strict=True):
        assert result.stored + result.existing + result.in_progress == length
        assert result.rejected == 0
    await check_bytes(clients[0], hashes)
    await close_all(clients)


@pytest.mark.parametrize(("number", "transport"), [(2, "shm"), (3, "nixl")])
async def test_nobody_waits_for_a_writer_that_hangs_or_was_killed_in_mid_write(
    cluster: Cluster, number: int, transport: str
) -> None:
    winner = start_winner(cluster, number, transport)
    assert winner.stdout is not None
    hashes, data = prompt(number, BLOCKS), contents(prompt(number, BLOCKS))
    clients = pools(cluster, CLIENTS)
    await asyncio.gather(*(client.connect() for client in clients))

    async def put(client: AsyncPool) -> PutResult:
        started = time.monotonic()
        result = await client.put(NAMESPACE, hashes, data)
        assert time.monotonic() - started < SOON_S
        return result

    with winner:
        assert int(await asyncio.to_thread(winner.stdout.readline)) == BLOCKS
        for result in await asyncio.gather(*map(put, clients)):
            assert (result.in_progress, result.stored) == (BLOCKS, 0)
        started = time.monotonic()
        got = await clients[0].get(NAMESPACE, hashes, np.zeros_like(data))
        assert (got.found, got.miss_reason) == (0, "in_progress")
        assert time.monotonic() - started < SOON_S
        winner.kill()
    wait_until(lambda: not cluster.node_stats("n0")["reservations"], "the death is noticed", SOON_S)
    # Its slots are in quarantine, for what it wrote may still arrive; the keys are free at once.
    results = await asyncio.gather(*map(put, clients))
    assert sum(result.stored for result in results) == BLOCKS
    [dram] = cluster.node_stats("n0")["tiers"]
    assert dram["quarantined_bytes"] >= BLOCKS * SIZE
    await check_bytes(clients[1], hashes)
    await close_all(clients)
