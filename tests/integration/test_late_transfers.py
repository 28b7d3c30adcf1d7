"""A one-sided read that was given up may still arrive: never in memory that the caller owns."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.transports.staging import MAX_BUFFERS
from tests.support.process_cluster import Cluster

# Over TCP a frozen peer leaves the transfer under way for ever; it goes on when the peer does.
TCP_ONLY = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}

READER = """
import asyncio, sys, time, numpy as np
from kvpool import AsyncPool, Layout, Namespace, hash_chain
from kvpool.errors import KvpoolError
from kvpool.transports import Pieces

PAGE = 4096
LAYOUT = Layout("bfloat16", layers=8, kv_heads=4, head_dim=128, block_tokens=64)
SPACE = Namespace("tests/late", "r", LAYOUT)

async def main():
    pool = AsyncPool(node=sys.argv[1], host_label="elsewhere", transport="nixl")
    await pool.connect(timeout_s=60)  # loads NIXL
    hashes = hash_chain(SPACE, np.arange(16 * 64))
    await pool.put(SPACE, hashes, np.full((16, LAYOUT.part_bytes), 77, np.uint8))
    pinned = await pool.pin(SPACE, hashes, part=0, ttl_s=60)
    link, lease, _ = pinned.held[0]
    out = np.zeros((16, LAYOUT.part_bytes), np.uint8)
    thrown = np.zeros_like(out)
    await pool.read_pinned(pinned, out)
    print(int((out == 77).all()), flush=True)
    out[:] = 0
    sys.stdin.readline()  # the node is frozen now
    for target, disposable in ((out, False), (thrown, True)):
        addresses = target.ctypes.data + np.arange(16) * LAYOUT.part_bytes
        started = time.monotonic()
        try:
            await link.read(SPACE, lease, hashes, addresses, target, verify=True, timeout_s=0.5,
                            is_disposable=disposable)
            print("read", flush=True)
        except KvpoolError as error:
            print(error.code, time.monotonic() - started < 10, flush=True)
    print(link.transports.dram.quarantined_transfers, flush=True)
    # Scattered pages go through buffers of the transport: every second page here, a block's bytes there.
    at = np.arange(LAYOUT.part_bytes // PAGE, dtype=np.int64) * PAGE
    pages = np.zeros(2 * LAYOUT.part_bytes, np.uint8)
    last = link.node.arenas[0].size_bytes - LAYOUT.part_bytes  # free memory, so a write there does no harm
    for operation, start in ((link.transports.dram.read, lease.places[0, 1]), (link.transports.dram.write, last)):
        places = np.stack((np.full_like(at, lease.places[0, 0]), start + at), axis=1)
        pieces = Pieces(pages.ctypes.data + 2 * at, places, np.full_like(at, PAGE), pages)
        before = link.transports.dram.staging.free
        try:
            await asyncio.to_thread(operation, link.node, pieces, 0.5)
            print("moved", flush=True)
        except KvpoolError as error:
            print(error.code, before - link.transports.dram.staging.free, flush=True)
    sys.stdin.readline()  # the node goes on
    again = np.zeros_like(out)
    deadline = time.monotonic() + 20
    while link.transports.dram.quarantined_transfers and time.monotonic() < deadline:
        try:
            await pool.read_pinned(pinned, again, timeout_s=2)
        except KvpoolError:
            pass
    await pool.read_pinned(pinned, again, timeout_s=5)
    print(link.transports.dram.quarantined_transfers, int((again == 77).all()), flush=True)
    print(int(out.max()), int(thrown.max()), flush=True)
    print(link.transports.dram.staging.free, int(pages.max()), flush=True)
    await pool.close()

asyncio.run(main())
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    running = Cluster(tmp_path, env=TCP_ONLY)
    with running.supervisor:
        running.start_node("n0", "node.dram_bytes=64MiB", "node.advanced.slab_bytes=8MiB")
        yield running


def test_a_read_that_was_given_up_arrives_in_quarantined_memory_only(cluster: Cluster) -> None:
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, cluster.nodes["n0"]["wire"]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **TCP_ONLY},
    )
    assert reader.stdin is not None
    assert reader.stdout is not None
    with reader:

        def line() -> str:
            assert reader.stdout is not None
            return reader.stdout.readline().strip()

        assert line() == "1"
        cluster.kill("n0", signal.SIGSTOP)
        try:
            print("frozen", file=reader.stdin, flush=True)
            assert line() == "deadline True"
            assert line() == "deadline True"
            assert int(line()) >= 2  # each read went in one group or several
            assert line() == "deadline 1"  # the buffer of pages that did not come is nobody's now
            assert line() == "deadline 1"
        finally:
            cluster.kill("n0", signal.SIGCONT)
        print("thawed", file=reader.stdin, flush=True)
        assert line() == "0 1"
        # What the caller owns is untouched; what it gave away was written late (so the hazard is real).
        assert line() == "0 77"
        # Pages are written from a buffer only, which is free again: theirs stay as they were.
        assert line() == f"{MAX_BUFFERS} 0"
        reader.stdin.close()
    assert reader.returncode == 0
