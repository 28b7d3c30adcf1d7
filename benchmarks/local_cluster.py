"""A cluster of one conductor, in memory, for benchmarks and tests."""

from __future__ import annotations

import time
from collections.abc import Callable

from conductor.cluster.cluster import Cluster
from conductor.cluster.members import Members
from conductor.cluster.pool_state import LocalState
from conductor.index.memory import MemoryIndex
from conductor.members.membership import MembershipConfig
from conductor.scheduling.scheduler import SchedulerConfig


def local_cluster(
    membership: MembershipConfig | None = None,
    clock: Callable[[], float] = time.monotonic,
    index: MemoryIndex | None = None,
) -> Cluster:
    """A cluster whose state is its own, so that `complete` runs what it is asked."""
    members = Members.none_yet(membership or MembershipConfig(), clock())
    state = LocalState(index or MemoryIndex())
    return Cluster("c", 1, members, state, SchedulerConfig(), clock=clock)
