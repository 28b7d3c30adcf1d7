"""Structured logging for every process. Logs go to stderr, results to stdout.

The standard library's loggers (uvicorn, grpc, ...) use the same renderer. Lines about a request
have its `request_id`.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, Literal

import structlog

LogFormat = Literal["console", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]


def setup_logging(level: LogLevel, format: LogFormat, process: str) -> None:
    """Configure structlog and the standard library's logging. A second call replaces the first.

    Args:
        level: lowest level that is logged.
        format: `json` writes one object a line; `console` is for people, with colours on a
            terminal.
        process: name of this process on every line, e.g. "node".
    """

    def add_process(
        _: Any, __: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        event.setdefault("process", process)
        return event

    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        add_process,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    render: list[structlog.typing.Processor]
    if format == "json":
        render = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        # The default prints every local variable of every frame. That takes seconds of the event
        # loop, and gigabytes if one is large, and shows what users sent.
        plain = structlog.dev.plain_traceback
        render = [
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)
        ]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # httpx logs a line for each request, and the conductor polls engine servers every second.
    logging.getLogger("httpx").setLevel("DEBUG" if level == "debug" else "WARNING")
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
