"""The contract of a transport: moving runs of bytes between local memory and a node's arenas.

One-sided: the node's Python takes no part. Whoever calls holds a lease (to read) or a reservation (to
write) at that node; transports know nothing of either.
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
    """Runs to be moved: row i is `lengths[i]` bytes between `local[i]` and place `places[i]`.

    Args:
        local: addresses in this process, shape [n].
        places: shape [n, 2], rows of (arena id, byte offset in the arena).
        lengths: bytes, shape [n].
        owner: kept alive until the transfer is known to be over; what `local` points into.
        per_sum: so many successive rows share one checksum; n is a multiple of it.
        is_kept: the caller uses `local` again even if a read of it failed, so that nothing may be written
            there late; a transport that might reads into memory of its own first.
    """

    local: Int64Array
    places: Int64Array
    lengths: Int64Array
    owner: Any
    per_sum: int = 1
    is_kept: bool = False

    @property
    def total_bytes(self) -> int:
        """Bytes over all runs."""
        return int(self.lengths.sum())

    def groups(self, group_bytes: int) -> list[Pieces]:
        """The same runs in order, cut between those with checksums of their own into groups of `group_bytes` or
        little more.
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
        """The same bytes with neighbours joined that are contiguous on both sides; no longer fit for sums."""
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
    quick_bytes: int = 0  # up to this many, a call takes less time than handing it to a thread
    may_write_late: bool = False  # memory may still be written after `read` raised DeadlineExceeded
    can_sum_in_place: bool = False  # see `sum_in_place`

    @abc.abstractmethod
    def can_reach(self, node: NodeDescriptor, local_host: str) -> bool:
        """Whether this transport applies to `node` seen from the machine labelled `local_host`."""

    def fabric(self, node: NodeDescriptor, local_host: str) -> str:
        """By what its bytes go: "rdma", "host" (within one), "tcp"; "" where that is not known."""
        return "host"

    @abc.abstractmethod
    def read(self, node: NodeDescriptor, pieces: Pieces, timeout_s: float) -> None:
        """Copy from the node into local memory; blocks the calling thread, releases the GIL.

        Raises:
            TransferFailed: the node is gone or the memory cannot be reached.
            DeadlineExceeded: not over in time. Unless `pieces.is_kept`, local memory may still be written
                later: `pieces.owner` is kept alive here until that is known to be over, and must not be
                reused by the caller.
        """

    @abc.abstractmethod
    def write(self, node: NodeDescriptor, pieces: Pieces, timeout_s: float) -> None:
        """Copy local memory into the node's arena; otherwise as `read`."""

    def read_and_sum(self, node: NodeDescriptor, pieces: Pieces, timeout_s: float) -> Sums:
        """`read`, and the xxh3-64 of each `per_sum` pieces as they now stand in local memory."""
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
        """The xxh3-64 of runs where they stand at the node, of which nothing is moved.

        Raises:
            UnverifiableRead: this transport cannot look there.
            TransferFailed: as `read`.
        """
        raise UnverifiableRead(f"{self.name} cannot look at bytes without moving them")

    @functools.cached_property
    def threads(self) -> ThreadPoolExecutor:
        """Where callers with an event loop run this transport; its own, so that a slow peer of one
        transport holds up nobody who uses another.
        """
        return ThreadPoolExecutor(THREADS, thread_name_prefix=f"kvpool-{self.name}")

    def is_connected(self, node: NodeDescriptor) -> bool:
        """Whether the next transfer pays for nothing but its bytes."""
        return False

    @abc.abstractmethod
    def connect(self, node: NodeDescriptor, timeout_s: float) -> None:
        """Meet the node now, so that the first transfer is as fast as the later ones. Raises as `read`."""

    def forget(self, node_id: str) -> None:  # noqa: B027 - nothing to forget is a fine default
        """Drop what is cached about a node (it restarted or is gone)."""

    def close(self) -> None:
        """Release everything."""
        self.threads.shutdown(wait=False, cancel_futures=True)
