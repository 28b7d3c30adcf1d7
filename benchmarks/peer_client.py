"""The process that measures a peer, with the same shapes, buffers and arithmetic as for kvpool."""

from __future__ import annotations

import json
import sys
import time
from typing import Any, Protocol

import numpy as np

from benchmarks.rows import Row, aligned, percentile, row
from benchmarks.store_client import LOOKUP_HASHES, MAX_ITERATIONS, MIN_ITERATIONS

SEGMENT_BYTES = 3 << 30
WARM_BLOCK_BYTES = 16 << 20
NO_ROOM = -200  # Mooncake's NO_AVAILABLE_HANDLE
MAX_WAITS = 30  # of a second, over all shapes
LOOKUP_SECONDS = 2.0


class Store(Protocol):
    """The interface of a peer for measuring."""

    label: str

    def use(self, source: np.ndarray, target: np.ndarray) -> None:
        """Use these buffers from now on."""

    def put(self, keys: list[str], size: int) -> None:
        """Store the next `size` bytes of the source buffer under each key."""

    def get(self, keys: list[str], size: int) -> None:
        """Read them back into the target buffer."""


class PeerFull(Exception):
    """A peer has no room now: it leases what was read recently, and removes nothing before the lease ends."""


class Mooncake:
    """Mooncake's distributed store with registered buffers."""

    label = "tcp"

    def __init__(self, master: int, segment_bytes: int) -> None:
        from mooncake.store import MooncakeDistributedStore

        self.store: Any = MooncakeDistributedStore()
        status = self.store.setup(
            "127.0.0.1",
            "P2PHANDSHAKE",
            segment_bytes,
            512 << 20,
            "tcp",
            "",
            f"127.0.0.1:{master}",
        )
        if status != 0:
            raise RuntimeError(f"mooncake's setup returned {status}")
        self._addresses: tuple[int, int] = (0, 0)
        self._buffers: tuple[np.ndarray, ...] = ()

    def use(self, source: np.ndarray, target: np.ndarray) -> None:
        for address in self._addresses:
            if address:
                self.store.unregister_buffer(address)
        self._buffers = (source, target)  # registered memory must stay where it is
        self._addresses = (source.ctypes.data, target.ctypes.data)
        for buffer in (source, target):
            self.store.register_buffer(buffer.ctypes.data, buffer.nbytes)

    def put(self, keys: list[str], size: int) -> None:
        pointers = [self._addresses[0] + i * size for i in range(len(keys))]
        answers = self.store.batch_put_from(keys, pointers, [size] * len(keys))
        if NO_ROOM in answers:
            raise PeerFull
        if any(answer != 0 for answer in answers):
            raise RuntimeError(f"mooncake's put returned {sorted(set(answers))}")

    def get(self, keys: list[str], size: int) -> None:
        pointers = [self._addresses[1] + i * size for i in range(len(keys))]
        answers = self.store.batch_get_into(keys, pointers, [size] * len(keys))
        if any(answer != size for answer in answers):
            raise RuntimeError(f"mooncake's get returned {sorted(set(answers))}")

    def forget(self) -> None:
        """Empty the store."""
        self.store.remove_all()

    def lookups(self) -> dict[str, float]:
        """Measure `batch_is_exist` of 256 keys, one call after another."""
        keys = [f"lookup-{i}" for i in range(LOOKUP_HASHES)]
        for left in reversed(range(MAX_WAITS)):
            try:
                self.put(keys, 4096)
                break
            except PeerFull:
                if not left:
                    raise
                time.sleep(1.0)
                self.forget()
        times = []
        deadline = time.perf_counter() + LOOKUP_SECONDS
        while time.perf_counter() < deadline:
            started = time.perf_counter()
            self.store.batch_is_exist(keys)
            times.append(time.perf_counter() - started)
        ordered = sorted(times)
        return {
            "hashes": LOOKUP_HASHES,
            "p50_us": round(percentile(ordered, 0.5) * 1e6, 1),
            "p99_us": round(percentile(ordered, 0.99) * 1e6, 1),
            "per_s": round(len(times) / LOOKUP_SECONDS, 1),
        }


class Redis:
    """Redis by redis-py. Values are copied into the target buffer, as a reader of KV has to do."""

    label = "unix"

    def __init__(self, path: str) -> None:
        import redis

        self._redis = redis.Redis(unix_socket_path=path)
        self._source = self._target = memoryview(b"")

    def use(self, source: np.ndarray, target: np.ndarray) -> None:
        self._source, self._target = source.data.cast("B"), target.data.cast("B")

    def put(self, keys: list[str], size: int) -> None:
        pieces = {key: self._source[i * size : (i + 1) * size] for i, key in enumerate(keys)}
        self._redis.mset(pieces)

    def get(self, keys: list[str], size: int) -> None:
        values: Any = self._redis.mget(keys)
        for i, value in enumerate(values):
            self._target[i * size : (i + 1) * size] = value

    def forget(self) -> None:
        """Empty the store."""
        self._redis.flushall()


def measure(store: Any, order: dict[str, Any]) -> list[Row]:
    """Rows for all shapes. The store's memory is touched before, so that the figures are warm."""
    rows = []
    number = waits = 0
    warm = np.zeros(WARM_BLOCK_BYTES, dtype=np.uint8)
    store.use(warm, np.empty_like(warm))
    for i in range(SEGMENT_BYTES * 8 // 10 // WARM_BLOCK_BYTES):
        store.put([f"warm-{i}"], WARM_BLOCK_BYTES)
    store.forget()
    for block_bytes in order["block_bytes"]:
        for batch in order["batches"]:
            size = block_bytes * batch
            source, target, other = aligned(size), aligned(size), aligned(size)
            source[:] = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)
            store.use(source, target)
            puts: list[float] = []
            gets: list[float] = []
            copies: list[float] = []
            held = 0
            deadline = time.perf_counter() + order["seconds"]
            while len(puts) <= MIN_ITERATIONS or (
                time.perf_counter() < deadline and len(puts) <= MAX_ITERATIONS
            ):
                number += 1
                if held + size > SEGMENT_BYTES * 8 // 10:
                    store.forget()
                    held = 0
                held += size
                keys = [f"{number}-{i}" for i in range(batch)]
                started = time.perf_counter()
                try:
                    store.put(keys, block_bytes)
                except PeerFull:
                    waits += 1
                    if waits > MAX_WAITS:
                        raise
                    time.sleep(1.0)
                    store.forget()
                    held = 0
                    deadline += time.perf_counter() - started
                    continue
                puts.append(time.perf_counter() - started)
                started = time.perf_counter()
                store.get(keys, block_bytes)
                gets.append(time.perf_counter() - started)
                started = time.perf_counter()
                np.copyto(other, source)
                copies.append(time.perf_counter() - started)
            if not np.array_equal(source, target):
                raise RuntimeError("the bytes read are not the bytes written")
            memcpy_s = percentile(sorted(copies[1:]), 0.5)
            for op, times in (("put", puts), ("get", gets)):
                rows.append(row(op, store.label, block_bytes, batch, times[0], times[1:], memcpy_s))
            print(f"{store.label} {block_bytes >> 10} KiB x {batch}", file=sys.stderr)
    return rows


def main(order: dict[str, Any]) -> None:
    """Measure one peer, or lend Mooncake's segment until stdin closes."""
    if order["role"] == "segment":
        segment = Mooncake(order["master"], SEGMENT_BYTES)
        print("ready", flush=True)
        sys.stdin.read()
        del segment
        return
    store: Any = (
        Redis(order["socket"]) if order["role"] == "redis" else Mooncake(order["master"], 0)
    )
    result: dict[str, Any] = {"rows": [r.plain() for r in measure(store, order)]}
    if order["role"] == "mooncake":
        store.forget()
        result["lookup"] = store.lookups()
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
