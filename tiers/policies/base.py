"""The contract of eviction policies: an order over the blocks of one cache.

A policy decides the order only. Its owner decides through `may_go` whether a block may leave at all
(nobody reads it, no descendant needs it). So the same policies serve every tier of a node and,
through `BlockCache`, a replayed trace.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import ClassVar, Generic, Protocol, TypeVar


class Candidate(Protocol):
    """What a policy knows of a block in the cache; hashed by identity."""

    @property
    def ident(self) -> Hashable:
        """Identifies the block, also after it left and came back."""

    @property
    def last_use(self) -> int:
        """Tick of the last use, updated by the owner: unique, larger is more recent."""

    @property
    def size_bytes(self) -> int:
        """Bytes that its eviction frees."""

    @property
    def cost(self) -> float:
        """Time to compute the block again, in any unit."""


K = TypeVar("K", bound=Candidate)


def always(_: Candidate) -> bool:
    """Every block may leave."""
    return True


class EvictionPolicy(ABC, Generic[K]):
    """The order in which blocks leave one cache; every call is O(log n) amortised.

    A block that may not leave when its turn comes is set aside until it is offered again, and keeps
    its rank. So the owner offers a block whenever it may have become free to leave.

    Args:
        may_go: called when a block's turn has come; False sets the block aside.
    """

    is_by_recency: ClassVar[bool] = False
    """The order is that of `last_use`."""
    wants_uses: ClassVar[bool] = False
    """The owner must call `used`."""
    is_leaves_only: ClassVar[bool] = False
    """A `BlockCache` keeps parents until their children are gone. A node does so with every policy
    (invariant 6)."""

    @abstractmethod
    def __init__(self, may_go: Callable[[K], bool] = always) -> None: ...

    @abstractmethod
    def offer(self, key: K) -> None:
        """The block may leave; the first offer is its arrival. A second offer changes nothing."""

    def used(self, key: K) -> None:
        """The block was read. Unknown blocks are ignored."""

    @abstractmethod
    def discard(self, key: K) -> None:
        """The block left for another reason than eviction. Unknown blocks are ignored."""

    def evicted(self, key: K) -> None:
        """The block was evicted."""
        self.discard(key)

    @abstractmethod
    def victim(self) -> K | None:
        """The next block to evict; None if none may. It stays until `evicted` or `discard`."""

    @abstractmethod
    def __contains__(self, key: K) -> bool:
        """The block's turn comes without another offer."""
