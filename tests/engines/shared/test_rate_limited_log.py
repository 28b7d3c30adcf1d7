"""A trouble that repeats is logged at a bounded rate, and what was left out is counted."""

from __future__ import annotations

import logging

import pytest

from kvpool.engines.shared.rate_limited_log import RateLimitedLog


def test_each_kind_is_written_once_a_period_with_what_was_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = RateLimitedLog("kvpool.tests.quiet", period_s=10.0)
    with caplog.at_level(logging.WARNING, "kvpool.tests.quiet"):
        assert log.report("down", "first", 0.0)
        assert not any(log.report("down", "again", 1.0 + n) for n in range(5))
        assert log.report("full", "another kind", 2.0)
        assert log.report("down", "later", 10.0)
    texts = [record.getMessage() for record in caplog.records]
    assert texts == [
        "kvpool: down: first",
        "kvpool: full: another kind",
        "kvpool: down: later (and 5 like it since the last such line)",
    ]


def test_a_defect_is_an_error_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    log = RateLimitedLog("kvpool.tests.quiet")
    assert log.report("load", "of ours", 0.0, error=ValueError("why"))
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert "ValueError: why" in caplog.text
