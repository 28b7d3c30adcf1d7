"""An engine's own prefix cache: blocks of recent prompts in this process's memory, by prefix hash.

A serving engine has such a cache without any pool. Here it is the reference for measuring the pool.
Other processes cannot use it. Not thread-safe: only the engine's thread may call it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from kvpool.errors import InvalidArgument, WrongByteCount
from workers.engine.contract import Bytes


class LocalPrefixCache:
    """At most `capacity_tokens` of KV. Evicts the least recently used, never a parent before its child.

    Args:
        capacity_tokens: rounded down to whole blocks; 0 keeps nothing.
        block_tokens: tokens per block.

    Raises:
        InvalidArgument: the capacity is negative, or the block size is not positive.
    """

    def __init__(self, capacity_tokens: int, block_tokens: int) -> None:
        if capacity_tokens < 0 or block_tokens < 1:
            raise InvalidArgument(
                f"capacity_tokens is {capacity_tokens}, block_tokens {block_tokens}",
                hint="0 or more, and 1 or more",
            )
        self.capacity_blocks = capacity_tokens // block_tokens
        # Oldest first. A use touches a block before its ancestors, so a parent is always younger
        # than its children: the oldest entry has no child here and may be evicted.
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()
        self._free = list(range(self.capacity_blocks))  # sorted
        self._arena: Bytes = np.empty((0, 0), np.uint8)

    def __len__(self) -> int:
        """Blocks kept now."""
        return len(self._slot_of)

    def __contains__(self, block_hash: bytes) -> bool:
        """Whether the block is kept. Does not count as a use."""
        return block_hash in self._slot_of

    def match(self, hashes: Sequence[bytes]) -> Bytes | None:
        """The leading blocks of the chain that are kept, `[n, part_bytes]`, or None.

        The array is read-only. It may be a view of the cache, valid until the next `insert`.
        """
        slots: list[int] = []
        for block_hash in hashes:
            slot = self._slot_of.get(block_hash)
            if slot is None:
                break
            slots.append(slot)
        if not slots:
            return None
        self._touch(hashes[: len(slots)])
        if slots == list(range(slots[0], slots[0] + len(slots))):
            found = self._arena[slots[0] : slots[0] + len(slots)]  # no copy: the common case
        else:
            found = self._arena[slots]
        found.flags.writeable = False
        return found

    def insert(self, hashes: Sequence[bytes], blocks: Bytes, first_block: int = 0) -> int:
        """Keep blocks of a chain, evicting older ones.

        Args:
            hashes: the chain from the start of the prompt.
            blocks: shape `[n, part_bytes]`, block `first_block` of the chain and those after it.
                Copied.

        Returns:
            The number of blocks added. 0 if the chain before `first_block` is not kept: a child
            without its parent could never be found. Blocks beyond the capacity are left out.

        Raises:
            InvalidArgument: `blocks` reaches beyond the chain, or is not a uint8 matrix.
            WrongByteCount: its rows are not as long as those that are kept.
        """
        if blocks.dtype != np.uint8 or blocks.ndim != 2:
            raise InvalidArgument(f"blocks are {blocks.dtype} of shape {blocks.shape}")
        if first_block < 0 or first_block + len(blocks) > len(hashes):
            raise InvalidArgument(
                f"blocks [{first_block}, {first_block + len(blocks)}) of {len(hashes)} hashes"
            )
        self._prepare_arena(blocks.shape[1])
        chain = hashes[: min(first_block + len(blocks), self.capacity_blocks)]
        known = next((i for i, h in enumerate(chain) if h not in self._slot_of), len(chain))
        if known < first_block:
            return 0
        self._touch(chain[:known])
        new = chain[known:]
        self._make_room(len(new))
        slots = self._take_slots(len(new))
        self._arena[slots] = blocks[known - first_block : known - first_block + len(new)]
        self._slot_of.update(zip(new, slots, strict=True))
        self._touch(chain)
        return len(new)

    def clear(self) -> None:
        """Forget everything."""
        self._slot_of.clear()
        self._free = list(range(self.capacity_blocks))

    def _touch(self, chain: Sequence[bytes]) -> None:
        for block_hash in reversed(chain):
            self._slot_of.move_to_end(block_hash)

    def _make_room(self, blocks: int) -> None:
        for _ in range(blocks - len(self._free)):
            _, slot = self._slot_of.popitem(last=False)
            self._free.append(slot)
        self._free.sort()

    def _take_slots(self, count: int) -> list[int]:
        """Take neighbouring slots if there are enough, so that `match` need not copy."""
        if not count:
            return []
        runs = range(len(self._free) - count + 1)
        start = next((i for i in runs if self._free[i + count - 1] - self._free[i] < count), 0)
        taken = self._free[start : start + count]
        del self._free[start : start + count]
        return taken

    def _prepare_arena(self, part_bytes: int) -> None:
        if not len(self._slot_of) and self._arena.shape[1] != part_bytes:
            self._arena = np.empty((self.capacity_blocks, part_bytes), np.uint8)
        elif self._arena.shape[1] != part_bytes:
            raise WrongByteCount(
                f"the blocks have {part_bytes} bytes, those in the cache {self._arena.shape[1]}",
                hint="one cache serves one layout",
            )

    def check_integrity(self) -> list[str]:
        """Describe inconsistencies; empty if there are none. For tests."""
        slots = [*self._slot_of.values(), *self._free]
        problems = []
        if sorted(slots) != list(range(self.capacity_blocks)):
            problems.append(f"slots do not add up: {sorted(slots)}")
        return problems
