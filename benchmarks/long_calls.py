"""How long one client waits at a node while another client's call covers very many blocks.

    python -m benchmarks.long_calls [--blocks 16000]

One client process reserves and commits long runs at a real node process; another one pins 16 blocks
over and over. Prints how long the long calls took, and how long the short ones waited meanwhile and
at an idle node. The node's memory holds fewer than three such runs, so the third one evicts a block
for each that it reserves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.rows import percentile
from kvpool.blocks.hashing import pack_hashes
from kvpool.blocks.layout import Layout, Namespace
from kvpool.serving.supervisor import Supervisor
from kvpool.wire import WireClient
from kvpool.wire import messages as m

NAMESPACE = Namespace(
    "bench", "r", Layout("bfloat16", 1, 1, 16, block_tokens=64)
)  # 4 KiB per block
IDLE_S = 1.0
SHORT = 16


def chain(blocks: int) -> list[bytes]:
    return [os.urandom(16) for _ in range(blocks)]


async def put(client: WireClient, hashes: list[bytes]) -> tuple[float, float]:
    """Reserve and commit a run; return how long each took, in ms."""
    asked = time.perf_counter()
    reserve = m.Reserve(NAMESPACE.namespace_id, pack_hashes(hashes), b"", 0, 60.0)
    granted = await client.call(reserve, 60.0)
    reserved = time.perf_counter()
    await client.call(m.Commit(granted.reservation_id, bytes(len(granted.places) // 2)), 60.0)
    return (reserved - asked) * 1e3, (time.perf_counter() - reserved) * 1e3


async def long_calls(address: str, blocks: int) -> list[dict[str, float]]:
    """Write three runs, one after another."""
    client = WireClient(address, "long")
    rounds = []
    for _ in range(3):
        reserve_ms, commit_ms = await put(client, chain(blocks))
        rounds.append({"reserve_ms": round(reserve_ms, 1), "commit_ms": round(commit_ms, 1)})
        await asyncio.sleep(0.2)
    await client.close()
    return rounds


def percentiles(waits: list[float]) -> dict[str, float]:
    ordered = sorted(waits)
    return {
        "p50_ms": round(percentile(ordered, 0.5) * 1e3, 2),
        "p99_ms": round(percentile(ordered, 0.99) * 1e3, 2),
        "max_ms": round(ordered[-1] * 1e3, 2),
    }


async def measure(address: str, blocks: int) -> dict[str, Any]:
    client = WireClient(address, "short")
    await client.call(m.RegisterNamespace(NAMESPACE), 10.0)
    short = chain(SHORT)
    await put(client, short)
    pin = m.Pin(NAMESPACE.namespace_id, pack_hashes(short), 60.0)

    async def waits_until(is_over: Any) -> list[float]:
        waits = []
        while not is_over():
            asked = time.perf_counter()
            reply = await client.call(pin, 60.0)
            waits.append(time.perf_counter() - asked)
            client.send_nowait(m.Release([reply.lease_id]))
            await asyncio.sleep(0.001)
        return waits

    end = time.perf_counter() + IDLE_S
    idle = await waits_until(lambda: time.perf_counter() > end)
    other = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "benchmarks.long_calls", "--address", address),
        *("--blocks", str(blocks)),
        stdout=subprocess.PIPE,
    )
    reading = asyncio.create_task(other.communicate())
    busy = await waits_until(reading.done)
    rounds = json.loads((await reading)[0])
    await client.close()
    return {
        "blocks": blocks,
        "idle": percentiles(idle),
        "meanwhile": percentiles(busy),
        "long": rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--blocks", type=int, default=16_000)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.address:
        print(json.dumps(uvloop.run(long_calls(given.address, given.blocks))))
        return
    with tempfile.TemporaryDirectory() as logs, Supervisor(Path(logs)) as supervisor:
        dram = (given.blocks * 5 // 2 * 4096 >> 20) + 1
        arguments = [
            "--set",
            "node.advanced.slab_bytes=1MiB",
            "node",
            "--wire-port",
            "0",
            "--http-port",
            "0",
        ]
        arguments += ["--grpc-port", "0", "--dram", f"{dram}MiB", "--conductor", "none"]
        node = supervisor.start("node", arguments)
        print(json.dumps(uvloop.run(measure(node["wire"], given.blocks)), indent=2))


if __name__ == "__main__":
    main()
