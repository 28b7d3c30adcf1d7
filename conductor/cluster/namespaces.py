"""Namespaces, as clients and members bring them to a conductor."""

from __future__ import annotations

from collections import Counter

import structlog

from conductor.cluster.pool_state import PoolState
from conductor.members.namespaces import KnownNamespaces
from kvpool.blocks.hash_check import check_proof
from kvpool.blocks.layout import Namespace
from kvpool.errors import LayoutMismatch
from kvpool.security.authorization import unknown_namespace
from kvpool.wire import messages as m
from kvpool.wire.principal import ANYBODY, Principal

log = structlog.get_logger(__name__)


class NamespaceRegistry:
    """Registers namespaces at this conductor and, if it shares its state, at all others."""

    def __init__(self, known: KnownNamespaces, state: PoolState, counters: Counter[str]) -> None:
        self._known = known
        self._state = state
        self._counters = counters

    async def register(self, request: m.RegisterNamespace) -> m.NamespaceReply:
        """Make a namespace known.

        Raises:
            LayoutMismatch: its model, revision, tenant and salt are known with another layout.
            HashMismatch: the caller's hashes differ from this conductor's.
        """
        check_proof(request.namespace, request.proof)
        return m.NamespaceReply(await self.add(request.namespace))

    async def add(self, namespace: Namespace) -> bytes:
        """Make a namespace known, and return its id. Raises `LayoutMismatch`."""
        await self._state.register(namespace)
        return self._known.add(namespace)

    async def learn(self, node_id: str, namespace: Namespace) -> None:
        """Add a namespace that a node reports, unless its layout contradicts the known one.

        Any client may have registered it there, so the node's other blocks stay trusted.
        """
        try:
            await self.add(namespace)
        except LayoutMismatch as error:
            self._counters["layout_mismatches"] += 1
            log.error("a node has blocks of another layout", node=node_id, error=str(error))

    async def get(self, namespace_id: bytes) -> Namespace:
        """A namespace that this conductor or another one knows.

        Raises:
            UnknownNamespace: the namespace was not registered since the conductors started.
        """
        known = self._known.get(namespace_id)
        if known is None:
            known = await self._state.namespace(namespace_id)
            if known is None:
                raise unknown_namespace(namespace_id)
            self._known.add(known)
        return known

    def page(self, request: m.Namespaces, principal: Principal = ANYBODY) -> m.NamespacesReply:
        """A page of the namespaces that the principal may see."""
        tenant = None if principal.sees_all else principal.tenant
        return m.NamespacesReply(self._known.page(request.offset, request.limit, tenant))
