"""Waiting for what nobody signals, with a deadline; and ports that nobody has."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Any


async def until(
    claim: Callable[[], Any], what: str = "what is waited for", timeout_s: float = 60.0
) -> None:
    """Poll until `claim()`; fails with `what` after the deadline."""
    deadline = time.monotonic() + timeout_s
    while not claim():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        await asyncio.sleep(0.002)


def free_port() -> int:
    """A TCP port of loopback on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
