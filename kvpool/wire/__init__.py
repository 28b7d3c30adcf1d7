"""The hot lane between engines, nodes, workers and conductor: framed msgpack over TCP or Unix sockets."""

from kvpool.wire.client import WireClient
from kvpool.wire.server import Final, Session, WireServer

__all__ = ["Final", "Session", "WireClient", "WireServer"]
