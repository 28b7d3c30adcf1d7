"""kvpool processes that skip the imports: forks of one template process that has done them.

Importing takes a node two to six seconds of processor time, a fork some milliseconds. A child is otherwise
a process as `kvpool.serving.supervisor` starts it: with its own session, environment, standard output and log.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvpool.serving.supervisor import Member, Supervisor
from tests.support.sizes import IS_FULL

# What each command imports: before the first fork at all, or before the first of this command.
PRELOADED = {
    "": (
        "kvpool.cli.app",
        "conductor.cli.serve",
        "conductor.server",
        "tiers.cli",
        "tiers.server",
        "workers.cli.worker",
        "workers.server",
    ),
    "node": ("torch",),  # by NIXL
    "worker": ("workers.engine.transformers_engine", "transformers.models.llama.modeling_llama"),
}
MESSAGE_BYTES = 1 << 17
POLL_S = 0.01


class ForkedProcess(subprocess.Popen[bytes]):
    """A child of the template. The template reaps it and tells its exit status."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.args = "kvpool"
        self.pid = pid
        self.returncode = None
        self.stdin = self.stdout = self.stderr = None
        self._server = server

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.status_of(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(POLL_S)
        return status


class ForkServer:
    """The template process of this test process."""

    def __init__(self) -> None:
        self._control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        self._statuses: dict[int, int] = {}
        with other:
            code = f"from tests.support import fork_server; fork_server.serve({other.fileno()})"
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                start_new_session=True,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                    "OPENBLAS_NUM_THREADS": "1",  # no threads in a process that forks
                },
            )

    def start(
        self,
        arguments: Sequence[str],
        env: dict[str, str],
        stdout: int,
        stderr: int,
        cwd: str = ".",
    ) -> ForkedProcess:
        """Start `kvpool` with these arguments and file descriptors."""
        request = {"arguments": list(arguments), "env": env, "cwd": os.path.abspath(cwd)}
        with self._lock:
            socket.send_fds(self._control, [json.dumps(request).encode()], [stdout, stderr])
            while "started" not in (reply := self._receive()):
                pass
        return ForkedProcess(self, reply["started"])

    def status_of(self, pid: int) -> int | None:
        """The exit status of a child as `subprocess` has it; None while it runs."""
        with self._lock:
            while select.select([self._control], [], [], 0)[0]:
                self._receive()
            return self._statuses.get(pid)

    def close(self) -> None:
        """End the template; children that still run notice it and stop."""
        self._control.close()
        self._process.wait()

    def _receive(self) -> dict[str, Any]:
        message = self._control.recv(MESSAGE_BYTES)
        if not message:
            raise RuntimeError("the template process died")
        reply: dict[str, Any] = json.loads(message)
        if "ended" in reply:
            self._statuses[reply["ended"]] = reply["status"]
        return reply


@functools.cache
def fork_server() -> ForkServer:
    """The one of this process; it ends with it."""
    server = ForkServer()
    atexit.register(server.close)
    return server


class ForkedSupervisor(Supervisor):
    """A supervisor whose members are forks of the template."""

    def launch(self, name: str, arguments: Sequence[str]) -> Member:
        log_path = self._log_dir / f"{name}.log"
        readable, writable = os.pipe()
        with log_path.open("wb") as log, os.fdopen(writable, "wb"):
            process = fork_server().start(arguments, self._env, writable, log.fileno())
        process.stdout = os.fdopen(readable, "rb", buffering=0)
        member = Member(name, process, log_path)
        self.members.append(member)
        return member


def run_kvpool(
    *arguments: str,
    env: dict[str, str] | None = None,
    cwd: Path | str = ".",
    timeout_s: float = 60.0,
) -> subprocess.CompletedProcess[str]:
    """Run a `kvpool` command to its end, as `subprocess.run` does; a fork, but in `make test-full`.

    Args:
        env: added to the environment.

    Raises:
        subprocess.TimeoutExpired: it did not end in time and was killed.
    """
    environment = {**os.environ, **(env or {})}
    if IS_FULL:
        command = [sys.executable, "-P", "-m", "kvpool", *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, env=environment, cwd=cwd, timeout=timeout_s
        )
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = fork_server().start(arguments, environment, out.fileno(), err.fileno(), str(cwd))
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(list(arguments), status, out.read(), err.read())


def serve(control_fd: int) -> None:
    """The template's life: fork a child for each request and report each that ended."""
    control = socket.socket(fileno=control_fd)
    to_import = dict(PRELOADED)
    _import(to_import.pop(""))
    waker, wakes = socket.socketpair()
    for end in (waker, wakes):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    signal.set_wakeup_fd(wakes.fileno())
    while True:
        readable, _, _ = select.select([control, waker], [], [])
        if waker in readable:
            waker.recv(1 << 12)
            _report_ended(control)
        if control not in readable:
            continue
        message, fds, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 2)
        if not message:
            os._exit(0)
        request = json.loads(message)
        for command in to_import.keys() & request["arguments"]:
            if "worker.engine=fake" not in request["arguments"]:
                _import(to_import.pop(command))
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for end in (control, waker, wakes):
                end.close()
            _become_kvpool(request, *fds)
        for fd in fds:
            os.close(fd)
        control.send(json.dumps({"started": pid}).encode())


def _import(modules: Sequence[str]) -> None:
    for module in modules:
        importlib.import_module(module)
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"importing {modules} started {threads - 1} threads"
    gc.collect()
    gc.freeze()  # children leave these pages as they are


def _report_ended(control: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            reply = {"ended": ended[0], "status": os.waitstatus_to_exitcode(ended[1])}
            control.send(json.dumps(reply).encode())


def _become_kvpool(request: dict[str, Any], stdout: int, stderr: int) -> None:
    """Run `kvpool` in this child as in a process of its own. Does not return.

    Taking the interpreter apart with all its modules would cost half a second.
    """
    from kvpool.cli.app import main

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.chdir(request["cwd"])
    for fd, number in ((stdout, 1), (stderr, 2)):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request["env"])
    if "KVPOOL_PARENT_PID" in os.environ:
        os.environ["KVPOOL_PARENT_PID"] = str(os.getppid())
    sys.argv = ["kvpool", *request["arguments"]]
    status: Any = 1
    try:
        main()
        status = 0
    except SystemExit as error:
        status = error.code or 0
    except BaseException:  # noqa: BLE001 - the child ends here, whatever happened
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(status if isinstance(status, int) else 1)
