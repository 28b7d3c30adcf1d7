"""What all tests share: markers, time limits, the order of the tests and Hypothesis's profiles."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
import structlog

from tests.support.sizes import IS_FULL
from tests.support.work_units import UnitScheduling, order_of

# As in `kvpool.serving.log`: drawing the local variables of a traceback may take longer than a test waits.
structlog.configure(
    processors=[
        structlog.processors.add_log_level,
        structlog.dev.ConsoleRenderer(
            colors=False, exception_formatter=structlog.dev.plain_traceback
        ),
    ]
)

# `ci` draws the same examples for everybody; `full` searches with fresh seeds.
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, database=None)
hypothesis.settings.register_profile("full", deadline=None, print_blob=True)
hypothesis.settings.load_profile("full" if IS_FULL else "ci")

# Seconds that a test of a folder may take where it sets no limit itself; pyproject.toml has the default.
# Engines import for a minute on a busy machine.
TIMEOUTS_S = {"tests/engines/": 900, "tests/chaos/": 3600 if IS_FULL else 600}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for folder, seconds in TIMEOUTS_S.items():
            if item.nodeid.startswith(folder) and item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(seconds))
    items.sort(key=lambda item: order_of(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> UnitScheduling:
    return UnitScheduling(config, log)
