"""Which objects LMCache has locked, and the leases behind the locks. Keeps the books only: no I/O, no clock.

LMCache locks object by object and unlocks in any order, in other groupings, twice, or never. A lease covers a
run. So each lookup that found something leaves a group here: its lease is let go when every object of it was
unlocked, or when it is too old.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

L = TypeVar("L")


@dataclass(slots=True, eq=False)
class Group(Generic[L]):
    """What one lease covers."""

    lease: L
    until: float  # monotonic seconds; after it the lease goes whoever still counts on it
    open: dict[bytes, int] = field(default_factory=dict)  # locks by ident; empty: all unlocked


class LockTable(Generic[L]):
    """Locks by the idents of objects. Not thread-safe."""

    def __init__(self) -> None:
        self._groups: dict[Group[L], None] = {}
        self._by_ident: dict[bytes, deque[Group[L]]] = {}

    def lock(self, idents: Sequence[bytes], lease: L, until: float) -> Group[L]:
        """One lock for each of `idents`, all of them held by `lease`."""
        group = Group(lease, until)
        self._groups[group] = None
        for ident in idents:
            group.open[ident] = group.open.get(ident, 0) + 1
            self._by_ident.setdefault(ident, deque()).append(group)
        return group

    def unlock(self, idents: Sequence[bytes]) -> list[L]:
        """Take one lock off each; unknown ones are passed over. Returns the leases that nobody needs now."""
        free: list[L] = []
        for ident in idents:
            groups = self._by_ident.get(ident)
            if not groups:
                continue
            # Locks on one object are alike: the oldest goes, and so do the oldest leases.
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
        """Forget a group: its lease is over. A second call does nothing."""
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
        """Forget groups past their time; returns their leases."""
        old = [group for group in self._groups if group.until <= now]
        for group in old:
            self.drop(group)
        return [group.lease for group in old]

    def is_locked(self, ident: bytes) -> bool:
        """Whether somebody counts on it."""
        return ident in self._by_ident

    def groups(self) -> list[Group[L]]:
        """All groups, oldest first."""
        return list(self._groups)

    def __len__(self) -> int:
        """Locked objects."""
        return len(self._by_ident)
