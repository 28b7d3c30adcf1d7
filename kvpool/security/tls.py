"""The TLS files of a server, for the wire, HTTP and gRPC."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpool.wire.credentials import unusable


@dataclass(slots=True, frozen=True)
class ServerTls:
    """A server's certificate and key. With `client_ca`, clients need a certificate of that CA."""

    cert: Path
    key: Path
    client_ca: Path | None = None

    def context(self) -> ssl.SSLContext:
        """The context for the wire's sockets.

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
        """The credentials for gRPC's `add_secure_port`."""
        import grpc  # here, so that the wire needs no gRPC

        pair = (self.key.read_bytes(), self.cert.read_bytes())
        if self.client_ca is None:
            return grpc.ssl_server_credentials([pair])
        roots = self.client_ca.read_bytes()
        return grpc.ssl_server_credentials([pair], roots, require_client_auth=True)

    def for_uvicorn(self) -> dict[str, Any]:
        """Arguments for `uvicorn.Config`."""
        options: dict[str, Any] = {"ssl_certfile": self.cert, "ssl_keyfile": self.key}
        if self.client_ca is not None:
            options |= {"ssl_ca_certs": self.client_ca, "ssl_cert_reqs": ssl.CERT_REQUIRED}
        return options
