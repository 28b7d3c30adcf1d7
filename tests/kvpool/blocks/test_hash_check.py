"""The hash check: a fixed answer, every difference refused, and its cause explained."""

from __future__ import annotations

import msgspec
import pytest

from kvpool.blocks.hash_check import check_proof, known_answer, proof_of, versions
from kvpool.blocks.layout import Layout, Namespace
from kvpool.errors import HashMismatch
from kvpool.security.authorization import Authorizer
from kvpool.wire import messages as m
from kvpool.wire.principal import Principal, Scope

NAMESPACE = Namespace("m", "r", Layout("bfloat16", 2, 2, 32, 16))


def test_the_known_answer_never_changes() -> None:
    assert known_answer(NAMESPACE).hex() == "9f754f66444d91eab4634b4f617b714b"
    secure = msgspec.structs.replace(NAMESPACE, hash_algorithm="sha256")
    assert known_answer(secure).hex() == "8584282fd90b3873fa4d69bc06984b0a"


def test_a_peer_with_equal_hashes_or_without_a_proof_is_accepted() -> None:
    check_proof(NAMESPACE, proof_of(NAMESPACE))
    check_proof(NAMESPACE, None)
    # Different versions with equal hashes are accepted.
    check_proof(NAMESPACE, msgspec.structs.replace(proof_of(NAMESPACE), versions={"xxhash": "9"}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"versions": {**versions(), "xxhash": "0.1"}}, "xxhash 0.1 there, "),
        ({"versions": {**versions(), "platform": "s390x, big-endian"}}, "big-endian there, "),
        ({"algorithm": "sha256"}, "hash algorithm sha256 there, xxh3-128 here"),
        ({}, "is the code modified?"),
        ({"versions": {}}, "kvpool unknown there, "),
        ({"versions": {**versions(), "fork": "1"}}, "fork 1 there, unknown here"),
    ],
)
def test_a_refusal_says_what_differs(change: dict[str, object], said: str) -> None:
    proof = msgspec.structs.replace(proof_of(NAMESPACE), known_answer=bytes(16), **change)
    with pytest.raises(HashMismatch, match="m@r") as refused:
        check_proof(NAMESPACE, proof)
    assert said in refused.value.message


def test_a_message_of_an_older_process_has_no_proof_and_is_read() -> None:
    old = msgspec.msgpack.encode(["RegisterNamespace", msgspec.to_builtins(NAMESPACE)])
    read = msgspec.msgpack.decode(old, type=m.RegisterNamespace)
    assert read == m.RegisterNamespace(NAMESPACE, None)


def test_a_tenants_proof_is_of_the_namespace_as_the_tenant_calls_it() -> None:
    authorizer = Authorizer()
    tenant = Principal("t", "acme", frozenset({Scope.READ}))
    admitted = authorizer.authorize(m.RegisterNamespace(NAMESPACE, proof_of(NAMESPACE)), tenant)
    assert admitted.namespace.tenant == "acme"
    check_proof(admitted.namespace, admitted.proof)
    wrong = m.RegisterNamespace(
        NAMESPACE, msgspec.structs.replace(proof_of(NAMESPACE), known_answer=bytes(16))
    )
    with pytest.raises(HashMismatch):
        authorizer.authorize(wrong, tenant)
    own = msgspec.structs.replace(NAMESPACE, tenant="acme")
    assert authorizer.authorize(m.RegisterNamespace(own, proof_of(own)), tenant).proof == proof_of(
        own
    )  # the handler checks it
