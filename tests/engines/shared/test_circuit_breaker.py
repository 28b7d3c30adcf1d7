"""A pool that did not answer is left alone for a while, then tried by one caller for all."""

from __future__ import annotations

import pytest

from kvpool.engines.shared.circuit_breaker import CircuitBreaker, says_pool_is_down
from kvpool.errors import (
    BlockMiss,
    DeadlineExceeded,
    Forbidden,
    KvpoolError,
    NoRoom,
    StaleEpoch,
    TransferFailed,
    Unavailable,
)


def test_nobody_asks_until_the_back_off_has_passed_and_then_one_does() -> None:
    pool = CircuitBreaker(1.0, 4.0)
    assert pool.may_ask(0.0)
    assert pool.failed(0.0)
    assert pool.is_down
    assert not pool.may_ask(0.9)
    assert pool.may_ask(1.0)
    assert not pool.may_ask(1.1)


def test_each_failed_try_doubles_the_back_off_up_to_its_longest() -> None:
    pool, now, waits = CircuitBreaker(1.0, 4.0), 0.0, []
    for _ in range(4):
        pool.failed(now)
        wait = next(s for s in range(1, 10) if pool.may_ask(now + s))
        waits.append(wait)
        now += wait
    assert waits == [1, 2, 4, 4]


def test_calls_that_fail_together_count_once() -> None:
    pool = CircuitBreaker(1.0, 60.0)
    assert [pool.failed(0.0) for _ in range(5)] == [True, False, False, False, False]
    assert pool.may_ask(1.0)


def test_an_answer_opens_the_pool_to_all_and_says_that_it_had_been_down() -> None:
    pool = CircuitBreaker(1.0, 4.0)
    pool.failed(0.0)
    assert pool.answered()
    assert not pool.answered()
    assert not pool.is_down
    assert pool.may_ask(0.0)
    assert pool.may_ask(0.0)


@pytest.mark.parametrize(
    ("kind", "is_down"),
    [
        (Unavailable, True),
        (DeadlineExceeded, True),
        (Forbidden, True),
        (TransferFailed, False),  # one node's
        (StaleEpoch, False),
        (NoRoom, False),
        (BlockMiss, False),
    ],
)
def test_a_trouble_of_one_node_is_not_the_pools(kind: type[KvpoolError], is_down: bool) -> None:
    assert says_pool_is_down(kind("it went wrong")) is is_down
