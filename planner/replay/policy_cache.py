"""A cache over opaque block ids under one of the node's eviction policies: no bytes, leases or tiers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from kvpool.errors import InvalidArgument
from tiers.policies.base import EvictionPolicy
from tiers.policies.cost import prefill_cost
from tiers.policies.registry import create, policy_class

Id = TypeVar("Id", bound=Hashable)


class CachedBlock(Generic[Id]):
    """A block in the cache, as the policies see it (`Candidate`)."""

    __slots__ = ("cost", "ident", "last_use", "parent", "size_bytes")

    def __init__(
        self, ident: Id, parent: Id | None, size_bytes: int, cost: float, last_use: int
    ) -> None:
        self.ident = ident
        self.parent = parent
        self.size_bytes = size_bytes
        self.cost = cost
        self.last_use = last_use


class BlockCache(Generic[Id]):
    """A cache of bounded bytes under one policy.

    Args:
        policy: a name in `POLICIES`.
        capacity_bytes: the most that it holds.
        is_leaves_only: keep a parent while a child is in the cache, as a node does (invariant 6);
            None: as the policy itself says.
        make: makes the policy instead, e.g. one with arguments.
        on_evicted: called with each evicted block's id, parent, size and cost.

    Raises:
        ConfigError: no policy has that name.
        InvalidArgument: the capacity is not positive.
    """

    def __init__(
        self,
        policy: str,
        capacity_bytes: int,
        *,
        is_leaves_only: bool | None = None,
        make: Callable[[Callable[[CachedBlock[Id]], bool]], EvictionPolicy[CachedBlock[Id]]]
        | None = None,
        on_evicted: Callable[[Id, Id | None, int, float], object] | None = None,
    ) -> None:
        if capacity_bytes < 1:
            raise InvalidArgument(f"a cache of {capacity_bytes} bytes")
        self.policy: EvictionPolicy[CachedBlock[Id]] = (
            make(self._may_go) if make is not None else create(policy, self._may_go)
        )
        if is_leaves_only is None:
            is_leaves_only = policy_class(policy).is_leaves_only
        self.is_leaves_only = is_leaves_only
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.hits = self.evictions = 0
        self._blocks: dict[Id, CachedBlock[Id]] = {}
        self._children: Counter[Id] = Counter()
        self._shielded: set[Id] = set()  # which the current access needs
        self._parked: list[CachedBlock[Id]] = []
        self._tick = 0
        self._on_evicted = on_evicted

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, ident: Id) -> bool:
        return ident in self._blocks

    def access(
        self, ident: Id, parent: Id | None = None, size_bytes: int = 1, cost: float = 1.0
    ) -> bool:
        """Use one block, and add it if it is missing. Returns whether it was in the cache.

        A block is not added if it is too large, or if nothing may be evicted for it.
        """
        self._tick += 1
        self._shielded = {ident} if parent is None else {ident, parent}
        is_hit = self._use(ident, parent, size_bytes, cost, self._tick)
        self._end_access()
        return is_hit

    def access_chain(self, chain: Sequence[Id], size_bytes: int = 1, block_tokens: int = 64) -> int:
        """Use a prompt's blocks in order. Returns how many leading ones were in the cache (a prefix hit).

        As in a node, the head counts as the most recent, and no block of the chain is evicted for
        another.
        """
        self._tick += len(chain)
        self._shielded = set(chain)
        prefix = 0
        parent: Id | None = None
        for depth, ident in enumerate(chain):
            cost = prefill_cost(depth, block_tokens)
            if self._use(ident, parent, size_bytes, cost, self._tick - depth) and prefix == depth:
                prefix += 1
            parent = ident
        self._end_access()
        return prefix

    def touch_chain(self, chain: Sequence[Id], size_bytes: int = 1, block_tokens: int = 64) -> int:
        """The same for a cache without prompts: block after block, so the tail is the most recent.

        Any block may be evicted for any other: of a prompt larger than the cache only the tail
        remains.
        """
        prefix = 0
        for ident in chain:
            if ident not in self._blocks:
                break
            prefix += 1
        parent: Id | None = None
        for depth, ident in enumerate(chain):
            self._tick += 1
            self._use(ident, parent, size_bytes, prefill_cost(depth, block_tokens), self._tick)
            parent = ident
        return prefix

    def insert(self, ident: Id, parent: Id | None, size_bytes: int, cost: float) -> None:
        """Add a block that another tier evicted."""
        self._tick += 1
        self._shielded = set() if parent is None else {parent}
        self._use(ident, parent, size_bytes, cost, self._tick)
        self._end_access()

    def remove(self, ident: Id) -> bool:
        """Remove a block without evicting it. Returns False if it is not in the cache."""
        block = self._blocks.get(ident)
        if block is None:
            return False
        self.policy.discard(block)
        self._leave(block)
        return True

    # ------------------------------------------------------------ within

    def _use(self, ident: Id, parent: Id | None, size_bytes: int, cost: float, tick: int) -> bool:
        block = self._blocks.get(ident)
        if block is not None:
            self.hits += 1
            block.last_use = tick
            self.policy.used(block)
            return True
        while self.used_bytes + size_bytes > self.capacity_bytes:
            victim = self.policy.victim() if size_bytes <= self.capacity_bytes else None
            if victim is None:
                return False
            self.evictions += 1
            self.policy.evicted(victim)
            self._leave(victim)
            if self._on_evicted is not None:
                self._on_evicted(victim.ident, victim.parent, victim.size_bytes, victim.cost)
        block = self._blocks[ident] = CachedBlock(ident, parent, size_bytes, cost, tick)
        self.used_bytes += size_bytes
        if parent is not None:
            self._children[parent] += 1
        self.policy.offer(block)
        return False

    def _leave(self, block: CachedBlock[Id]) -> None:
        del self._blocks[block.ident]
        self.used_bytes -= block.size_bytes
        if block.parent is None:
            return
        self._children[block.parent] -= 1
        if not self._children[block.parent]:
            del self._children[block.parent]
            parent = self._blocks.get(block.parent)
            if parent is not None:
                self.policy.offer(parent)

    def _may_go(self, block: CachedBlock[Id]) -> bool:
        if block.ident in self._shielded:
            self._parked.append(block)
            return False
        return not (self.is_leaves_only and block.ident in self._children)

    def _end_access(self) -> None:
        self._shielded = set()
        for block in self._parked:
            if self._blocks.get(block.ident) is block:
                self.policy.offer(block)
        self._parked.clear()
