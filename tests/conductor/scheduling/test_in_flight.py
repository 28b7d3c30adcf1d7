"""Requests in flight: how they count for the workers that prefill and decode them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conductor.scheduling.decision import Decision
from conductor.scheduling.in_flight import InFlight
from conductor.scheduling.scheduler import refuse
from tests.support.clusters import request

SENT = Decision(
    *("x", "disaggregated", "p", "d", 0, "n", 2.0, 0.1, ""),
    prompt_tokens=100,
    output_tokens=10,
    work_s=1.5,
)


def test_in_flight_burdens_the_prefill_worker_first_and_the_decode_worker_then() -> None:
    in_flight = InFlight()
    in_flight.assigned(SENT, 10.0)
    assert in_flight.backlog_s("p", 10.0) == 1.5
    assert in_flight.backlog_s("p", 11.5) == pytest.approx(0.5)
    assert in_flight.backlog_s("p", 10.0, since=10.0) == 0.0
    assert in_flight.backlog_s("d", 10.0) == 0.0
    assert in_flight.decoding("d", 11.0, 10.0) == (0, 0.0)
    assert in_flight.decoding("d", 12.0, 10.0) == (1, 105.0)
    assert in_flight.decoding("d", 13.5, 10.0) == (0, 0.0)
    assert in_flight.decoding("d", 14.0, 14.0) == (1, 105.0)  # overdue: it runs still
    in_flight.finished("x")
    assert in_flight.decoding("d", 12.0, 10.0) == (0, 0.0)
    assert len(in_flight) == 0


def test_a_prefill_that_ended_early_frees_its_queue_and_decodes_at_once() -> None:
    in_flight = InFlight()
    in_flight.assigned(SENT, 10.0)
    in_flight.prefilled("x", 10.5)
    assert in_flight.backlog_s("p", 10.5) == 0.0
    assert in_flight.decoding("d", 10.5, 10.5)[0] == 1
    assert in_flight.decoding("d", 11.6, 10.5)[0] == 0


def test_assigning_again_replaces_and_unknown_ids_are_ignored() -> None:
    in_flight = InFlight()
    in_flight.assigned(SENT, 10.0)
    in_flight.assigned(replace(SENT, mode="local", prefill=None), 11.0)
    assert (in_flight.backlog_s("p", 11.0), in_flight.backlog_s("d", 11.0)) == (0.0, 1.5)
    in_flight.finished("unknown")
    in_flight.prefilled("unknown", 1.0)
    in_flight.assigned(refuse(request(request_id="no"), "test", 1.0), 12.0)
    assert len(in_flight) == 1


def test_requests_that_never_ended_are_dropped_in_time() -> None:
    in_flight = InFlight()
    in_flight.assigned(SENT, 10.0)
    assert in_flight.expire(older_than=10.0) == []
    assert in_flight.expire(older_than=11.0) == ["x"]
    assert in_flight.decoding("d", 12.0, 11.0)[0] == 0
