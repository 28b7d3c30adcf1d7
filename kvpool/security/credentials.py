"""What a client shows to the servers that it speaks to: its token, and its side of TLS."""

from __future__ import annotations

import functools
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from kvpool.config.settings import CallerConfig
from kvpool.errors import ConfigError


@dataclass(frozen=True)
class Credentials:
    """A token and the files of TLS; all may be left out.

    Args:
        token: of `kvpool token create`.
        tls_ca: certificates (PEM) of those who may have signed a server's; with it, every TCP connection is
            encrypted and the server's name checked.
        tls_cert: our own certificate, for servers that ask for one.
        tls_key: its key.

    Raises:
        ConfigError: a certificate without its key or without `tls_ca`; a file cannot be used.
    """

    token: str = field(default="", repr=False)
    tls_ca: Path | str | None = None
    tls_cert: Path | str | None = None
    tls_key: Path | str | None = None

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert and tls_key are set together or not at all")
        if self.tls_cert is not None and self.tls_ca is None:
            raise ConfigError("a client's tls_cert needs tls_ca", hint="it says whom to trust")
        _ = self.tls  # a file that cannot be used is told now

    @functools.cached_property
    def tls(self) -> ssl.SSLContext | None:
        """For connections to servers; None: they are not encrypted."""
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
    """That one of these files cannot be used for TLS."""
    names = ", ".join(str(path) for path in paths if path is not None)
    reason = getattr(error, "strerror", None) or str(error)
    return ConfigError(f"TLS cannot use {names}: {reason}", hint="PEM files are expected")


def credentials_of(config: CallerConfig) -> Credentials:
    """What a process shows to those that it calls, by its settings.

    Raises:
        ConfigError: as `Credentials`.
    """
    cert = config.tls_cert if config.tls_ca is not None else None
    key = config.tls_key if config.tls_ca is not None else None
    return Credentials(config.token.get_secret_value(), config.tls_ca, cert, key)


NO_CREDENTIALS = Credentials()
