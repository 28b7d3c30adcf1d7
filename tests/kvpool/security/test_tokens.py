"""Tokens, scopes and the authorizer: who may do what. A tenant learns nothing of others."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from kvpool.blocks.layout import Layout, Namespace
from kvpool.errors import ConfigError, Forbidden, Unauthenticated, UnknownNamespace
from kvpool.proto import kvpool_pb2
from kvpool.security.authorization import Authorizer
from kvpool.security.scopes import MESSAGES, METHODS, ROUTES
from kvpool.security.tokens import Tokens, parse_tokens, read_tokens, token_line
from kvpool.wire import messages as m
from kvpool.wire.principal import ANYBODY, EVERY_TENANT, Scope

LAYOUT = Layout("bfloat16", layers=1, kv_heads=1, head_dim=8)
A, B = (Namespace("model", "1", LAYOUT, tenant=tenant) for tenant in "ab")
READ, WRITE, ADMIN, INTERNAL = Scope.READ, Scope.WRITE, Scope.ADMIN, Scope.INTERNAL


def tokens(**holders: tuple[str, list[Scope]]) -> Tokens:
    """Tokens `token-NAME` of (tenant, scopes)."""
    lines = [token_line(f"token-{n}", n, *holder) for n, holder in holders.items()]
    return parse_tokens(yaml.safe_load("\n".join(lines)), "test")


def authorizer_of(*known: Namespace, **holders: tuple[str, list[Scope]]) -> Authorizer:
    authorizer = Authorizer(tokens(**holders))
    authorizer.find_namespace = {n.namespace_id: n for n in known}.get
    return authorizer


# ---------------------------------------------------------------- tables


def test_every_message_has_a_scope() -> None:
    assert MESSAGES.keys() == m.REPLIES.keys() - {m.Hello}


def test_every_grpc_method_has_a_scope() -> None:
    declared = {
        f"/{service.full_name}/{method.name}"
        for service in kvpool_pb2.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert declared == {name for name in METHODS if name.startswith("/kvpool")}


def test_only_paths_without_anything_to_see_are_open() -> None:
    open_paths = {path for (_, path), scope in ROUTES.items() if scope is None}
    assert open_paths == {
        *("/", "/healthz", "/readyz", "/docs", "/docs/oauth2-redirect", "/openapi.json")
    }


# ---------------------------------------------------------------- tokens


def test_a_token_file_holds_hashes_and_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "tokens.yaml"
    path.write_text(token_line("kvp_x", "x", "a", [WRITE], is_isolated=True) + "\n")
    assert "kvp_x" not in path.read_text()
    known = read_tokens(path)
    principal = known.authenticate("kvp_x")
    assert (principal.name, principal.tenant, principal.is_isolated) == ("x", "a", True)
    assert principal.scopes == {READ, WRITE}
    assert known.isolated_tenants == {"a"}


@pytest.mark.parametrize("wrong", ["", "token-", "token-x ", "TOKEN-X", "\udc80"])
def test_a_wrong_token_is_refused_and_not_quoted(wrong: str) -> None:
    with pytest.raises(Unauthenticated) as caught:
        tokens(x=("a", [READ])).authenticate(wrong)
    assert not wrong.strip("-") or wrong not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"token_sha256": "12"}, "64 hexadecimal"),
        ({"scopes": []}, "length"),
        ({"scopes": ["root"]}, "root"),
        ({"tenant": "*"}, "every tenant"),
        ({"scopes": ["admin"]}, "tenant: '\\*'"),
        ({"tenant": "*", "scopes": ["admin"], "isolated": True}, "isolated"),
        ({"password": "x"}, "password"),
        ({"tenant": "a\0b"}, "matching"),
    ],
)
def test_a_token_file_that_cannot_be_meant_is_refused(
    change: dict[str, object], problem: str
) -> None:
    entry = {"name": "x", "token_sha256": "a" * 64, "tenant": "a", "scopes": ["read"], **change}
    with pytest.raises(ConfigError, match=problem) as caught:
        parse_tokens([entry], "test")
    assert "a" * 64 not in str(caught.value)


def test_names_and_tokens_come_once_and_a_tenant_is_isolated_or_not() -> None:
    one: dict[str, Any] = {"name": "x", "token_sha256": "a" * 64, "tenant": "a"}
    one["scopes"] = ["read"]
    other: dict[str, Any]
    for other in ({"name": "x", "token_sha256": "b" * 64}, {"name": "y"}):
        with pytest.raises(ConfigError, match="twice"):
            parse_tokens([one, {**one, **other}], "test")
    other = {**one, "name": "y", "token_sha256": "b" * 64, "isolated": True}
    with pytest.raises(ConfigError, match="isolated in one token"):
        parse_tokens([one, other], "test")


# ---------------------------------------------------------------- the authorizer


def test_without_tokens_everybody_may_do_everything() -> None:
    authorizer = Authorizer()
    assert authorizer.authenticate("") is ANYBODY
    assert authorizer.authenticate_header("") is ANYBODY
    drain = m.Drain(1.0)
    assert authorizer.authorize(drain, ANYBODY) is drain


@pytest.mark.parametrize(
    ("header", "is_known"),
    [("Bearer token-x", True), ("bearer token-x", True), ("", False), ("Basic token-x", False)],
)
def test_the_header_carries_the_token(header: str, is_known: bool) -> None:
    authorizer = authorizer_of(x=("a", [READ]))
    if is_known:
        assert authorizer.authenticate_header(header).name == "x"
    else:
        with pytest.raises(Unauthenticated):
            authorizer.authenticate_header(header)


HASH = bytes(16)
EXAMPLES: dict[Scope, m.Message] = {
    READ: m.Lookup(A.namespace_id, HASH),
    WRITE: m.Reserve(A.namespace_id, HASH, b"", 0, 1.0),
    ADMIN: m.Drain(1.0),
    INTERNAL: m.NodeLeave("n", 1),
}


@pytest.mark.parametrize(
    ("holder", "allowed"),
    [
        (("a", [READ]), {READ}),
        (("a", [WRITE]), {READ, WRITE}),
        ((EVERY_TENANT, [ADMIN]), {READ, WRITE, ADMIN, INTERNAL}),
        ((EVERY_TENANT, [INTERNAL]), {READ, WRITE, INTERNAL}),
        ((EVERY_TENANT, [Scope.METRICS]), set()),
    ],
)
def test_scopes_allow_their_messages_and_no_others(
    holder: tuple[str, list[Scope]], allowed: set[Scope]
) -> None:
    authorizer = authorizer_of(A, x=holder)
    principal = authorizer.authenticate("token-x")
    for scope, message in EXAMPLES.items():
        if scope in allowed:
            assert authorizer.authorize(message, principal) == message
        else:
            with pytest.raises(Forbidden, match=scope):
                authorizer.authorize(message, principal)


def test_a_message_that_the_table_lacks_needs_admin(monkeypatch: pytest.MonkeyPatch) -> None:
    table: dict[Any, Any] = MESSAGES
    monkeypatch.delitem(table, m.Lookup)
    authorizer = authorizer_of(A, a=("a", [WRITE]))
    with pytest.raises(Forbidden, match="admin"):
        authorizer.authorize(EXAMPLES[READ], authorizer.authenticate("token-a"))


def test_every_message_that_names_a_namespace_is_held_to_the_tenants_own() -> None:
    authorizer = authorizer_of(A, B, a=("a", [INTERNAL]))
    principal = authorizer.authenticate("token-a")
    with_namespace = [kind for kind in MESSAGES if "namespace_id" in kind.__struct_fields__]
    assert len(with_namespace) >= 12
    for kind in with_namespace:
        fields = dict.fromkeys(kind.__struct_fields__)
        texts = []
        for namespace_id in (B.namespace_id, bytes(16)):
            message = kind(**{**fields, "namespace_id": namespace_id})
            if kind in (m.Prefill, m.Generate):  # from the conductor to a worker
                with pytest.raises(Forbidden):
                    authorizer.authorize(message, principal)
                continue
            with pytest.raises(UnknownNamespace) as caught:
                authorizer.authorize(message, principal)
            texts.append(str(caught.value).replace(namespace_id.hex(), "ID"))
        assert len(set(texts)) <= 1, "the errors reveal which namespace exists"
        if kind not in (m.Prefill, m.Generate):
            own = kind(**{**fields, "namespace_id": A.namespace_id})
            assert authorizer.authorize(own, principal) is own


def test_registering_anothers_namespace_is_refused_like_an_unknown_one() -> None:
    authorizer = authorizer_of(B, a=("a", [READ]))
    principal = authorizer.authenticate("token-a")
    with pytest.raises(UnknownNamespace) as registering:
        authorizer.authorize(m.RegisterNamespace(B), principal)
    with pytest.raises(UnknownNamespace) as naming:
        authorizer.authorize(m.NodeLookup(B.namespace_id, HASH), principal)
    assert str(registering.value) == str(naming.value)


def test_a_tenant_left_out_is_filled_in_and_the_id_without_it_still_names_it() -> None:
    authorizer = authorizer_of(A, a=("a", [READ]), b=("b", [READ]))
    nameless = msgspec.structs.replace(A, tenant="")
    principal = authorizer.authenticate("token-a")
    assert authorizer.authorize(m.RegisterNamespace(nameless), principal).namespace == A
    lookup = m.NodeLookup(nameless.namespace_id, HASH)
    assert authorizer.authorize(lookup, principal).namespace_id == A.namespace_id
    with pytest.raises(UnknownNamespace):
        authorizer.authorize(lookup, authorizer.authenticate("token-b"))


def test_only_internal_processes_reserve_for_others_and_only_for_their_tenant_join() -> None:
    authorizer = authorizer_of(A, a=("a", [WRITE]), w=("a", [INTERNAL]))
    reserve = m.Reserve(A.namespace_id, HASH, b"", 0, 1.0, writer_id="somebody")
    with pytest.raises(Forbidden):
        authorizer.authorize(reserve, authorizer.authenticate("token-a"))
    worker = authorizer.authenticate("token-w")
    assert authorizer.authorize(reserve, worker) is reserve
    for namespace, is_own in ((A, True), (B, False)):
        descriptor = m.WorkerDescriptor("w", 1, "both", "h", "h:1", namespace, "model", 100)
        if is_own:
            authorizer.authorize(m.WorkerJoin(descriptor), worker)
        else:
            with pytest.raises(Forbidden, match=r"worker\.tenant"):
                authorizer.authorize(m.WorkerJoin(descriptor), worker)


def test_a_tenants_process_cannot_speak_as_a_worker_of_another() -> None:
    """Otherwise a join with a newer epoch would replace another tenant's worker."""
    authorizer = authorizer_of(A, w=("a", [INTERNAL]), pool=("*", [INTERNAL]))
    authorizer.find_worker = {"a0": "a", "b0": "b"}.get
    load = m.WorkerLoad(0, 0, 0, 0, 0.0, 0.0)
    worker = authorizer.authenticate("token-w")
    for worker_id, is_own in (("a0", True), ("b0", False), ("new", True)):
        descriptor = m.WorkerDescriptor(worker_id, 9, "both", "h", "h:1", A, "model", 100)
        for message in (
            m.WorkerJoin(descriptor),
            m.WorkerHeartbeat(worker_id, 9, load),
            m.WorkerLeave(worker_id, 9),
        ):
            assert authorizer.authorize(message, authorizer.authenticate("token-pool")) is message
            if is_own:
                assert authorizer.authorize(message, worker) is message
            else:
                with pytest.raises(Forbidden, match="tenant's"):
                    authorizer.authorize(message, worker)


# ---------------------------------------------------------------- isolated tenants


def _isolating(only_tenant: str) -> Authorizer:
    lines = [
        token_line("token-vault", "vault", "vault", [WRITE], is_isolated=True),
        token_line("token-safe", "safe", "safe", [WRITE], is_isolated=True),
        token_line("token-a", "a", "a", [WRITE]),
        token_line("token-node", "node", EVERY_TENANT, [INTERNAL]),
    ]
    known = parse_tokens(yaml.safe_load("\n".join(lines)), "test")
    return Authorizer(known, keeps_apart=True, only_tenant=only_tenant)


@pytest.mark.parametrize(
    ("only_tenant", "welcome"), [("", {"a", "node"}), ("vault", {"vault", "node"})]
)
def test_a_server_that_lends_memory_lets_in_whose_it_is(
    only_tenant: str, welcome: set[str]
) -> None:
    authorizer = _isolating(only_tenant)
    for name in ("vault", "safe", "a", "node"):
        for attempt in (
            partial(authorizer.authenticate, f"token-{name}"),
            partial(authorizer.authenticate_header, f"Bearer token-{name}"),
        ):
            if name in welcome:
                assert attempt().name == name
            else:
                with pytest.raises(Unauthenticated):
                    attempt()


@pytest.mark.parametrize(
    ("only_tenant", "held"), [("", {"", "a", "unheard-of"}), ("vault", {"vault"})]
)
def test_nobody_registers_a_namespace_where_its_blocks_must_not_stand(
    only_tenant: str, held: set[str]
) -> None:
    authorizer = _isolating(only_tenant)
    node = authorizer.authenticate("token-node")
    for tenant in ("", "a", "unheard-of", "vault", "safe"):
        request = m.RegisterNamespace(msgspec.structs.replace(A, tenant=tenant))
        if tenant in held:
            assert authorizer.authorize(request, node) is request
        else:
            with pytest.raises(Forbidden):
                authorizer.authorize(request, node)


def test_other_servers_let_isolated_tenants_in() -> None:
    lines = [token_line("token-vault", "vault", "vault", [WRITE], is_isolated=True)]
    authorizer = Authorizer(parse_tokens(yaml.safe_load("\n".join(lines)), "test"))
    assert authorizer.authenticate("token-vault").is_isolated
