"""Runs of bytes: cut into groups, joined, copied and summed."""

from __future__ import annotations

import time

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvpool.errors import DeadlineExceeded
from kvpool.transports import Pieces
from kvpool.transports import copy as copy_module
from kvpool.transports.copy import CHUNK_BYTES, copy, copy_and_sum, sum_runs

lengths_of_runs = st.lists(st.integers(1, 50), min_size=1, max_size=40)


def pieces_of(lengths: list[int]) -> Pieces:
    sizes = np.array(lengths, dtype=np.int64)
    starts = np.cumsum(sizes) - sizes
    places = np.stack((np.zeros_like(starts), starts), axis=1)
    return Pieces(starts + 4096, places, sizes, None)


@given(lengths_of_runs, st.integers(1, 200))
def test_groups_are_the_same_runs_in_order_and_little_larger_than_asked(
    lengths: list[int], group_bytes: int
) -> None:
    pieces = pieces_of(lengths)
    groups = pieces.groups(group_bytes)
    assert np.concatenate([group.lengths for group in groups]).tolist() == lengths
    assert np.concatenate([group.local for group in groups]).tolist() == pieces.local.tolist()
    assert np.concatenate([g.places for g in groups]).tolist() == pieces.places.tolist()
    for group in groups:
        # Cut between runs: the first may be longer than a group, the others fit together.
        assert len(group.lengths)
        assert group.lengths[1:].sum() < group_bytes


@given(lengths_of_runs, st.integers(1, 4), st.integers(1, 200))
def test_groups_never_part_runs_that_share_a_checksum(
    lengths: list[int], per_sum: int, group_bytes: int
) -> None:
    alone = pieces_of(lengths * per_sum)
    pieces = Pieces(alone.local, alone.places, alone.lengths, None, per_sum)
    groups = pieces.groups(group_bytes)
    assert np.concatenate([group.local for group in groups]).tolist() == pieces.local.tolist()
    for group in groups:
        assert group.per_sum == per_sum
        assert len(group.lengths) % per_sum == 0
        assert group.lengths[per_sum:].sum() < group_bytes


def test_runs_that_share_a_checksum_are_summed_in_their_order() -> None:
    source = np.random.default_rng(1).integers(0, 256, (6, 100), dtype=np.uint8)
    target = np.zeros_like(source)
    to = target.ctypes.data + np.array([5, 0, 3, 1, 4, 2], dtype=np.int64) * 100
    of = source.ctypes.data + np.arange(6, dtype=np.int64) * 100
    lengths = np.full(6, 100, dtype=np.int64)
    expected = [xxhash.xxh3_64_intdigest(rows.tobytes()) for rows in (source[:3], source[3:])]
    for sum_targets in (True, False):
        sums = copy_and_sum(to, of, lengths, sum_targets=sum_targets, per_sum=3)
        assert sums.tolist() == expected
    assert sum_runs(to, lengths, 3).tolist() == expected


def test_equal_runs_are_cut_evenly() -> None:
    groups = pieces_of([4] * 16).groups(8)
    assert [len(group.lengths) for group in groups] == [2] * 8


def test_groups_of_nothing_are_one_empty_group() -> None:
    nothing = pieces_of([1])
    empty = Pieces(nothing.local[:0], nothing.places[:0], nothing.lengths[:0], None)
    assert [len(group.lengths) for group in empty.groups(8)] == [0]


@pytest.mark.parametrize("sum_targets", [True, False])
@pytest.mark.parametrize("length", [1, 4096, CHUNK_BYTES, 3 * CHUNK_BYTES + 17])
def test_bytes_arrive_and_sums_are_those_of_the_whole_run(length: int, sum_targets: bool) -> None:
    source = np.random.default_rng(length).integers(0, 256, (3, length), dtype=np.uint8)
    target = np.zeros_like(source)
    rows = np.arange(3, dtype=np.int64) * length
    lengths = np.full(3, length, dtype=np.int64)
    sums = copy_and_sum(
        target.ctypes.data + rows, source.ctypes.data + rows, lengths, sum_targets=sum_targets
    )
    assert np.array_equal(source, target)
    expected = [xxhash.xxh3_64_intdigest(run.tobytes()) for run in source]
    assert sums.tolist() == expected == sum_runs(source.ctypes.data + rows, lengths).tolist()


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_every_run_is_done_once_whatever_the_number_of_threads(
    monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    monkeypatch.setattr(copy_module, "_threads", lambda: threads)
    done: list[range] = []
    copy_module._spread(lambda first, last: done.append(range(first, last)), np.full(11, 1 << 20))
    assert sorted(at for share in done for at in share) == list(range(11))
    assert len(done) == threads


def test_nothing_is_copied_after_the_deadline() -> None:
    source, target = np.ones(64, np.uint8), np.zeros(64, np.uint8)
    run = np.array([64], dtype=np.int64)
    to = np.array([target.ctypes.data], dtype=np.int64)
    of = np.array([source.ctypes.data], dtype=np.int64)
    with pytest.raises(DeadlineExceeded):
        copy(to, of, run, time.monotonic() - 1)
    with pytest.raises(DeadlineExceeded):
        copy_and_sum(to, of, run, time.monotonic() - 1, sum_targets=True)
    assert not target.any()
