"""The conductor's gRPC API: a thin adapter over the parts of its `Cluster`."""

from __future__ import annotations

from typing import Any

import msgspec

from conductor.cluster.cluster import Cluster
from kvpool.blocks.hashing import pack_hashes
from kvpool.proto import kvpool_pb2 as pb
from kvpool.proto import kvpool_pb2_grpc as pb_grpc
from kvpool.security.authorization import CALLER, Authorizer
from kvpool.security.tls import ServerTls
from kvpool.serving.grpc import GrpcServer, hashes_from, namespace_from_proto, typed_errors
from kvpool.wire import messages as m
from kvpool.wire.json_view import named


class ConductorGrpc(pb_grpc.ConductorServicer):
    """The gRPC API of a cluster."""

    def __init__(self, cluster: Cluster, authorizer: Authorizer) -> None:
        self._namespaces = cluster.namespaces
        self._lookups = cluster.lookups
        self._overview = cluster.overview
        self._authorizer = authorizer

    @typed_errors
    async def RegisterNamespace(self, request: Any, _context: Any) -> Any:
        namespace = namespace_from_proto(request.namespace)
        admitted = self._authorizer.authorize(m.RegisterNamespace(namespace), CALLER.get())
        reply = await self._namespaces.register(admitted)
        return pb.RegisterNamespaceReply(namespace_id=reply.namespace_id, name=namespace.name)

    @typed_errors
    async def Lookup(self, request: Any, _context: Any) -> Any:
        hashes = pack_hashes(hashes_from(request.hashes))
        lookup = m.Lookup(request.namespace_id, hashes, request.host)
        reply = await self._lookups.lookup(self._authorizer.authorize(lookup, CALLER.get()))
        segments = [
            pb.Segment(node_id=s.node_id, start=s.start, count=s.count, tier=str(s.tier))
            for s in reply.segments
        ]
        return pb.LookupReply(found=reply.found, segments=segments)

    @typed_errors
    async def Nodes(self, _request: Any, _context: Any) -> Any:
        nodes = [
            pb.NodeInfo(
                node_id=info.descriptor.node_id,
                epoch=info.descriptor.epoch,
                host=info.descriptor.host,
                address=info.descriptor.address,
                http_address=info.descriptor.http_address,
                state=info.state,
                free_bytes=info.free_bytes,
                capacity_bytes=info.capacity_bytes,
                transports=info.descriptor.transports,
            )
            for info in self._overview.node_list(CALLER.get()).nodes
        ]
        return pb.NodesReply(nodes=nodes)

    @typed_errors
    async def Stats(self, _request: Any, _context: Any) -> Any:
        stats = named(self._overview.stats(CALLER.get()))
        return pb.StatsReply(json=msgspec.json.encode(stats).decode())


def grpc_server(
    cluster: Cluster, max_message_bytes: int, authorizer: Authorizer, tls: ServerTls | None = None
) -> GrpcServer:
    """Build the conductor's gRPC server without starting it."""
    servicer = ConductorGrpc(cluster, authorizer)
    return GrpcServer(
        lambda server: pb_grpc.add_ConductorServicer_to_server(servicer, server),
        "Conductor",
        max_message_bytes=max_message_bytes,
        authorizer=authorizer,
        tls=tls,
    )
