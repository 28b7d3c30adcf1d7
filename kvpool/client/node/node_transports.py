"""The transports between this process and one node, chosen on first use, and how fast they were."""

from __future__ import annotations

import asyncio
import functools

import numpy as np

from kvpool.blocks.resharding import TransferPlan
from kvpool.blocks.tier import Tier
from kvpool.client.node.rates import TransferRate
from kvpool.client.node.transfer_threads import load_transport
from kvpool.errors import TransferFailed, UnverifiableRead
from kvpool.transports import Transport, Transports
from kvpool.transports.copy import Int64Array
from kvpool.wire import messages as m


class NodeTransports:
    """One transport to a node's DRAM, and one to its HBM if it has any.

    Args:
        node: the node's descriptor; `NodeLink` replaces it by a newer one.
        transports: the transports of this process.
        host: label of this machine.
    """

    def __init__(self, node: m.NodeDescriptor, transports: Transports, host: str) -> None:
        self.node = node
        self.read_rate, self.write_rate = TransferRate(), TransferRate()
        self._transports = transports
        self._host = host
        self._hbm_arenas = [arena.arena_id for arena in node.arenas if arena.tier == Tier.HBM]

    @functools.cached_property
    def dram(self) -> Transport:
        """The transport to the node's DRAM.

        The first use chooses it and may load NIXL, so call it from a thread.

        Raises:
            NoTransport: no transport reaches the node.
        """
        return self._transports.choose(self.node, self._host)

    @functools.cached_property
    def hbm(self) -> Transport | None:
        """The transport to the node's HBM; None if there is none. The first use may load NIXL."""
        return self._transports.choose_for_hbm(self.node)

    @property
    def chosen(self) -> Transport | None:
        """The transport to the node's DRAM if it was chosen already."""
        chosen: Transport | None = self.__dict__.get("dram")
        return chosen

    @property
    def peer_rate(self) -> m.PeerRate:
        """Bytes moved to and from the node, how fast, and by which transport ("" before any)."""
        chosen = self.chosen
        return m.PeerRate(
            self.node.node_id,
            chosen.name if chosen is not None else "",
            chosen.fabric(self.node, self._host) if chosen is not None else "",
            self.read_rate.total_bytes,
            self.write_rate.total_bytes,
            self.read_rate.bytes_per_s,
            self.write_rate.bytes_per_s,
        )

    def to(self, places: Int64Array) -> Transport:
        """The transport that moves bytes to and from `places`.

        Raises:
            NoTransport: no transport reaches the node.
            TransferFailed: some places are in HBM, which this process cannot reach.
        """
        if not self._is_in_hbm(places):
            return self.dram
        if self.hbm is None:
            raise TransferFailed(
                f"HBM of node {self.node.node_id} cannot be reached", hint="it needs NIXL"
            )
        return self.hbm

    async def load(self, places: Int64Array, timeout_s: float) -> Transport:
        """`to`, in a thread if the transport is not loaded yet.

        Raises:
            NoTransport, TransferFailed: as `to`.
            DeadlineExceeded: the transport was not loaded in time.
        """
        if ("hbm" if self._is_in_hbm(places) else "dram") in self.__dict__:
            return self.to(places)
        return await load_transport(lambda: self.to(places), self.node.node_id, timeout_s)

    def is_mapped(self, tier: Tier) -> bool:
        """Whether granted blocks will be copied through shared memory.

        False while this is unknown.
        """
        chosen = self.chosen
        return tier == Tier.DRAM and chosen is not None and chosen.name == "shm"

    async def usable_tier(self, tier: Tier) -> Tier:
        """The tier to ask for if the caller wants `tier`: no HBM that this process cannot reach."""
        if tier != Tier.HBM or not self._hbm_arenas:
            return Tier.DRAM
        if "hbm" not in self.__dict__:
            await asyncio.to_thread(lambda: self.hbm)
        return tier if self.hbm is not None else Tier.DRAM

    async def check_verifiable(self, plan: TransferPlan, timeout_s: float) -> None:
        """Check that a read by `plan` can be compared with checksums.

        Raises:
            DeadlineExceeded: the transport was not loaded in time.
            UnverifiableRead: the read covers pieces of parts only, and the transport cannot sum
                whole parts at the node.
            NoTransport: no transport reaches the node.
        """
        if plan.is_whole:
            return
        chosen = self.chosen or await load_transport(
            lambda: self.dram, self.node.node_id, timeout_s
        )
        if not chosen.can_sum_in_place:
            raise UnverifiableRead(
                f"{chosen.name} reads pieces of parts from {self.node.node_id}, but checksums cover"
                " whole parts",
                hint="pass verify=False, or store with a tp_size that the reader's divides",
            )

    def _is_in_hbm(self, places: Int64Array) -> bool:
        return bool(self._hbm_arenas) and bool(np.isin(places[:, 0], self._hbm_arenas).any())
