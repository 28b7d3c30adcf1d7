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
from collections.abc import Callable, Iterator, Set
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import structlog

from kvpool.errors import DeadlineExceeded, KvpoolError, TransferFailed
from kvpool.transports import ucx
from kvpool.transports.base import Pieces, Transport
from kvpool.transports.batches import GRACE_S, GROUP_BYTES, PACK_BELOW_BYTES, GroupMover
from kvpool.transports.copy import Sums, sum_runs
from kvpool.transports.nixl_agent import NixlAgent
from kvpool.transports.staging import Buffer, Staging, unpack_and_sum
from kvpool.wire.messages import NodeDescriptor

log = structlog.get_logger(__name__)

SPIN_S = 0.0005  # poll without sleeping for this long, then with pauses
PAUSE_S = 0.0001
PROBE_BYTES = 64


@dataclass(slots=True, eq=False)
class _Transfer:
    """A transfer under way, with what it may touch."""

    handle: Any
    registration: Any
    owner: Any  # kept alive until the transfer is known to be over
    node_id: str
    deadline: float
    future: Future[None]
    posted_at: float
    on_end: Callable[[], None] | None = None  # told once nothing is moved any more


@dataclass(slots=True, frozen=True)
class _Peer:
    """A node that was met, and the arenas that it had then."""

    epoch: int
    agent_name: str
    arena_ids: frozenset[int]


Job = Callable[[Future[None]], bool]  # False: the future is settled later, by `_poll`


class NixlTransport(Transport):
    """Moves bytes with NIXL.

    Args:
        name: agent name, unique per process and start.
        loopback_only: keep UCX on the loopback interface.
        pack_below_bytes: see `groups`; 0 packs nothing.

    Raises:
        NixlUnavailable: NIXL cannot be loaded here.
    """

    name = "nixl"
    may_write_late = True  # there is no cancel

    def __init__(
        self,
        name: str,
        *,
        loopback_only: bool = True,
        pack_below_bytes: int = PACK_BELOW_BYTES,
    ) -> None:
        self._jobs: queue.SimpleQueue[tuple[Job, Future[None]] | None] = queue.SimpleQueue()
        self._agent_name = name
        self._loopback_only = loopback_only
        self._agent: NixlAgent | None = None
        self.ucx: tuple[str, ...] = ()  # see `ucx.available`
        self._peers: dict[str, _Peer] = {}  # by node id
        self._registered: dict[int, tuple[int, Any, Any]] = {}  # address -> (size, handle, owner)
        self._active: list[_Transfer] = []
        self._stuck: list[_Transfer] = []  # past their deadline, not over
        self._groups = GroupMover(
            self._enqueue, self._post, self._await, self.register, pack_below_bytes
        )
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="kvpool-nixl", daemon=True)
        self._thread.start()
        self._submit(self._start)

    def fabric(self, node: NodeDescriptor, local_host: str) -> str:
        return ucx.fabric(self.ucx, node.ucx, is_same_host=node.host == local_host)

    def can_reach(self, node: NodeDescriptor, local_host: str) -> bool:
        return self.name in node.transports and bool(node.nixl_metadata)

    def register(self, address: int, size_bytes: int, owner: Any) -> None:
        """Register memory that will be used again and again; `owner` is kept alive meanwhile."""
        self._submit(lambda _future: self._register(address, size_bytes, owner))

    def deregister(self, address: int) -> None:
        """Undo `register`."""
        self._submit(lambda _future: self._deregister(address))

    def connect(self, node: NodeDescriptor, timeout_s: float) -> None:
        # UCX connects with the first transfer: read a few bytes that nobody looks at.
        scratch = np.empty(PROBE_BYTES, dtype=np.uint8)
        local = np.array([scratch.ctypes.data], dtype=np.int64)
        place = np.array([[node.arenas[0].arena_id, 0]], dtype=np.int64)
        self.read(node, Pieces(local, place, np.array([PROBE_BYTES]), scratch), timeout_s)

    def read(self, node: NodeDescriptor, pieces: Pieces, timeout_s: float) -> None:
        self._groups.move("READ", node, pieces, timeout_s)

    def write(self, node: NodeDescriptor, pieces: Pieces, timeout_s: float) -> None:
        self._groups.move("WRITE", node, pieces, timeout_s)

    def read_and_sum(self, node: NodeDescriptor, pieces: Pieces, timeout_s: float) -> Sums:
        groups = pieces.groups(GROUP_BYTES)
        sums: list[Sums] = []

        def unpack(group: Pieces, buffer: Buffer) -> None:
            sums.append(unpack_and_sum(group, buffer))

        moving = self._groups.each("READ", node, groups, timeout_s, unpack)
        with contextlib.closing(moving) as moved:
            for count, group in enumerate(moved):
                if len(sums) == count:  # it went straight to its place
                    sums.append(sum_runs(group.local, group.lengths, group.per_sum))
        return np.concatenate(sums)

    def write_and_sum(self, node: NodeDescriptor, pieces: Pieces, timeout_s: float) -> Sums:
        sums: list[Sums] = []

        def summed() -> Iterator[Pieces]:
            for group in pieces.groups(GROUP_BYTES):
                sums.append(sum_runs(group.local, group.lengths, group.per_sum))
                yield group

        for _ in self._groups.each("WRITE", node, summed(), timeout_s):
            pass
        return np.concatenate(sums)

    def forget(self, node_id: str) -> None:
        self._submit(lambda _future: self._unmeet(node_id))

    @property
    def staging(self) -> Staging:
        """The buffers that short runs are packed in."""
        return self._groups.staging

    @property
    def quarantined_transfers(self) -> int:
        """Transfers past their deadline that have not ended yet."""
        return len(self._stuck)

    def close(self) -> None:
        super().close()
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
            self._thread.join(timeout=5)

    # ------------------------------------------------------------ from here on: the agent's thread

    def _work(self) -> None:
        while True:
            # With transfers under way: take what has been handed in, then look after them.
            try:
                job = self._jobs.get(block=not self._active)
            except queue.Empty:
                self._poll()
                continue
            if job is None:
                for transfer in self._active:
                    transfer.future.set_exception(TransferFailed("the NIXL transport is closed"))
                self._peers.clear()
                self._agent = None
                return
            function, future = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                is_over = function(future)
            except KvpoolError as error:
                future.set_exception(error)
            except Exception as error:  # noqa: BLE001 - native errors of many types; each is a failed transfer
                future.set_exception(TransferFailed(f"NIXL: {type(error).__name__}: {error}"))
            else:
                if is_over:
                    future.set_result(None)

    def _poll(self) -> None:
        """One look at every transfer under way; a slow peer holds up nobody else's."""
        now = time.monotonic()
        is_fresh = False
        for transfer in list(self._active):
            is_fresh = is_fresh or now - transfer.posted_at < SPIN_S
            try:
                state = self._raw.check_xfer_state(transfer.handle)
                if state == "PROC" and now < transfer.deadline:
                    continue
                self._active.remove(transfer)
                if state == "PROC":
                    self._stuck.append(transfer)
                    raise DeadlineExceeded(
                        f"a NIXL transfer with node {transfer.node_id} is not over",
                        hint="its memory stays quarantined until it ends",
                    )
                self._settle(transfer)
                if state != "DONE":
                    raise TransferFailed(f"NIXL transfer with node {transfer.node_id}: {state}")
            except KvpoolError as error:
                transfer.future.set_exception(error)
            except Exception as error:  # noqa: BLE001 - native errors of many types
                self._broken(transfer, error)
            else:
                transfer.future.set_result(None)
        if not is_fresh and self._jobs.empty():
            time.sleep(PAUSE_S)

    def _broken(self, transfer: _Transfer, error: Exception) -> None:
        """A native error ended the transfer; the peer is met afresh next time."""
        if transfer in self._active:
            self._active.remove(transfer)
        with contextlib.suppress(Exception):
            self._settle(transfer)
        self._unmeet(transfer.node_id)
        transfer.future.set_exception(
            TransferFailed(
                f"NIXL transfer with node {transfer.node_id}: {type(error).__name__}: {error}"
            )
        )

    def _submit(self, function: Job, timeout_s: float = 30.0) -> None:
        self._await(self._enqueue(function), time.monotonic() + timeout_s)

    def _enqueue(self, function: Job) -> Future[None]:
        if self._closed:
            raise TransferFailed("the NIXL transport is closed")
        future: Future[None] = Future()
        self._jobs.put((function, future))
        return future

    def _await(self, future: Future[None], deadline: float) -> None:
        try:
            future.result(timeout=max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            if not future.cancel():
                # Begun, and so bounded by its own deadline: wait for what became of it.
                with contextlib.suppress(TimeoutError):
                    future.result(timeout=GRACE_S)
                    return
            raise DeadlineExceeded("NIXL's thread was busy until the deadline") from None

    @property
    def _raw(self) -> Any:
        if self._agent is None:
            raise TransferFailed("the NIXL transport is closed")
        return self._agent.raw

    def _start(self, _future: Future[None]) -> bool:
        self._agent = NixlAgent(self._agent_name, loopback_only=self._loopback_only)
        self.ucx = self._agent.ucx
        return True

    def _register(self, address: int, size_bytes: int, owner: Any) -> bool:
        assert self._agent is not None
        self._registered[address] = (size_bytes, self._agent.register(address, size_bytes), owner)
        return True

    def _deregister(self, address: int) -> bool:
        entry = self._registered.pop(address, None)
        if entry is not None and self._agent is not None:
            self._agent.deregister(entry[1])
        return True

    def _unregistered(self, pieces: Pieces) -> tuple[int, int] | None:
        """The range of those runs that no registered memory holds whole; None if there are none."""
        ends = pieces.local + pieces.lengths
        lacks = np.ones(len(ends), dtype=bool)
        for address, (size, _, _) in self._registered.items():
            lacks &= (pieces.local < address) | (ends > address + size)
            if not lacks.any():
                return None
        return int(pieces.local[lacks].min()), int(ends[lacks].max())

    def _meet(self, node: NodeDescriptor, arena_ids: Set[int]) -> str:
        """The agent name of a node's present life; an earlier life is removed first."""
        known = self._peers.get(node.node_id)
        is_same_life = known is not None and known.epoch == node.epoch
        if known is not None and is_same_life and known.arena_ids >= arena_ids:
            return known.agent_name
        # New arenas: what is met already learns of them. Where nothing is under way it is met afresh, so that
        # arenas that are gone are forgotten, whose addresses may be those of the new ones.
        if not is_same_life or not self._is_busy_with(node.node_id):
            self._unmeet(node.node_id)
        name = self._raw.add_remote_agent(node.nixl_metadata)
        name = name.decode() if isinstance(name, bytes) else str(name)
        if name != node.nixl_agent:
            raise TransferFailed(f"metadata of {node.node_id} names agent {name!r}")
        arena_ids = frozenset(arena.arena_id for arena in node.arenas)
        self._peers[node.node_id] = _Peer(node.epoch, name, arena_ids)
        return name

    def _is_busy_with(self, node_id: str) -> bool:
        return any(transfer.node_id == node_id for transfer in (*self._active, *self._stuck))

    def _unmeet(self, node_id: str) -> bool:
        # Transfers under way with it stay in quarantine: it may only have been slow.
        known = self._peers.pop(node_id, None)
        if known is not None and self._agent is not None:
            with contextlib.suppress(Exception):
                self._agent.raw.remove_remote_agent(known.agent_name)
        return True

    def _settle(self, transfer: _Transfer) -> None:
        """Release what a transfer that has ended still holds."""
        try:
            self._raw.release_xfer_handle(transfer.handle)
            if transfer.registration is not None and self._agent is not None:
                self._agent.deregister(transfer.registration)
        finally:
            on_end, transfer.on_end = transfer.on_end, None
            if on_end is not None:
                on_end()

    def _post(
        self,
        operation: str,
        node: NodeDescriptor,
        pieces: Pieces,
        deadline: float,
        future: Future[None],
        on_end: Callable[[], None] | None = None,
    ) -> bool:
        """Begin a transfer; True when it is over already, as between processes of one host.

        `on_end` is told when nothing is moved any more: be it soon, late, or never begun.
        """
        try:
            is_over = self._try_post(operation, node, pieces, deadline, future, on_end)
        except Exception:
            if on_end is not None:
                on_end()
            raise
        if is_over and on_end is not None:
            on_end()
        return is_over

    def _try_post(
        self,
        operation: str,
        node: NodeDescriptor,
        pieces: Pieces,
        deadline: float,
        future: Future[None],
        on_end: Callable[[], None] | None,
    ) -> bool:
        assert self._agent is not None
        raw = self._raw
        self._sweep()
        if time.monotonic() >= deadline:
            # Never begin late: the lease or reservation behind it may be over (invariants 2 and 3).
            raise DeadlineExceeded(f"no time left to begin a transfer with node {node.node_id}")
        kind, remote = _remote_rows(node, pieces)
        peer = self._meet(node, set(pieces.places[:, 0].tolist()))
        registration = None
        lacking = self._unregistered(pieces)
        if lacking is not None:
            registration = self._agent.register(lacking[0], lacking[1] - lacking[0])
        local = np.stack((pieces.local, pieces.lengths, np.zeros_like(pieces.local)), axis=1)
        transfer = None
        try:
            handle = raw.initialize_xfer(
                operation,
                raw.get_xfer_descs(local.astype(np.uint64), "DRAM"),
                raw.get_xfer_descs(remote.astype(np.uint64), kind.upper()),
                peer,
            )
            transfer = _Transfer(
                handle, registration, pieces.owner, node.node_id, deadline, future, time.monotonic()
            )
            state = raw.transfer(handle)
        except Exception:
            if transfer is not None:
                with contextlib.suppress(Exception):
                    self._settle(transfer)
            elif registration is not None:
                self._agent.deregister(registration)
            # A broken peer stays broken under this agent name: meet it afresh next time.
            self._unmeet(node.node_id)
            raise
        if state == "PROC":
            transfer.on_end = on_end
            self._active.append(transfer)
            return False
        self._settle(transfer)
        if state != "DONE":
            raise TransferFailed(f"NIXL {operation} with node {node.node_id}: {state}")
        return True

    def _sweep(self) -> None:
        """Settle the transfers past their deadline that have ended by now."""
        for transfer in list(self._stuck):
            try:
                state = self._raw.check_xfer_state(transfer.handle)
            except Exception:  # noqa: BLE001 - an error ends a transfer as well as success does
                state = "ERR"
            if state != "PROC":
                self._stuck.remove(transfer)
                with contextlib.suppress(Exception):
                    self._settle(transfer)


def _remote_rows(node: NodeDescriptor, pieces: Pieces) -> tuple[str, np.ndarray]:
    """The kind of memory that the pieces lie in at the node, and a descriptor for each."""
    kind = "dram"
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
        rows[chosen, 2] = arena.device_id
        kind = arena.kind
    return kind, rows
