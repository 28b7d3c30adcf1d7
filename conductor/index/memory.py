"""The block index in this process's memory, the default backend.

A namespace maps each hash to one int. Its bits are holdings, (node, tier) pairs of that namespace,
so that a look-up costs one dict probe and one AND per block. Each holding keeps its hashes in a
bag, the reverse index. Retiring a holding clears its bit in the namespace's `live` mask, in O(1).
Its entries are reclaimed in slices, and only then is the bit reused. A snapshot fills new holdings
beside the old ones and retires the old ones at its end, which is O(1) too.

Look-ups are bound by memory: three cache misses per block. Alternatives, each measured in one run
with 256 hashes, as multiples of the dict's time: `itemgetter` 0.9 to 1.0; sorting the hashes first
1.5; huge pages under the dict 0.95 to 1.05; an open-addressed numpy table with 16-byte entries 0.9
to 1.05 at 1 million blocks and 0.45 at 5 million, but updates cost several times as much.

It is not thread-safe and, by design, not durable.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any, TypeVar, cast

from conductor.index.contract import Holder, Holders, checked_hashes
from conductor.index.negative_cache import Copies, NegativeCache
from conductor.index.packed_hashes import PackedHashes
from kvpool.blocks.records import BlockEvent
from kvpool.blocks.tier import Tier
from kvpool.errors import InvalidArgument, StaleEpoch

T = TypeVar("T")

MAX_FENCES = 65_536  # epochs of nodes, also of those that left
FIRST_PIECE, PIECE = 32, 1024  # blocks of a chain that are probed at a time
MAX_MASKS = 4_096  # shared int objects and decoded masks, at most a few hundred bytes each


class _Holding:
    """The blocks of one namespace that one node holds in one tier; `mask` is its bit."""

    __slots__ = ("hashes", "mask", "namespace_id", "node_id", "tier")

    def __init__(self, namespace_id: bytes, node_id: str, tier: Tier, mask: int) -> None:
        self.namespace_id = namespace_id
        self.node_id = node_id
        self.tier = tier
        self.mask = mask
        self.hashes = PackedHashes()


class _Space:
    """One namespace: masks by hash, and the holding of each bit."""

    __slots__ = ("blocks", "decoded", "free_bits", "holdings", "live")

    def __init__(self) -> None:
        self.blocks: dict[bytes, int] = {}
        self.live = 0
        self.holdings: list[_Holding | None] = []
        self.free_bits: list[int] = []  # a heap: low bits are used first, which keeps masks short
        self.decoded: dict[int, Holders] = {}


_Table = dict[tuple[bytes, Tier], _Holding]  # by (namespace_id, tier)


class _Node:
    __slots__ = ("building", "current", "epoch")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.current: _Table = {}
        self.building: _Table | None = None  # set between begin and end of a snapshot


class MemoryIndex:
    """The index of one process. Its calls never wait: `complete` calls them without an event loop.

    Args:
        max_blocks: maximum number of entries, about 115 B each with one holder
            (benchmarks/index.py). Above it new blocks are not recorded and become misses; `dropped`
            counts them.
        max_misses: maximum number of recorded misses. Above it those that end first are dropped.

    Raises:
        InvalidArgument: a limit is not positive.
    """

    def __init__(self, max_blocks: int = 16_000_000, max_misses: int = 65_536) -> None:
        if max_blocks < 1 or max_misses < 1:
            raise InvalidArgument("max_blocks and max_misses must be positive")
        self.max_blocks = max_blocks
        self.dropped = 0
        self._count = 0
        self._spaces: dict[bytes, _Space] = {}
        self._nodes: dict[str, _Node] = {}
        self._fences: dict[str, int] = {}
        self._retired: deque[_Holding] = deque()
        self._untidy: dict[_Holding, None] = {}  # holdings whose bags have memory to free
        self._masks: dict[int, int] = {}
        self._misses = NegativeCache(max_misses)

    # ------------------------------------------------------------ reports of nodes

    async def apply(self, node_id: str, epoch: int, events: Sequence[BlockEvent]) -> None:
        unpacked = [checked_hashes(event) for event in events]
        node = self._admit(node_id, epoch)
        for event, hashes in zip(events, unpacked, strict=True):
            if event.kind == "stored":
                self._store(node_id, node, event, hashes)
            elif event.kind == "removed":
                self._remove(node_id, node, event, hashes)
            else:
                for table in _tables(node):
                    for key in _keys(table, event):
                        self._retire(table.pop(key))

    async def begin_snapshot(self, node_id: str, epoch: int) -> None:
        node = self._admit(node_id, epoch)
        self._retire_table(node.building)
        node.building = {}

    async def end_snapshot(self, node_id: str) -> bool:
        node = self._nodes.get(node_id)
        if node is None or node.building is None:
            return False
        self._retire_table(node.current)
        node.current, node.building = node.building, None
        return True

    async def remove_node(self, node_id: str, max_blocks: int) -> bool:
        node = self._nodes.pop(node_id, None)
        if node is not None:
            for table in _tables(node):
                self._retire_table(table)
        return await self.reclaim(max_blocks)

    async def reclaim(self, max_blocks: int) -> bool:
        budget = max_blocks
        while self._retired and budget > 0:
            holding = self._retired[0]
            blocks = self._spaces[holding.namespace_id].blocks
            get, mask = blocks.get, holding.mask
            taken = holding.hashes.pop_some(budget)
            for block_hash in taken:
                if get(block_hash, 0) & mask:
                    self._clear_bit(blocks, block_hash, mask)
            budget -= len(taken)
            if holding.hashes.is_exhausted:
                self._retired.popleft()
                self._free_bit(holding)
        while self._untidy and budget > 0:
            holding = next(iter(self._untidy))
            if holding.hashes.is_untidy:
                budget -= holding.hashes.tidy()
            else:
                del self._untidy[holding]
        return not self._retired

    # ------------------------------------------------------------ misses

    def record_miss(
        self, node_id: str, namespace_id: bytes, block_hash: bytes, until: float
    ) -> None:
        space = self._spaces.get(namespace_id)
        if space is not None and block_hash in space.blocks:
            self._misses.add(node_id, namespace_id, block_hash, until)

    def expire_misses(self, now: float) -> int:
        return self._misses.expire(now)

    # ------------------------------------------------------------ look-ups

    async def holders(self, namespace_id: bytes, hashes: Sequence[bytes]) -> list[Holders]:
        space = self._spaces.get(namespace_id)
        if space is None:
            return []
        masks = self._leading_masks(namespace_id, space, hashes)
        if masks and masks.count(masks[0]) == len(masks):  # mostly so, and counted in C
            return [space.decoded.get(masks[0]) or _decode(space, masks[0])] * len(masks)
        decoded = {mask: space.decoded.get(mask) or _decode(space, mask) for mask in set(masks)}
        return list(map(decoded.__getitem__, masks))

    async def resident_holders(self, namespace_id: bytes, hashes: Sequence[bytes]) -> list[Holders]:
        found: list[Holders] = []
        for block_hash in hashes:
            copies = await self.holders(namespace_id, [block_hash])
            found.append(copies[0] if copies else ())
        return found

    def blocks(self) -> int:
        return self._count

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless forward and reverse index agree. For tests; O(blocks)."""
        entries = 0
        for namespace_id, space in self._spaces.items():
            entries += len(space.blocks)
            named: dict[bytes, int] = {}
            for bit, holding in enumerate(space.holdings):
                if holding is None:
                    _ensure(not space.live & 1 << bit, f"free bit {bit} is live")
                    continue
                _ensure(holding.mask == 1 << bit, f"holding at bit {bit} has another mask")
                _ensure(holding.namespace_id == namespace_id, "holding of another namespace")
                for block_hash in holding.hashes:
                    named[block_hash] = named.get(block_hash, 0) | holding.mask
            _ensure(named == space.blocks, "reverse index differs from the masks")
        _ensure(entries == self._count, f"{entries} entries, {self._count} counted")

    # ------------------------------------------------------------ inside

    def _admit(self, node_id: str, epoch: int) -> _Node:
        """The node at this epoch.

        A newer epoch removes what the node reported under the older one.
        """
        fence = self._fences.get(node_id, epoch)
        if epoch < fence:
            raise StaleEpoch(f"node {node_id} is at epoch {fence}, message is of {epoch}")
        node = self._nodes.get(node_id)
        if node is not None and node.epoch != epoch:
            for table in _tables(node):
                self._retire_table(table)
            node = None
        if node is None:
            node = self._nodes[node_id] = _Node(epoch)
            self._fences.pop(node_id, None)  # to the end of the order in which fences are dropped
            self._fences[node_id] = epoch
            if len(self._fences) > MAX_FENCES:
                gone = next((n for n in self._fences if n not in self._nodes), None)
                if gone is not None:
                    del self._fences[gone]
        return node

    def _store(self, node_id: str, node: _Node, event: BlockEvent, hashes: list[bytes]) -> None:
        if not hashes or event.tier is None:
            return
        table = node.current if node.building is None else node.building
        holding = table.get((event.namespace_id, event.tier))
        if holding is None:
            holding = self._new_holding(event.namespace_id, node_id, event.tier)
            table[event.namespace_id, event.tier] = holding
        space = self._spaces[event.namespace_id]
        suspects = self._misses.of(event.namespace_id)
        blocks, mask = space.blocks, holding.mask
        for block_hash in hashes:
            if suspects and block_hash in suspects:
                self._misses.clear(event.namespace_id, block_hash, node_id)
            held = blocks.get(block_hash)
            if held is None:
                if self._count >= self.max_blocks:
                    self.dropped += 1
                    continue
                self._count += 1
                blocks[block_hash] = mask
            elif held & mask:
                continue
            else:
                blocks[block_hash] = self._shared(held | mask)
            holding.hashes.add(block_hash)
        self._drop_if_empty(holding)

    def _remove(self, node_id: str, node: _Node, event: BlockEvent, hashes: list[bytes]) -> None:
        for table in _tables(node):
            for key in _keys(table, event):
                holding = table[key]
                blocks = self._spaces[event.namespace_id].blocks
                for block_hash in hashes:
                    if blocks.get(block_hash, 0) & holding.mask:
                        holding.hashes.remove(block_hash)
                        self._clear_bit(blocks, block_hash, holding.mask)
                if holding.hashes.is_untidy:
                    self._untidy[holding] = None
                self._drop_if_empty(holding)

    def _new_holding(self, namespace_id: bytes, node_id: str, tier: Tier) -> _Holding:
        space = self._spaces.setdefault(namespace_id, _Space())
        if space.free_bits:
            bit = heapq.heappop(space.free_bits)
        else:
            bit = len(space.holdings)
            space.holdings.append(None)
        holding = _Holding(namespace_id, node_id, tier, 1 << bit)
        space.holdings[bit] = holding
        space.live |= holding.mask
        return holding

    def _retire_table(self, table: _Table | None) -> None:
        for holding in (table or {}).values():
            self._retire(holding)

    def _retire(self, holding: _Holding) -> None:
        """Hide a holding's blocks at once. `reclaim` frees them."""
        self._spaces[holding.namespace_id].live &= ~holding.mask
        self._untidy.pop(holding, None)
        self._retired.append(holding)

    def _drop_if_empty(self, holding: _Holding) -> None:
        """Free the bit of an empty holding. If the holding is retired, `reclaim` frees the bit."""
        if holding.hashes or not self._spaces[holding.namespace_id].live & holding.mask:
            return
        key = (holding.namespace_id, holding.tier)
        for table in _tables(self._nodes[holding.node_id]):
            if table.get(key) is holding:
                del table[key]
        self._free_bit(holding)

    def _free_bit(self, holding: _Holding) -> None:
        self._untidy.pop(holding, None)
        space = self._spaces[holding.namespace_id]
        bit = holding.mask.bit_length() - 1
        space.live &= ~holding.mask
        space.holdings[bit] = None
        space.decoded.clear()  # the bit will mean another holding
        heapq.heappush(space.free_bits, bit)
        if len(space.free_bits) == len(space.holdings):
            del self._spaces[holding.namespace_id]

    def _clear_bit(self, blocks: dict[bytes, int], block_hash: bytes, mask: int) -> None:
        left = blocks[block_hash] & ~mask
        if left:
            blocks[block_hash] = self._shared(left)
        else:
            del blocks[block_hash]
            self._count -= 1

    def _shared(self, mask: int) -> int:
        """One int object for equal masks, because many blocks share few masks."""
        if len(self._masks) >= MAX_MASKS:
            self._masks.clear()
        return self._masks.setdefault(mask, mask)

    def _leading_masks(
        self, namespace_id: bytes, space: _Space, hashes: Sequence[bytes]
    ) -> list[int]:
        live, suspects = space.live, self._misses.of(namespace_id)
        masks: list[int] = []
        # Probe in pieces, so that a long unknown chain costs little. Each piece takes a few passes
        # in C.
        for start, end in _pieces(len(hashes)):
            found = list(map(space.blocks.get, hashes[start:end], repeat(0)))
            kinds = {mask: mask & live for mask in set(found)}
            is_whole = all(kinds.values())
            if any(mask != kept for mask, kept in kinds.items()):
                found = list(map(kinds.__getitem__, found))
            masks += found if is_whole else found[: found.index(0)]
            if not is_whole:
                break
        if suspects:
            self._leave_out(space, suspects, hashes, masks)
        return masks

    def _leave_out(
        self,
        space: _Space,
        suspects: Mapping[bytes, Copies],
        hashes: Sequence[bytes],
        masks: list[int],
    ) -> None:
        """Take copies with recorded misses out of the masks.

        A block without other copies ends the run.
        """
        for at, block_hash in enumerate(hashes[: len(masks)]):
            doubted = suspects.get(block_hash)
            if doubted:
                for holding in space.holdings:
                    if holding is not None and holding.node_id in doubted:
                        masks[at] &= ~holding.mask
                if not masks[at]:
                    del masks[at:]
                    return


def complete(call: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits, such as a call of `MemoryIndex`."""
    try:
        call.send(None)
    except StopIteration as ended:
        return cast(T, ended.value)
    call.close()
    raise AssertionError("a coroutine that should never wait does")


def _pieces(count: int) -> Iterator[tuple[int, int]]:
    start, size = 0, FIRST_PIECE
    while start < count:
        yield start, start + size
        start, size = start + size, PIECE


def _tables(node: _Node) -> tuple[_Table, ...]:
    return (node.current,) if node.building is None else (node.current, node.building)


def _keys(table: _Table, event: BlockEvent) -> list[tuple[bytes, Tier]]:
    tiers = (event.tier,) if event.tier is not None else tuple(Tier)
    return [(event.namespace_id, t) for t in tiers if (event.namespace_id, t) in table]


def _decode(space: _Space, mask: int) -> Holders:
    copies = {Holder(h.node_id, h.tier) for h in space.holdings if h is not None and h.mask & mask}
    if len(space.decoded) >= MAX_MASKS:
        space.decoded.clear()
    ordered = tuple(sorted(copies, key=lambda copy: (copy.tier, copy.node_id)))
    return space.decoded.setdefault(mask, ordered)


def _ensure(claim: bool, message: str) -> None:
    if not claim:
        raise AssertionError(message)
