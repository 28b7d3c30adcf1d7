"""Start and stop several kvpool processes on this machine, as `kvpool up` does."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvpool.errors import KvpoolError

STOP_TIMEOUT_S = 8.0
LOG_TAIL_LINES = 15


class ProcessFailed(KvpoolError):
    """A child process ended, or was not ready in time."""

    code = "process_failed"


@dataclass(slots=True)
class Member:
    """One child process; `facts` is its announcement when it was ready."""

    name: str
    process: subprocess.Popen[bytes]
    log_path: Path
    facts: dict[str, Any] = field(default_factory=dict)

    def log_tail(self) -> str:
        """The last lines of its log."""
        try:
            lines = self.log_path.read_text(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-LOG_TAIL_LINES:])


class Supervisor:
    """Starts `kvpool ...` processes and stops them all at the end. Use it as a context manager.

    Each child has its parent's pid in the environment and stops when the parent is gone, even by
    kill -9.

    Args:
        log_dir: directory of the logs, one file for each process.
        env: added to the environment of every process.
    """

    def __init__(self, log_dir: Path, env: dict[str, str] | None = None) -> None:
        log_dir.mkdir(parents=True, exist_ok=True)
        self.members: list[Member] = []
        self._log_dir = log_dir
        self._env = {**os.environ, **(env or {}), "KVPOOL_PARENT_PID": str(os.getpid())}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.stop()

    def launch(self, name: str, arguments: Sequence[str]) -> Member:
        """Start one process without waiting for it."""
        log_path = self._log_dir / f"{name}.log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                # -P: a workers.py or a tiers/ in the current folder must not hide kvpool's.
                [sys.executable, "-P", "-m", "kvpool", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._env,
                start_new_session=True,  # Ctrl-C reaches the parent only, which stops them in order
            )
        member = Member(name, process, log_path)
        self.members.append(member)
        return member

    def wait_ready(self, member: Member, timeout_s: float) -> dict[str, Any]:
        """Wait until a process is ready; returns its facts.

        Raises:
            ProcessFailed: it ended, or was not ready in time. The message has the end of its log.
        """
        assert member.process.stdout is not None
        deadline = time.monotonic() + timeout_s
        line = b""
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            readable, _, _ = select.select([member.process.stdout], [], [], max(0.0, left))
            if not readable:
                raise ProcessFailed(
                    f"{member.name} was not ready within {timeout_s:g} s\n{member.log_tail()}"
                )
            piece = os.read(member.process.stdout.fileno(), 65536)
            if not piece:
                code = member.process.wait()
                raise ProcessFailed(f"{member.name} ended with status {code}\n{member.log_tail()}")
            line += piece
        member.facts = json.loads(line)
        return member.facts

    def start(self, name: str, arguments: Sequence[str], timeout_s: float = 60.0) -> dict[str, Any]:
        """Start one process and wait until it is ready; returns its facts."""
        return self.wait_ready(self.launch(name, arguments), timeout_s)

    def check(self) -> None:
        """Check that all processes run.

        Raises:
            ProcessFailed: one has ended.
        """
        for member in self.members:
            code = member.process.poll()
            if code is not None:
                raise ProcessFailed(f"{member.name} ended with status {code}\n{member.log_tail()}")

    def stop(self) -> None:
        """Stop all processes, the last started first. Kill those that do not stop in time."""
        for member in reversed(self.members):
            if member.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    member.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for member in reversed(self.members):
            try:
                member.process.wait(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                member.process.kill()
                member.process.wait()
            if member.process.stdout is not None:
                member.process.stdout.close()
        self.members.clear()
