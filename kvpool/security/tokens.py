"""Who is asking: API tokens, the principals they stand for, and the scopes that these have. Pure.

What a scope is needed for stands in `kvpool.security.scopes`; whether a call may go on is decided by `kvpool.security.authorization`.
A token is kept by nobody: files and memory hold its SHA-256, and no error quotes it.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvpool.config.strict_yaml import read_yaml
from kvpool.errors import ConfigError, Unauthenticated

TOKEN_PREFIX = "kvp_"
TOKEN_BYTES = 32  # of randomness: nothing to guess, so that a plain hash of it is safe to keep
EVERY_TENANT = "*"
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Scope(StrEnum):
    """What a token may do. ADMIN includes all others, INTERNAL and WRITE include READ (see `_INCLUDES`)."""

    READ = "read"
    WRITE = "write"
    ADMIN = "admin"
    INTERNAL = "internal"  # of nodes, workers and conductors among themselves
    METRICS = "metrics"  # /metrics, which shows sums over all tenants


_INCLUDES: dict[Scope, frozenset[Scope]] = {
    Scope.READ: frozenset({Scope.READ}),
    Scope.WRITE: frozenset({Scope.WRITE, Scope.READ}),
    Scope.ADMIN: frozenset(Scope),
    Scope.INTERNAL: frozenset({Scope.INTERNAL, Scope.WRITE, Scope.READ}),
    Scope.METRICS: frozenset({Scope.METRICS}),
}
_OVER_ALL_TENANTS = frozenset({Scope.ADMIN, Scope.METRICS})  # meaningless within one
_MAY_BE_OVER_ALL = _OVER_ALL_TENANTS | {Scope.INTERNAL}


@dataclass(slots=True, frozen=True)
class Principal:
    """Somebody whom a server knows: by a token, or because it asks nobody for one.

    `scopes` are those of the token and all that they include. `is_isolated`: the tenant's blocks stand in
    memory of their own, which nobody else is told how to reach. `token_sha256` tells a token from the one that
    replaced it under the same name.
    """

    name: str
    tenant: str
    scopes: frozenset[Scope]
    is_isolated: bool = False
    token_sha256: bytes = field(default=b"", repr=False)

    @property
    def sees_all(self) -> bool:
        """Whether no tenant is hidden from it."""
        return self.tenant == EVERY_TENANT


ANYBODY = Principal("", EVERY_TENANT, frozenset(Scope))  # where no tokens are asked for
NOBODY = Principal("", "", frozenset())  # before a token was looked at


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One token as the file has it."""

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
        """Whether the token by which somebody became this principal still stands for it."""
        return self._entries.get(principal.token_sha256) == principal

    def instead_of(self, old: Tokens) -> Tokens:
        """These tokens where a server has accepted `old` until now.

        Tenants that have no token any more stay isolated.

        Raises:
            ConfigError: a tenant is isolated in one and not in the other: what stands where would have to change.
        """
        tenants = {principal.tenant for principal in self._entries.values()}
        kept = old.isolated_tenants - tenants
        changed = (self.isolated_tenants | kept) ^ old.isolated_tenants
        if changed:
            raise ConfigError(
                f"tenant {min(changed)!r} begins or ceases to be isolated",
                hint="restart conductors and nodes for that",
            )
        self.isolated_tenants |= kept
        return self

    def authenticate(self, token: str) -> Principal:
        """Whose token this is. Every known hash is compared, in constant time.

        Raises:
            Unauthenticated: there is none, or nobody's.
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
    """What a server says of a token that is nobody's, or of none."""
    return Unauthenticated(
        "this token is not known here" if is_given else "a token is needed here",
        hint="Authorization: Bearer TOKEN over HTTP and gRPC, else client.token; "
        "`kvpool token create` makes one",
    )


def token_digest(token: str) -> bytes:
    """SHA-256 of a token: what is kept of it."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def token_line(
    token: str, name: str, tenant: str, scopes: list[Scope], *, is_isolated: bool = False
) -> str:
    """The line of a token file for `token`; appended to others it makes a file."""
    entry = _Entry(name, token_digest(token).hex(), tenant, scopes, is_isolated)
    plain = msgspec.to_builtins(entry)
    _principal(entry, "token")
    return f"- {msgspec.json.encode(plain).decode()}"  # JSON is YAML


def read_tokens(path: Path) -> Tokens:
    """The tokens of a YAML file: a list of name, token_sha256, tenant, scopes and isolated.

    Raises:
        ConfigError: it cannot be read, or says something that cannot be meant.
    """
    return parse_tokens(read_yaml(path, hint="see tokens_path"), f"file {path}")


def parse_tokens(document: Any, source: str) -> Tokens:
    """The tokens of a parsed document; `source` names it in errors, which quote no hash.

    Raises:
        ConfigError: as `read_tokens`.
    """
    try:
        entries = msgspec.convert(document, list[_Entry])
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source} is no list of tokens: {error}") from None
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
