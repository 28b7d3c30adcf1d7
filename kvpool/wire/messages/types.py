"""The base classes of all messages, and what every server understands."""

from __future__ import annotations

import msgspec

PROTOCOL_VERSION = 1


class Message(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Base of all requests."""


class Reply(msgspec.Struct, array_like=True, frozen=True):
    """Base of all replies and of the records inside messages."""


class Hello(Message, frozen=True):
    """First frame on a connection.

    `client_id` is a UUID, never an address; `epoch` changes at each start.
    """

    protocol: int
    client_id: str
    kind: str  # "client", "node", "worker", "conductor"
    epoch: int = 0
    token: str = ""


class HelloReply(Reply, frozen=True):
    protocol: int
    kind: str
    server_id: str
    epoch: int


class Ok(Reply, frozen=True):
    """The call is done."""


class Ping(Message, frozen=True):
    pass
