"""The wire protocol of all processes: framed msgpack over TCP or Unix sockets."""

from kvpool.wire.client import WireClient
from kvpool.wire.failover import FailoverClient, split_addresses
from kvpool.wire.server import Final, Session, WireServer

__all__ = [
    "FailoverClient",
    "Final",
    "Session",
    "WireClient",
    "WireServer",
    "split_addresses",
]
