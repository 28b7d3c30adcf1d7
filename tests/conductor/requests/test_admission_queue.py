"""The admission queue: order, bounds, displacement, deadlines, and the predicted wait."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.requests.admission_queue import (
    PRIORITIES,
    AdmissionQueue,
    Priority,
    Ticket,
    priority_of,
)
from kvpool.errors import InvalidArgument
from tests.support.sizes import examples


def ticket(
    name: str, priority: Priority = "normal", start_by: float = 1e9, at: float = 0.0
) -> Ticket:
    return Ticket(name, priority, at, start_by)


def names(queue: AdmissionQueue) -> list[str]:
    return [one.request_id for one in queue.in_order(1000)]


def test_it_serves_by_priority_then_by_arrival() -> None:
    queue = AdmissionQueue(9)
    for name, priority in (("a", "low"), ("b", "normal"), ("c", "high"), ("d", "normal")):
        queue.enqueue(ticket(name, priority), 0.0)  # type: ignore[arg-type]
    assert names(queue) == ["c", "b", "d", "a"]
    assert queue.by_priority() == {"low": 1, "normal": 2, "high": 1}
    assert [one.request_id for one in queue.in_order(2)] == ["c", "b"]


def test_a_full_queue_refuses_unless_somebody_of_a_lower_class_waits() -> None:
    queue = AdmissionQueue(2)
    queue.enqueue(ticket("a", "low"), 0.0)
    queue.enqueue(ticket("b", "normal"), 0.0)
    assert queue.enqueue(ticket("c", "low"), 0.0).refused == "queue_full"
    displaced = queue.enqueue(ticket("d", "normal"), 0.0).displaced
    assert displaced is not None
    assert displaced.request_id == "a"
    assert queue.enqueue(ticket("e", "normal"), 0.0).refused == "queue_full"
    assert queue.enqueue(ticket("f", "high"), 0.0).displaced == ticket("d", "normal")  # the later
    assert names(queue) == ["f", "b"]


def test_with_a_capacity_of_zero_no_request_waits() -> None:
    queue = AdmissionQueue(0)
    assert queue.enqueue(ticket("a", "high"), 0.0).refused == "queue_full"
    assert not queue.has_place("high")
    with pytest.raises(InvalidArgument):
        AdmissionQueue(-1)


def test_a_request_that_would_start_too_late_does_not_wait() -> None:
    queue = AdmissionQueue(99)
    for number in range(6):
        queue.enqueue(ticket(f"r{number}"), 0.0)
    queue.started("r0", 10.0)
    queue.started("r1", 12.0)  # one in two seconds
    assert queue.wait_s("normal") == pytest.approx(10.0)  # four before it
    assert queue.wait_s("high") == pytest.approx(2.0)
    entry = queue.enqueue(ticket("late", start_by=15.0), 12.0)
    assert entry.refused == "queue_slow"
    assert entry.retry_after_s == pytest.approx(7.0)
    assert queue.enqueue(ticket("first", "high", start_by=15.0), 12.0).refused == ""


def test_the_pace_is_not_that_of_an_empty_queue() -> None:
    queue = AdmissionQueue(99)
    queue.enqueue(ticket("a"), 0.0)
    queue.started("a", 1.0)
    queue.enqueue(ticket("b"), 1000.0)
    queue.started("b", 1001.0)
    assert queue.wait_s("normal") == 0.0


def test_late_requests_are_removed_and_the_next_expiry_is_known() -> None:
    queue = AdmissionQueue(9)
    queue.enqueue(ticket("a", start_by=5.0), 0.0)
    queue.enqueue(ticket("b", start_by=3.0), 0.0)
    queue.enqueue(ticket("c", "high", start_by=4.0), 0.0)
    assert queue.next_expiry() == 3.0
    assert queue.expire(2.9) == []
    assert [one.request_id for one in queue.expire(4.0)] == ["c", "b"]
    assert names(queue) == ["a"]


def test_leaving_twice_and_entering_twice() -> None:
    queue = AdmissionQueue(9)
    queue.enqueue(ticket("a"), 0.0)
    with pytest.raises(InvalidArgument):
        queue.enqueue(ticket("a"), 0.0)
    assert queue.leave("a") is not None
    assert queue.leave("a") is None
    queue.started("a", 1.0)
    assert queue.next_expiry() is None


@pytest.mark.parametrize(
    ("asked", "tenant", "expected"),
    [
        (None, "x", "normal"),
        ("high", "x", "high"),
        (None, "gold", "high"),
        ("low", "gold", "low"),
        (None, "batch", "low"),
        ("high", "batch", "low"),
    ],
)
def test_a_request_may_lower_its_tenants_class_but_not_raise_it(
    asked: Priority | None, tenant: str, expected: Priority
) -> None:
    assert priority_of(asked, tenant, {"gold": "high", "batch": "low"}, "normal") == expected


steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("enter"),
            st.sampled_from(PRIORITIES),
            st.floats(0.1, 50.0),
        ),
        st.tuples(st.just("start"), st.integers(0, 3), st.just(0.0)),
        st.tuples(st.just("leave"), st.integers(0, 9), st.just(0.0)),
        st.tuples(st.just("expire"), st.just(0), st.just(0.0)),
    ),
    max_size=60,
)


@settings(max_examples=examples(300), deadline=None)
@given(st.integers(0, 6), steps)
def test_order_bounds_and_accounting_hold_after_any_sequence(
    capacity: int, happenings: list[tuple[str, Priority | int, float]]
) -> None:
    queue = AdmissionQueue(capacity)
    model: list[Ticket] = []  # in order of arrival
    now = 0.0
    for number, (kind, what, patience_s) in enumerate(happenings):
        now += 1.0
        if kind == "enter":
            one = Ticket(f"r{number}", what, now, now + patience_s)  # type: ignore[arg-type]
            wait_s = queue.wait_s(one.priority)
            entry = queue.enqueue(one, now)
            lower = [t for t in model if _rank(t) < _rank(one)]
            if len(model) >= capacity and not lower:
                assert entry.refused == "queue_full"
            elif now + wait_s > one.start_by:
                assert entry.refused == "queue_slow"
                assert entry.retry_after_s > 0
            else:
                assert entry.refused == ""
                model.append(one)
            if entry.displaced is not None:
                assert len(model) == capacity + 1
                assert _rank(entry.displaced) == min(map(_rank, lower))
                model.remove(entry.displaced)
        elif kind == "expire":
            late = queue.expire(now)
            assert late == [t for t in _served(model) if t.start_by <= now]
            model = [t for t in model if t not in late]
        elif isinstance(what, int) and what < len(model):
            gone = _served(model)[what]
            if kind == "start":
                queue.started(gone.request_id, now)
            else:
                assert queue.leave(gone.request_id) == gone
            model.remove(gone)
        assert queue.in_order(100) == _served(model)
        assert len(queue) == len(model) <= capacity
        assert sum(queue.by_priority().values()) == len(model)
        assert all(t.request_id in queue for t in model)
        for priority in PRIORITIES:
            ahead = [t for t in model if _rank(t) >= PRIORITIES.index(priority)]
            assert queue.outranks_all(priority) == (not ahead)


def _rank(one: Ticket) -> int:
    return PRIORITIES.index(one.priority)


def _served(model: list[Ticket]) -> list[Ticket]:
    return sorted(model, key=lambda t: -_rank(t))
