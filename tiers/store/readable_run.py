"""The leading blocks of a chain that a caller can read where they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvpool.blocks.tier import Tier
from kvpool.errors import InvalidArgument
from tiers.store.blocks import Copy, Space, check_memory_tier
from tiers.store.migrations import whole_copy


@dataclass(slots=True)
class ReadableRun:
    """The leading blocks of `hashes` that are in one of `tiers`, as copies.

    `parts` are the tensor-parallel parts whose places are wanted; None: all.
    """

    space: Space
    hashes: Sequence[bytes]
    ttl_s: float
    parts: Sequence[int] | None
    tiers: tuple[Tier, ...]
    copies: list[Copy]

    @property
    def is_cold_next(self) -> bool:
        """Whether the block after the run is here, but in a slower tier."""
        found = len(self.copies)
        return found < len(self.hashes) and any(
            self.hashes[found] in names for names in self.space.visible
        )


def readable_run(
    space: Space, hashes: Sequence[bytes], ttl_s: float, parts: Sequence[int] | None, tier: Tier
) -> ReadableRun:
    """Find the leading blocks that can be read from `tier` down to DRAM.

    Raises:
        InvalidArgument: a part or tier that does not exist.
    """
    wanted = _wanted_parts(space, parts)
    is_device_wanted = check_memory_tier(tier) == Tier.HBM
    tiers = (Tier.HBM, Tier.DRAM) if is_device_wanted else (Tier.DRAM,)
    find: Callable[[bytes], Copy | None] = space.visible[Tier.DRAM].get
    if is_device_wanted:
        find = partial(whole_copy, space, tiers)
    copies: list[Copy] = []
    for name in hashes:
        copy = find(name)
        if copy is None:
            break
        copies.append(copy)
    return ReadableRun(space, hashes, ttl_s, wanted, tiers, copies)


def _wanted_parts(space: Space, parts: Sequence[int] | None) -> Sequence[int] | None:
    if not parts:
        return None
    if len(set(parts)) != len(parts) or not all(0 <= part < space.tp_size for part in parts):
        raise InvalidArgument(f"parts {list(parts)} of {space.tp_size}")
    return parts
