"""The one thread that uses a NIXL agent, with the agent's transfers, peers and registrations.

Callers hand over a job and wait for it. NIXL has neither a cancel nor time-outs: a transfer that
outlives its deadline is quarantined, with the memory that it may still touch, until it ends
(invariant 2, on the reader's side).
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Set
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvpool.errors import DeadlineExceeded, KvpoolError, TransferFailed
from kvpool.transports.base import Pieces
from kvpool.transports.nixl_agent import NixlAgent
from kvpool.wire.messages import NodeDescriptor

SPIN_S = 0.0005  # poll without sleeping for this long, then with pauses
PAUSE_S = 0.0001
RUN_TIMEOUT_S = 30.0  # of jobs that move no bytes
GRACE_S = 1.0  # beyond a transfer's deadline, for this thread to notice it

Job = Callable[[Future[None]], bool]  # returns False if `_poll` sets the future's result later


@dataclass(slots=True, eq=False)
class _Transfer:
    """A transfer under way, with what it may touch."""

    handle: Any
    registration: Any
    owner: Any  # kept alive until the transfer has ended
    node_id: str
    deadline: float
    future: Future[None]
    posted_at: float
    on_end: Callable[[], None] | None = None  # called once no more bytes move


@dataclass(slots=True, frozen=True)
class _Peer:
    """A node that the agent knows, and the arenas that it had when it was added."""

    epoch: int
    agent_name: str
    arena_ids: frozenset[int]


class NixlThread:
    """Runs jobs on the agent one after the other, and polls the transfers under way.

    Args:
        name: agent name, unique per process and start.
        loopback_only: keep UCX on the loopback interface.

    Raises:
        NixlUnavailable: NIXL cannot be loaded here.
    """

    def __init__(self, name: str, *, loopback_only: bool) -> None:
        self.ucx: tuple[str, ...] = ()  # as in `ucx.available`
        self._agent: NixlAgent | None = None
        self._jobs: queue.SimpleQueue[tuple[Job, Future[None]] | None] = queue.SimpleQueue()
        self._peers: dict[str, _Peer] = {}  # by node id
        self._registered: dict[int, tuple[int, Any, Any]] = {}  # address -> (size, handle, owner)
        self._active: list[_Transfer] = []
        self._quarantined: list[_Transfer] = []  # past their deadline, still under way
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="kvpool-nixl", daemon=True)
        self._thread.start()

        def start(_future: Future[None]) -> bool:
            self._agent = NixlAgent(name, loopback_only=loopback_only)
            self.ucx = self._agent.ucx
            return True

        try:
            self._run(start)
        except BaseException:
            self.close()
            raise

    @property
    def quarantined_transfers(self) -> int:
        """Transfers past their deadline that have not ended yet."""
        return len(self._quarantined)

    def close(self) -> None:
        """End the thread. Transfers under way fail; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
            self._thread.join(timeout=5)

    def enqueue(self, job: Job) -> Future[None]:
        """Hand a job to the thread.

        Raises:
            TransferFailed: the thread was closed.
        """
        if self._closed:
            raise TransferFailed("the NIXL transport is closed")
        future: Future[None] = Future()
        self._jobs.put((job, future))
        return future

    def wait_for(self, future: Future[None], deadline: float) -> None:
        """Wait for a job until `deadline` (monotonic seconds), and raise its error.

        Raises:
            DeadlineExceeded: the job did not begin in time, or did not end.
        """
        try:
            future.result(timeout=max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            if not future.cancel():
                # It has begun, so it ends by its own deadline: wait for its result.
                with contextlib.suppress(TimeoutError):
                    future.result(timeout=GRACE_S)
                    return
            raise DeadlineExceeded("NIXL's thread was busy until the deadline") from None

    def register(self, address: int, size_bytes: int, owner: Any) -> None:
        """Register memory that many transfers will use.

        `owner` is kept alive until `deregister`.
        """

        def register(_future: Future[None]) -> bool:
            assert self._agent is not None
            handle = self._agent.register(address, size_bytes)
            self._registered[address] = (size_bytes, handle, owner)
            return True

        self._run(register)

    def deregister(self, address: int) -> None:
        """Undo `register`."""

        def deregister(_future: Future[None]) -> bool:
            entry = self._registered.pop(address, None)
            if entry is not None and self._agent is not None:
                self._agent.deregister(entry[1])
            return True

        self._run(deregister)

    def forget(self, node_id: str) -> None:
        """Remove a node from the agent's peers. The next transfer adds it again."""
        self._run(lambda _future: self._remove_peer(node_id))

    def post(
        self,
        operation: str,
        node: NodeDescriptor,
        pieces: Pieces,
        deadline: float,
        future: Future[None],
        on_end: Callable[[], None] | None = None,
    ) -> bool:
        """Begin a transfer; call it from a job.

        Returns whether it is over already, as within one host.

        Args:
            operation: "READ" or "WRITE".
            on_end: called once no more bytes move: now, later, or because the transfer never began.
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

    # ------------------------------------------------------------ from here on: on the thread

    def _work(self) -> None:
        while True:
            # With transfers under way, take the waiting jobs and then poll; otherwise sleep until a
            # job comes.
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
            except Exception as error:  # noqa: BLE001 - native errors of many types
                future.set_exception(TransferFailed(f"NIXL: {type(error).__name__}: {error}"))
            else:
                if is_over:
                    future.set_result(None)

    def _poll(self) -> None:
        """Check every transfer under way once, so that no peer delays another peer's transfers."""
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
                    self._quarantined.append(transfer)
                    raise DeadlineExceeded(
                        f"a NIXL transfer with node {transfer.node_id} has not ended",
                        hint="its memory stays quarantined until it ends",
                    )
                self._finish(transfer)
                if state != "DONE":
                    raise TransferFailed(f"NIXL transfer with node {transfer.node_id}: {state}")
            except KvpoolError as error:
                transfer.future.set_exception(error)
            except Exception as error:  # noqa: BLE001 - native errors of many types
                self._break_off(transfer, error)
            else:
                transfer.future.set_result(None)
        if not is_fresh and self._jobs.empty():
            time.sleep(PAUSE_S)

    def _break_off(self, transfer: _Transfer, error: Exception) -> None:
        """Fail a transfer that a native error ended. The next transfer adds the peer again."""
        if transfer in self._active:
            self._active.remove(transfer)
        with contextlib.suppress(Exception):
            self._finish(transfer)
        self._remove_peer(transfer.node_id)
        transfer.future.set_exception(
            TransferFailed(
                f"NIXL transfer with node {transfer.node_id}: {type(error).__name__}: {error}"
            )
        )

    def _run(self, job: Job) -> None:
        self.wait_for(self.enqueue(job), time.monotonic() + RUN_TIMEOUT_S)

    @property
    def _raw(self) -> Any:
        if self._agent is None:
            raise TransferFailed("the NIXL transport is closed")
        return self._agent.raw

    def _unregistered(self, pieces: Pieces) -> tuple[int, int] | None:
        """The address range of the runs that lie in no registered memory; None if all do."""
        ends = pieces.local + pieces.lengths
        lacks = np.ones(len(ends), dtype=bool)
        for address, (size, _, _) in self._registered.items():
            lacks &= (pieces.local < address) | (ends > address + size)
            if not lacks.any():
                return None
        return int(pieces.local[lacks].min()), int(ends[lacks].max())

    def _add_peer(self, node: NodeDescriptor, arena_ids: Set[int]) -> str:
        """Make the agent know this epoch of a node and these arenas.

        Return the name of its agent.
        """
        known = self._peers.get(node.node_id)
        is_same_epoch = known is not None and known.epoch == node.epoch
        if known is not None and is_same_epoch and known.arena_ids >= arena_ids:
            return known.agent_name
        # Metadata of a known peer adds its new arenas. If nothing is under way, remove the peer
        # first: new arenas may have the addresses of arenas that are gone.
        if not is_same_epoch or not self._is_busy_with(node.node_id):
            self._remove_peer(node.node_id)
        name = self._raw.add_remote_agent(node.nixl_metadata)
        name = name.decode() if isinstance(name, bytes) else str(name)
        if name != node.nixl_agent:
            raise TransferFailed(f"metadata of {node.node_id} names agent {name!r}")
        arena_ids = frozenset(arena.arena_id for arena in node.arenas)
        self._peers[node.node_id] = _Peer(node.epoch, name, arena_ids)
        return name

    def _is_busy_with(self, node_id: str) -> bool:
        return any(transfer.node_id == node_id for transfer in (*self._active, *self._quarantined))

    def _remove_peer(self, node_id: str) -> bool:
        # Its quarantined transfers stay in quarantine: the node may only have been slow.
        known = self._peers.pop(node_id, None)
        if known is not None and self._agent is not None:
            with contextlib.suppress(Exception):
                self._agent.raw.remove_remote_agent(known.agent_name)
        return True

    def _finish(self, transfer: _Transfer) -> None:
        """Release the handle and registration of a transfer that has ended; call its `on_end`."""
        try:
            self._raw.release_xfer_handle(transfer.handle)
            if transfer.registration is not None and self._agent is not None:
                self._agent.deregister(transfer.registration)
        finally:
            on_end, transfer.on_end = transfer.on_end, None
            if on_end is not None:
                on_end()

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
            # Never begin late: the lease or reservation may have ended (invariants 2 and 3).
            raise DeadlineExceeded(f"no time left to begin a transfer with node {node.node_id}")
        kind, remote = _remote_rows(node, pieces)
        peer = self._add_peer(node, set(pieces.places[:, 0].tolist()))
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
                    self._finish(transfer)
            elif registration is not None:
                self._agent.deregister(registration)
            # A broken peer stays broken until it is added again.
            self._remove_peer(node.node_id)
            raise
        if state == "PROC":
            transfer.on_end = on_end
            self._active.append(transfer)
            return False
        self._finish(transfer)
        if state != "DONE":
            raise TransferFailed(f"NIXL {operation} with node {node.node_id}: {state}")
        return True

    def _sweep(self) -> None:
        """Finish the quarantined transfers that have ended."""
        for transfer in list(self._quarantined):
            try:
                state = self._raw.check_xfer_state(transfer.handle)
            except Exception:  # noqa: BLE001 - an error ends a transfer as success does
                state = "ERR"
            if state != "PROC":
                self._quarantined.remove(transfer)
                with contextlib.suppress(Exception):
                    self._finish(transfer)


def _remote_rows(node: NodeDescriptor, pieces: Pieces) -> tuple[str, np.ndarray]:
    """The kind of the node's memory that holds the pieces, and a descriptor row for each piece."""
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
