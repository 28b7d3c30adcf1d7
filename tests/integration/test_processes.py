"""Starting and stopping: clear words when it cannot start, nothing left when it stops."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.fork_server import run_kvpool
from tests.support.process_cluster import Cluster, wait_until


def node_arguments(*settings: str) -> list[str]:
    sets = [text for setting in settings for text in ("--set", setting)]
    free = ["--wire-port", "0", "--http-port", "0", "--grpc-port", "0", "--conductor", "none"]
    return [*sets, "node", *free]


@pytest.mark.parametrize("port", ["--wire-port", "--http-port", "--grpc-port"])
def test_a_port_in_use_is_named_with_status_2(port: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = str(taken.getsockname()[1])
        done = run_kvpool(*node_arguments("node.dram_bytes=64MiB"), port, number)
    assert done.returncode == 2
    assert number in done.stderr
    assert "choose another" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_no_room_in_shared_memory_is_an_error_with_advice() -> None:
    done = run_kvpool(*node_arguments("node.dram_bytes=60TiB"))
    assert done.returncode == 2
    assert "does not fit" in done.stderr
    assert "node.dram_bytes" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_model_is_an_error_with_advice() -> None:
    done = run_kvpool("worker", "--model", "/nowhere/model", "--wire-port", "0", "--http-port", "0")
    assert done.returncode == 1
    assert "/nowhere/model" in done.stderr
    assert "config.json" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_conductor_without_tokenizer_files_says_which_are_missing(tmp_path: Path) -> None:
    done = run_kvpool("conductor", "--model", str(tmp_path), "--wire-port", "0", "--http-port", "0")
    assert done.returncode == 1
    assert "tokenizer.json" in done.stderr


def arenas_of(pids: Sequence[int]) -> list[str]:
    """Shared-memory files that these processes hold open."""
    found = []
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(fd)
            if "kvpool-arena" in target:
                found.append(target)
    return found


@pytest.fixture
def up(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "kvpool", "--set", "node.dram_bytes=64MiB"),
            *("--set", f"node.advanced.runtime_dir={tmp_path / 'run'}", "up", "--free-ports"),
            *("--nodes", "2", "--log-dir", str(tmp_path / "logs")),
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_up_starts_a_pool_and_leaves_nothing_behind(
    up: subprocess.Popen[str], tmp_path: Path, number: int
) -> None:
    shm_before = set(os.listdir("/dev/shm"))
    assert up.stderr is not None
    lines: list[str] = []
    while not lines or "Ctrl-C" not in lines[-1]:
        lines.append(up.stderr.readline())
        assert lines[-1], lines
    children = [
        int(pid) for pid in os.listdir("/proc") if pid.isdigit() and _parent(int(pid)) == up.pid
    ]
    assert len(children) == 3
    assert sum(bool(arenas_of([pid])) for pid in children) == 2
    assert list((tmp_path / "run").glob("*.sock"))
    started = time.monotonic()
    up.send_signal(number)
    up.wait(45)
    wait_until(lambda: not any(_is_alive(pid) for pid in children), "all children end")
    assert time.monotonic() - started < 45
    if number != signal.SIGKILL:
        assert up.returncode == 0
    assert set(os.listdir("/dev/shm")) <= shm_before
    assert not list((tmp_path / "run").glob("*.sock"))


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return -1


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_files_go_into_the_pool_and_come_back_by_command(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    with cluster.supervisor:
        cluster.start_conductor()
        cluster.start_node("n0")
        cluster.wait_joined(nodes=1)
        to = ("--conductor", cluster.conductor["wire"])
        source = tmp_path / "document"
        source.write_bytes(os.urandom(300_001))
        key = json.loads(run_kvpool("put", str(source), *to, "--json").stdout)["key"]
        again = json.loads(run_kvpool("put", str(source), *to, "--json").stdout)
        assert (again["key"], again["result"]["stored"]) == (key, 0)
        found = json.loads(run_kvpool("lookup", key, *to, "--json").stdout)
        assert found["found"] == found["blocks"] == 5
        assert run_kvpool("get", key, str(tmp_path / "copy"), *to).returncode == 0
        assert (tmp_path / "copy").read_bytes() == source.read_bytes()
        stats = json.loads(run_kvpool("stats", *to, "--json").stdout)
        assert stats["index_blocks"] == 5
        table = run_kvpool("stats", *to)
        assert "live" in table.stdout
        assert "dram" in table.stdout
        missing = run_kvpool("get", f"{'0' * 64}-70000", str(tmp_path / "none"), *to)
        assert missing.returncode == 1
        assert "0 of 2 blocks" in missing.stderr
        assert not (tmp_path / "none").exists()
        nonsense = run_kvpool("lookup", "nonsense", *to)
        assert (nonsense.returncode, "is not a key" in nonsense.stderr) == (1, True)
    refused = run_kvpool("stats", "--conductor", "127.0.0.1:9")
    assert refused.returncode == 1
    assert "127.0.0.1:9" in refused.stderr
    assert "Traceback" not in refused.stderr
