"""API tokens: the file that lists them, and the principal of each.

Files and memory hold the SHA-256 of a token, never the token. No error quotes one.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvpool.config.strict_yaml import read_yaml
from kvpool.errors import ConfigError, Unauthenticated
from kvpool.wire.principal import EVERY_TENANT, Principal, Scope

TOKEN_PREFIX = "kvp_"
TOKEN_BYTES = 32  # of randomness: it cannot be guessed, so a plain hash of it is safe to store
_DIGEST = re.compile(r"[0-9a-f]{64}")


_INCLUDES: dict[Scope, frozenset[Scope]] = {
    Scope.READ: frozenset({Scope.READ}),
    Scope.WRITE: frozenset({Scope.WRITE, Scope.READ}),
    Scope.ADMIN: frozenset(Scope),
    Scope.INTERNAL: frozenset({Scope.INTERNAL, Scope.WRITE, Scope.READ}),
    Scope.METRICS: frozenset({Scope.METRICS}),
}
_OVER_ALL_TENANTS = frozenset({Scope.ADMIN, Scope.METRICS})  # meaningless within one
_MAY_BE_OVER_ALL = _OVER_ALL_TENANTS | {Scope.INTERNAL}


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One token of the file."""

    name: Annotated[str, Meta(min_length=1, max_length=128)]
    token_sha256: str
    tenant: Annotated[str, Meta(max_length=512, pattern=r"^[^\x00-\x1f]*$")]
    scopes: Annotated[list[Scope], Meta(min_length=1)]
    isolated: bool = False


class Tokens:
    """The tokens that a server accepts.

    Args:
        entries: principals by the SHA-256 of their tokens.
    """

    def __init__(self, entries: dict[bytes, Principal]) -> None:
        self._entries = entries
        self.isolated_tenants = frozenset(p.tenant for p in entries.values() if p.is_isolated)

    def __len__(self) -> int:
        return len(self._entries)

    def holds(self, principal: Principal) -> bool:
        """Whether the principal's token is still accepted, with the same tenant and scopes."""
        return self._entries.get(principal.token_sha256) == principal

    def instead_of(self, old: Tokens) -> Tokens:
        """Make these tokens the successors of `old` on a running server.

        A tenant that was isolated and has no token any more stays isolated.

        Raises:
            ConfigError: a tenant is isolated in one and not in the other, so its blocks would have
                to move.
        """
        tenants = {principal.tenant for principal in self._entries.values()}
        kept = old.isolated_tenants - tenants
        changed = (self.isolated_tenants | kept) ^ old.isolated_tenants
        if changed:
            raise ConfigError(
                f"tenant {min(changed)!r} begins or ceases to be isolated",
                hint="restart conductors and nodes",
            )
        self.isolated_tenants |= kept
        return self

    def authenticate(self, token: str) -> Principal:
        """The principal of a token. Compares every known hash, in constant time.

        Raises:
            Unauthenticated: the token is empty or unknown.
        """
        digest = token_digest(token)
        found: Principal | None = None
        for known, principal in self._entries.items():
            if hmac.compare_digest(known, digest):
                found = principal
        if found is None:
            raise unknown_token(is_given=bool(token))
        return found


def unknown_token(*, is_given: bool = True) -> Unauthenticated:
    """The error for an unknown token, or for none."""
    return Unauthenticated(
        "this token is not known here" if is_given else "a token is needed here",
        hint="Authorization: Bearer TOKEN over HTTP and gRPC, else client.token; "
        "`kvpool token create` makes one",
    )


def token_digest(token: str) -> bytes:
    """The SHA-256 of a token, which is stored in its place."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def token_line(
    token: str, name: str, tenant: str, scopes: list[Scope], *, is_isolated: bool = False
) -> str:
    """The line of a token file for `token`."""
    entry = _Entry(name, token_digest(token).hex(), tenant, scopes, is_isolated)
    plain = msgspec.to_builtins(entry)
    _principal(entry, "token")
    return f"- {msgspec.json.encode(plain).decode()}"  # JSON is YAML


def read_tokens(path: Path) -> Tokens:
    """Read a YAML file: a list of entries with name, token_sha256, tenant, scopes and isolated.

    Raises:
        ConfigError: the file cannot be read, or has an invalid entry.
    """
    return parse_tokens(read_yaml(path, hint="see tokens_path"), f"file {path}")


def parse_tokens(document: Any, source: str) -> Tokens:
    """Read a parsed document; `source` names it in errors, which quote no hash.

    Raises:
        ConfigError: as `read_tokens`.
    """
    try:
        entries = msgspec.convert(document, list[_Entry])
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source} is not a list of tokens: {error}") from None
    known: dict[bytes, Principal] = {}
    names: set[str] = set()
    for entry in entries:
        if not _DIGEST.fullmatch(entry.token_sha256):
            raise ConfigError(
                f"{source}: token_sha256 of {entry.name!r} is not 64 hexadecimal digits",
                hint="`kvpool token create` prints the line",
            )
        digest = bytes.fromhex(entry.token_sha256)
        if entry.name in names or digest in known:
            raise ConfigError(f"{source}: {entry.name!r} or its token is given twice")
        names.add(entry.name)
        known[digest] = _principal(entry, source, digest)
    isolated = {p.tenant: p.is_isolated for p in known.values()}
    for principal in known.values():
        if principal.is_isolated != isolated[principal.tenant]:
            raise ConfigError(
                f"{source}: tenant {principal.tenant!r} is isolated in one token and not in another"
            )
    return Tokens(known)


def _principal(entry: _Entry, source: str, digest: bytes = b"") -> Principal:
    scopes = set(entry.scopes)
    if entry.tenant == EVERY_TENANT and not scopes <= _MAY_BE_OVER_ALL:
        raise ConfigError(
            f"{source}: {entry.name!r} may read or write for every tenant",
            hint="name one tenant; '*' is for the scopes admin, internal and metrics",
        )
    if entry.tenant != EVERY_TENANT and scopes & _OVER_ALL_TENANTS:
        raise ConfigError(
            f"{source}: {entry.name!r} has the scope admin or metrics, which see every tenant",
            hint="write tenant: '*'",
        )
    if entry.isolated and entry.tenant == EVERY_TENANT:
        raise ConfigError(f"{source}: {entry.name!r} cannot be isolated from every tenant")
    included = frozenset[Scope]().union(*(_INCLUDES[scope] for scope in scopes))
    return Principal(entry.name, entry.tenant, included, entry.isolated, digest)
