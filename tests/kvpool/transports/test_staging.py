"""Buffers between scattered memory and long runs: every byte arrives, and no buffer is shared."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.errors import TransferFailed
from kvpool.transports.base import Pieces
from kvpool.transports.batches import _runs_of_kind
from kvpool.transports.staging import MAX_BUFFERS, Staging, StagingBuffer, pack, packed, unpack
from kvpool.wire.messages import Arena, NodeDescriptor

MEMORY = np.zeros(1 << 16, dtype=np.uint8)


def scattered(spots: list[tuple[int, int]]) -> Pieces:
    """Runs (gap before, length) in MEMORY, which follow on each other at the node."""
    starts, lengths, at = [], [], 0
    for gap, length in spots:
        starts.append(at + gap)
        lengths.append(length)
        at += gap + length
    sizes = np.array(lengths, dtype=np.int64)
    places = np.stack((np.zeros_like(sizes), np.cumsum(sizes) - sizes), axis=1)
    return Pieces(MEMORY.ctypes.data + np.array(starts, dtype=np.int64), places, sizes, MEMORY)


SPOTS = st.one_of(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 500)), min_size=1, max_size=40),
    # Pages of one engine: one length, any of them.
    st.lists(st.sampled_from([(0, 256), (256, 256), (768, 256)]), min_size=1, max_size=40),
)


@given(SPOTS, st.integers(0, 2**32))
def test_what_is_packed_and_unpacked_is_what_was_there(
    spots: list[tuple[int, int]], seed: int
) -> None:
    pieces = scattered(spots)
    random = np.random.default_rng(seed)
    order = random.permutation(len(spots))
    pieces = Pieces(pieces.local[order], pieces.places, pieces.lengths[order], MEMORY)
    MEMORY[:] = random.integers(0, 256, len(MEMORY))
    before = MEMORY.copy()
    buffer = Staging(lambda _: None).take()
    assert buffer is not None
    starts = pieces.local - MEMORY.ctypes.data
    rows = list(zip(starts.tolist(), pieces.lengths.tolist(), strict=True))
    pack(pieces, buffer)
    content = b"".join(before[a : a + n].tobytes() for a, n in rows)
    assert buffer.bytes[: len(content)].tobytes() == content
    for a, n in rows:
        MEMORY[a : a + n] = 0
    unpack(pieces, buffer)
    assert np.array_equal(MEMORY, before)  # and nothing beside them was touched


def test_runs_that_follow_on_each_other_at_the_node_become_one() -> None:
    buffer = Staging(lambda _: None).take()
    assert buffer is not None
    through = packed(scattered([(10, 100)] * 8), buffer)
    assert through.local.tolist() == [buffer.address]
    assert through.lengths.tolist() == [800]


def test_a_buffer_is_free_only_when_the_last_holder_let_go() -> None:
    made: list[StagingBuffer] = []
    staging = Staging(made.append)
    taken = [staging.take() for _ in range(MAX_BUFFERS)]
    assert len({id(buffer) for buffer in taken}) == len(made) == MAX_BUFFERS
    assert staging.take() is None
    first = taken[0]
    assert first is not None
    first.hold()  # a transfer that did not end
    first.release()
    assert (staging.take(), staging.free) == (None, 0)
    first.release()
    assert staging.take() is first
    assert len(made) == MAX_BUFFERS


def test_a_buffer_that_cannot_be_registered_takes_no_room() -> None:
    def fail(_: StagingBuffer) -> None:
        raise TransferFailed("closed")

    staging = Staging(fail)
    for _ in range(MAX_BUFFERS + 1):
        with pytest.raises(TransferFailed):
            staging.take()
    assert staging.free == MAX_BUFFERS


def test_however_runs_are_cut_or_joined_memory_that_is_kept_stays_so() -> None:
    pieces = replace(scattered([(1, 64)] * 8), is_kept=True)
    node = NodeDescriptor(
        *("n", 1, "h", "a"), arenas=[Arena(0, 1 << 20, 0), Arena(1, 1 << 20, 0, kind="vram")]
    )
    pieces.places[4:, 0] = 1
    by_kind = _runs_of_kind(node, pieces)
    assert [len(run.lengths) for run in by_kind] == [4, 4]
    for cut in (
        *by_kind,
        *pieces.groups(128),
        pieces.coalesced(),
        replace(scattered([(0, 64)] * 8), is_kept=True).coalesced(),
    ):
        assert cut.is_kept
