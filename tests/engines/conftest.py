"""What engines leave behind in the process that imports them is undone."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _own_environment() -> Iterator[None]:
    """vLLM and SGLang set variables; one would make all servers started later share metrics."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
