"""One-sided reads and writes over NIXL (UCX): RDMA if the hosts have it, otherwise CMA or TCP."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvpool.transports import ucx
from kvpool.transports.base import Pieces, Transport
from kvpool.transports.batches import GROUP_BYTES, PACK_BELOW_BYTES, GroupedTransfers
from kvpool.transports.copy import Sums, sum_runs
from kvpool.transports.nixl_thread import NixlThread
from kvpool.transports.staging import Buffer, Staging, unpack_and_sum
from kvpool.wire.messages import NodeDescriptor

PROBE_BYTES = 64


class NixlTransport(Transport):
    """Moves bytes with NIXL.

    Args:
        name: agent name, unique per process and start.
        loopback_only: keep UCX on the loopback interface.
        pack_below_bytes: runs that are shorter on average are packed; 0 packs nothing.

    Raises:
        NixlUnavailable: NIXL cannot be loaded here.
    """

    name = "nixl"
    may_write_late = True  # NIXL has no cancel

    def __init__(
        self,
        name: str,
        *,
        loopback_only: bool = True,
        pack_below_bytes: int = PACK_BELOW_BYTES,
    ) -> None:
        self._thread = NixlThread(name, loopback_only=loopback_only)
        self._groups = GroupedTransfers(self._thread, pack_below_bytes)

    @property
    def ucx(self) -> tuple[str, ...]:
        """The transports that UCX has in this process, as in `ucx.available`."""
        return self._thread.ucx

    @property
    def staging(self) -> Staging:
        """The buffers that short runs are packed in."""
        return self._groups.staging

    @property
    def quarantined_transfers(self) -> int:
        """Transfers past their deadline that have not ended yet."""
        return self._thread.quarantined_transfers

    def fabric(self, node: NodeDescriptor, local_host: str) -> str:
        return ucx.fabric(self.ucx, node.ucx, is_same_host=node.host == local_host)

    def can_reach(self, node: NodeDescriptor, local_host: str) -> bool:
        return self.name in node.transports and bool(node.nixl_metadata)

    def register(self, address: int, size_bytes: int, owner: Any) -> None:
        """Register memory that many transfers will use.

        `owner` is kept alive until `deregister`.
        """
        self._thread.register(address, size_bytes, owner)

    def deregister(self, address: int) -> None:
        """Undo `register`."""
        self._thread.deregister(address)

    def connect(self, node: NodeDescriptor, timeout_s: float) -> None:
        # UCX connects with the first transfer: read a few bytes and discard them.
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
                if len(sums) == count:  # it was read without a buffer
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
        self._thread.forget(node_id)

    def close(self) -> None:
        super().close()
        self._thread.close()
