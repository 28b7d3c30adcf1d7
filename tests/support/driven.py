"""Asynchronous objects whose calls wait for their end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class Driven:
    """Calls an object's coroutines to their end with `run`."""

    def __init__(self, whole: Any, run: Callable[[Any], Any]) -> None:
        self.whole = whole
        self._run = run

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.whole, name)
        if not callable(method):
            return method

        def call(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            return self._run(result) if asyncio.iscoroutine(result) else result

        return call
