"""`kvpool stats`, and `put`, `get` and `lookup`, which store files to try a pool out."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from kvpool.blocks.hashing import hash_chain
from kvpool.blocks.layout import Layout, Namespace
from kvpool.cli.connect import Conductor, open_pool
from kvpool.cli.ids import short_id
from kvpool.cli.output import AsJson, console, format_rate, format_seconds, print_json, print_table
from kvpool.errors import BlockMiss, InvalidArgument
from kvpool.transports.ucx import fabric
from kvpool.wire import messages as m
from kvpool.wire.json_view import named

# Files are stored as the KV of an imaginary model: 1 KiB per token, 64 tokens a block.
FILE_LAYOUT = Layout(dtype="uint8", layers=1, kv_heads=1, head_dim=512, block_tokens=64)
FILE_NAMESPACE = Namespace("kvpool/files", "1", FILE_LAYOUT)
MAX_FILE_BYTES = 1 << 30


def stats(ctx: typer.Context, conductor: Conductor = None, as_json: AsJson = False) -> None:
    """Show the nodes with their tiers, the workers, the hit ratio and all counters."""
    with open_pool(ctx, conductor) as pool:
        reply = pool.stats()
    if as_json:
        print_json(named(reply))
        return
    _print_tiers(reply)
    _print_transports(reply.nodes)
    if reply.workers:
        console().print()
        _print_workers(reply.workers)
    console().print()
    _print_counters(reply)


def _print_tiers(reply: m.PoolStatsReply) -> None:
    rows = []
    for node in reply.nodes:
        for tier in node.tiers:
            used = tier.capacity_bytes - tier.free_bytes
            rows.append(
                (
                    node.node_id[:8],
                    node.host,
                    reply.node_states.get(node.node_id, "gone"),
                    f"{tier.tier} ({tier.note})" if tier.note else tier.tier,
                    tier.blocks,
                    _mib(used),
                    _mib(tier.capacity_bytes),
                    _mib(tier.pinned_bytes),
                    _rate(tier.read_bytes_per_s),
                    _rate(tier.write_bytes_per_s),
                    node.leases,
                    node.reservations,
                )
            )
    numbers = (
        *("blocks", "used", "size", "pinned", "disk reads", "disk writes"),
        *("leases", "reservations"),
    )
    print_table(("node", "host", "state", "tier", *numbers), rows, right=numbers)


def _print_workers(workers: list[m.WorkerInfo]) -> None:
    print_table(
        ("worker", "role", "host", "state", "model", "running", "prefill tok/s", "TPOT"),
        [
            (
                short_id(worker.descriptor.worker_id, 8),
                worker.descriptor.role,
                worker.descriptor.host,
                worker.state,
                worker.descriptor.model,
                worker.load.running,
                f"{worker.load.prefill_tokens_per_s:.0f}",
                f"{1000 * worker.load.tpot_s:.1f} ms",
            )
            for worker in workers
        ],
        right=("running", "prefill tok/s", "TPOT"),
    )


def _print_counters(reply: m.PoolStatsReply) -> None:
    totals: dict[str, float] = {}
    for node in reply.nodes:
        for name, value in node.counters.items():
            totals[f"node:{name}"] = totals.get(f"node:{name}", 0) + value
    totals |= reply.counters
    hits, misses = totals.get("node:hits", 0), totals.get("node:misses", 0)
    ratio = f"{hits / (hits + misses):.3f}" if hits + misses else "-"
    console().print(f"blocks in the index: {reply.index_blocks}   hit ratio of pins: {ratio}")
    prompt, found = totals.get("prompt_tokens", 0), totals.get("pool_tokens", 0)
    if prompt:
        console().print(f"prompt tokens: {prompt:.0f}, of which from the pool: {found:.0f}")
    print_table(
        ("counter", "value"),
        [(name, f"{value:.0f}") for name, value in sorted(totals.items())],
        right=("value",),
    )


def _print_transports(nodes: list[m.NodeStatsReply]) -> None:
    """Print the UCX transports of each node, and the speed of copies between nodes."""
    if any(node.ucx for node in nodes):
        console().print()
        rows = [
            (node.node_id[:8], fabric(node.ucx, (), is_same_host=False) or "-", " ".join(node.ucx))
            for node in nodes
        ]
        print_table(("node", "between hosts", "UCX transports"), rows)
    peers = [(node, peer) for node in nodes for peer in node.peers if peer.transport]
    if peers:
        console().print()
        print_table(
            ("node", "copied from", "transport", "over", "read", "speed"),
            [
                (
                    node.node_id[:8],
                    peer.node_id[:8],
                    peer.transport,
                    peer.fabric or "-",
                    _mib(peer.read_bytes),
                    _rate(peer.read_bytes_per_s),
                )
                for node, peer in peers
            ],
            right=("read", "speed"),
        )


def put(
    ctx: typer.Context,
    file: Annotated[Path, typer.Argument(help="File to store.", exists=True, dir_okay=False)],
    conductor: Conductor = None,
    as_json: AsJson = False,
) -> None:
    """Store a file in the pool, cut into blocks, and print the key to read it back with."""
    data = file.read_bytes()
    if not data or len(data) > MAX_FILE_BYTES:
        raise InvalidArgument(f"{file} has {len(data)} bytes", hint="1 byte to 1 GiB")
    key, hashes = _key(data)
    blocks = np.zeros((len(hashes), FILE_LAYOUT.part_bytes), dtype=np.uint8)
    blocks.reshape(-1)[: len(data)] = np.frombuffer(data, dtype=np.uint8)
    with open_pool(ctx, conductor) as pool:
        result = pool.put(FILE_NAMESPACE, hashes, blocks)
    if as_json:
        print_json({"key": key, "blocks": len(hashes), "result": result})
        return
    console().print(f"key {key}")
    console().print(
        f"{len(hashes)} blocks: {result.stored} stored, {result.existing} already there,"
        f" {result.rejected} rejected; {_moved(result.bytes_moved)} moved"
    )


def get(
    ctx: typer.Context,
    key: Annotated[str, typer.Argument(help="Key that `kvpool put` printed.")],
    file: Annotated[Path, typer.Argument(help="Where to write the bytes.")],
    conductor: Conductor = None,
    as_json: AsJson = False,
) -> None:
    """Read a file back from the pool, and verify every block."""
    size, hashes = file_hashes(key)
    blocks = np.empty((len(hashes), FILE_LAYOUT.part_bytes), dtype=np.uint8)
    with open_pool(ctx, conductor) as pool:
        result = pool.get(FILE_NAMESPACE, hashes, blocks)
    if result.found < len(hashes):
        raise BlockMiss(
            f"{result.found} of {len(hashes)} blocks are in the pool ({result.miss_reason})"
        )
    data = blocks.reshape(-1)[:size].tobytes()
    if _key(data)[0] != key:
        raise BlockMiss("the bytes that were read do not match the key")
    file.write_bytes(data)
    if as_json:
        print_json({"bytes": size, "result": result})
        return
    console().print(f"{size} bytes written to {file}; {_moved(result.bytes_moved)} moved")


def lookup(
    ctx: typer.Context,
    key: Annotated[str, typer.Argument(help="Key that `kvpool put` printed.")],
    conductor: Conductor = None,
    as_json: AsJson = False,
) -> None:
    """Show how many leading blocks of a file are in the pool, and on which nodes."""
    _, hashes = file_hashes(key)
    with open_pool(ctx, conductor) as pool:
        reply = pool.lookup(FILE_NAMESPACE, hashes)
    if as_json:
        print_json(
            {
                "blocks": len(hashes),
                "found": reply.found,
                "segments": named(reply.segments),
                "wait_s": reply.wait_s,
            }
        )
        return
    console().print(f"{reply.found} of {len(hashes)} blocks are in the pool")
    if reply.wait_s > 0:
        console().print(f"some are on disk: they can be read in {format_seconds(reply.wait_s)}")
    print_table(
        ("node", "blocks", "tier"),
        [(s.node_id, f"{s.start} to {s.start + s.count - 1}", s.tier) for s in reply.segments],
    )


def _key(data: bytes) -> tuple[str, list[bytes]]:
    """A file's key (its digest and size) and its chain of block hashes."""
    key = f"{hashlib.sha256(data).hexdigest()}-{len(data)}"
    return key, file_hashes(key)[1]


def file_hashes(key: str) -> tuple[int, list[bytes]]:
    """The size of the file with this key, and the hash chain of its blocks.

    Raises:
        InvalidArgument: it is not a key.
    """
    digest, _, size_text = key.partition("-")
    size = -1
    with suppress(ValueError):
        size = int(size_text)
    if len(digest) != 64 or set(digest) - set("0123456789abcdef") or not 0 < size <= MAX_FILE_BYTES:
        raise InvalidArgument(f"{key!r} is not a key", hint="use the one that `kvpool put` printed")
    count = -(-size // FILE_LAYOUT.part_bytes)
    # Bytes are not tokens: the digest identifies the content, a counter the position.
    tokens = np.arange(count * FILE_LAYOUT.block_tokens, dtype=np.uint32)
    return size, hash_chain(FILE_NAMESPACE, tokens, (f"file:{key}",))


def _moved(by_transport: dict[str, int]) -> str:
    return ", ".join(f"{_mib(n)} by {name}" for name, n in by_transport.items()) or "nothing"


def _rate(bytes_per_s: float) -> str:
    """A rate, or a hyphen if it is not measured, as for memory."""
    return format_rate(bytes_per_s, 1.0) if bytes_per_s else "-"


def _mib(count: float) -> str:
    return f"{count / (1 << 20):.1f} MiB"
