"""A client of several equal servers.

It uses one, and switches to the next if that one does not reply.

It serves conductors that share their state. A call that fails with its server is sent to the next
server. That is safe, since every message to a conductor may be handled twice.
"""

from __future__ import annotations

import time
from typing import Any

from kvpool.errors import ConfigError, DeadlineExceeded, Unavailable
from kvpool.wire.client import WireClient
from kvpool.wire.credentials import NO_CREDENTIALS, Credentials
from kvpool.wire.messages import Message

PATIENCE_S = 2.0  # longest wait for one server while there is another


def split_addresses(text: str) -> list[str]:
    """Split "host:port,host:port" into addresses.

    Raises:
        ConfigError: there is no address.
    """
    addresses = [address.strip() for address in text.split(",") if address.strip()]
    if not addresses:
        raise ConfigError("no address is given", hint='e.g. "10.0.0.1:7800,10.0.0.2:7800"')
    return addresses


class FailoverClient:
    """Calls the first of several servers that replies. With one server it is like `WireClient`.

    Args:
        addresses: "host:port" of each server, separated by commas, in the order in which they are
            tried.
        client_id, kind, epoch, credentials: as for `WireClient`.

    Raises:
        ConfigError: there is no address.
    """

    def __init__(
        self,
        addresses: str,
        client_id: str,
        *,
        kind: str = "client",
        epoch: int = 0,
        credentials: Credentials = NO_CREDENTIALS,
    ) -> None:
        self._clients = [
            WireClient(address, client_id, kind=kind, epoch=epoch, credentials=credentials)
            for address in split_addresses(addresses)
        ]
        self._at = 0

    @property
    def address(self) -> str:
        """The address of the server in use."""
        return self._clients[self._at].address

    async def call(self, request: Message, timeout_s: float) -> Any:
        """Send `request` and return the reply of the first server that gives one.

        Raises:
            DeadlineExceeded, Unavailable: no server replied within `timeout_s`; the error of the
                last one.
            KvpoolError: the error that a server raised.
        """
        deadline = time.monotonic() + timeout_s
        for others in range(len(self._clients) - 1, -1, -1):
            at = self._at
            left_s = max(0.0, deadline - time.monotonic())
            limit_s = min(left_s / (others + 1), PATIENCE_S) if others else left_s
            try:
                return await self._clients[at].call(request, limit_s)
            except (Unavailable, DeadlineExceeded) as error:
                if type(error) not in (Unavailable, DeadlineExceeded):
                    raise  # a subclass, such as `StaleEpoch`, is the server's own reply
                if self._at == at:  # else another call has switched already
                    self._at = (at + 1) % len(self._clients)
                if not others or time.monotonic() >= deadline:
                    raise
        raise AssertionError("unreachable")

    def send_nowait(self, request: Message) -> bool:
        """Send one-way over an open connection. Returns False if there is none."""
        return self._clients[self._at].send_nowait(request)

    async def close(self) -> None:
        """Close all connections. Calls that run fail with `Unavailable`."""
        for client in self._clients:
            await client.close()
