"""Which transport a client takes to a node."""

from __future__ import annotations

import sys

import pytest

from kvpool.errors import NoTransport
from kvpool.transports.select import Transports
from kvpool.wire.messages import NodeDescriptor


def test_without_nixl_a_node_of_another_host_is_an_error_that_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    monkeypatch.delitem(sys.modules, "nixl._api", raising=False)
    node = NodeDescriptor("far", 1, "b", "10.0.0.2:7810", transports=["shm", "nixl"])
    with pytest.raises(NoTransport) as caught:
        Transports("test-select").choose(node, "a")
    assert "NIXL is not installed" in caught.value.message
    assert caught.value.hint == "pip install 'kvpool[nixl]'"
