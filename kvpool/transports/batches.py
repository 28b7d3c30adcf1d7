"""Transfers of many runs, cut into groups: several groups move at once, and short runs are packed.

A run costs about 2 µs over CMA and 6 µs over TCP, more than copying a few KiB. So short runs go
through a registered buffer (`staging`) and become a few long runs. Reads into memory that must not
be written late go through a buffer, too. The caller's thread packs and unpacks while other groups
are under way.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from itertools import chain, pairwise

import numpy as np

from kvpool.transports.base import Pieces
from kvpool.transports.nixl_thread import GRACE_S, NixlThread
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

# One group is summed or packed while the next is under way. Smaller groups spend more time on
# posting.
GROUP_BYTES = 8 << 20
AHEAD = 3  # groups under way at once
# Runs shorter than this on average are packed. Measured (benchmarks/descriptors.py), packed over
# direct: 16 and more at 512 B, 3 to 4 at 4 KiB, 2 to 3 at 16 KiB, 0.6 to 1.9 at 32 KiB; over TCP 9,
# 3, 1.2, 1.0.
PACK_BELOW_BYTES = 24 << 10


@dataclass(slots=True, eq=False)
class _Begun:
    """A group under way. `unpack_from` is the buffer that it must be unpacked from."""

    pieces: Pieces
    future: Future[None]
    unpack_from: Buffer | None = None


class GroupedTransfers:
    """Moves runs in groups over NIXL.

    Args:
        thread: carries out the transfers.
        pack_below_bytes: runs that are shorter on average are packed.
    """

    def __init__(self, thread: NixlThread, pack_below_bytes: int = PACK_BELOW_BYTES) -> None:
        self._thread = thread
        self._pack_below_bytes = pack_below_bytes
        self.staging = Staging(lambda buffer: thread.register(buffer.address, BUFFER_BYTES, buffer))

    def move(self, operation: str, node: NodeDescriptor, pieces: Pieces, timeout_s: float) -> None:
        """Move all runs. Raises as `Transport.read`."""
        # Groups fit a buffer; without a buffer, one transfer moves all runs.
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
        """Move groups in order, and yield each one when it has ended.

        A group in two kinds of memory yields twice.

        When the generator ends, for whatever reason, no transfer touches memory any more, except
        for the quarantined ones.

        Args:
            unpack_by: copies a group that was read into a buffer to its local addresses.
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
        """A buffer if the read needs one, or if packing pays and a buffer is free.

        Otherwise None.
        """
        if operation == "READ" and direct.is_kept:
            fits = direct.total_bytes <= BUFFER_BYTES
            return (self.staging.take() if fits else None) or SpareBuffer(direct.total_bytes)
        if not self._is_short(direct) or direct.total_bytes > BUFFER_BYTES:
            return None
        ends = direct.places[:-1, 1] + direct.lengths[:-1]
        joins = (ends == direct.places[1:, 1]) & (direct.places[:-1, 0] == direct.places[1:, 0])
        if 2 * np.count_nonzero(joins) < len(direct.lengths):
            return None  # scattered at the node, too: packing would leave as many runs
        return self.staging.take()

    def _begin(
        self, operation: str, node: NodeDescriptor, pieces: Pieces, deadline: float
    ) -> _Begun:
        direct = pieces.coalesced()
        buffer = self._buffer_for(operation, direct)
        if buffer is None:
            return _Begun(
                pieces,
                self._thread.enqueue(
                    lambda f: self._thread.post(operation, node, direct, deadline, f)
                ),
            )
        is_write = operation == "WRITE"
        is_kept = False
        try:
            if is_write:
                pack(pieces, buffer)
            future = self._through(operation, node, packed(pieces, buffer), buffer, deadline)
            is_kept = (
                not is_write
            )  # a read is unpacked later; a write needs the buffer for its transfer only
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
        """Begin a transfer that holds `buffer` until it moves no more bytes."""
        buffer.hold()

        def post(future: Future[None]) -> bool:
            return self._thread.post(operation, node, pieces, deadline, future, buffer.release)

        try:
            future = self._thread.enqueue(post)
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
        """Wait for the first group under way, and unpack it."""
        begun = under_way[0]
        self._thread.wait_for(begun.future, deadline)
        under_way.popleft()
        if begun.unpack_from is not None:
            try:
                unpack_by(begun.pieces, begun.unpack_from)
            finally:
                begun.unpack_from.release()
        return begun.pieces


def _runs_of_kind(node: NodeDescriptor, pieces: Pieces) -> list[Pieces]:
    """The pieces in order, cut where the kind of memory changes: a transfer has only one kind.

    Rows that share a checksum belong to one part, and so to one kind.
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
