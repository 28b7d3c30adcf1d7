"""The credentials of a client: its token and its TLS files."""

from __future__ import annotations

import functools
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from kvpool.config.settings import CallerConfig
from kvpool.errors import ConfigError


@dataclass(frozen=True)
class Credentials:
    """A token and TLS files. All are optional.

    Args:
        token: from `kvpool token create`.
        tls_ca: PEM file of the CAs that may sign a server's certificate. If set, every TCP
            connection is encrypted and the server's name is checked.
        tls_cert: PEM file of the client's own certificate, for servers that ask for one.
        tls_key: PEM file of the key of `tls_cert`.

    Raises:
        ConfigError: `tls_cert` is given without `tls_key` or `tls_ca`, or a file cannot be used.
    """

    token: str = field(default="", repr=False)
    tls_ca: Path | str | None = None
    tls_cert: Path | str | None = None
    tls_key: Path | str | None = None

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert and tls_key are set together or not at all")
        if self.tls_cert is not None and self.tls_ca is None:
            raise ConfigError(
                "a client's tls_cert needs tls_ca", hint="tls_ca names the CAs to trust"
            )
        _ = self.tls  # raises now if a file cannot be used

    @functools.cached_property
    def tls(self) -> ssl.SSLContext | None:
        """The context for connections to servers; None: no encryption."""
        if self.tls_ca is None:
            return None
        try:
            context = ssl.create_default_context(cafile=self.tls_ca)
            if self.tls_cert is not None:
                context.load_cert_chain(self.tls_cert, self.tls_key)
        except (OSError, ValueError) as error:
            raise unusable(error, self.tls_ca, self.tls_cert, self.tls_key) from None
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        return context


def unusable(error: Exception, *paths: Path | str | None) -> ConfigError:
    """The error for TLS files that cannot be used."""
    names = ", ".join(str(path) for path in paths if path is not None)
    reason = getattr(error, "strerror", None) or str(error)
    return ConfigError(f"TLS cannot use {names}: {reason}", hint="PEM files are expected")


def credentials_of(config: CallerConfig) -> Credentials:
    """The credentials in a process's settings.

    Raises:
        ConfigError: as `Credentials`.
    """
    cert = config.tls_cert if config.tls_ca is not None else None
    key = config.tls_key if config.tls_ca is not None else None
    return Credentials(config.token.get_secret_value(), config.tls_ca, cert, key)


NO_CREDENTIALS = Credentials()
