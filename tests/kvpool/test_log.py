"""Logging: what stands on every line, and that there is one line for one event."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from kvpool.log import current_request_id, get_logger, request_context, setup_logging


@pytest.fixture
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


@pytest.mark.usefixtures("restored_logging")
def test_json_lines_carry_process_level_and_request(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("info", "json", "node")
    with request_context("r-1", tenant="t"):
        assert current_request_id() == "r-1"
        get_logger("tiers.x").info("block stored", blocks=3)
        logging.getLogger("uvicorn").warning("from %s", "outside")
    get_logger("tiers.x").info("later")
    get_logger("tiers.x").debug("not written")
    stored, outside, later = map(json.loads, capsys.readouterr().err.splitlines())
    assert stored["event"] == "block stored"
    assert (stored["process"], stored["level"], stored["logger"]) == ("node", "info", "tiers.x")
    assert (stored["request_id"], stored["tenant"], stored["blocks"]) == ("r-1", "t", 3)
    assert (outside["event"], outside["request_id"]) == ("from outside", "r-1")
    assert "request_id" not in later
    assert current_request_id() is None


@pytest.mark.usefixtures("restored_logging")
def test_exceptions_are_one_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("info", "json", "node")
    try:
        raise ValueError("broken")
    except ValueError:
        get_logger("x").exception("failed")
    (line,) = capsys.readouterr().err.splitlines()
    assert "ValueError: broken" in json.loads(line)["exception"]


@pytest.mark.usefixtures("restored_logging")
def test_console_lines_are_for_people_and_set_up_twice_writes_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    setup_logging("info", "json", "node")
    setup_logging("warning", "console", "node")
    get_logger("x").info("quiet")
    get_logger("x").warning("loud", n=1)
    (line,) = capsys.readouterr().err.splitlines()
    assert "loud" in line
    assert "n=1" in line
    assert not line.startswith("{")
