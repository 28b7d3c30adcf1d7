"""Read and write blocks across tensor-parallel sizes: which bytes of which part go where.

The pool stores a block as the parts of its namespace's layout. An engine of another tensor-parallel
size, or with another order of dimensions, moves *pieces*: runs of bytes that are contiguous both in
the stored part and in the engine's own. Nothing is stored again, and nothing is copied in between.
If the pieces would be too many and too small, the plan is refused.

A plan depends on two layouts and a rank alone, so it is computed once for all blocks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from kvpool.blocks.layout import DTYPE_BYTES, Layout
from kvpool.errors import CannotReshard, InvalidArgument, LayoutMismatch, WrongByteCount

Int64Array = npt.NDArray[np.int64]

DIMENSIONS = ("layer", "kv", "head", "token", "dim")
# Besides its bytes, a piece costs 1 to 2 us over shared memory and 4 to 5 us over NIXL between
# processes. Pieces of 4 KiB reach an eighth of the bandwidth of whole parts (about 1 GB/s), those
# of 1 KiB a twentieth, at which computing is as fast (2 cores: benchmarks/resharding.py).
MIN_PIECE_BYTES = 4096
PIECE_COST_BYTES = (
    8 << 10
)  # the fixed cost of a piece, as the bytes that could be moved in that time


@dataclass(slots=True, frozen=True)
class TensorParallelRank:
    """One rank of an engine that reads or writes blocks of another layout.

    For each block, its buffers hold one part of the stored layout with `tp_size` replaced by
    `size`, and `order` by the `order` given here; "" means the stored one.

    Raises:
        InvalidArgument: the rank is not in [0, size).
    """

    size: int
    rank: int
    order: str = ""

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise InvalidArgument(f"tensor-parallel rank {self.rank} of {self.size}")

    def layout(self, stored: Layout) -> Layout:
        """The layout of this rank's engine.

        Raises:
            InvalidArgument: the KV heads cannot be divided over `size` ranks.
        """
        order = self.order or stored.order
        return msgspec.structs.replace(stored, tp_size=self.size, order=order)


@dataclass(slots=True, frozen=True)
class TransferPlan:
    """The pieces of one block for one rank, part by part, in ascending order within the stored
    part.

    Each part has the same number of pieces. The arrays are read-only.

    Args:
        parts: the stored parts that have pieces.
        rows: which of `parts` each piece belongs to, shape [n].
        stored_offsets: bytes from the start of the stored part, shape [n].
        rank_offsets: bytes from the start of the rank's own part, shape [n].
        lengths: bytes, shape [n].
        rank_bytes: size of the rank's own part.
        is_whole: the pieces of each part cover it, so its checksum can be computed from them.
    """

    parts: tuple[int, ...]
    rows: Int64Array
    stored_offsets: Int64Array
    rank_offsets: Int64Array
    lengths: Int64Array
    rank_bytes: int
    is_whole: bool

    @property
    def pieces_per_part(self) -> int:
        """The number of pieces of each part."""
        return len(self.lengths) // len(self.parts)

    def effort_bytes(self, blocks: int) -> int:
        """Contiguous bytes that take as long to move as this many blocks by this plan."""
        extra = PIECE_COST_BYTES * (len(self.lengths) - len(self.parts))
        return blocks * (int(self.lengths.sum()) + extra)

    def runs(
        self, addresses: Int64Array, places: Int64Array
    ) -> tuple[Int64Array, Int64Array, Int64Array]:
        """The pieces of many blocks: local addresses [m], places [m, 2] and lengths [m], block by
        block.

        Args:
            addresses: of each block of the rank, shape [b], or of each piece, shape [b, n].
            places: rows of (arena id, byte offset), block by block, in the order of `parts` within
                a block.
        """
        if len(self.lengths) == 1:
            shift = (0, self.stored_offsets[0])
            lengths = np.repeat(self.lengths, len(addresses))
            return addresses.reshape(-1) + self.rank_offsets[0], places + shift, lengths
        local = addresses if addresses.ndim == 2 else addresses[:, None] + self.rank_offsets
        stood = places.reshape(len(addresses), len(self.parts), 2)[:, self.rows]
        stood[:, :, 1] += self.stored_offsets
        lengths = np.tile(self.lengths, len(addresses))
        return local.reshape(-1), stood.reshape(-1, 2), lengths

    def in_runs(self, lengths: Int64Array) -> TransferPlan:
        """The plan for memory in which a block has several runs.

        `runs` then takes an address for each of them.

        Raises:
            WrongByteCount: the runs do not add up to the rank's part.
            InvalidArgument: this plan has several pieces already.
        """
        if len(self.lengths) != 1:
            raise InvalidArgument("memory in runs is not combined with as_rank", hint="use part=")
        if int(lengths.sum()) != self.rank_bytes:
            raise WrongByteCount(
                f"runs of {int(lengths.sum())} bytes together, a block part has {self.rank_bytes}"
            )
        starts = np.cumsum(lengths) - lengths
        if len(lengths) == 1:
            return self
        return _plan(self.parts, [(starts, starts, lengths)], self.rank_bytes, True)

    def of_part(self, row: int) -> TransferPlan:
        """The plan of `parts[row]` alone."""
        chosen = self.rows == row
        return _plan(
            (self.parts[row],),
            [(self.stored_offsets[chosen], self.rank_offsets[chosen], self.lengths[chosen])],
            self.rank_bytes,
            self.is_whole,
        )


def plan_part(stored: Layout, part: int) -> TransferPlan:
    """The plan of an engine that has the stored layout: its whole part."""
    whole = (_array(0), _array(0), _array(stored.part_bytes))
    return _plan((part,), [whole], stored.part_bytes, True)


@functools.lru_cache(maxsize=1024)
def plan_read(
    stored: Layout, reader: Layout, rank: int, *, min_piece_bytes: int = MIN_PIECE_BYTES
) -> TransferPlan:
    """Plan what a rank of an engine with layout `reader` reads of each block stored as `stored`.

    If several stored parts have copies of one head, one copy is read.

    Raises:
        LayoutMismatch: the layouts differ in more than `tp_size` and `order`.
        CannotReshard: neither size divides the other, the order of dimensions is unknown, or parts
            have several pieces that are shorter than `min_piece_bytes`.
        InvalidArgument: there is no such rank.
    """
    _check(stored, reader, rank)
    if _is_same(stored, reader):
        return plan_part(stored, rank)
    first, heads = _heads(reader, rank)
    copies = _copies(stored)
    chosen = rank % _copies(reader) % copies
    shares = range(first // stored.heads_per_part, (first + heads - 1) // stored.heads_per_part + 1)
    parts = [share * copies + chosen for share in shares]
    return _between(stored, reader, rank, parts, min_piece_bytes)


@functools.lru_cache(maxsize=1024)
def plan_write(
    stored: Layout, writer: Layout, rank: int, *, min_piece_bytes: int = MIN_PIECE_BYTES
) -> TransferPlan:
    """Plan what a rank of an engine with layout `writer` writes of each block stored as `stored`:
    whole parts only.

    Together, the ranks of an engine write all parts. If ranks hold copies of one head, several may
    want to write the same part; the pool grants it to one of them.

    Raises:
        CannotReshard: as `plan_read`, or the rank holds no whole part.
        LayoutMismatch, InvalidArgument: as `plan_read`.
    """
    _check(stored, writer, rank)
    if _is_same(stored, writer):
        return plan_part(stored, rank)
    if stored.heads_per_part > writer.heads_per_part:
        raise CannotReshard(
            f"a rank of tp_size={writer.tp_size} holds {writer.heads_per_part} of the"
            f" {stored.heads_per_part} KV heads of a part stored with tp_size={stored.tp_size}",
            hint="ranks write whole parts: store with the largest tp_size of all engines that "
            "write",
        )
    if stored.tp_size < writer.tp_size:
        parts = [rank * stored.tp_size // writer.tp_size]
    else:
        parts = [
            part
            for part in range(stored.tp_size)
            if part * writer.tp_size // stored.tp_size == rank
        ]
    return _between(stored, writer, rank, parts, min_piece_bytes)


def _check(stored: Layout, other: Layout, rank: int) -> None:
    alike = msgspec.structs.replace(other, tp_size=stored.tp_size, order=stored.order)
    if alike != stored:
        raise LayoutMismatch(
            f"the blocks have another layout: {'; '.join(stored.differences(alike))}",
            hint="only tp_size and order may differ",
        )
    if not 0 <= rank < other.tp_size:
        raise InvalidArgument(f"tensor-parallel rank {rank} of {other.tp_size}")
    few, many = sorted((_shares(stored), _shares(other)))
    if many % few:
        raise CannotReshard(
            f"blocks stored with tp_size={stored.tp_size} cannot be used with "
            f"tp_size={other.tp_size}",
            hint="one of the two must divide the other",
        )
    if _is_same(stored, other):
        return
    for layout in (stored, other):
        if sorted(layout.order.split(",")) != sorted(DIMENSIONS):
            raise CannotReshard(
                f"nothing is known of the order {layout.order!r}",
                hint=f"name each of {', '.join(DIMENSIONS)} once, or use equal tp_size and order",
            )


def _is_same(stored: Layout, other: Layout) -> bool:
    return stored.tp_size == other.tp_size and stored.order == other.order


def _shares(layout: Layout) -> int:
    """How many different parts a block has. Further ranks hold copies."""
    return min(layout.tp_size, layout.kv_heads)


def _copies(layout: Layout) -> int:
    return layout.tp_size // _shares(layout)


def _heads(layout: Layout, part: int) -> tuple[int, int]:
    """The first KV head of a part, and how many it has.

    Successive ranks hold copies of one head.
    """
    return part // _copies(layout) * layout.heads_per_part, layout.heads_per_part


def _between(
    stored: Layout, other: Layout, rank: int, parts: Sequence[int], min_piece_bytes: int
) -> TransferPlan:
    """The heads that `rank` of `other` and each of `parts` have in common."""
    first, heads = _heads(other, rank)
    pieces = []
    for part in parts:
        stored_first, stored_heads = _heads(stored, part)
        start = max(first, stored_first)
        common = min(first + heads, stored_first + stored_heads) - start
        pieces.append(
            _pieces(stored, other, start - stored_first, start - first, common, min_piece_bytes)
        )
    is_whole = stored.heads_per_part <= other.heads_per_part
    return _plan(parts, pieces, other.part_bytes, is_whole)


def _pieces(
    stored: Layout,
    other: Layout,
    stored_head: int,
    other_head: int,
    heads: int,
    min_piece_bytes: int,
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Offsets in both parts and lengths of `heads` heads, from the given first heads on."""
    sizes = _sizes(stored) | {"head": heads}
    stored_strides, other_strides = _strides(stored), _strides(other)
    inner, length = _inner(sizes, stored_strides, other_strides, DTYPE_BYTES[stored.dtype])
    total = math.prod(sizes.values()) * DTYPE_BYTES[stored.dtype]
    if length < min(min_piece_bytes, total):
        raise CannotReshard(
            f"between tp_size={stored.tp_size} in order {stored.order} and tp_size={other.tp_size}"
            f" in order {other.order} pieces are {length} bytes long, at least {min_piece_bytes} "
            "are wanted",
            hint="put head before token in the order of the layout, or use larger blocks",
        )
    at = _array(stored_head * stored_strides["head"])
    to = _array(other_head * other_strides["head"])
    for name in stored.order.split(","):
        if name not in inner:
            steps = np.arange(sizes[name], dtype=np.int64)
            at = (at[:, None] + steps * stored_strides[name]).reshape(-1)
            to = (to[:, None] + steps * other_strides[name]).reshape(-1)
    return at, to, np.full(len(at), length, dtype=np.int64)


def _inner(
    sizes: Mapping[str, int], stored: Mapping[str, int], other: Mapping[str, int], length: int
) -> tuple[set[str], int]:
    """The dimensions within a piece, and its bytes: those without a gap on both sides.

    Args:
        stored, other: bytes from one element of a dimension to the next.
        length: bytes of one element.
    """
    inner: set[str] = set()
    while True:
        names = [n for n in sizes if sizes[n] > 1 and stored[n] == other[n] == length]
        if not names:
            return inner, length
        inner.add(names[0])
        length *= sizes[names[0]]


def _sizes(layout: Layout) -> dict[str, int]:
    """Extent of each dimension of one part."""
    return dict(zip(DIMENSIONS, layout.part_shape, strict=True))


def _strides(layout: Layout) -> Mapping[str, int]:
    """Bytes from one element of a dimension to the next."""
    sizes = _sizes(layout)
    strides: dict[str, int] = {}
    stride = DTYPE_BYTES[layout.dtype]
    for name in reversed(layout.order.split(",")):
        strides[name] = stride
        stride *= sizes[name]
    return strides


def _plan(
    parts: Sequence[int],
    pieces: Sequence[tuple[Int64Array, Int64Array, Int64Array]],
    rank_bytes: int,
    is_whole: bool,
) -> TransferPlan:
    counts = [len(lengths) for _, _, lengths in pieces]
    rows = np.repeat(np.arange(len(parts), dtype=np.int64), counts)
    stored, local, lengths = (np.concatenate([piece[i] for piece in pieces]) for i in range(3))
    for column in (rows, stored, local, lengths):
        column.flags.writeable = False
    return TransferPlan(tuple(parts), rows, stored, local, lengths, rank_bytes, is_whole)


def _array(value: int) -> Int64Array:
    return np.array([value], dtype=np.int64)
