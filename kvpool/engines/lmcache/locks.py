"""The objects that LMCache has locked, and the leases behind the locks. No I/O, no clock.

LMCache locks single objects and unlocks them in any order, in other groups, twice, or never. A
lease covers a run of objects. So each lookup that found something adds a group; its lease ends when
all its objects are unlocked, or when the group is too old.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

L = TypeVar("L")


@dataclass(slots=True, eq=False)
class Group(Generic[L]):
    """The objects that one lease covers."""

    lease: L
    until: float  # monotonic seconds; the lease ends then, even if objects are still locked
    # locks by ident; empty when all are unlocked
    open: dict[bytes, int] = field(default_factory=dict)


class LockTable(Generic[L]):
    """Locks by the idents of objects. Not thread-safe."""

    def __init__(self) -> None:
        self._groups: dict[Group[L], None] = {}
        self._by_ident: dict[bytes, deque[Group[L]]] = {}

    def lock(self, idents: Sequence[bytes], lease: L, until: float) -> Group[L]:
        """Add one lock for each of `idents`, all covered by `lease`."""
        group = Group(lease, until)
        self._groups[group] = None
        for ident in idents:
            group.open[ident] = group.open.get(ident, 0) + 1
            self._by_ident.setdefault(ident, deque()).append(group)
        return group

    def unlock(self, idents: Sequence[bytes]) -> list[L]:
        """Remove one lock from each; skips unknown idents. Returns the leases no longer needed."""
        free: list[L] = []
        for ident in idents:
            groups = self._by_ident.get(ident)
            if not groups:
                continue
            # Locks on one object are interchangeable: remove the oldest, so that the oldest leases
            # end first.
            group = groups.popleft()
            if not groups:
                del self._by_ident[ident]
            group.open[ident] -= 1
            if not group.open[ident]:
                del group.open[ident]
            if not group.open:
                del self._groups[group]
                free.append(group.lease)
        return free

    def drop(self, group: Group[L]) -> None:
        """Forget a group whose lease ended. A second call does nothing."""
        if group not in self._groups:
            return
        del self._groups[group]
        for ident in group.open:
            groups = [g for g in self._by_ident[ident] if g is not group]
            if groups:
                self._by_ident[ident] = deque(groups)
            else:
                del self._by_ident[ident]

    def expire(self, now: float) -> list[L]:
        """Forget the groups whose time is up. Returns their leases."""
        old = [group for group in self._groups if group.until <= now]
        for group in old:
            self.drop(group)
        return [group.lease for group in old]

    def is_locked(self, ident: bytes) -> bool:
        """Whether the object has a lock."""
        return ident in self._by_ident

    def groups(self) -> list[Group[L]]:
        """All groups, oldest first."""
        return list(self._groups)

    def __len__(self) -> int:
        """The number of locked objects."""
        return len(self._by_ident)
