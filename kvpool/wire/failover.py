"""A client of several equal servers: it stays with one that answers, and turns to the next when it does not.

For conductors that share their state. A call that was lost with its server is sent again to the next one,
which is right for every message that a conductor takes: doing it twice does no harm.
"""

from __future__ import annotations

import time
from typing import Any

from kvpool.errors import ConfigError, DeadlineExceeded, Unavailable
from kvpool.wire.client import WireClient
from kvpool.wire.credentials import NO_CREDENTIALS, Credentials
from kvpool.wire.messages import Message

PATIENCE_S = 2.0  # longest wait for a server's answer while there is another to ask


def split_addresses(text: str) -> list[str]:
    """The addresses of "host:port,host:port".

    Raises:
        ConfigError: there is none.
    """
    addresses = [address.strip() for address in text.split(",") if address.strip()]
    if not addresses:
        raise ConfigError("no address is given", hint='e.g. "10.0.0.1:7800,10.0.0.2:7800"')
    return addresses


class FailoverClient:
    """Speaks to the first of several servers that answers; with a single one, much like `WireClient`.

    Args:
        addresses: "host:port" of each, with commas between them, in the order in which they are tried.
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
        """Of the server that is spoken to now."""
        return self._clients[self._at].address

    async def call(self, request: Message, timeout_s: float) -> Any:
        """Send `request` and return its reply, of whichever server gives it first.

        Raises:
            DeadlineExceeded, Unavailable: no server answered within `timeout_s`; of the last one tried.
            KvpoolError: what the server raised.
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
                    raise  # a server's own word, such as `StaleEpoch`
                if self._at == at:  # else a neighbouring call has turned already
                    self._at = (at + 1) % len(self._clients)
                if not others or time.monotonic() >= deadline:
                    raise
        raise AssertionError("unreachable")

    def send_nowait(self, request: Message) -> bool:
        """Send one-way if a connection stands; False if none does."""
        return self._clients[self._at].send_nowait(request)

    async def close(self) -> None:
        """Close all connections; calls in flight fail with `Unavailable`."""
        for client in self._clients:
            await client.close()
