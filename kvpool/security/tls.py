"""A server's side of TLS, for the three kinds of servers. Whether it is used is decided elsewhere."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpool.security.credentials import unusable


@dataclass(slots=True, frozen=True)
class ServerTls:
    """The files of a server's TLS. With `client_ca`, clients without a certificate of it are refused."""

    cert: Path
    key: Path
    client_ca: Path | None = None

    def context(self) -> ssl.SSLContext:
        """For sockets of our own.

        Raises:
            ConfigError: a file cannot be used.
        """
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.load_cert_chain(self.cert, self.key)
            if self.client_ca is not None:
                context.load_verify_locations(self.client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ValueError) as error:
            raise unusable(error, self.cert, self.key, self.client_ca) from None
        return context

    def for_grpc(self) -> Any:
        """For `add_secure_port`."""
        import grpc  # here, so that other users of this module need no gRPC

        pair = (self.key.read_bytes(), self.cert.read_bytes())
        if self.client_ca is None:
            return grpc.ssl_server_credentials([pair])
        roots = self.client_ca.read_bytes()
        return grpc.ssl_server_credentials([pair], roots, require_client_auth=True)

    def for_uvicorn(self) -> dict[str, Any]:
        """Arguments of `uvicorn.Config`."""
        options: dict[str, Any] = {"ssl_certfile": self.cert, "ssl_keyfile": self.key}
        if self.client_ca is not None:
            options |= {"ssl_ca_certs": self.client_ca, "ssl_cert_reqs": ssl.CERT_REQUIRED}
        return options
