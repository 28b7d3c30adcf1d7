"""The contract of a transport: it moves runs of bytes between local memory and a node's arenas.

Transfers are one-sided: the node's Python takes no part. The caller holds a lease to read, or a
reservation to write, at that node; transports do not check either.
"""

from __future__ import annotations

import abc
import functools
import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvpool.errors import UnverifiableRead
from kvpool.transports.copy import Int64Array, Sums, sum_runs
from kvpool.wire.messages import NodeDescriptor

THREADS = 8


@dataclass(slots=True, frozen=True)
class Pieces:
    """Runs to move: row i is `lengths[i]` bytes between `local[i]` and `places[i]`.

    Args:
        local: addresses in this process, shape [n].
        places: shape [n, 2], rows of (arena id, byte offset in the arena).
        lengths: bytes, shape [n].
        owner: the object that `local` points into; kept alive until the transfer has ended.
        per_sum: how many successive rows share one checksum; n is a multiple of it.
        is_kept: the caller uses `local` again even if a read of it failed, so nothing may be
            written there late. A transport that may write late reads into memory of its own first.
    """

    local: Int64Array
    places: Int64Array
    lengths: Int64Array
    owner: Any
    per_sum: int = 1
    is_kept: bool = False

    @property
    def total_bytes(self) -> int:
        """Bytes of all runs together."""
        return int(self.lengths.sum())

    def groups(self, group_bytes: int) -> list[Pieces]:
        """The same runs in order, in groups of about `group_bytes`.

        Runs that share a checksum stay together.
        """
        ends = np.cumsum(self.lengths)[self.per_sum - 1 :: self.per_sum]
        if not len(ends) or ends[-1] <= group_bytes:
            return [self]
        number = (ends - 1) // group_bytes  # of the group that the last byte of a run falls into
        last = (np.flatnonzero(np.diff(number, append=number[-1] + 1)) + 1) * self.per_sum
        return [
            replace(self, local=self.local[a:b], places=self.places[a:b], lengths=self.lengths[a:b])
            for a, b in itertools.pairwise([0, *last.tolist()])
        ]

    def coalesced(self) -> Pieces:
        """The same bytes in fewer runs: neighbours contiguous on both sides are joined.

        `per_sum` is lost.
        """
        if len(self.lengths) < 2:
            return self
        ends_local = self.local[:-1] + self.lengths[:-1]
        ends_remote = self.places[:-1, 1] + self.lengths[:-1]
        joins = (
            (ends_local == self.local[1:])
            & (ends_remote == self.places[1:, 1])
            & (self.places[:-1, 0] == self.places[1:, 0])
        )
        if not joins.any():
            return self
        starts = np.concatenate(([0], np.flatnonzero(~joins) + 1))
        return Pieces(
            self.local[starts],
            self.places[starts],
            np.add.reduceat(self.lengths, starts),
            self.owner,
            is_kept=self.is_kept,
        )


class Transport(abc.ABC):
    """Moves bytes between this process and nodes. Safe to call from several threads."""

    name: str
    quick_bytes: int = 0  # up to this size, a call takes less time than starting it in a thread
    may_write_late: bool = False  # memory may still be written after `read` raised DeadlineExceeded
    can_sum_in_place: bool = False  # whether `sum_in_place` works

    @abc.abstractmethod
    def can_reach(self, node: NodeDescriptor, local_host: str) -> bool:
        """Whether this transport reaches `node` from the machine labelled `local_host`."""

    def fabric(self, node: NodeDescriptor, local_host: str) -> str:
        """What carries the bytes: "rdma", "host" (within one host) or "tcp"; "" if unknown."""
        return "host"

    @abc.abstractmethod
    def read(self, node: NodeDescriptor, pieces: Pieces, timeout_s: float) -> None:
        """Copy from the node into local memory. Blocks the calling thread and releases the GIL.

        Raises:
            TransferFailed: the node is gone, or its memory cannot be reached.
            DeadlineExceeded: the transfer did not end in time. Unless `pieces.is_kept`, it may
                still write to local memory: the transport keeps `pieces.owner` alive until it ends,
                and the caller must not use that memory again.
        """

    @abc.abstractmethod
    def write(self, node: NodeDescriptor, pieces: Pieces, timeout_s: float) -> None:
        """Copy local memory into the node's arena. Raises as `read`."""

    def read_and_sum(self, node: NodeDescriptor, pieces: Pieces, timeout_s: float) -> Sums:
        """`read`, and the xxh3-64 of each `per_sum` pieces in local memory after the read."""
        self.read(node, pieces, timeout_s)
        return sum_runs(pieces.local, pieces.lengths, pieces.per_sum)

    def write_and_sum(self, node: NodeDescriptor, pieces: Pieces, timeout_s: float) -> Sums:
        """`write`, and the xxh3-64 of each `per_sum` pieces."""
        sums = sum_runs(pieces.local, pieces.lengths, pieces.per_sum)
        self.write(node, pieces, timeout_s)
        return sums

    def sum_in_place(
        self, node: NodeDescriptor, places: Int64Array, lengths: Int64Array, timeout_s: float
    ) -> Sums:
        """The xxh3-64 of each run in the node's memory. Moves nothing.

        Raises:
            UnverifiableRead: this transport cannot sum bytes at the node.
            TransferFailed: as `read`.
        """
        raise UnverifiableRead(f"{self.name} cannot sum bytes at the node")

    @functools.cached_property
    def threads(self) -> ThreadPoolExecutor:
        """The threads in which callers with an event loop run this transport.

        Each transport has its own, so that a slow peer of one transport delays no user of another.
        """
        return ThreadPoolExecutor(THREADS, thread_name_prefix=f"kvpool-{self.name}")

    def is_connected(self, node: NodeDescriptor) -> bool:
        """Whether the next transfer takes only the time of its bytes."""
        return False

    @abc.abstractmethod
    def connect(self, node: NodeDescriptor, timeout_s: float) -> None:
        """Connect to the node now, so that the first transfer is as fast as later ones.

        Raises as `read`.
        """

    def forget(self, node_id: str) -> None:  # noqa: B027 - most transports cache nothing
        """Drop what is cached about a node that restarted or is gone."""

    def close(self) -> None:
        """End the transport's threads."""
        self.threads.shutdown(wait=False, cancel_futures=True)
