"""The longest prefix that all pools of a hybrid model can restore.

Does no I/O: callers pass functions. The main pool and some side pools need every page of the
prefix. Other side pools, such as the states of linear layers, have only some pages, and need only
those at the end of the prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

ATTEMPTS = 4  # lengths tried; a length fails if a page disappears before it is leased

HoldLeading = Callable[[str, Sequence[str]], int]
HoldAll = Callable[[str, Sequence[str]], bool]
Resident = Callable[[str, Sequence[str]], list[bool]]


@dataclass(slots=True, frozen=True)
class Wanted:
    """What a side pool must have: every page of the prefix, or its last `trailing` pages."""

    name: str
    trailing: int  # 0: every page

    @classmethod
    def by(cls, transfers: Sequence[PoolTransfer]) -> list[Self]:
        """What SGLang's transfers need.

        Raises:
            ValueError: a hit policy is unknown.
        """
        wanted = []
        for transfer in transfers:
            policy = PoolHitPolicy(transfer.hit_policy)
            if policy == PoolHitPolicy.BLOCK_GROUPS:
                continue  # another form of the main pool's pages; does not limit a hit
            is_trailing = policy == PoolHitPolicy.TRAILING_PAGES
            trailing = max(1, len(transfer.keys or ())) if is_trailing else 0
            wanted.append(cls(str(getattr(transfer.name, "value", transfer.name)), trailing))
        return wanted


@dataclass(slots=True, frozen=True)
class Hits:
    """The prefix that can be restored.

    Args:
        pages: its length.
        by_pool: for each pool that has pages, the length that this pool alone could restore.
        restorable: all known lengths that can be restored, ascending; the last is `pages`.
    """

    pages: int
    by_pool: dict[str, int]
    restorable: list[int]


def combined_hits(
    keys: Sequence[str],
    kv_found: int,
    wanted: Sequence[Wanted],
    hold_leading: HoldLeading,
    hold_all: HoldAll,
    resident: Resident,
) -> Hits:
    """Find the longest prefix that all pools can restore, and hold it in all of them.

    Args:
        kv_found: leading pages that the main pool has; they are held already.
        hold_leading: leases a pool's leading pages of the given keys; returns how many.
        hold_all: leases all pages of the given keys; returns whether the pool has them all.
        resident: returns which pages of the given keys a pool has.
    """
    by_pool = {PoolName.KV.value: kv_found} if kv_found else {}
    lengths = set(range(1, kv_found + 1))
    trailing = [w for w in wanted if w.trailing]
    for side in wanted:
        if not lengths:
            break
        if side.trailing:
            has = resident(side.name, keys[:kv_found])
            own = {n for n in range(1, kv_found + 1) if all(has[max(0, n - side.trailing) : n])}
        else:
            own = set(range(1, hold_leading(side.name, keys[:kv_found]) + 1))
        if own:
            by_pool[side.name] = max(own)
        lengths &= own
    for _ in range(ATTEMPTS):
        if not lengths:
            break
        length = max(lengths)
        if all(hold_all(w.name, keys[max(0, length - w.trailing) : length]) for w in trailing):
            return Hits(length, by_pool, sorted(lengths))
        lengths.discard(length)
    return Hits(0, by_pool, [])
