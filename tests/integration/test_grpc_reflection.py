"""The gRPC services as a generic client finds them: by reflection alone, called with good and with random messages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvpool.proto
from kvpool import hash_chain
from tests.support.process_cluster import LAYOUT, NAMESPACE, Cluster
from tests.support.sizes import examples

TYPED = frozenset(
    (
        grpc.StatusCode.OK,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    )
)
HASHES = hash_chain(NAMESPACE, range(3 * LAYOUT.block_tokens))
SPACE = {
    "model": NAMESPACE.model,
    "revision": NAMESPACE.revision,
    "layout": {
        "dtype": LAYOUT.dtype,
        "layers": LAYOUT.layers,
        "kv_heads": LAYOUT.kv_heads,
        "head_dim": LAYOUT.head_dim,
        "block_tokens": LAYOUT.block_tokens,
    },
}
DATA = bytes(range(256)) * (LAYOUT.part_bytes // 256)
NS = NAMESPACE.namespace_id
GOOD: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "kvpool.v1.Conductor": [
        ("RegisterNamespace", {"namespace": SPACE}),
        ("Lookup", {"namespace_id": NS, "hashes": HASHES, "host": "here"}),
        ("Nodes", {}),
        ("Stats", {}),
    ],
    "kvpool.v1.Node": [
        ("RegisterNamespace", {"namespace": SPACE}),
        ("Put", {"namespace_id": NS, "block_hash": HASHES[0], "data": DATA}),
        ("Get", {"namespace_id": NS, "block_hash": HASHES[0]}),
        ("Lookup", {"namespace_id": NS, "hashes": HASHES}),
        ("Stats", {}),
    ],
}


class Reflected:
    """One server, known by what it says of itself."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(address)
        database = ProtoReflectionDescriptorDatabase(self.channel)
        self.names = set(database.get_services())
        pool = DescriptorPool(database)
        self.services: dict[str, ServiceDescriptor] = {
            name: pool.FindServiceByName(name) for name in self.names if name.startswith("kvpool.")
        }

    def methods(self) -> list[MethodDescriptor]:
        return [method for service in self.services.values() for method in service.methods]

    def call(self, method: MethodDescriptor, request: Any) -> tuple[grpc.StatusCode, Any]:
        """Status and reply, or status and the trailer "kvpool-code"."""
        stub = self.channel.unary_unary(
            f"/{method.containing_service.full_name}/{method.name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
        )
        try:
            return grpc.StatusCode.OK, stub(request, timeout=20)
        except grpc.RpcError as error:
            return error.code(), dict(error.trailing_metadata() or ()).get("kvpool-code")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Reflected]]:
    running = Cluster(tmp_path_factory.mktemp("grpc"))
    with running.supervisor:
        running.start_conductor(
            "conductor.advanced.heartbeat_s=0.2", "conductor.advanced.suspect_after_s=5"
        )
        running.start_node("n")
        running.wait_joined(nodes=1)
        found = {
            "kvpool.v1.Conductor": Reflected(running.conductor["grpc"]),
            "kvpool.v1.Node": Reflected(running.nodes["n"]["grpc"]),
        }
        yield found
        for server in found.values():
            server.channel.close()


@pytest.mark.parametrize("name", GOOD)
def test_a_generic_client_lists_the_service_and_calls_every_method(
    servers: dict[str, Reflected], name: str
) -> None:
    server = servers[name]
    assert server.names == {name, "grpc.reflection.v1alpha.ServerReflection"}
    methods = {method.name: method for method in server.methods()}
    assert sorted(methods) == sorted(called for called, _ in GOOD[name])
    replies = {}
    for called, fields in GOOD[name]:
        request = message_factory.GetMessageClass(methods[called].input_type)(**fields)
        status, replies[called] = server.call(methods[called], request)
        assert status is grpc.StatusCode.OK, (called, replies[called])
    assert replies["RegisterNamespace"].namespace_id == NS
    if name == "kvpool.v1.Node":
        assert replies["Get"].data == DATA
        assert (replies["Lookup"].found, list(replies["Lookup"].tiers)) == (1, ["dram"])
    else:
        assert [node.state for node in replies["Nodes"].nodes] == ["live"]


SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_STRING: st.text(max_size=20)
    | st.sampled_from(["bfloat16", "sha256", NAMESPACE.model, "layer,kv,head,token,dim"]),
    FieldDescriptor.TYPE_BYTES: st.binary(max_size=40)
    | st.sampled_from([NS, HASHES[0], HASHES[1], DATA]),
    FieldDescriptor.TYPE_UINT32: st.integers(0, 70) | st.integers(0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: st.integers(0, 2**64 - 1),
}


def messages(descriptor: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Any message of this type, as the fields to build it from; each may be left out."""
    fields = {}
    for field in descriptor.fields:
        one = messages(field.message_type) if field.message_type else SCALARS[field.type]
        fields[field.name] = st.lists(one, max_size=5) if field.is_repeated else one
    return st.fixed_dictionaries({}, optional=fields)


@settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
@pytest.mark.parametrize("name", GOOD)
def test_random_messages_get_typed_answers_and_break_nothing(
    servers: dict[str, Reflected], name: str, data: st.DataObject
) -> None:
    server = servers[name]
    for method in server.methods():
        fields = data.draw(messages(method.input_type), label=method.name)
        request = message_factory.GetMessageClass(method.input_type)(**fields)
        status, told = server.call(method, request)
        assert status in TYPED, (method.name, status, told)
        if status is not grpc.StatusCode.OK:
            assert told, f"{method.name} failed with {status} and without a code"


@pytest.mark.parametrize("name", GOOD)
def test_what_is_no_message_at_all_and_what_is_no_method_is_refused(
    servers: dict[str, Reflected], name: str
) -> None:
    server = servers[name]
    stub = server.channel.unary_unary(f"/{name}/Lookup")
    with pytest.raises(grpc.RpcError) as caught:
        stub(b"\xff\xff\xff not protobuf", timeout=20)
    assert (
        caught.value.code() is grpc.StatusCode.UNKNOWN
    )  # gRPC's own answer to bytes it cannot read
    with pytest.raises(grpc.RpcError) as caught:
        server.channel.unary_unary(f"/{name}/Nothing")(b"", timeout=20)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    [stats] = [method for method in server.methods() if method.name == "Stats"]
    status, _ = server.call(stats, message_factory.GetMessageClass(stats.input_type)())
    assert status is grpc.StatusCode.OK  # it lives


def test_every_service_method_and_message_of_the_proto_is_documented() -> None:
    [directory] = kvpool.proto.__path__
    lines = (Path(directory) / "kvpool.proto").read_text().splitlines()
    declared = [at for at, line in enumerate(lines) if re.match(r"\s*(message|service|rpc) ", line)]
    assert len(declared) > 20
    for at in declared:
        assert lines[at - 1].lstrip().startswith("//"), f"undocumented: {lines[at]}"
