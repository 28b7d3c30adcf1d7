"""Structured logging for every process: one set-up, always to stderr, so that stdout stays for results.

The standard library's loggers (uvicorn, grpc, ...) go through the same renderer. Lines about a request carry
its `request_id`.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, Literal

import structlog

LogFormat = Literal["console", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]


def setup_logging(level: LogLevel, format: LogFormat, process: str) -> None:
    """Configure structlog and the standard library's logging; calling it again replaces the set-up.

    Args:
        level: lowest level that is written.
        format: `json` writes one object a line; `console` is for people, coloured on a terminal.
        process: name of this process, e.g. "node"; stands on every line.
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
        # Plain: the default draws every local variable of every frame, which takes seconds of the event
        # loop, and gigabytes where one of them is large, and shows what users sent.
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
    # It writes a line for each request, and engine servers are asked every second.
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
