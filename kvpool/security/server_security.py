"""Secure a server by its settings: tokens, TLS, and its own credentials for calls to other servers.

A server that listens beyond this machine without tokens does not start, unless `allow_insecure` is
set.
"""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
from dataclasses import dataclass

import structlog

from kvpool.config.settings import ServerConfig
from kvpool.errors import ConfigError
from kvpool.security.authorization import Authorizer
from kvpool.security.tls import ServerTls
from kvpool.security.token_file import TokenFile, some_tokens
from kvpool.wire.credentials import Credentials, credentials_of

log = structlog.get_logger(__name__)


@dataclass(slots=True, frozen=True)
class Security:
    """The parts of one server's security.

    `tls` and `context` are None without encryption. `credentials` are for calls to other servers.
    """

    authorizer: Authorizer
    tls: ServerTls | None
    context: ssl.SSLContext | None
    credentials: Credentials
    token_file: TokenFile | None = None

    def tasks(self) -> list[asyncio.Task[None]]:
        """Start the tasks that run as long as the server."""
        if self.token_file is None:
            return []
        return [asyncio.create_task(self.token_file.run(), name="tokens")]


def secure(
    config: ServerConfig, section: str, *, keeps_apart: bool = False, only_tenant: str = ""
) -> Security:
    """Read the files that a server's settings name, and check that it is safe to listen.

    Args:
        section: name of the settings section for messages, e.g. "node".
        keeps_apart, only_tenant: as for `Authorizer`.

    Raises:
        ConfigError: it would listen beyond this machine without tokens, or a file cannot be used.
    """
    tokens = some_tokens(config.tokens_path) if config.tokens_path is not None else None
    if not is_loopback(config.host):
        _check_exposure(config, section)
    tls = None
    if config.tls_cert is not None and config.tls_key is not None:
        tls = ServerTls(config.tls_cert, config.tls_key, config.tls_client_ca)
    authorizer = Authorizer(tokens, keeps_apart=keeps_apart, only_tenant=only_tenant)
    watch = TokenFile(config.tokens_path, authorizer) if config.tokens_path is not None else None
    return Security(authorizer, tls, tls.context() if tls else None, credentials_of(config), watch)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _check_exposure(config: ServerConfig, section: str) -> None:
    if config.tokens_path is None:
        if not config.allow_insecure:
            raise ConfigError(
                f"{section}.host {config.host} can be reached from other machines, and "
                f"{section}.tokens_path is not set: any caller could read and write every block",
                hint=f"make tokens with `kvpool token create` and set {section}.tokens_path, "
                "bind to "
                f"127.0.0.1, or set {section}.allow_insecure=true on a trusted network",
            )
        log.warning(
            "listening beyond this machine without tokens: allow_insecure is set",
            host=config.host,
        )
    elif config.tls_cert is None:
        log.warning("tokens travel unencrypted: set tls_cert and tls_key", host=config.host)
