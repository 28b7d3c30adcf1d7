"""The same-host path: map the node's arenas and copy.

A node hands out the file descriptors of its memory over a Unix socket that only its own user can open.
A mapping outlives a node's death (the kernel keeps the memory while it is mapped), so a copy under way
never faults.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import threading
import time
from dataclasses import dataclass

import msgspec
import numpy as np

from kvpool.errors import StaleEpoch, TransferFailed
from kvpool.transports.base import Pieces, Transport
from kvpool.transports.copying import Int64Array, Sums, copy, copy_and_sum, sum_runs
from kvpool.wire.messages import NodeDescriptor, Reply

ATTACH_TIMEOUT_S = 2.0
POPULATE_BYTES = 64 << 20  # at a time, so that unmapping never waits long
MADV_POPULATE_WRITE = 23
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
MAX_ARENAS = 64


class ArenaHandout(Reply, frozen=True):
    """What the node sends along with the file descriptors, in their order."""

    node_id: str
    epoch: int
    arena_ids: list[int]
    sizes: list[int]


@dataclass(slots=True)
class _Attached:
    epoch: int
    bases: dict[int, tuple[int, int]]  # arena id -> (address, size)
    maps: list[mmap.mmap]


class ShmTransport(Transport):
    """Copies through mapped shared memory."""

    name = "shm"
    quick_bytes = 512 << 10  # 40 us at 12 GB/s
    can_sum_in_place = True

    def __init__(self) -> None:
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
        remote = self._addresses(node, pieces.places, pieces.lengths)
        copy(pieces.local, remote, pieces.lengths, deadline)

    def write(self, node: NodeDescriptor, pieces: Pieces, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        remote = self._addresses(node, pieces.places, pieces.lengths)
        copy(remote, pieces.local, pieces.lengths, deadline)

    def read_and_sum(self, node: NodeDescriptor, pieces: Pieces, timeout_s: float) -> Sums:
        deadline = time.monotonic() + timeout_s
        remote = self._addresses(node, pieces.places, pieces.lengths)
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
        remote = self._addresses(node, pieces.places, pieces.lengths)
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
        return sum_runs(self._addresses(node, places, lengths), lengths)

    def _addresses(
        self, node: NodeDescriptor, places: Int64Array, lengths: Int64Array
    ) -> Int64Array:
        attached = self._attach(node)
        out = np.empty(len(lengths), dtype=np.int64)
        for arena_id in set(places[:, 0].tolist()):
            if int(arena_id) not in attached.bases:
                raise TransferFailed(f"node {node.node_id} has no arena {arena_id}")
            base, size = attached.bases[int(arena_id)]
            rows = places[:, 0] == arena_id
            offsets = places[rows, 1]
            if (offsets < 0).any() or (offsets + lengths[rows] > size).any():
                raise TransferFailed(f"a place lies outside arena {arena_id} of {node.node_id}")
            out[rows] = offsets + base
        return out

    def _attach(self, node: NodeDescriptor) -> _Attached:
        attached = self._attached.get(node.node_id)
        if attached is not None and attached.epoch == node.epoch:
            return attached
        with self._lock:
            attached = self._attached.get(node.node_id)
            if attached is None or attached.epoch != node.epoch:
                attached = self._attached[node.node_id] = _map_arenas(node)
                threading.Thread(
                    target=_populate, args=(attached,), name="kvpool-populate", daemon=True
                ).start()
            return attached

    def forget(self, node_id: str) -> None:
        with self._lock:
            self._attached.pop(node_id, None)  # unmapped when the last copy from it is over

    def close(self) -> None:
        super().close()
        with self._lock:
            self._attached.clear()


def _populate(attached: _Attached) -> None:
    """Enter the arenas' pages into our page table, beside the traffic.

    The node has touched them all, but each page costs this process a fault of its own at its first use:
    a put into fresh slots ran at a third of its speed for it.
    """
    for base, size in attached.bases.values():
        for at in range(0, size, POPULATE_BYTES):
            step = min(POPULATE_BYTES, size - at)
            if _madvise(base + at, step, MADV_POPULATE_WRITE) != 0:
                return  # an older kernel: pages come when they are used


def _map_arenas(node: NodeDescriptor) -> _Attached:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(ATTACH_TIMEOUT_S)
            link.connect(node.shm_path)
            data, fds, _, _ = socket.recv_fds(link, 65536, MAX_ARENAS)
    except OSError as error:
        raise TransferFailed(
            f"cannot map the memory of node {node.node_id}: {error}",
            hint="it runs as another user, or has just stopped",
        ) from error
    maps: list[mmap.mmap] = []
    try:
        handout = msgspec.msgpack.decode(data, type=ArenaHandout)
        if (handout.node_id, handout.epoch) != (node.node_id, node.epoch):
            raise StaleEpoch(f"node {node.node_id} has restarted since it was looked up")
        bases: dict[int, tuple[int, int]] = {}
        for arena_id, size, fd in zip(handout.arena_ids, handout.sizes, fds, strict=True):
            mapped = mmap.mmap(fd, size)
            maps.append(mapped)
            bases[arena_id] = (ctypes.addressof(ctypes.c_char.from_buffer(mapped)), size)
    except (msgspec.DecodeError, ValueError, OSError) as error:
        raise TransferFailed(f"node {node.node_id} sent no usable memory: {error}") from error
    finally:
        for fd in fds:
            os.close(fd)
    return _Attached(node.epoch, bases, maps)
