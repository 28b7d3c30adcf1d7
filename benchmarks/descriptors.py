"""Scattered memory over NIXL: one descriptor per piece against packing, in one run, with two real processes.

    python -m benchmarks.descriptors
    UCX_TLS=tcp UCX_NET_DEVICES=lo python -m benchmarks.descriptors

The node's side is whole slots. The client's side is 8 MiB of pages of one length: every second page
of a registered buffer, as in an engine. Packed means a few large runs between the slots and a
registered buffer of the client's, and a copy between that buffer and the pages
(`kvpool.transports.batches`). A second part measures what it costs to build descriptor lists for
each transfer instead of preparing them once and sending indices.

Packed over direct, read and write, on 2 cores with other work to do (two runs; one over TCP):

    page     512     1 KiB  2 KiB  4 KiB  8 KiB  16 KiB  32 KiB    64 KiB    256 KiB
    CMA   16 to 33  7 to 10  5 to 6  3 to 4  2 to 4  2 to 3  0.6 to 1.9  0.7 to 1.1  0.6 to 0.9
    TCP    9 to 12  6 to 11    6      3       2     1.2    1.0 to 1.1  1.0 to 1.2    0.9

Hence `PACK_BELOW_BYTES` is between 16 and 32 KiB. Lists prepared once are 1.0 times as fast at
4 MiB x 16 and 1.1 to 1.3 times at 64 KiB x 64 over CMA, and 1.0 times over TCP. That holds only if
the same buffers and slots are used again. They are not: readers bring other memory each time, and
leases give other slots. So no lists are kept.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvpool.transports import Pieces
from kvpool.transports.nixl import NixlTransport
from kvpool.transports.nixl_agent import NixlAgent
from kvpool.wire.messages import Arena as ArenaDescriptor
from kvpool.wire.messages import NodeDescriptor
from tiers.memory.arena import Arena
from tiers.memory.nixl_target import NixlTarget

TOTAL_BYTES = 8 << 20
PAGES = (512, 1 << 10, 2 << 10, 4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 256 << 10)
REPEATED = ((4 << 20, 16), (64 << 10, 64))
ROUNDS = 15
TIMEOUT_S = 30.0


def serve(link: Connection) -> None:
    """The other process: an arena behind a NIXL target, until it is stopped."""
    arena = Arena(0, 64 << 20)
    target = NixlTarget("bench-node", [arena], lambda: True, loopback_only=True)
    link.send((arena.base, arena.size_bytes, target.agent_name, target.metadata))
    link.recv()
    target.close()
    arena.close()


def median_s(works: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median seconds of each, measured in turns after one call that does not count."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(ROUNDS + 1):
        for name, work in works.items():
            started = time.perf_counter()
            work()
            if turn:
                times[name].append(time.perf_counter() - started)
    return {name: sorted(seconds)[ROUNDS // 2] for name, seconds in times.items()}


def scattered(node: NodeDescriptor, direct: NixlTransport, packing: NixlTransport) -> None:
    """Move pages of growing length through a transport that never packs and one that always does."""
    memory = Arena(1, 2 * TOTAL_BYTES)
    direct.register(memory.base, memory.size_bytes, memory)
    print("    page |  read GB/s: direct  packed  ratio | write GB/s: direct  packed  ratio")
    for page in PAGES:
        at = np.arange(TOTAL_BYTES // page, dtype=np.int64)
        places = np.stack((np.zeros_like(at), page * at), axis=1)
        pages = Pieces(memory.base + 2 * page * at, places, np.full_like(at, page), memory)
        ways: dict[str, Callable[[], object]] = {
            "read": partial(direct.read, node, pages, TIMEOUT_S),
            "read packed": partial(packing.read, node, pages, TIMEOUT_S),
            "write": partial(direct.write, node, pages, TIMEOUT_S),
            "write packed": partial(packing.write, node, pages, TIMEOUT_S),
        }
        rates = {name: TOTAL_BYTES / taken / 1e9 for name, taken in median_s(ways).items()}
        line = f"{page:8d} |"
        for way in ("read", "write"):
            alone, packed = rates[way], rates[f"{way} packed"]
            line += f" {alone:17.2f} {packed:7.2f} {packed / alone:6.2f} |"
        print(line, flush=True)


def repeated(node: NodeDescriptor) -> None:
    """Move the same buffers again and again, with lists built for each transfer or prepared once."""
    agent = NixlAgent("bench-lists")
    raw = agent.raw
    memory = Arena(3, 64 << 20)
    agent.register(memory.base, memory.size_bytes)
    name = raw.add_remote_agent(node.nixl_metadata)

    def finish(handle: Any, *, is_kept: bool) -> None:
        state = raw.transfer(handle)
        while state == "PROC":
            state = raw.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"a transfer ended as {state}")
        if not is_kept:
            raw.release_xfer_handle(handle)

    for size, count in REPEATED:
        at = np.arange(count, dtype=np.int64) * size
        # Slots in another order, so that no two can be merged.
        order = np.random.default_rng(1).permutation(count)
        tail = (np.full(count, size), np.zeros(count))
        local = np.stack((memory.base + at, *tail), axis=1).astype(np.uint64)
        remote = np.stack((node.arenas[0].base + at[order], *tail), axis=1).astype(np.uint64)
        indices = np.arange(count, dtype=np.int32)
        ours = raw.prep_xfer_dlist("NIXL_INIT_AGENT", raw.get_xfer_descs(local, "DRAM"))
        theirs = raw.prep_xfer_dlist(name, raw.get_xfer_descs(remote, "DRAM"))

        def built(local: Any = local, remote: Any = remote) -> None:
            ends = [raw.get_xfer_descs(rows, "DRAM") for rows in (local, remote)]
            finish(raw.initialize_xfer("READ", *ends, name), is_kept=False)

        def prepared(ours: Any = ours, theirs: Any = theirs, indices: Any = indices) -> None:
            finish(raw.make_prepped_xfer("READ", ours, indices, theirs, indices), is_kept=False)

        kept = raw.make_prepped_xfer("READ", ours, indices, theirs, indices)
        seconds = median_s(
            {"built": built, "prepared": prepared, "kept": partial(finish, kept, is_kept=True)}
        )
        parts = ", ".join(f"{k} {v * 1e6:.0f} us" for k, v in seconds.items())
        gain = seconds["built"] / seconds["prepared"]
        print(f"{size >> 10} KiB x {count}: {parts}; prepared is {gain:.2f} times as fast")


def main() -> None:
    """Print a line for each page length, then one for each repeated shape."""
    context = multiprocessing.get_context("spawn")
    link, other = context.Pipe()
    child = context.Process(target=serve, args=(other,), daemon=True)
    child.start()
    base, size, agent, metadata = link.recv()
    node = NodeDescriptor(
        *("bench", 1, "elsewhere", ""),
        arenas=[ArenaDescriptor(0, size, base)],
        nixl_agent=agent,
        nixl_metadata=metadata,
        transports=["nixl"],
    )
    direct = NixlTransport("bench-direct", pack_below_bytes=0)
    packing = NixlTransport("bench-packing", pack_below_bytes=1 << 40)
    try:
        for transport in (direct, packing):
            transport.connect(node, TIMEOUT_S)
        scattered(node, direct, packing)
        repeated(node)
    finally:
        for transport in (direct, packing):
            transport.close()
        link.send("end")
        child.join(5)


if __name__ == "__main__":
    main()
