"""The thread of a NIXL agent, without NIXL."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kvpool.transports import nixl_thread
from kvpool.transports.nixl_agent import NixlUnavailable


def test_a_thread_whose_agent_cannot_be_created_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(*_: Any, **__: Any) -> Any:
        raise NixlUnavailable("no NIXL here")

    monkeypatch.setattr(nixl_thread, "NixlAgent", unavailable)
    before = threading.active_count()
    with pytest.raises(NixlUnavailable):
        nixl_thread.NixlThread("test", loopback_only=True)
    assert threading.active_count() == before
