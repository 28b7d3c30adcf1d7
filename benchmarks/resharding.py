"""What pieces of blocks cost by their length, over shared memory and NIXL, against whole parts in the same run.

    python -m benchmarks.resharding

Shows why `kvpool.blocks.resharding` refuses pieces shorter than `MIN_PIECE_BYTES`.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

import numpy as np

from kvpool import AsyncPool, Layout, Namespace, TensorParallelRank, hash_chain
from kvpool.blocks.resharding import TransferPlan, plan_part, plan_read
from kvpool.client.node.node_link import NodeLink
from kvpool.serving.supervisor import Supervisor
from kvpool.transports import TransportName

PART_BYTES = 4 << 20
BLOCKS = 4
BLOCK_TOKENS = 16
ROUNDS = 5
TRANSPORTS: tuple[TransportName, ...] = ("shm", "nixl")
NODE = ("--set", "node.dram_bytes=1GiB", "node", "--wire-port", "0", "--http-port", "0")


def space_of(piece_bytes: int) -> Namespace:
    """A namespace from which a rank of TP=2 reads pieces of this length, out of two parts of TP=4."""
    layers = PART_BYTES // (2 * BLOCK_TOKENS * piece_bytes)
    order = "layer,kv,token,head,dim"
    layout = Layout("uint8", layers, 4, piece_bytes, BLOCK_TOKENS, tp_size=4, order=order)
    return Namespace(f"benchmarks/{piece_bytes}", "r", layout)


async def read_s(
    link: NodeLink, space: Namespace, hashes: list[bytes], plans: list[TransferPlan]
) -> float:
    """Shortest seconds of reading `plans`, one after the other."""
    times = []
    for _ in range(ROUNDS):
        seconds = 0.0
        for plan in plans:
            out = np.empty((BLOCKS, plan.rank_bytes), dtype=np.uint8)
            out.fill(0)
            rows = out.ctypes.data + np.arange(BLOCKS, dtype=np.int64) * plan.rank_bytes
            lease = await link.pin(space, hashes, ttl_s=60, timeout_s=10, parts=plan.parts)
            started = time.perf_counter()
            await link.read(
                space,
                lease,
                hashes,
                rows,
                out,
                verify=False,
                timeout_s=60,
                is_disposable=True,
                plan=plan,
            )
            seconds += time.perf_counter() - started
            link.release(lease)
        times.append(seconds)
    return min(times)


async def measure(node: str, transport: TransportName) -> None:
    """Print one line per length."""
    async with AsyncPool(node=node, host_label="here", transport=transport) as pool:
        for piece_bytes in (256, 1 << 10, 4 << 10, 16 << 10, 64 << 10):
            space = space_of(piece_bytes)
            layout = space.layout
            hashes = hash_chain(space, np.arange(BLOCKS * BLOCK_TOKENS))
            data = np.ones((BLOCKS, layout.part_bytes), dtype=np.uint8)
            for part in range(layout.tp_size):
                await pool.put(space, hashes, data, part=part)
            link = pool.directory.link_to((await pool.nodes())[0].descriptor)
            reader = TensorParallelRank(2, 0).layout(layout)
            pieces = plan_read(layout, reader, 0, min_piece_bytes=1)
            in_pieces = await read_s(link, space, hashes, [pieces])
            whole = await read_s(link, space, hashes, [plan_part(layout, p) for p in pieces.parts])
            count = BLOCKS * len(pieces.lengths)
            print(
                f"{transport:4} {piece_bytes:6} B: {whole / in_pieces:.2f} of the bandwidth of whole parts,"
                f" {1e6 * (in_pieces - whole) / count:5.2f} us a piece"
            )


def main() -> None:
    """Start a node and measure."""
    with tempfile.TemporaryDirectory() as directory, Supervisor(Path(directory)) as supervisor:
        ready = supervisor.start("node", [*NODE, "--host-label", "here", "--conductor", "none"])
        for transport in TRANSPORTS:
            asyncio.run(measure(ready["wire"], transport))


if __name__ == "__main__":
    main()
