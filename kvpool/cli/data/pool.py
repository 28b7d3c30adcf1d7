"""Commands that talk to a running pool: stats, and put, get, lookup on files for trying it out."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from kvpool.blocks.hashing import hash_chain
from kvpool.blocks.layout import Layout, Namespace
from kvpool.cli.context import invocation, overrides
from kvpool.cli.ids import short_id
from kvpool.cli.output import console, format_rate, format_seconds, print_json, print_table
from kvpool.client import Pool
from kvpool.errors import BlockMiss, InvalidArgument
from kvpool.security.credentials import credentials_of
from kvpool.transports.ucx import fabric
from kvpool.wire import messages as m
from kvpool.wire.json_view import named

# Files are stored as the KV of a pretended model: 1 KiB "per token", 64 tokens a block.
FILE_LAYOUT = Layout(dtype="uint8", layers=1, kv_heads=1, head_dim=512, block_tokens=64)
FILE_NAMESPACE = Namespace("kvpool/files", "1", FILE_LAYOUT)
MAX_FILE_BYTES = 1 << 30

Conductor = Annotated[
    str | None, typer.Option("--conductor", help="Conductor's wire address; default: configured.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def open_pool(ctx: typer.Context, conductor: str | None) -> Pool:
    given = overrides(conductor=("client.conductor", conductor))
    settings = invocation(ctx).load(given).settings.client
    return Pool(
        conductor=settings.conductor,
        host_label=settings.host_label,
        transport=settings.transport,
        timeout_s=settings.timeout_s,
        verify_checksums=settings.verify_checksums,
        credentials=credentials_of(settings),
        require_rdma=settings.require_rdma,
    )


def stats(ctx: typer.Context, conductor: Conductor = None, as_json: AsJson = False) -> None:
    """Show the nodes with their tiers, the workers, and what was hit and missed."""
    with open_pool(ctx, conductor) as pool:
        reply = pool.stats()
    if as_json:
        print_json(named(reply))
        return
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
    _print_transports(reply.nodes)
    if reply.workers:
        console().print()
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
                for worker in reply.workers
            ],
            right=("running", "prefill tok/s", "TPOT"),
        )
    totals: dict[str, float] = {}
    for node in reply.nodes:
        for name, value in node.counters.items():
            totals[f"node:{name}"] = totals.get(f"node:{name}", 0) + value
    totals |= reply.counters
    console().print()
    hits, misses = totals.get("node:hits", 0), totals.get("node:misses", 0)
    ratio = f"{hits / (hits + misses):.3f}" if hits + misses else "-"
    console().print(f"blocks in the index {reply.index_blocks}   hit ratio of pins {ratio}")
    prompt, found = totals.get("prompt_tokens", 0), totals.get("pool_tokens", 0)
    if prompt:
        console().print(f"prompt tokens {prompt:.0f}, of them from the pool {found:.0f}")
    print_table(
        ("counter", "value"),
        [(name, f"{value:.0f}") for name, value in sorted(totals.items())],
        right=("value",),
    )


def _print_transports(nodes: list[m.NodeStatsReply]) -> None:
    """What UCX has on each node, and how fast nodes copied from each other."""
    if any(node.ucx for node in nodes):
        console().print()
        rows = [
            (node.node_id[:8], fabric(node.ucx, (), is_same_host=False) or "-", " ".join(node.ucx))
            for node in nodes
        ]
        print_table(("node", "between hosts", "UCX has"), rows)
    peers = [(node, peer) for node in nodes for peer in node.peers if peer.transport]
    if peers:
        console().print()
        print_table(
            ("node", "copied from", "transport", "by", "read", "speed"),
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
    """Store a file's bytes in the pool, cut into blocks named by its content; prints its key."""
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
        f"{len(hashes)} blocks: {result.stored} stored, {result.existing} were there,"
        f" {result.rejected} rejected; moved {_moved(result.bytes_moved)}"
    )


def get(
    ctx: typer.Context,
    key: Annotated[str, typer.Argument(help="Key that `kvpool put` printed.")],
    file: Annotated[Path, typer.Argument(help="Where to write the bytes.")],
    conductor: Conductor = None,
    as_json: AsJson = False,
) -> None:
    """Read a file back from the pool; every block is verified."""
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
        raise BlockMiss("the bytes found are not those of the key")
    file.write_bytes(data)
    if as_json:
        print_json({"bytes": size, "result": result})
        return
    console().print(f"{size} bytes written to {file}; moved {_moved(result.bytes_moved)}")


def lookup(
    ctx: typer.Context,
    key: Annotated[str, typer.Argument(help="Key that `kvpool put` printed.")],
    conductor: Conductor = None,
    as_json: AsJson = False,
) -> None:
    """Say how many leading blocks of a key the pool has, and where. Changes nothing."""
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
        console().print(f"they can be read in {format_seconds(reply.wait_s)}: some stand on disks")
    print_table(
        ("node", "blocks", "tier"),
        [(s.node_id, f"{s.start} to {s.start + s.count - 1}", s.tier) for s in reply.segments],
    )


def _key(data: bytes) -> tuple[str, list[bytes]]:
    """A file's key (its digest and size) and its chain of block hashes."""
    key = f"{hashlib.sha256(data).hexdigest()}-{len(data)}"
    return key, file_hashes(key)[1]


def file_hashes(key: str) -> tuple[int, list[bytes]]:
    """Size of the file that has this key, and the chain of its blocks.

    Raises:
        InvalidArgument: it is no key.
    """
    digest, _, size_text = key.partition("-")
    size = -1
    with suppress(ValueError):
        size = int(size_text)
    if len(digest) != 64 or set(digest) - set("0123456789abcdef") or not 0 < size <= MAX_FILE_BYTES:
        raise InvalidArgument(f"{key!r} is no key", hint="use what `kvpool put` printed")
    count = -(-size // FILE_LAYOUT.part_bytes)
    # Bytes are no tokens: the digest stands for the content, a counter for the position.
    tokens = np.arange(count * FILE_LAYOUT.block_tokens, dtype=np.uint32)
    return size, hash_chain(FILE_NAMESPACE, tokens, (f"file:{key}",))


def _moved(by_transport: dict[str, int]) -> str:
    return ", ".join(f"{_mib(n)} by {name}" for name, n in by_transport.items()) or "nothing"


def _rate(bytes_per_s: float) -> str:
    """A hyphen while it is not known, as for memory, which is not measured."""
    return format_rate(bytes_per_s, 1.0) if bytes_per_s else "-"


def _mib(count: float) -> str:
    return f"{count / (1 << 20):.1f} MiB"
