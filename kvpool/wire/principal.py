"""The caller of a server: a principal with its tenant and scopes.

`kvpool.security` finds it by its token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

EVERY_TENANT = "*"


class Scope(StrEnum):
    """What a token may do. ADMIN includes all others, INTERNAL and WRITE include READ."""

    READ = "read"
    WRITE = "write"
    ADMIN = "admin"
    INTERNAL = "internal"  # calls among nodes, workers and conductors
    METRICS = "metrics"  # /metrics, which shows sums over all tenants


@dataclass(slots=True, frozen=True)
class Principal:
    """A caller, known by its token or admitted without one.

    Args:
        scopes: those of the token and all that they include.
        is_isolated: the tenant's blocks have memory of their own, which other tenants cannot reach.
        token_sha256: tells a token from its replacement under the same name.
    """

    name: str
    tenant: str
    scopes: frozenset[Scope]
    is_isolated: bool = False
    token_sha256: bytes = field(default=b"", repr=False)

    @property
    def sees_all(self) -> bool:
        """Whether it may see the blocks of every tenant."""
        return self.tenant == EVERY_TENANT


ANYBODY = Principal("", EVERY_TENANT, frozenset(Scope))  # on a server that asks for no token
NOBODY = Principal("", "", frozenset())  # before the token is checked
