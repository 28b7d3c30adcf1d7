"""Which transport reaches which node: automatic, or forced by configuration."""

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
    """The transports of one process, made on first use.

    Args:
        agent_name: name of the NIXL agent, unique per process and start.
        forced: "auto" takes shared memory on the same host and NIXL elsewhere; another name allows that
            transport alone, and a node that it cannot reach is an error, never a silent fallback.
        loopback_only: keep UCX on the loopback interface.
        is_rdma_required: NIXL may go over RDMA or within the host; a node that it would reach over TCP is an error.
        token: shown to nodes that hand out their memory.
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
            NixlUnavailable: it is NIXL, and that cannot be loaded.
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
        """Memory that transfers will use again and again; `owner` is kept alive meanwhile.

        NIXL registers it once, now or when it is loaded, instead of with every transfer.

        Raises:
            TransferFailed, DeadlineExceeded: NIXL is loaded and does not take it.
        """
        with self._lock:
            self._memory[address] = (size_bytes, owner)
            nixl = self._made.get("nixl")
        if isinstance(nixl, NixlTransport):
            nixl.register(address, size_bytes, owner)

    def deregister(self, address: int) -> None:
        """Undo `register`. Raises as it."""
        with self._lock:
            is_known = self._memory.pop(address, None) is not None
            nixl = self._made.get("nixl")
        if is_known and isinstance(nixl, NixlTransport):
            nixl.deregister(address)

    def ucx(self) -> tuple[str, ...]:
        """What UCX has in this process; empty before NIXL was used."""
        nixl = self._made.get("nixl")
        return nixl.ucx if isinstance(nixl, NixlTransport) else ()

    def check_rdma(self, what: str) -> None:
        """Load NIXL, and see that UCX has RDMA; from a thread, as that takes long. `what` requires it.

        Raises:
            RdmaRequired: it has none. NixlUnavailable: NIXL cannot be loaded.
        """
        self.get("nixl")
        require_rdma(self.ucx(), what)

    def choose(self, node: NodeDescriptor, local_host: str) -> Transport:
        """The best transport to `node` from the machine labelled `local_host`.

        Raises:
            NoTransport: none reaches it, with the reason of each.
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
                here, there = self.ucx(), node.ucx or ["not told"]
                reasons.append(
                    f"{name}: no RDMA, which is required ({', '.join(here)} here;"
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
        """NIXL, which alone reaches a node's hbm; None where it may not be used, or does not reach."""
        if self._forced == "shm" or not any(arena.tier == Tier.HBM for arena in node.arenas):
            return None
        try:
            transport = self.get("nixl")
        except NixlUnavailable as error:
            log.warning("hbm cannot be reached", node=node.node_id, error=str(error))
            return None
        return transport if transport.can_reach(node, "") else None

    def forget(self, node_id: str) -> None:
        """Drop what is cached about a node."""
        with self._lock:
            transports = list(self._made.values())
        for transport in transports:
            transport.forget(node_id)

    def close(self) -> None:
        """Release everything."""
        with self._lock:
            for transport in self._made.values():
                transport.close()
            self._made.clear()
