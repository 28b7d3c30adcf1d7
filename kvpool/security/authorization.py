"""Whether a call may go on: whose token it came with, what that allows, and which namespaces it may name.

Pure but for `CALLER`, which carries the principal of a call from the edge of HTTP and gRPC servers to their
handlers; over the wire the session does. A namespace of another tenant is answered like one that does
not exist.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

import msgspec

from kvpool.blocks.hash_check import check_proof
from kvpool.blocks.layout import Namespace
from kvpool.errors import Forbidden, Unauthenticated, UnknownNamespace, brief
from kvpool.security.scopes import MESSAGES, OF_TENANTS_WORKERS
from kvpool.security.tokens import ANYBODY, NOBODY, Principal, Scope, Tokens, unknown_token
from kvpool.wire import messages as m

MAX_ALIASES = 10_000
CALLER: ContextVar[Principal] = ContextVar("kvpool_caller", default=NOBODY)
T = TypeVar("T", bound=m.Message)


class Gate:
    """What stands before the handlers of one server.

    Args:
        tokens: those accepted; None: nobody is asked for one, and everybody may do everything.
        keeps_apart: this server hands out ways to reach its memory: a tenant that is isolated gets in only where
            the server is its own (`lent_to`), and there nobody else does.
        lent_to: the tenant whose blocks alone this server may hold; "": those of all who are not isolated.
    """

    def __init__(
        self, tokens: Tokens | None = None, *, keeps_apart: bool = False, lent_to: str = ""
    ) -> None:
        self.tokens = tokens
        self.notice = ""  # what is not well with the tokens
        self._keeps_apart = keeps_apart
        self._lent_to = lent_to
        self.on_change: list[Callable[[], None]] = []  # called when other tokens are in force
        # By id, the namespaces that this server knows; a server without any refuses nothing by them.
        self.find_namespace: Callable[[bytes], Namespace | None] = lambda _id: None
        # By id, the tenant of each worker that this server knows.
        self.find_worker: Callable[[str], str | None] = lambda _id: None
        # What a client calls a namespace whose tenant it left out, and what it is called here.
        self._aliases: OrderedDict[tuple[str, bytes], bytes] = OrderedDict()

    def replace(self, tokens: Tokens) -> None:
        """Accept these tokens from now on; who came with one that is none of them any more is sent away.

        Raises:
            ConfigError: see `Tokens.instead_of`; the old ones stay.
        """
        self.tokens = tokens if self.tokens is None else tokens.instead_of(self.tokens)
        for listener in self.on_change:
            listener()

    def is_current(self, principal: Principal) -> bool:
        """Whether the token that somebody came with would still make it this principal."""
        return self.tokens is None or self.tokens.holds(principal)

    def authenticate(self, token: str) -> Principal:
        """Whose token this is.

        Raises:
            Unauthenticated: nobody's, and one is needed; or of a tenant that has no business here.
        """
        return ANYBODY if self.tokens is None else self._neighbour(self.tokens.authenticate(token))

    def authenticate_header(self, value: str) -> Principal:
        """Whose token stands in the value of an `Authorization` header ("" when there is none).

        Raises:
            Unauthenticated: nobody's, and one is needed.
        """
        if self.tokens is None:
            return ANYBODY
        kind, _, token = value.partition(" ")
        if value and kind.lower() != "bearer":
            raise Unauthenticated("the Authorization header is not of kind Bearer")
        return self._neighbour(self.tokens.authenticate(token.strip()))

    def _neighbour(self, principal: Principal) -> Principal:
        """The principal, unless it must not even learn how to reach this server's memory."""
        if self._keeps_apart and not principal.sees_all and not self.may_hold(principal.tenant):
            raise unknown_token()
        return principal

    def may_hold(self, tenant: str) -> bool:
        """Whether blocks of this tenant may stand here."""
        if not self._keeps_apart:
            return True
        isolated = self.tokens.isolated_tenants if self.tokens is not None else frozenset()
        return self._lent_to == (tenant if tenant in isolated or self._lent_to == tenant else "")

    def admit(self, request: T, principal: Principal) -> T:
        """The request as the handler shall get it: its namespace is one of the principal's tenant.

        Raises:
            Forbidden: the principal lacks the scope, or it speaks as a worker of another tenant.
            UnknownNamespace: it names one of another tenant, or one that is not known.
            HashMismatch: whoever registers a namespace hashes otherwise.
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
                check_proof(request.namespace, request.proof)  # of what the client calls it
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
        """Whoever it is that asks: what is isolated stands apart."""
        if not self.may_hold(namespace.tenant):
            raise Forbidden(
                "blocks of this namespace do not stand in this node's memory",
                hint="isolated tenants have nodes of their own: see kvpool stats",
            )

    def own_namespace(self, namespace_id: bytes, principal: Principal) -> bytes:
        """The id here of what a tenant calls `namespace_id`.

        Raises:
            UnknownNamespace: it is another tenant's, or nobody's.
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
                    "this worker serves another tenant than its token is for",
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
        if len(self._aliases) >= MAX_ALIASES:
            self._aliases.popitem(last=False)  # its clients register it again
        self._aliases[principal.tenant, namespace.namespace_id] = own.namespace_id
        return own


def require(scope: Scope, principal: Principal, what: str) -> None:
    """Raises Forbidden: the principal has not got `scope`, which `what` needs."""
    if scope not in principal.scopes:
        raise Forbidden(f"this token may not use {brief(what, 80)}: it needs the scope {scope}")


def unknown_namespace(namespace_id: bytes) -> UnknownNamespace:
    """What a server says of a namespace that is nobody's, and of one that is another's."""
    return UnknownNamespace(
        f"namespace {bytes(namespace_id).hex()} is not known here",
        hint="register it first; this server may have restarted",
    )
