"""The members of the pool and the namespaces that they have brought, as one conductor knows them."""

from __future__ import annotations

from dataclasses import dataclass, field

from conductor.members.membership import Membership, MembershipConfig
from conductor.members.namespaces import KnownNamespaces
from kvpool.wire import messages as m

Nodes = Membership[m.NodeDescriptor, m.NodeStatsReply]
Workers = Membership[m.WorkerDescriptor, m.WorkerLoad]


@dataclass(slots=True, frozen=True)
class Members:
    """Nodes, workers and namespaces."""

    nodes: Nodes
    workers: Workers
    namespaces: KnownNamespaces = field(default_factory=KnownNamespaces)

    @classmethod
    def none_yet(cls, config: MembershipConfig, now: float) -> Members:
        """No members, at `now` in monotonic seconds."""
        return cls(Membership(config, now), Membership(config, now))
