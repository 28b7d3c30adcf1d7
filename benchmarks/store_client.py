"""The process that measures for `kvpool bench store`: one transport, all shapes, a node in another process.

It is a separate process because UCX reads its environment only once, when it is loaded.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

import numpy as np
import uvloop

from benchmarks.rows import Row, aligned, percentile, row
from kvpool.blocks.hashing import hash_chain, pack_hashes
from kvpool.blocks.layout import Layout, Namespace
from kvpool.client import AsyncPool
from kvpool.transports.nixl import NixlTransport
from kvpool.wire import WireClient
from kvpool.wire import messages as m

BLOCK_TOKENS = 64
LOOKUP_HASHES = 256
MIN_ITERATIONS = 5
MAX_ITERATIONS = 60


def namespace(block_bytes: int) -> Namespace:
    """A namespace whose blocks have exactly `block_bytes`."""
    layout = Layout("uint8", layers=1, kv_heads=1, head_dim=block_bytes // (2 * BLOCK_TOKENS))
    return Namespace("kvpool/bench", f"{block_bytes}", layout)


class Bench:
    """Measures puts and gets of one shape after the other.

    Every put writes blocks that the node does not have, from a buffer that is reused, as in an
    engine.
    """

    def __init__(self, pool: AsyncPool, label: str, seconds_per_shape: float) -> None:
        self._pool = pool
        self._label = label
        self._budget_s = seconds_per_shape
        self._next_token = 0

    async def shape(self, block_bytes: int, batch: int) -> list[Row]:
        """Rows for put and get. A memcpy of the same bytes is measured in between."""
        size = block_bytes * batch
        source, target, other = aligned(size), aligned(size), aligned(size)
        source[:] = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)
        await self._register(source, target)
        space = namespace(block_bytes)
        puts: list[float] = []
        gets: list[float] = []
        copies: list[float] = []
        deadline = time.perf_counter() + self._budget_s
        while len(puts) <= MIN_ITERATIONS or (
            time.perf_counter() < deadline and len(puts) <= MAX_ITERATIONS
        ):
            hashes = self._fresh_chain(space, batch)
            started = time.perf_counter()
            result = await self._pool.put(space, hashes, source)
            puts.append(time.perf_counter() - started)
            if result.stored != batch:
                raise RuntimeError(f"{result.stored} of {batch} blocks were stored")
            started = time.perf_counter()
            got = await self._pool.get(space, hashes, target, is_disposable=True)
            gets.append(time.perf_counter() - started)
            if got.found != batch:
                raise RuntimeError(f"{got.found} of {batch} blocks were read: {got.miss_reason}")
            started = time.perf_counter()
            np.copyto(other, source)
            copies.append(time.perf_counter() - started)
        if not np.array_equal(source, target):
            raise RuntimeError("the bytes read are not the bytes written")
        await self._deregister(source, target)
        memcpy_s = percentile(sorted(copies[1:]), 0.5)
        return [
            row(op, self._label, block_bytes, batch, times[0], times[1:], memcpy_s)
            for op, times in (("put", puts), ("get", gets))
        ]

    def _fresh_chain(self, space: Namespace, batch: int) -> list[bytes]:
        self._next_token += 1
        tokens = np.zeros(batch * BLOCK_TOKENS, dtype=np.uint32)
        tokens[0] = self._next_token
        return hash_chain(space, tokens)

    async def _register(self, *buffers: np.ndarray) -> None:
        transport = await self._nixl()
        for buffer in buffers if transport else ():
            await asyncio.to_thread(
                transport.register, int(buffer.ctypes.data), buffer.nbytes, buffer
            )

    async def _deregister(self, *buffers: np.ndarray) -> None:
        transport = await self._nixl()
        for buffer in buffers if transport else ():
            await asyncio.to_thread(transport.deregister, int(buffer.ctypes.data))

    async def _nixl(self) -> Any:
        [info] = await self._pool.nodes()
        transport = self._pool.directory.link_to(info.descriptor).transports.dram
        return transport if isinstance(transport, NixlTransport) else None


def memcpy_gbps(size: int = 256 << 20) -> float:
    """One thread copying `size` bytes, median of nine."""
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    times = []
    for _ in range(9):
        started = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - started)
    return size / percentile(sorted(times), 0.5) / 1e9


async def lookups(address: str, seconds: float) -> dict[str, float]:
    """Measure look-ups and pins of 256 hashes over one connection: latency alone, rate with 16 in flight."""
    space = namespace(64 << 10)
    hashes = hash_chain(space, np.arange(LOOKUP_HASHES * BLOCK_TOKENS))
    async with AsyncPool(node=address, host_label="bench") as pool:
        size = LOOKUP_HASHES * space.layout.part_bytes
        await pool.put(space, hashes, np.zeros(size, dtype=np.uint8))
    link = WireClient(address, "bench")
    packed = pack_hashes(hashes)
    lookup = m.NodeLookup(space.namespace_id, packed)
    pin = m.Pin(space.namespace_id, packed, 10.0, is_mapped=True)
    found = await link.call(lookup, 5)
    if found.found != LOOKUP_HASHES:
        raise RuntimeError(f"{found.found} blocks found")
    times: dict[str, list[float]] = {"lookup": [], "pin": []}
    for name, request in (("lookup", lookup), ("pin", pin)):
        deadline = time.perf_counter() + seconds / 2
        while time.perf_counter() < deadline:
            started = time.perf_counter()
            reply = await link.call(request, 5)
            times[name].append(time.perf_counter() - started)
            if name == "pin":
                await link.call(
                    m.Release([reply.lease_id]), 5
                )  # not timed, and over before the next
    count = 0

    async def caller() -> None:
        nonlocal count
        while time.perf_counter() < rate_until:
            await link.call(lookup, 5)
            count += 1

    rate_until = time.perf_counter() + seconds
    await asyncio.gather(*(caller() for _ in range(16)))
    await link.close()
    result: dict[str, float] = {"hashes": LOOKUP_HASHES, "per_s": count / seconds}
    for name, prefix in (("lookup", ""), ("pin", "pin_")):
        ordered = sorted(times[name])
        result[f"{prefix}p50_us"] = percentile(ordered, 0.5) * 1e6
        result[f"{prefix}p99_us"] = percentile(ordered, 0.99) * 1e6
    return {name: round(value, 1) for name, value in result.items()}


async def run(order: dict[str, Any]) -> None:
    """Carry out one order and print the result as one JSON line."""
    if order["what"] == "lookup":
        print(json.dumps(await lookups(order["node"], order["seconds"])), flush=True)
        return
    async with AsyncPool(
        node=order["node"],
        host_label=order["host_label"],
        transport=order["transport"],
        timeout_s=30,
        verify_checksums=order["verify"],
    ) as pool:
        bench = Bench(pool, order["label"], order["seconds"])
        rows = []
        for block_bytes in order["block_bytes"]:
            for batch in order["batches"]:
                rows += [r.plain() for r in await bench.shape(block_bytes, batch)]
                print(f"{order['label']} {block_bytes >> 10} KiB x {batch}", file=sys.stderr)
    print(json.dumps({"memcpy_gbps": round(memcpy_gbps(), 2), "rows": rows}), flush=True)


if __name__ == "__main__":
    uvloop.run(run(json.loads(os.environ["KVPOOL_BENCH_ORDER"])))
