"""Logging: the fields of every line, and one line for each event."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from kvpool.serving.log import LogLevel, setup_logging


@pytest.fixture
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    config = structlog.get_config()
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.configure(**config)


@pytest.mark.usefixtures("restored_logging")
def test_json_lines_carry_process_level_and_request(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("info", "json", "node")
    structlog.stdlib.get_logger("tiers.x").info("block stored", request_id="r-1", blocks=3)
    logging.getLogger("uvicorn").warning("from %s", "outside")
    structlog.stdlib.get_logger("tiers.x").debug("not written")
    stored, outside = map(json.loads, capsys.readouterr().err.splitlines())
    assert stored["event"] == "block stored"
    assert (stored["process"], stored["level"], stored["logger"]) == ("node", "info", "tiers.x")
    assert (stored["request_id"], stored["blocks"]) == ("r-1", 3)
    assert (outside["event"], outside["process"]) == ("from outside", "node")


@pytest.mark.usefixtures("restored_logging")
def test_exceptions_are_one_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("info", "json", "node")
    try:
        raise ValueError("broken")
    except ValueError:
        structlog.stdlib.get_logger("x").exception("failed")
    (line,) = capsys.readouterr().err.splitlines()
    assert "ValueError: broken" in json.loads(line)["exception"]


@pytest.mark.usefixtures("restored_logging")
def test_console_lines_are_for_people_and_set_up_twice_writes_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    setup_logging("info", "json", "node")
    setup_logging("warning", "console", "node")
    structlog.stdlib.get_logger("x").info("quiet")
    structlog.stdlib.get_logger("x").warning("loud", n=1)
    (line,) = capsys.readouterr().err.splitlines()
    assert "loud" in line
    assert "n=1" in line
    assert not line.startswith("{")


@pytest.mark.usefixtures("restored_logging")
def test_a_traceback_on_the_console_shows_no_local_variables(
    capsys: pytest.CaptureFixture[str],
) -> None:
    setup_logging("info", "console", "node")
    prompt = "what a user sent"
    try:
        raise ValueError("broken")
    except ValueError:
        structlog.get_logger("x").exception("failed")
    written = capsys.readouterr().err
    assert "ValueError: broken" in written
    assert prompt not in written.replace('prompt = "what a user sent"', "")


@pytest.mark.parametrize("level", ["info", "debug"])
@pytest.mark.usefixtures("restored_logging")
def test_the_http_clients_line_for_each_request_is_for_debugging(
    capsys: pytest.CaptureFixture[str], level: LogLevel
) -> None:
    setup_logging(level, "json", "conductor")
    logging.getLogger("httpx").info("HTTP Request: GET ...")
    assert ("HTTP Request" in capsys.readouterr().err) == (level == "debug")
