"""Both clients have the same methods, with the same signatures and docstrings."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from kvpool.client import AsyncPool, Pool

# Engines close their pools this late: vLLM in one process does it by `weakref.finalize`.
CLOSES_AT_EXIT = """
import atexit
from kvpool import Pool
pool = Pool(conductor="127.0.0.1:1")
atexit.register(pool.close)
"""
ASYNC_ONLY: set[str] = set()
BLOCKING_ONLY = {"release", "submit"}
WRITTEN_TWICE = {"close", "pinned"}


def public_methods(kind: type) -> dict[str, Callable[..., Any]]:
    members = inspect.getmembers(kind, inspect.isfunction)
    return {name: function for name, function in members if not name.startswith("_")}


def test_both_clients_have_the_same_methods() -> None:
    assert set(public_methods(AsyncPool)) - set(public_methods(Pool)) == ASYNC_ONLY
    assert set(public_methods(Pool)) - set(public_methods(AsyncPool)) == BLOCKING_ONLY


@pytest.mark.parametrize("name", sorted(set(public_methods(Pool)) - BLOCKING_ONLY))
def test_a_blocking_method_keeps_signature_and_docstring(name: str) -> None:
    blocking, original = getattr(Pool, name), getattr(AsyncPool, name)
    assert blocking.__doc__
    if name not in WRITTEN_TWICE:
        assert inspect.signature(blocking) == inspect.signature(original)
        assert blocking.__doc__ == original.__doc__


def test_both_clients_take_the_same_settings() -> None:
    assert inspect.signature(Pool) == inspect.signature(AsyncPool)


def test_a_pool_can_be_closed_while_the_interpreter_exits() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", CLOSES_AT_EXIT], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stderr) == (0, "")
