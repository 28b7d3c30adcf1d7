"""The same-host path: map the node's arenas and copy.

A node hands out the file descriptors of its memory over a Unix socket that only its own user can
open. The kernel keeps memory while it is mapped, so a copy never faults, even if the node dies. A
node's arenas change while it runs: a place in an unmapped arena makes the client map the node's
current arenas, and an arena that the node no longer hands out is unmapped after the last copy from
it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TypeGuard

import msgspec
import numpy as np

from kvpool.blocks.tier import Tier
from kvpool.errors import StaleEpoch, TransferFailed
from kvpool.transports.base import Pieces, Transport
from kvpool.transports.copy import Int64Array, Sums, copy, copy_and_sum, sum_runs
from kvpool.wire.messages import NodeDescriptor, Reply

ATTACH_TIMEOUT_S = 2.0
POPULATE_BYTES = 64 << 20  # at a time, so that unmapping never waits long
MADV_POPULATE_WRITE = 23
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
MAX_ARENAS = 64


class ArenaRequest(Reply, frozen=True):
    """The first message of a client."""

    token: str


class ArenaHandout(Reply, frozen=True):
    """The node's reply, with one file descriptor for each arena, in the same order."""

    node_id: str
    epoch: int
    arena_ids: list[int]
    sizes: list[int]


@dataclass(slots=True, frozen=True)
class _Mapped:
    map: mmap.mmap
    base: int
    size_bytes: int


@dataclass(slots=True, frozen=True)
class _Attached:
    """The mapped arenas of a node. A copy holds a reference, which keeps them mapped."""

    epoch: int
    arenas: dict[int, _Mapped]  # by arena id


class ShmTransport(Transport):
    """Copies through mapped shared memory."""

    name = "shm"
    quick_bytes = 512 << 10  # 40 us at 12 GB/s
    can_sum_in_place = True

    def __init__(self, token: str = "") -> None:
        self._token = token
        self._attached: dict[str, _Attached] = {}
        self._lock = threading.Lock()

    def can_reach(self, node: NodeDescriptor, local_host: str) -> bool:
        return (
            node.host == local_host
            and self.name in node.transports
            and bool(node.shm_path)
            and os.path.exists(node.shm_path)
        )

    def is_connected(self, node: NodeDescriptor) -> bool:
        attached = self._attached.get(node.node_id)
        return attached is not None and attached.epoch == node.epoch

    def connect(self, node: NodeDescriptor, timeout_s: float) -> None:
        self._attach(node)

    def read(self, node: NodeDescriptor, pieces: Pieces, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        _held, remote = self._addresses(node, pieces.places, pieces.lengths)
        copy(pieces.local, remote, pieces.lengths, deadline)

    def write(self, node: NodeDescriptor, pieces: Pieces, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        _held, remote = self._addresses(node, pieces.places, pieces.lengths)
        copy(remote, pieces.local, pieces.lengths, deadline)

    def read_and_sum(self, node: NodeDescriptor, pieces: Pieces, timeout_s: float) -> Sums:
        deadline = time.monotonic() + timeout_s
        _held, remote = self._addresses(node, pieces.places, pieces.lengths)
        return copy_and_sum(
            pieces.local,
            remote,
            pieces.lengths,
            deadline,
            sum_targets=True,
            per_sum=pieces.per_sum,
        )

    def write_and_sum(self, node: NodeDescriptor, pieces: Pieces, timeout_s: float) -> Sums:
        deadline = time.monotonic() + timeout_s
        _held, remote = self._addresses(node, pieces.places, pieces.lengths)
        return copy_and_sum(
            remote,
            pieces.local,
            pieces.lengths,
            deadline,
            sum_targets=False,
            per_sum=pieces.per_sum,
        )

    def sum_in_place(
        self, node: NodeDescriptor, places: Int64Array, lengths: Int64Array, timeout_s: float
    ) -> Sums:
        _held, remote = self._addresses(node, places, lengths)
        return sum_runs(remote, lengths)

    def _addresses(
        self, node: NodeDescriptor, places: Int64Array, lengths: Int64Array
    ) -> tuple[_Attached, Int64Array]:
        """Addresses of places in this process, valid while the caller holds the first result."""
        arena_ids = set(places[:, 0].tolist())
        if any(arena.tier == Tier.HBM and arena.arena_id in arena_ids for arena in node.arenas):
            raise TransferFailed(
                f"some places of node {node.node_id} lie in HBM, which cannot be mapped",
                hint="NIXL reads and writes it",
            )
        attached = self._attach(node, arena_ids)
        out = np.empty(len(lengths), dtype=np.int64)
        for arena_id in arena_ids:
            arena = attached.arenas.get(arena_id)
            if arena is None:
                raise TransferFailed(f"node {node.node_id} has no arena {arena_id}")
            rows = places[:, 0] == arena_id
            offsets = places[rows, 1]
            if (offsets < 0).any() or (offsets + lengths[rows] > arena.size_bytes).any():
                raise TransferFailed(f"a place lies outside arena {arena_id} of {node.node_id}")
            out[rows] = offsets + arena.base
        return attached, out

    def _attach(self, node: NodeDescriptor, arena_ids: Set[int] = frozenset()) -> _Attached:
        attached = self._attached.get(node.node_id)
        if _has(attached, node, arena_ids):
            return attached
        with self._lock:
            attached = self._attached.get(node.node_id)
            if not _has(attached, node, arena_ids):
                is_same_epoch = attached is not None and attached.epoch == node.epoch
                known = attached.arenas if attached is not None and is_same_epoch else {}
                attached = self._attached[node.node_id] = _map_arenas(node, known, self._token)
                fresh = [arena for key, arena in attached.arenas.items() if key not in known]
                threading.Thread(
                    target=_populate, args=(fresh,), name="kvpool-populate", daemon=True
                ).start()
            return attached

    def forget(self, node_id: str) -> None:
        with self._lock:
            self._attached.pop(node_id, None)  # the last copy from it unmaps it

    def close(self) -> None:
        super().close()
        with self._lock:
            self._attached.clear()


def _has(
    attached: _Attached | None, node: NodeDescriptor, arena_ids: Set[int]
) -> TypeGuard[_Attached]:
    return (
        attached is not None
        and attached.epoch == node.epoch
        and attached.arenas.keys() >= arena_ids
    )


def _populate(arenas: Sequence[_Mapped]) -> None:
    """Enter the arenas' pages into this process's page table, while transfers go on.

    The node has touched every page, but this process takes a fault at its own first use of each: a
    put into fresh slots ran at a third of its speed.
    """
    for arena in arenas:
        for at in range(0, arena.size_bytes, POPULATE_BYTES):
            step = min(POPULATE_BYTES, arena.size_bytes - at)
            if _madvise(arena.base + at, step, MADV_POPULATE_WRITE) != 0:
                return  # older kernels cannot: pages are mapped when they are used


def _map_arenas(node: NodeDescriptor, known: Mapping[int, _Mapped], token: str) -> _Attached:
    """Map the arenas that the node hands out now. Arenas in `known` keep their mapping."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(ATTACH_TIMEOUT_S)
            link.connect(node.shm_path)
            link.sendall(msgspec.msgpack.encode(ArenaRequest(token)))
            data, fds, _, _ = socket.recv_fds(link, 65536, MAX_ARENAS)
    except OSError as error:
        raise TransferFailed(
            f"cannot map the memory of node {node.node_id}: {error}",
            hint="the node runs as another user, or has just stopped",
        ) from error
    if not data:
        raise TransferFailed(f"node {node.node_id} hands out no memory to this client")
    try:
        handout = msgspec.msgpack.decode(data, type=ArenaHandout)
        if (handout.node_id, handout.epoch) != (node.node_id, node.epoch):
            raise StaleEpoch(f"node {node.node_id} has restarted since it was looked up")
        arenas: dict[int, _Mapped] = {}
        for arena_id, size, fd in zip(handout.arena_ids, handout.sizes, fds, strict=True):
            arenas[arena_id] = known.get(arena_id) or _map(fd, size)
    except (msgspec.DecodeError, ValueError, OSError) as error:
        raise TransferFailed(f"node {node.node_id} sent no usable memory: {error}") from error
    finally:
        for fd in fds:
            os.close(fd)
    return _Attached(node.epoch, arenas)


def _map(fd: int, size: int) -> _Mapped:
    mapped = mmap.mmap(fd, size)
    return _Mapped(mapped, ctypes.addressof(ctypes.c_char.from_buffer(mapped)), size)
