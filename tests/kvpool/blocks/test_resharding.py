"""Pieces between tensor-parallel sizes, against numpy's slicing of the whole KV of a block."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.blocks.layout import Layout
from kvpool.blocks.resharding import (
    DIMENSIONS,
    MIN_PIECE_BYTES,
    TensorParallelRank,
    TransferPlan,
    plan_part,
    plan_read,
    plan_write,
)
from kvpool.errors import CannotReshard, InvalidArgument, LayoutMismatch

ORDERS = [",".join(names) for names in itertools.permutations(DIMENSIONS)]
LLAMA = Layout("bfloat16", layers=80, kv_heads=8, head_dim=128, block_tokens=64, tp_size=4)


def with_tp(layout: Layout, tp_size: int, **changes: Any) -> Layout:
    return msgspec.structs.replace(layout, tp_size=tp_size, **changes)


def whole_block(layout: Layout) -> np.ndarray:
    """The KV of a block in one array, with different elements as far as two bytes allow."""
    outer = (layout.layers, layout.kv_per_token, layout.kv_heads)
    shape = (*outer, layout.block_tokens, layout.head_dim)
    return np.arange(np.prod(shape), dtype=np.uint16).reshape(shape)


def share(layout: Layout, block: np.ndarray, rank: int) -> np.ndarray:
    """A rank's part of a block, by slicing. Successive ranks hold copies of one head."""
    heads = np.arange(layout.kv_heads)
    if layout.tp_size > layout.kv_heads:
        heads = np.repeat(heads, layout.tp_size // layout.kv_heads)
    mine = np.split(heads, layout.tp_size)[rank]
    axes = [DIMENSIONS.index(name) for name in layout.order.split(",")]
    return np.ascontiguousarray(block[:, :, mine].transpose(axes)).reshape(-1).view(np.uint8)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Layout, Layout, int]:
    """Layouts of two engines of one model, and a rank of the second.

    Most, not all, can be matched.
    """
    heads = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12]))
    sizes = [n for n in range(1, 25) if heads % n == 0 or n % heads == 0]
    orders = st.sampled_from([ORDERS[0], *ORDERS])
    first = Layout(
        "bfloat16",
        layers=draw(st.integers(1, 3)),
        kv_heads=heads,
        head_dim=draw(st.integers(1, 4)),
        block_tokens=draw(st.integers(1, 4)),
        tp_size=draw(st.sampled_from(sizes)),
        kv_per_token=draw(st.integers(1, 2)),
        order=draw(orders),
    )
    second = with_tp(first, draw(st.sampled_from(sizes)), order=draw(orders))
    return first, second, draw(st.integers(0, second.tp_size - 1))


def is_merged(plan: TransferPlan) -> bool:
    """Whether no two neighbouring pieces could be merged."""
    joins = (
        (plan.rows[1:] == plan.rows[:-1])
        & (plan.stored_offsets[1:] == plan.stored_offsets[:-1] + plan.lengths[:-1])
        & (plan.rank_offsets[1:] == plan.rank_offsets[:-1] + plan.lengths[:-1])
    )
    return not joins.any()


def fit(first: Layout, second: Layout) -> bool:
    shares = sorted(min(layout.tp_size, layout.kv_heads) for layout in (first, second))
    return shares[1] % shares[0] == 0


@given(pairs())
def test_pieces_read_what_slicing_gives(pair: tuple[Layout, Layout, int]) -> None:
    stored, reader, rank = pair
    if not fit(stored, reader):
        with pytest.raises(CannotReshard, match="must divide"):
            plan_read(stored, reader, rank, min_piece_bytes=1)
        return
    plan = plan_read(stored, reader, rank, min_piece_bytes=1)
    block = whole_block(stored)
    out = np.full(plan.rank_bytes, 0xEE, dtype=np.uint8)
    times = np.zeros(plan.rank_bytes, dtype=np.int64)
    for row, at, to, length in zip(
        plan.rows, plan.stored_offsets, plan.rank_offsets, plan.lengths, strict=True
    ):
        part = share(stored, block, plan.parts[row])
        out[to : to + length] = part[at : at + length]
        times[to : to + length] += 1
    assert (times == 1).all()
    assert (out == share(reader, block, rank)).all()
    if stored.order == reader.order:
        assert is_merged(plan)


@given(pairs())
def test_whole_parts_come_in_their_own_order_and_no_others_are_called_whole(
    pair: tuple[Layout, Layout, int],
) -> None:
    stored, reader, rank = pair
    if not fit(stored, reader):
        return
    plan = plan_read(stored, reader, rank, min_piece_bytes=1)
    for row in range(len(plan.parts)):
        alone = plan.of_part(row)
        assert len(alone.lengths) == plan.pieces_per_part
        ends = np.cumsum(alone.lengths)
        is_whole = (alone.stored_offsets == ends - alone.lengths).all()
        assert plan.is_whole == (is_whole and ends[-1] == stored.part_bytes)


@given(pairs())
def test_ranks_write_all_parts_between_them(pair: tuple[Layout, Layout, int]) -> None:
    stored, writer, _ = pair
    if not fit(stored, writer):
        return
    block = whole_block(stored)
    written: set[int] = set()
    for rank in range(writer.tp_size):
        if writer.heads_per_part < stored.heads_per_part:
            with pytest.raises(CannotReshard, match="largest tp_size"):
                plan_write(stored, writer, rank, min_piece_bytes=1)
            continue
        plan = plan_write(stored, writer, rank, min_piece_bytes=1)
        mine = share(writer, block, rank)
        for row, part in enumerate(plan.parts):
            alone = plan.of_part(row)
            assert alone.is_whole
            bytes_sent = [
                mine[to : to + length]
                for to, length in zip(alone.rank_offsets, alone.lengths, strict=True)
            ]
            assert (np.concatenate(bytes_sent) == share(stored, block, part)).all()
        written |= set(plan.parts)
    if writer.heads_per_part >= stored.heads_per_part:
        assert written == set(range(stored.tp_size))


@given(pairs(), st.integers(1, 3))
def test_runs_of_many_blocks_are_the_pieces_of_each(
    pair: tuple[Layout, Layout, int], count: int
) -> None:
    stored, reader, rank = pair
    if not fit(stored, reader):
        return
    plan = plan_read(stored, reader, rank, min_piece_bytes=1)
    rng = np.random.default_rng(0)
    addresses = rng.integers(0, 1 << 40, count)
    places = rng.integers(0, 1 << 40, (count * len(plan.parts), 2))
    local, stood, lengths = plan.runs(addresses, places)
    n = len(plan.lengths)
    for block, i in itertools.product(range(count), range(n)):
        arena, offset = places[block * len(plan.parts) + plan.rows[i]]
        assert local[block * n + i] == addresses[block] + plan.rank_offsets[i]
        assert tuple(stood[block * n + i]) == (arena, offset + plan.stored_offsets[i])
        assert lengths[block * n + i] == plan.lengths[i]


def test_a_rank_of_tp_2_takes_one_piece_a_layer_and_kv_from_each_of_two_parts_of_tp_4() -> None:
    plan = plan_read(LLAMA, with_tp(LLAMA, 2), 1)
    assert plan.parts == (2, 3)
    assert plan.is_whole
    assert len(plan.lengths) == 2 * 80 * 2
    assert set(plan.lengths.tolist()) == {2 * 64 * 128 * 2}


def test_a_rank_of_tp_8_takes_half_of_a_part_of_tp_4() -> None:
    plan = plan_read(LLAMA, with_tp(LLAMA, 8), 5)
    assert plan.parts == (2,)
    assert not plan.is_whole
    assert int(plan.lengths.sum()) == LLAMA.part_bytes // 2


def test_equal_layouts_are_one_piece_in_whatever_order() -> None:
    odd = with_tp(LLAMA, 4, order="as the engine likes it")
    plan = plan_read(odd, odd, 3)
    assert plan.parts == (3,)
    assert plan.lengths.tolist() == [odd.part_bytes]
    assert plan_write(odd, odd, 3).lengths.tolist() == [odd.part_bytes]
    assert plan_part(odd, 3).parts == (3,)


def test_one_latent_for_all_ranks_is_read_by_every_tensor_parallel_size() -> None:
    mla = Layout("bfloat16", 61, kv_heads=1, head_dim=576, kv_per_token=1, tp_size=3)
    for size in (1, 2, 5, 8):
        read = {plan_read(mla, with_tp(mla, size), rank).parts for rank in range(size)}
        assert all(len(parts) == 1 for parts in read)
        assert len(read) == min(3, size)  # ranks spread over the copies
        assert plan_read(mla, with_tp(mla, size), 0).lengths.tolist() == [mla.part_bytes]


@pytest.mark.parametrize(
    ("stored", "reader", "says"),
    [
        (with_tp(LLAMA, 4, kv_heads=24), with_tp(LLAMA, 6, kv_heads=24), "must divide"),
        (with_tp(LLAMA, 4, order="blob"), with_tp(LLAMA, 2, order="blob"), "order 'blob'"),
        (with_tp(LLAMA, 4), with_tp(LLAMA, 4, order="layer,kv,head,head,dim"), "order 'layer"),
    ],
)
def test_what_cannot_be_matched_is_refused(stored: Layout, reader: Layout, says: str) -> None:
    for plan in (plan_read, plan_write):
        with pytest.raises(CannotReshard, match=says):
            plan(stored, reader, 0)


def test_pieces_too_short_to_pay_are_refused_and_say_what_to_do() -> None:
    token_first = with_tp(LLAMA, 4, order="layer,kv,token,head,dim")
    with pytest.raises(CannotReshard, match=r"512 bytes long.*head before token"):
        plan_read(token_first, with_tp(token_first, 2), 0)
    wide = with_tp(token_first, 2, kv_heads=64)  # 16 heads of 256 bytes
    plan = plan_read(wide, with_tp(wide, 4), 0)
    assert plan.lengths.min() >= MIN_PIECE_BYTES
    plan_read(token_first, token_first, 0)
    tiny = with_tp(LLAMA, 2, layers=1, kv_heads=1, head_dim=1, kv_per_token=1)
    assert plan_read(tiny, with_tp(tiny, 1), 0).lengths.tolist() == [
        128
    ]  # one piece: no shorter list exists


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float16"},
        {"layers": 79},
        {"kv_heads": 16},
        {"head_dim": 64},
        {"block_tokens": 32},
        {"kv_per_token": 1},
    ],
)
def test_layouts_that_differ_otherwise_are_a_mismatch(change: dict[str, Any]) -> None:
    with pytest.raises(LayoutMismatch, match=next(iter(change))):
        plan_read(LLAMA, with_tp(LLAMA, 2, **change), 0)


@pytest.mark.parametrize(("size", "rank"), [(2, 2), (2, -1), (0, 0), (-1, 0)])
def test_ranks_that_do_not_exist_are_refused(size: int, rank: int) -> None:
    with pytest.raises(InvalidArgument, match="rank"):
        TensorParallelRank(size, rank)
    if size > 0:
        with pytest.raises(InvalidArgument, match="rank"):
            plan_read(LLAMA, with_tp(LLAMA, size), rank)


def test_a_rank_names_its_engines_layout() -> None:
    assert TensorParallelRank(2, 1).layout(LLAMA) == with_tp(LLAMA, 2)
    other = TensorParallelRank(2, 1, order="kv,layer,head,token,dim")
    assert other.layout(LLAMA).order == "kv,layer,head,token,dim"
    with pytest.raises(InvalidArgument, match="tp_size=3"):
        TensorParallelRank(3, 1).layout(LLAMA)
