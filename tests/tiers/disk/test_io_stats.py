"""What a node knows of its disk's speed: from traffic alone, whatever lies between."""

from __future__ import annotations

import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiers.disk.io_stats import MIN_BUSY_S, MIN_OPERATIONS, ByteQueue, Operation, Throughput

MIB = 1 << 20


def drive(
    disk: Throughput,
    count: int,
    bytes_per_s: float,
    *,
    depth: int = 1,
    size: int = MIB,
    start: float = 0.0,
    pause_s: float = 0.0,
) -> float:
    """`count` operations, `depth` at once, on a device of `bytes_per_s` in total."""
    now = start
    for _ in range(count // depth):
        operations = [disk.begin(now) for _ in range(depth)]
        now += depth * size / bytes_per_s
        for operation in operations:
            disk.end(operation, size, now)
        now += pause_s
    return now


def test_nothing_is_known_before_enough_was_seen() -> None:
    disk = Throughput()
    assert disk.bytes_per_s == 0
    assert disk.seconds(MIB, 1) is None
    drive(disk, MIN_OPERATIONS - 1, 1e9)
    assert disk.bytes_per_s == 0
    drive(disk, 1, 1e9, start=10.0)
    assert disk.bytes_per_s == pytest.approx(1e9)
    assert disk.seconds(2e9, 8) == pytest.approx(2.0)


def test_one_slow_operation_is_enough() -> None:
    disk = Throughput()
    drive(disk, 1, MIB / (2 * MIN_BUSY_S))
    assert disk.bytes_per_s == pytest.approx(MIB / (2 * MIN_BUSY_S))


def test_moving_nothing_costs_nothing_even_while_nothing_is_known() -> None:
    assert Throughput().seconds(0, 0) == 0.0


@given(
    st.floats(1e5, 1e10),
    st.integers(1, 8),
    st.integers(4096, 1 << 24),
    st.floats(0.0, 3600.0),
    st.integers(8, 40),
)
def test_a_steady_rate_is_found_at_any_depth_size_and_idleness(
    rate: float, depth: int, size: int, pause_s: float, count: int
) -> None:
    disk = Throughput()
    drive(disk, count * depth, rate, depth=depth, size=size, pause_s=pause_s)
    assert disk.bytes_per_s == pytest.approx(rate, rel=1e-3)
    assert disk.operation_s == pytest.approx(depth * size / rate, rel=1e-3)


@given(st.lists(st.tuples(st.floats(0.001, 1.0), st.floats(0.001, 1.0)), min_size=8, max_size=40))
def test_overlapping_operations_never_count_time_twice(pairs: list[tuple[float, float]]) -> None:
    """With any overlap, the speed lies between all bytes over the longest and the shortest time."""
    disk = Throughput()
    begins: list[tuple[float, float]] = []
    at = 0.0
    for gap, length in pairs:
        at += gap
        begins.append((at, at + length))
    ends: list[tuple[float, int]] = []
    operations: dict[int, Operation] = {}
    for i, (begin, end) in enumerate(begins):
        while ends and ends[0][0] <= begin:
            over, j = heapq.heappop(ends)
            disk.end(operations[j], MIB, over)
        operations[i] = disk.begin(begin)
        heapq.heappush(ends, (end, i))
    while ends:
        over, j = heapq.heappop(ends)
        disk.end(operations[j], MIB, over)
    shortest = min(end - begin for begin, end in begins)
    most_at_once = max(sum(b <= begin < e for b, e in begins) for begin, _ in begins)
    longest = max(end - begin for begin, end in begins)
    for operations_asked in (1, 8):
        seconds = disk.seconds(MIB, operations_asked)
        assert seconds is not None
        assert shortest / (4 * most_at_once) <= seconds <= 4 * longest


def test_several_at_once_and_one_alone_are_told_apart() -> None:
    disk = Throughput()
    now = drive(disk, 8, 1e9)
    drive(disk, 32, 4e9, depth=4, start=now)
    assert disk.seconds(4e9, 1) == pytest.approx(4.0, rel=1e-3)
    assert disk.seconds(4e9, 16) == pytest.approx(1.0, rel=1e-3)
    assert disk.bytes_per_s == pytest.approx(4e9, rel=1e-3)


def test_a_disk_that_became_slow_is_seen_through_at_once_and_one_that_recovered_soon() -> None:
    disk = Throughput()
    now = drive(disk, 4000, 2e9, depth=2)
    now = drive(disk, 8, 2e6, depth=2, start=now)  # then the burst credits are gone
    assert disk.bytes_per_s == pytest.approx(2e6, rel=0.5)
    drive(disk, 200, 2e9, depth=2, start=now + 1000)
    assert disk.bytes_per_s == pytest.approx(2e9, rel=0.25)


def test_a_failed_operation_teaches_no_speed() -> None:
    disk = Throughput()
    for i in range(MIN_OPERATIONS):
        disk.end(disk.begin(float(i)), 0, i + 0.001)
    assert disk.bytes_per_s == 0
    assert disk.operation_s == 0


def test_the_queue_says_what_lies_ahead_of_each() -> None:
    queue = ByteQueue()
    for key, size in (("a", 10), ("b", 20), ("c", 30)):
        queue.enter(key, size)
    assert (queue.size_bytes, len(queue)) == (60, 3)
    assert [queue.bytes_until(key) for key in "abcx"] == [10, 30, 60, 0]
    queue.leave("b")  # overtakes
    assert [queue.bytes_until(key) for key in "ac"] == [10, 40]
    queue.leave("a")
    queue.leave("a")
    assert (queue.bytes_until("c"), queue.size_bytes) == (30, 30)
    queue.leave("c")
    assert (queue.size_bytes, len(queue)) == (0, 0)
