"""The request log: the last decisions with their outcomes."""

from __future__ import annotations

import pytest

from conductor.requests.request_log import RequestLog, RequestOutcome
from conductor.scheduling.scheduler import refuse
from kvpool.errors import InvalidArgument
from tests.support.clusters import request


def test_the_log_keeps_the_last_decisions_with_their_outcomes() -> None:
    log = RequestLog(capacity=2)
    for number in range(3):
        log.decided(refuse(request(request_id=str(number)), "test", 1.0), float(number))
    assert log.get("0") is None
    assert log.ended("0", RequestOutcome("ok")) is None
    log.ended("2", RequestOutcome("failed", ttft_s=2.0))
    assert [r.decision.request_id for r in log.recent(5)] == ["2", "1"]
    assert [r.decision.request_id for r in log.recent(1)] == ["2"]
    assert log.recent(0) == []
    log.decided(refuse(request(request_id="theirs"), "test", 1.0), 9.0, "them")
    assert [r.decision.request_id for r in log.recent(5, "them")] == ["theirs"]
    assert [r.decision.request_id for r in log.recent(5, "")] == ["2"]
    record = log.get("2")
    assert record is not None
    assert record.outcome is not None
    assert record.outcome.ttft_s == 2.0
    with pytest.raises(InvalidArgument):
        RequestLog(0)
