"""Many runs as a few groups, some of them under way at once; scattered small ones packed on the way.

Each run of a transfer costs about 2 µs over CMA and 6 over TCP, more than copying a few KiB does: short runs go
through a registered buffer (`staging`) and few long ones. So do reads into memory that must not be written late. The thread of whoever calls packs and unpacks, beside
the transfers of other groups.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any, Protocol

import numpy as np

from kvpool.transports.base import Pieces
from kvpool.transports.staging import (
    BUFFER_BYTES,
    Buffer,
    SpareBuffer,
    Staging,
    pack,
    packed,
    unpack,
)
from kvpool.wire.messages import NodeDescriptor

# Of one group checksums are made, or bytes packed, while the next is under way; smaller ones cost more in posting.
GROUP_BYTES = 8 << 20
AHEAD = 3  # groups begun before the first of them is awaited
# Runs shorter than this on average are packed. Measured (benchmarks/descriptors.py), packed over direct: 16 and more
# at 512 B, 3 to 4 at 4 KiB, 2 to 3 at 16 KiB, 0.6 to 1.9 at 32 KiB; over TCP 9, 3, 1.2, 1.0.
PACK_BELOW_BYTES = 24 << 10
GRACE_S = 1.0  # beyond a transfer's deadline, for the transport's thread to notice it

Job = Callable[[Future[None]], bool]


class Post(Protocol):
    """Begins a transfer, in the transport's thread; True when it is over already.

    `on_end` is told when nothing is moved any more: be it soon, late, or never begun.
    """

    def __call__(
        self,
        operation: str,
        node: NodeDescriptor,
        pieces: Pieces,
        deadline: float,
        future: Future[None],
        on_end: Callable[[], None] | None = None,
    ) -> bool: ...


@dataclass(slots=True, eq=False)
class _Begun:
    """A group handed to the transport's thread; with a buffer, if it must be unpacked."""

    pieces: Pieces
    future: Future[None]
    unpack_from: Buffer | None = None


class GroupMover:
    """Moves runs in groups over one transport.

    Args:
        enqueue: hands a job to the transport's thread.
        post: what such a job does.
        wait_for: waits for a job until a deadline; raises what it raised, or DeadlineExceeded.
        register: makes memory known to the transport (address, size, owner).
        pack_below_bytes: runs that are shorter on average are packed.
    """

    def __init__(
        self,
        enqueue: Callable[[Job], Future[None]],
        post: Post,
        wait_for: Callable[[Future[None], float], None],
        register: Callable[[int, int, Any], None],
        pack_below_bytes: int = PACK_BELOW_BYTES,
    ) -> None:
        self._pack_below_bytes = pack_below_bytes
        self.staging = Staging(lambda buffer: register(buffer.address, BUFFER_BYTES, buffer))
        self._enqueue = enqueue
        self._post = post
        self._wait_for = wait_for

    def move(self, operation: str, node: NodeDescriptor, pieces: Pieces, timeout_s: float) -> None:
        """Move all runs; see `Transport.read` for what is raised."""
        # What goes through a buffer is cut into groups that fit one, the rest goes at once.
        is_staged = self._is_short(pieces) or (pieces.is_kept and operation == "READ")
        groups = pieces.groups(GROUP_BYTES) if is_staged else [pieces]
        for _ in self.each(operation, node, groups, timeout_s):
            pass

    def each(
        self,
        operation: str,
        node: NodeDescriptor,
        groups: Iterable[Pieces],
        timeout_s: float,
        unpack_by: Callable[[Pieces, Buffer], None] = unpack,
    ) -> Generator[Pieces, None, None]:
        """Move groups; yields each when it is over, in order, or its parts if they lie in unlike memory.

        Args:
            unpack_by: brings what was read through a buffer to where it belongs.

        When this is left, whatever the reason, no transfer touches memory any more. Those that outlived
        their deadline are the exception, as everywhere: they are in quarantine.
        """
        deadline = time.monotonic() + timeout_s
        under_way: deque[_Begun] = deque()
        try:
            for run in chain.from_iterable(_runs_of_kind(node, group) for group in groups):
                if len(run.lengths):
                    under_way.append(self._begin(operation, node, run, deadline))
                if len(under_way) == AHEAD:
                    yield self._end(under_way, deadline, unpack_by)
            while under_way:
                yield self._end(under_way, deadline, unpack_by)
        finally:
            for begun in under_way:
                if not begun.future.cancel():
                    left_s = max(0.0, deadline - time.monotonic())
                    wait([begun.future], timeout=left_s + GRACE_S)
                if begun.unpack_from is not None:
                    begun.unpack_from.release()

    # ------------------------------------------------------------ within

    def _is_short(self, pieces: Pieces) -> bool:
        count = len(pieces.lengths)
        return count > 1 and pieces.total_bytes < self._pack_below_bytes * count

    def _buffer_for(self, operation: str, direct: Pieces) -> Buffer | None:
        """A buffer, where it must be or where packing pays and one is free."""
        if operation == "READ" and direct.is_kept:
            fits = direct.total_bytes <= BUFFER_BYTES
            return (self.staging.take() if fits else None) or SpareBuffer(direct.total_bytes)
        if not self._is_short(direct) or direct.total_bytes > BUFFER_BYTES:
            return None
        ends = direct.places[:-1, 1] + direct.lengths[:-1]
        joins = (ends == direct.places[1:, 1]) & (direct.places[:-1, 0] == direct.places[1:, 0])
        if 2 * np.count_nonzero(joins) < len(direct.lengths):
            return None  # scattered at the node as well: as many runs as before
        return self.staging.take()

    def _begin(
        self, operation: str, node: NodeDescriptor, pieces: Pieces, deadline: float
    ) -> _Begun:
        direct = pieces.coalesced()
        buffer = self._buffer_for(operation, direct)
        if buffer is None:
            return _Begun(
                pieces,
                self._enqueue(lambda f: self._post(operation, node, direct, deadline, f)),
            )
        is_write = operation == "WRITE"
        is_kept = False
        try:
            if is_write:
                pack(pieces, buffer)
            future = self._through(operation, node, packed(pieces, buffer), buffer, deadline)
            is_kept = not is_write  # until it is unpacked; what is written only the transfer needs
        finally:
            if not is_kept:
                buffer.release()
        return _Begun(pieces, future, buffer if is_kept else None)

    def _through(
        self,
        operation: str,
        node: NodeDescriptor,
        pieces: Pieces,
        buffer: Buffer,
        deadline: float,
    ) -> Future[None]:
        """Hand over a transfer that holds `buffer` until it moves nothing any more."""
        buffer.hold()

        def post(future: Future[None]) -> bool:
            return self._post(operation, node, pieces, deadline, future, buffer.release)

        try:
            future = self._enqueue(post)
        except BaseException:
            buffer.release()
            raise
        future.add_done_callback(lambda done: buffer.release() if done.cancelled() else None)
        return future

    def _end(
        self,
        under_way: deque[_Begun],
        deadline: float,
        unpack_by: Callable[[Pieces, Buffer], None],
    ) -> Pieces:
        """Wait for the first group, and unpack it."""
        begun = under_way[0]
        self._wait_for(begun.future, deadline)
        under_way.popleft()
        if begun.unpack_from is not None:
            try:
                unpack_by(begun.pieces, begun.unpack_from)
            finally:
                begun.unpack_from.release()
        return begun.pieces


def _runs_of_kind(node: NodeDescriptor, pieces: Pieces) -> list[Pieces]:
    """The pieces in order, cut where the kind of memory at the node changes: no transfer is with both.

    Rows that share a checksum are of one part, and so of one kind.
    """
    kinds = {arena.arena_id: arena.kind for arena in node.arenas}
    if len(set(kinds.values())) < 2:
        return [pieces]
    is_vram = np.array([kinds.get(arena) == "vram" for arena in pieces.places[:, 0].tolist()])
    cuts = [0, *(np.flatnonzero(np.diff(is_vram)) + 1).tolist(), len(is_vram)]
    return [
        replace(
            pieces,
            local=pieces.local[a:b],
            places=pieces.places[a:b],
            lengths=pieces.lengths[a:b],
        )
        for a, b in pairwise(cuts)
    ]
