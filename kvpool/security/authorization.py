"""Authorize calls: find the principal of a token, check its scope, and check the namespaces that it
names. `kvpool.security.scopes` says which scope each message needs.

A namespace of another tenant gets the same answer as one that does not exist. `CALLER` carries the
principal from HTTP and gRPC servers to their handlers; on the wire the session has it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

import msgspec

from kvpool.blocks.hash_check import check_proof
from kvpool.blocks.layout import Namespace
from kvpool.bounded import BoundedDict
from kvpool.errors import Forbidden, Unauthenticated, UnknownNamespace, brief
from kvpool.security.scopes import MESSAGES, OF_TENANTS_WORKERS
from kvpool.security.tokens import Tokens, unknown_token
from kvpool.wire import messages as m
from kvpool.wire.principal import ANYBODY, NOBODY, Principal, Scope

MAX_ALIASES = 10_000
CALLER: ContextVar[Principal] = ContextVar("kvpool_caller", default=NOBODY)
T = TypeVar("T", bound=m.Message)


class Authorizer:
    """Authorizes the calls of one server.

    Args:
        tokens: accepted tokens; None: the server asks for no token, and all callers may do
            everything.
        keeps_apart: whether callers learn how to reach this server's memory. Then an isolated
            tenant is admitted only by a server for it (`only_tenant`), which admits no other
            tenant.
        only_tenant: the only tenant whose blocks this server may hold; "": all tenants that are not
            isolated.
    """

    def __init__(
        self, tokens: Tokens | None = None, *, keeps_apart: bool = False, only_tenant: str = ""
    ) -> None:
        self.tokens = tokens
        self.notice = ""  # a problem with the tokens, for /readyz
        self._keeps_apart = keeps_apart
        self._only_tenant = only_tenant
        self.on_change: list[Callable[[], None]] = []  # called when the tokens change
        # Finds a namespace of this server by its id.
        self.find_namespace: Callable[[bytes], Namespace | None] = lambda _id: None
        # Finds the tenant of a worker by its id.
        self.find_worker: Callable[[str], str | None] = lambda _id: None
        # Clients may leave out the tenant of a namespace: (tenant, their id) to the id here.
        # Clients whose alias was dropped register it again.
        self._aliases: BoundedDict[tuple[str, bytes], bytes] = BoundedDict(MAX_ALIASES)

    def replace(self, tokens: Tokens) -> None:
        """Accept these tokens from now on, and close the connections of those that are gone.

        Raises:
            ConfigError: as `Tokens.instead_of`; the old tokens stay.
        """
        self.tokens = tokens if self.tokens is None else tokens.instead_of(self.tokens)
        for listener in self.on_change:
            listener()

    def is_current(self, principal: Principal) -> bool:
        """Whether the principal's token is still accepted, with the same tenant and scopes."""
        return self.tokens is None or self.tokens.holds(principal)

    def authenticate(self, token: str) -> Principal:
        """The principal of a token.

        Raises:
            Unauthenticated: the token is missing or unknown, or its tenant may not use this server.
        """
        return ANYBODY if self.tokens is None else self._admit(self.tokens.authenticate(token))

    def authenticate_header(self, value: str) -> Principal:
        """The principal of the token in an `Authorization` header; "" means that there is no
        header.

        Raises:
            Unauthenticated: as `authenticate`, or the header is not of kind Bearer.
        """
        if self.tokens is None:
            return ANYBODY
        kind, _, token = value.partition(" ")
        if value and kind.lower() != "bearer":
            raise Unauthenticated("the Authorization header is not of kind Bearer")
        return self._admit(self.tokens.authenticate(token.strip()))

    def _admit(self, principal: Principal) -> Principal:
        """The principal, if it may learn how to reach this server's memory."""
        if self._keeps_apart and not principal.sees_all and not self.may_hold(principal.tenant):
            raise unknown_token()
        return principal

    def may_hold(self, tenant: str) -> bool:
        """Whether this server may hold blocks of the tenant."""
        if not self._keeps_apart:
            return True
        isolated = self.tokens.isolated_tenants if self.tokens is not None else frozenset()
        return self._only_tenant == (
            tenant if tenant in isolated or self._only_tenant == tenant else ""
        )

    def authorize(self, request: T, principal: Principal) -> T:
        """Check a request, and return it with the tenant's own namespace for the handler.

        Raises:
            Forbidden: the principal lacks the scope, or the request is of another tenant's worker.
            UnknownNamespace: the namespace is unknown, or of another tenant.
            HashMismatch: the client that registers a namespace computes other hashes.
        """
        if principal is ANYBODY:
            return request
        kind = type(request)
        require(MESSAGES.get(kind, Scope.ADMIN), principal, kind.__name__)
        if principal.sees_all:
            if isinstance(request, m.RegisterNamespace):
                self._check_place(request.namespace)
            return request
        if isinstance(request, m.RegisterNamespace):
            namespace = self._registered(request.namespace, principal)
            if namespace is not request.namespace:
                check_proof(
                    request.namespace, request.proof
                )  # for the namespace as the client has it
                own: Any = m.RegisterNamespace(namespace)
                return own  # type: ignore[no-any-return]
            return request
        if isinstance(request, (m.WorkerJoin, m.WorkerHeartbeat, m.WorkerLeave)):
            self._check_worker(request, principal)
        elif isinstance(request, m.Reserve) and request.writer_id:
            require(Scope.INTERNAL, principal, "Reserve.writer_id")
        elif MESSAGES.get(kind) is Scope.INTERNAL and kind not in OF_TENANTS_WORKERS:
            raise Forbidden(
                f"{kind.__name__} is not for the processes of one tenant",
                hint="give nodes and conductors a token with tenant '*'",
            )
        given: bytes | None = getattr(request, "namespace_id", None)
        if given is None:
            return request
        own = self.own_namespace(given, principal)
        if own != given:
            return msgspec.structs.replace(request, namespace_id=own)
        return request

    def _check_place(self, namespace: Namespace) -> None:
        """Even a principal that sees all tenants cannot mix an isolated tenant with others."""
        if not self.may_hold(namespace.tenant):
            raise Forbidden(
                "this node may not hold blocks of this namespace",
                hint="isolated tenants have nodes of their own: see kvpool stats",
            )

    def own_namespace(self, namespace_id: bytes, principal: Principal) -> bytes:
        """The id here of the namespace that a tenant calls `namespace_id`.

        Raises:
            UnknownNamespace: the namespace is unknown, or of another tenant.
        """
        own = self._aliases.get((principal.tenant, namespace_id), namespace_id)
        namespace = self.find_namespace(own)
        if namespace is None or namespace.tenant != principal.tenant:
            raise unknown_namespace(namespace_id)
        return own

    def _check_worker(
        self, request: m.WorkerJoin | m.WorkerHeartbeat | m.WorkerLeave, principal: Principal
    ) -> None:
        if isinstance(request, m.WorkerJoin):
            worker_id = request.descriptor.worker_id
            if request.descriptor.namespace.tenant != principal.tenant:
                raise Forbidden(
                    "this worker serves another tenant than that of its token",
                    hint="set worker.tenant to the token's tenant",
                )
        else:
            worker_id = request.worker_id
        if self.find_worker(worker_id) not in (None, principal.tenant):
            raise Forbidden(f"worker {brief(worker_id)} is not this tenant's")

    def _registered(self, namespace: Namespace, principal: Principal) -> Namespace:
        if namespace.tenant == principal.tenant:
            return namespace
        if namespace.tenant:
            raise unknown_namespace(namespace.namespace_id)
        own = msgspec.structs.replace(namespace, tenant=principal.tenant)
        self._aliases[principal.tenant, namespace.namespace_id] = own.namespace_id
        return own


def require(scope: Scope, principal: Principal, what: str) -> None:
    """Check that the principal has `scope`, which `what` needs.

    Raises:
        Forbidden: it does not.
    """
    if scope not in principal.scopes:
        raise Forbidden(f"this token may not use {brief(what, 80)}: it needs the scope {scope}")


def unknown_namespace(namespace_id: bytes) -> UnknownNamespace:
    """The error for a namespace that is unknown or of another tenant."""
    return UnknownNamespace(
        f"namespace {bytes(namespace_id).hex()} is not known here",
        hint="register it first; this server may have restarted",
    )
