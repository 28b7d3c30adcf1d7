"""The marker `model`: tests with a real model, which is converted on first use (half a minute)."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "model: needs a real model, converted on first use")
