"""Chooses the transport to each node: automatically, or the one that the configuration names."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Literal

import structlog

from kvpool.blocks.tier import Tier
from kvpool.errors import NoTransport
from kvpool.transports.base import Transport
from kvpool.transports.nixl import NixlTransport
from kvpool.transports.nixl_agent import NixlUnavailable
from kvpool.transports.shm import ShmTransport
from kvpool.transports.ucx import require_rdma
from kvpool.wire.messages import NodeDescriptor

log = structlog.get_logger(__name__)

TransportName = Literal["auto", "shm", "nixl"]


class Transports:
    """The transports of one process, created on first use.

    Args:
        agent_name: name of the NIXL agent, unique per process and start.
        forced: "auto" uses shared memory on the same host and NIXL elsewhere. Another name allows
            only that transport; a node that it cannot reach is an error.
        loopback_only: keep UCX on the loopback interface.
        is_rdma_required: NIXL may use RDMA, or stay within the host; a node that it reaches only
            over TCP is an error.
        token: sent to nodes on this host when their memory is mapped.
    """

    def __init__(
        self,
        agent_name: str,
        *,
        forced: TransportName = "auto",
        loopback_only: bool = True,
        token: str = "",
        is_rdma_required: bool = False,
    ) -> None:
        self._forced = forced
        self._is_rdma_required = is_rdma_required
        self._lock = threading.Lock()
        self._made: dict[str, Transport] = {}
        self._memory: dict[int, tuple[int, Any]] = {}  # address -> size in bytes, owner
        self._makers: dict[str, Callable[[], Transport]] = {
            "shm": lambda: ShmTransport(token),
            "nixl": lambda: NixlTransport(agent_name, loopback_only=loopback_only),
        }

    def get(self, name: str) -> Transport:
        """The transport called `name`.

        Raises:
            NixlUnavailable: `name` is "nixl", and NIXL cannot be loaded.
        """
        with self._lock:
            if name not in self._made:
                made = self._makers[name]()
                if isinstance(made, NixlTransport):
                    for address, (size_bytes, owner) in self._memory.items():
                        made.register(address, size_bytes, owner)
                self._made[name] = made
            return self._made[name]

    def register(self, address: int, size_bytes: int, owner: Any) -> None:
        """Register memory that many transfers will use. `owner` is kept alive until `deregister`.

        NIXL registers it once, now or when NIXL is loaded, instead of with every transfer.

        Raises:
            TransferFailed, DeadlineExceeded: NIXL is loaded and rejected the memory.
        """
        with self._lock:
            self._memory[address] = (size_bytes, owner)
            nixl = self._made.get("nixl")
        if isinstance(nixl, NixlTransport):
            nixl.register(address, size_bytes, owner)

    def deregister(self, address: int) -> None:
        """Undo `register`. Raises as `register`."""
        with self._lock:
            is_known = self._memory.pop(address, None) is not None
            nixl = self._made.get("nixl")
        if is_known and isinstance(nixl, NixlTransport):
            nixl.deregister(address)

    def ucx(self) -> tuple[str, ...]:
        """The transports that UCX has in this process; empty before NIXL is loaded."""
        nixl = self._made.get("nixl")
        return nixl.ucx if isinstance(nixl, NixlTransport) else ()

    def check_rdma(self, what: str) -> None:
        """Load NIXL and check that UCX has RDMA. Loading takes long, so call it from a thread.

        Args:
            what: names the setting's section for the error.

        Raises:
            RdmaRequired: UCX has no RDMA.
            NixlUnavailable: NIXL cannot be loaded.
        """
        self.get("nixl")
        require_rdma(self.ucx(), what)

    def choose(self, node: NodeDescriptor, local_host: str) -> Transport:
        """The best transport to `node` from the machine labelled `local_host`.

        Raises:
            NoTransport: no transport reaches it; the error gives the reason for each.
        """
        names = list(self._makers) if self._forced == "auto" else [self._forced]
        reasons = []
        hint = "see `kvpool doctor`"
        for name in names:
            try:
                transport = self.get(name)
            except NixlUnavailable as error:
                reasons.append(f"{name}: {error.message}")
                hint = error.hint or hint
                continue
            if transport.can_reach(node, local_host):
                fabric = transport.fabric(node, local_host)
                if not self._is_rdma_required or fabric in ("rdma", "host"):
                    return transport
                here, there = self.ucx(), node.ucx or ["unknown"]
                reasons.append(
                    f"{name}: RDMA is required and missing ({', '.join(here)} here;"
                    f" {', '.join(there)} there)"
                )
                continue
            offered = "not offered by the node" if name not in node.transports else "not reachable"
            reasons.append(f"{name}: {offered} from host {local_host!r}")
        raise NoTransport(
            f"no transport reaches node {node.node_id} on host {node.host!r}: {'; '.join(reasons)}",
            hint=hint,
        )

    def choose_for_hbm(self, node: NodeDescriptor) -> Transport | None:
        """NIXL, the only transport to a node's HBM.

        None if it is not allowed or does not reach the node.
        """
        if self._forced == "shm" or not any(arena.tier == Tier.HBM for arena in node.arenas):
            return None
        try:
            transport = self.get("nixl")
        except NixlUnavailable as error:
            log.warning("HBM cannot be reached", node=node.node_id, error=str(error))
            return None
        return transport if transport.can_reach(node, "") else None

    def forget(self, node_id: str) -> None:
        """Drop what is cached about a node."""
        with self._lock:
            transports = list(self._made.values())
        for transport in transports:
            transport.forget(node_id)

    def close(self) -> None:
        """Close all transports."""
        with self._lock:
            for transport in self._made.values():
                transport.close()
            self._made.clear()
