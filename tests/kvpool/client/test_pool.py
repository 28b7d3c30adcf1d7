"""The blocking client offers what the asyncio client offers, with the same signatures and docstrings."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from kvpool.client import AsyncPool, Pool

ASYNC_ONLY: set[str] = set()
BLOCKING_ONLY = {"release", "submit"}
WRITTEN_TWICE = {"close", "pinned", "peers", "register_memory", "deregister_memory"}


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
