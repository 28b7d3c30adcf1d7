"""One-sided reads and writes over NIXL (UCX): RDMA where there is some, CMA or TCP elsewhere.

All use of the agent happens on one thread of its own; callers hand over a job and wait. NIXL has no
cancel and no time-outs: a transfer that outlives its deadline is kept, with the memory that it may still
touch, until it ends (invariant 2, on the reader's side).
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import structlog

from kvpool.errors import DeadlineExceeded, KvpoolError, TransferFailed
from kvpool.transports.base import Pieces, Transport
from kvpool.transports.nixl_agent import NixlAgent
from kvpool.wire.messages import NodeDescriptor

log = structlog.get_logger(__name__)

SPIN_S = 0.0005  # poll without sleeping for this long, then with pauses
PAUSE_S = 0.0001
PROBE_BYTES = 64


@dataclass(slots=True)
class _Stuck:
    """A transfer past its deadline, with what it may still touch."""

    handle: Any
    registration: Any
    owner: Any
    node_id: str


class NixlTransport(Transport):
    """Moves bytes with NIXL.

    Args:
        name: agent name, unique per process and start.
        loopback_only: keep UCX on the loopback interface.

    Raises:
        NixlUnavailable: NIXL cannot be loaded here.
    """

    name = "nixl"
    may_write_late = True  # there is no cancel

    def __init__(self, name: str, *, loopback_only: bool = True) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = (
            queue.SimpleQueue()
        )
        self._agent_name = name
        self._loopback_only = loopback_only
        self._agent: NixlAgent | None = None
        self._peers: dict[str, tuple[int, str]] = {}  # node id -> (epoch, agent name)
        self._registered: dict[int, tuple[int, Any, Any]] = {}  # address -> (size, handle, owner)
        self._stuck: list[_Stuck] = []
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="kvpool-nixl", daemon=True)
        self._thread.start()
        self._submit(self._start)

    def can_reach(self, node: NodeDescriptor, local_host: str) -> bool:
        return self.name in node.transports and bool(node.nixl_metadata)

    def register(self, address: int, size_bytes: int, owner: Any) -> None:
        """Register memory that will be used again and again; `owner` is kept alive meanwhile."""
        self._submit(lambda: self._register(address, size_bytes, owner))

    def deregister(self, address: int) -> None:
        """Undo `register`."""
        self._submit(lambda: self._deregister(address))

    def connect(self, node: NodeDescriptor, timeout_s: float) -> None:
        # UCX connects with the first transfer: read a few bytes that nobody looks at.
        scratch = np.empty(PROBE_BYTES, dtype=np.uint8)
        local = np.array([scratch.ctypes.data], dtype=np.int64)
        place = np.array([[node.arenas[0].arena_id, 0]], dtype=np.int64)
        self.read(node, Pieces(local, place, np.array([PROBE_BYTES]), scratch), timeout_s)

    def read(self, node: NodeDescriptor, pieces: Pieces, timeout_s: float) -> None:
        self._transfer("READ", node, pieces, timeout_s)

    def write(self, node: NodeDescriptor, pieces: Pieces, timeout_s: float) -> None:
        self._transfer("WRITE", node, pieces, timeout_s)

    def forget(self, node_id: str) -> None:
        self._submit(lambda: self._drop_peer(node_id))

    @property
    def quarantined_transfers(self) -> int:
        """Transfers past their deadline that have not ended yet."""
        return len(self._stuck)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
            self._thread.join(timeout=5)

    # ------------------------------------------------------------ from here on: the agent's thread

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                self._peers.clear()
                self._agent = None
                return
            function, future = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                function()
            except KvpoolError as error:
                future.set_exception(error)
            except Exception as error:  # noqa: BLE001 - native errors of many types; each is a failed transfer
                future.set_exception(TransferFailed(f"NIXL: {type(error).__name__}: {error}"))
            else:
                future.set_result(None)

    def _submit(self, function: Callable[[], None], timeout_s: float = 30.0) -> None:
        if self._closed:
            raise TransferFailed("the NIXL transport is closed")
        future: Future[None] = Future()
        self._jobs.put((function, future))
        try:
            future.result(timeout=timeout_s)
        except TimeoutError:
            future.cancel()
            raise DeadlineExceeded(f"NIXL's thread was busy for {timeout_s:g} s") from None

    def _start(self) -> None:
        self._agent = NixlAgent(self._agent_name, loopback_only=self._loopback_only)

    def _register(self, address: int, size_bytes: int, owner: Any) -> None:
        assert self._agent is not None
        self._registered[address] = (size_bytes, self._agent.register(address, size_bytes), owner)

    def _deregister(self, address: int) -> None:
        entry = self._registered.pop(address, None)
        if entry is not None and self._agent is not None:
            self._agent.deregister(entry[1])

    def _is_registered(self, low: int, high: int) -> bool:
        return any(a <= low and high <= a + size for a, (size, _, _) in self._registered.items())

    def _peer(self, node: NodeDescriptor) -> str:
        assert self._agent is not None
        known = self._peers.get(node.node_id)
        if known is not None and known[0] == node.epoch:
            return known[1]
        if known is not None:
            self._drop_peer(node.node_id)
        name = self._agent.raw.add_remote_agent(node.nixl_metadata)
        name = name.decode() if isinstance(name, bytes) else str(name)
        if name != node.nixl_agent:
            raise TransferFailed(f"metadata of {node.node_id} names agent {name!r}")
        self._peers[node.node_id] = (node.epoch, name)
        return name

    def _drop_peer(self, node_id: str) -> None:
        known = self._peers.pop(node_id, None)
        if known is not None and self._agent is not None:
            self._agent.raw.remove_remote_agent(known[1])
        # The peer is gone: what was in flight with it can touch nothing any more.
        for stuck in [s for s in self._stuck if s.node_id == node_id]:
            self._settle(stuck)

    def _settle(self, stuck: _Stuck) -> None:
        assert self._agent is not None
        self._stuck.remove(stuck)
        self._agent.raw.release_xfer_handle(stuck.handle)
        if stuck.registration is not None:
            self._agent.deregister(stuck.registration)

    def _transfer(
        self, operation: str, node: NodeDescriptor, pieces: Pieces, timeout_s: float
    ) -> None:
        if len(pieces.lengths) == 0:
            return
        deadline = time.monotonic() + timeout_s
        self._submit(
            lambda: self._move(operation, node, pieces.coalesced(), deadline), timeout_s + 1
        )

    def _move(self, operation: str, node: NodeDescriptor, pieces: Pieces, deadline: float) -> None:
        assert self._agent is not None
        raw = self._agent.raw
        self._sweep()
        peer = self._peer(node)
        remote = _remote_rows(node, pieces)
        low = int(pieces.local.min())
        high = int((pieces.local + pieces.lengths).max())
        registration = None
        if not self._is_registered(low, high):
            registration = self._agent.register(low, high - low)
        local = np.stack((pieces.local, pieces.lengths, np.zeros_like(pieces.local)), axis=1)
        handle = None
        is_stuck = False
        try:
            handle = raw.initialize_xfer(
                operation,
                raw.get_xfer_descs(local.astype(np.uint64), "DRAM"),
                raw.get_xfer_descs(remote.astype(np.uint64), "DRAM"),
                peer,
            )
            state = raw.transfer(handle)
            spin_until = time.monotonic() + SPIN_S
            while state == "PROC":
                now = time.monotonic()
                if now >= deadline:
                    is_stuck = True
                    self._stuck.append(_Stuck(handle, registration, pieces.owner, node.node_id))
                    raise DeadlineExceeded(
                        f"NIXL {operation} with node {node.node_id} is not over",
                        hint="its memory stays quarantined until it ends",
                    )
                if now > spin_until:
                    time.sleep(PAUSE_S)
                state = raw.check_xfer_state(handle)
            if state != "DONE":
                raise TransferFailed(f"NIXL {operation} with node {node.node_id}: {state}")
        except KvpoolError:
            raise
        except Exception as error:
            # A broken peer stays broken under this agent name: meet it afresh next time.
            if self._peers.pop(node.node_id, None) is not None:
                with contextlib.suppress(Exception):
                    raw.remove_remote_agent(peer)
            raise TransferFailed(
                f"NIXL {operation} with node {node.node_id}: {type(error).__name__}: {error}"
            ) from error
        finally:
            if not is_stuck:
                if handle is not None:
                    raw.release_xfer_handle(handle)
                if registration is not None:
                    self._agent.deregister(registration)

    def _sweep(self) -> None:
        """Settle the transfers past their deadline that have ended by now."""
        assert self._agent is not None
        for stuck in list(self._stuck):
            try:
                state = self._agent.raw.check_xfer_state(stuck.handle)
            except Exception:  # noqa: BLE001 - an error ends a transfer as well as success does
                state = "ERR"
            if state != "PROC":
                self._settle(stuck)


def _remote_rows(node: NodeDescriptor, pieces: Pieces) -> np.ndarray:
    rows = np.zeros((len(pieces.lengths), 3), dtype=np.int64)
    rows[:, 1] = pieces.lengths
    known = {arena.arena_id: arena for arena in node.arenas}
    for arena_id in np.unique(pieces.places[:, 0]):
        arena = known.get(int(arena_id))
        if arena is None:
            raise TransferFailed(f"node {node.node_id} has no arena {arena_id}")
        chosen = pieces.places[:, 0] == arena_id
        offsets = pieces.places[chosen, 1]
        if (offsets < 0).any() or (offsets + pieces.lengths[chosen] > arena.size_bytes).any():
            raise TransferFailed(f"a place lies outside arena {arena_id} of {node.node_id}")
        rows[chosen, 0] = offsets + arena.base
    return rows
