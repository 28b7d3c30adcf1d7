"""`kvpool bench`: measure the store on this machine, beside memcpy and the peers that are installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.cli.vllm import vllm
from benchmarks.peers import PEERS, PeerMissing
from kvpool.cli.output import AsJson, console, error_console, print_json, print_table
from kvpool.config.settings import parse_bytes
from kvpool.errors import InvalidArgument, KvpoolError
from kvpool.serving.supervisor import Supervisor

CLIENT_TIMEOUT_S = 600
NODE_DRAM = "3GiB"
NODE_SLAB = "64MiB"
# label -> (transport, environment of both processes)
WAYS: dict[str, tuple[str, dict[str, str]]] = {
    "shm": ("shm", {}),
    "nixl": ("nixl", {}),
    "nixl-tcp": ("nixl", {"UCX_TLS": "tcp"}),
}

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Measure the store and engines.")
app.command()(vllm)


@app.callback()
def _group() -> None:
    """Measure the store, and engines that use it, on this machine."""


@app.command()
def store(
    peers: Annotated[
        str, typer.Option(help="Peers to measure as well: mooncake,redis, or none.")
    ] = "mooncake,redis",
    transports: Annotated[
        str, typer.Option(help="Some of shm,nixl,nixl-tcp.")
    ] = "shm,nixl,nixl-tcp",
    block_sizes: Annotated[str, typer.Option(help="Block sizes.")] = "64KiB,1MiB,4MiB,16MiB",
    batches: Annotated[str, typer.Option(help="Blocks per call.")] = "1,16,64",
    seconds: Annotated[
        float, typer.Option(min=0.05, help="Seconds per block size and batch.")
    ] = 0.5,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Verify checksums on get.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Measure puts and gets between two processes, first and warm, against memcpy of the same bytes."""
    order = {
        "block_bytes": [_size(text) for text in block_sizes.split(",")],
        "batches": [_count(text) for text in batches.split(",")],
        "seconds": seconds,
        "verify": verify,
    }
    report: dict[str, Any] = {"memcpy_gbps": 0.0, "rows": [], "peers": {}, "not_installed": {}}
    for label in transports.split(","):
        if label not in WAYS:
            raise InvalidArgument(f"unknown transport {label!r}", hint=", ".join(WAYS))
        result, lookup = _measure(label, order)
        report["rows"] += result["rows"]
        report["memcpy_gbps"] = max(report["memcpy_gbps"], result["memcpy_gbps"])
        report.setdefault("lookup", lookup)
    for name in [] if peers in ("", "none") else peers.split(","):
        if name not in PEERS:
            raise InvalidArgument(f"unknown peer {name!r}", hint=", ".join(PEERS))
        try:
            report["peers"][name] = PEERS[name](order)
        except PeerMissing as error:
            report["not_installed"][name] = str(error)
        except KvpoolError as error:  # a peer that fails must not lose kvpool's own figures
            report["not_installed"][name] = f"it failed: {error}"
    if as_json:
        print_json(report)
    else:
        _show(report)


def _measure(label: str, order: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The results of one transport. Node and client are separate processes."""
    transport, env = WAYS[label]
    with (
        tempfile.TemporaryDirectory(prefix="kvpool-bench-") as logs,
        Supervisor(Path(logs), env) as supervisor,
    ):
        node = supervisor.start(
            "node",
            [
                *("--set", f"node.advanced.slab_bytes={NODE_SLAB}", "node", "--conductor", "none"),
                *("--wire-port", "0", "--http-port", "0", "--grpc-port", "0"),
                *("--dram", NODE_DRAM, "--host-label", "bench"),
            ],
        )
        mine = {**order, "what": "store", "node": node["wire"], "label": label}
        mine |= {"transport": transport, "host_label": "bench"}
        result = _child(mine, env)
        lookup = None
        if label == "shm":
            lookup = _child({"what": "lookup", "node": node["wire"], "seconds": 2.0}, env)
    return result, lookup


def _child(order: dict[str, Any], env: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "benchmarks.store_client"],
        env={**os.environ, **env, "KVPOOL_BENCH_ORDER": json.dumps(order)},
        stdout=subprocess.PIPE,
        timeout=CLIENT_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        raise KvpoolError(f"the measuring process ended with status {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _show(report: dict[str, Any]) -> None:
    out = console()
    out.print(f"memcpy, one thread, 256 MiB: {report['memcpy_gbps']:.1f} GB/s")
    columns = ("op", "transport", "block", "batch", "GB/s", "of memcpy", "p50", "p99", "first GB/s")
    names = [*report["peers"]]
    rows = []
    for row in report["rows"]:
        cells = _cells(row)
        for name in names:
            peer = next((p for p in report["peers"][name]["rows"] if _same(p, row)), None)
            cells.append("-" if peer is None else f"{row['gbps'] / peer['gbps']:.1f}x")
        rows.append(cells)
    print_table((*columns, *(f"x {name}" for name in names)), rows, right=columns[2:])
    for name in names:
        out.print(f"\n{name}: {report['peers'][name]['how']}")
        print_table(
            columns, [_cells(row) for row in report["peers"][name]["rows"]], right=columns[2:]
        )
    lookup = report.get("lookup")
    if lookup:
        out.print(
            f"\n{lookup['hashes']:.0f} hashes over wire: look-up p50 {lookup['p50_us']:.0f} us, p99"
            f" {lookup['p99_us']:.0f} us; pin p50 {lookup['pin_p50_us']:.0f} us;"
            f" {lookup['per_s']:.0f} look-ups/s from one connection"
        )
    for name in names:
        theirs = report["peers"][name].get("lookup")
        if theirs and lookup:
            out.print(
                f"{name}, one look-up at a time: p50 {theirs['p50_us']:.0f} us, {theirs['per_s']:.0f}/s;"
                f" kvpool is {theirs['p50_us'] / lookup['p50_us']:.1f}x as fast one at a time, and"
                f" {lookup['per_s'] / theirs['per_s']:.1f}x with 16 in flight"
            )
    for name, reason in report["not_installed"].items():
        out.print(f"{name} was not measured: {reason}")
    error_console().print("GB/s are those of the median call. GB are 10^9 bytes.")


def _cells(row: dict[str, Any]) -> list[str]:
    block = row["block_bytes"]
    return [
        row["op"],
        row["transport"],
        f"{block >> 20} MiB" if block >= 1 << 20 else f"{block >> 10} KiB",
        str(row["batch"]),
        f"{row['gbps']:.2f}",
        f"{row['ratio_memcpy']:.2f}",
        f"{row['p50_us']:.0f} us",
        f"{row['p99_us']:.0f} us",
        f"{row['first_gbps']:.2f}",
    ]


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one[key] == other[key] for key in ("op", "block_bytes", "batch"))


def _size(text: str) -> int:
    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise InvalidArgument(f"block size {text!r}: {error}") from error
    if not 4096 <= size <= 64 << 20 or size % 4096:
        raise InvalidArgument(
            f"block size {text} is invalid", hint="give multiples of 4 KiB up to 64 MiB"
        )
    return size


def _count(text: str) -> int:
    if not text.strip().isdigit() or not 1 <= int(text) <= 4096:
        raise InvalidArgument(f"batch {text!r} is out of range", hint="1 to 4096")
    return int(text)
