"""How long a prefix all pools of a hybrid model can restore together. Pure: asking and holding are arguments.

The main pool needs every page of the prefix; so do some side pools. Others, such as the states of linear layers,
hold a page here and there, and need those at the end of the prefix alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

ATTEMPTS = 4  # lengths tried; each but the first lost a page between being seen and being held

HoldLeading = Callable[[str, Sequence[str]], int]
HoldAll = Callable[[str, Sequence[str]], bool]
Resident = Callable[[str, Sequence[str]], list[bool]]


@dataclass(slots=True, frozen=True)
class Wanted:
    """What one side pool must have: every page of the prefix, or its last `trailing`."""

    name: str
    trailing: int  # 0: every page

    @classmethod
    def by(cls, transfers: Sequence[PoolTransfer]) -> list[Self]:
        """What transfers ask for.

        Raises:
            ValueError: a policy is not known.
        """
        wanted = []
        for transfer in transfers:
            policy = PoolHitPolicy(transfer.hit_policy)
            if policy == PoolHitPolicy.BLOCK_GROUPS:
                continue  # a second form of pages that the main pool has: never decides over a hit
            is_trailing = policy == PoolHitPolicy.TRAILING_PAGES
            trailing = max(1, len(transfer.keys or ())) if is_trailing else 0
            wanted.append(cls(str(getattr(transfer.name, "value", transfer.name)), trailing))
        return wanted


@dataclass(slots=True, frozen=True)
class Hits:
    """What can be restored.

    Args:
        pages: the longest prefix.
        by_pool: where each pool's own pages end, regardless of the others; pools without any are left out.
        restorable: all lengths that can be restored, ascending, as far as known; the last is `pages`.
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
    """The longest prefix that all pools can restore, held in all of them.

    Args:
        kv_found: leading pages that the main pool has, and holds already.
        hold_leading: holds the leading pages that a pool has of some; returns how many.
        hold_all: holds all of some pages of a pool; whether it has them.
        resident: which of some pages a pool has.
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
