"""What an eviction policy is: an order over the blocks of one cache, asked who goes next.

A policy decides the order alone. Whether a block may go at all (nobody reads it, no descendant needs it) is
its owner's to say, through `may_go`; so the same policies serve every tier of a node and, driven by
`BlockCache`, a replayed trace. No I/O, no clock, no randomness.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import ClassVar, Generic, Protocol, TypeVar


class Candidate(Protocol):
    """What a policy may know of a block that stands in the cache; hashed by identity."""

    @property
    def ident(self) -> Hashable:
        """Names the block also after it left and came back."""

    @property
    def last_use(self) -> int:
        """Tick of the last use, kept up by the owner: unique, larger is more recent."""

    @property
    def size_bytes(self) -> int:
        """Bytes that its eviction frees."""

    @property
    def cost(self) -> float:
        """What it would take to have the block again, in any unit of time."""


K = TypeVar("K", bound=Candidate)


def always(_: Candidate) -> bool:
    """Everything may go."""
    return True


class EvictionPolicy(ABC, Generic[K]):
    """The order in which blocks leave one cache; every call is O(log n) amortised.

    A block that may not go when its turn comes is set aside and costs nothing until it is offered again;
    it keeps its rank meanwhile. So the owner offers a block whenever it may have become free to go.

    Args:
        may_go: asked when a block's turn has come.
    """

    is_by_recency: ClassVar[bool] = False
    """The order is that of `last_use` and nothing else."""
    wants_uses: ClassVar[bool] = False
    """The owner must call `used`; where false it may save itself the call."""
    is_leaves_only: ClassVar[bool] = False
    """A cache of its own (`BlockCache`) keeps parents until their children are gone. A node always does,
    whatever the policy (invariant 6)."""

    @abstractmethod
    def __init__(self, may_go: Callable[[K], bool] = always) -> None: ...

    @abstractmethod
    def offer(self, key: K) -> None:
        """The block may go; the first offer is its arrival. Offering twice changes nothing."""

    def used(self, key: K) -> None:
        """The block was read; unknown ones are ignored."""

    @abstractmethod
    def discard(self, key: K) -> None:
        """The block left, for a reason that says nothing of its worth; unknown ones are ignored."""

    def evicted(self, key: K) -> None:
        """The block left to make room."""
        self.discard(key)

    @abstractmethod
    def victim(self) -> K | None:
        """The block to go next, None when none may. It stays until the owner says that it left."""

    @abstractmethod
    def __contains__(self, key: K) -> bool:
        """The block's turn will come without another offer."""
