"""A node's gRPC interface: single blocks and stats, for clients in any language."""

from __future__ import annotations

from typing import Any

import msgspec

from kvpool.blocks.hashing import pack_hashes
from kvpool.blocks.tier import unpack_tiers
from kvpool.proto import kvpool_pb2 as pb
from kvpool.proto import kvpool_pb2_grpc as pb_grpc
from kvpool.security.authorization import CALLER, Authorizer
from kvpool.security.tls import ServerTls
from kvpool.serving.grpc import GrpcServer, hashes_from, namespace_from_proto, typed_errors
from kvpool.wire import messages as m
from kvpool.wire.json_view import named
from tiers.service.inline_blocks import STATUS_NAMES
from tiers.service.service import NodeService
from tiers.service.stats import NodeStats

GRPC_CLIENT = "grpc"


class NodeGrpc(pb_grpc.NodeServicer):
    """The gRPC service of a node."""

    def __init__(self, service: NodeService, stats: NodeStats, authorizer: Authorizer) -> None:
        self._service = service
        self._stats = stats
        self._authorizer = authorizer

    @typed_errors
    async def RegisterNamespace(self, request: Any, _context: Any) -> Any:
        namespace = namespace_from_proto(request.namespace)
        admitted = self._authorizer.authorize(m.RegisterNamespace(namespace), CALLER.get())
        reply = self._service.register_namespace(admitted)
        return pb.RegisterNamespaceReply(namespace_id=reply.namespace_id, name=namespace.name)

    @typed_errors
    async def Lookup(self, request: Any, _context: Any) -> Any:
        hashes = pack_hashes(hashes_from(request.hashes))
        lookup = m.NodeLookup(request.namespace_id, hashes)
        reply = self._service.lookup(self._authorizer.authorize(lookup, CALLER.get()))
        return pb.NodeLookupReply(
            found=reply.found, tiers=[str(tier) for tier in unpack_tiers(reply.tiers)]
        )

    @typed_errors
    async def Put(self, request: Any, _context: Any) -> Any:
        [block_hash] = hashes_from([request.block_hash])
        put = m.PutInline(
            request.namespace_id, block_hash, request.parent, request.part, request.data
        )
        reply = self._service.put_inline(self._authorizer.authorize(put, CALLER.get()), GRPC_CLIENT)
        return pb.PutReply(status=STATUS_NAMES[reply.status])

    @typed_errors
    async def Get(self, request: Any, _context: Any) -> Any:
        [block_hash] = hashes_from([request.block_hash])
        get = m.GetInline(request.namespace_id, block_hash, request.part)
        reply = await self._service.inline.get(
            self._authorizer.authorize(get, CALLER.get()), GRPC_CLIENT
        )
        return pb.GetReply(data=reply.data, checksum=reply.checksum, tier=str(reply.tier))

    @typed_errors
    async def Stats(self, _request: Any, _context: Any) -> Any:
        stats = named(self._stats.read(CALLER.get()))
        return pb.StatsReply(json=msgspec.json.encode(stats).decode())


def grpc_server(
    service: NodeService,
    stats: NodeStats,
    max_message_bytes: int,
    authorizer: Authorizer,
    tls: ServerTls | None = None,
) -> GrpcServer:
    """The node's gRPC server, not started."""
    servicer = NodeGrpc(service, stats, authorizer)
    return GrpcServer(
        lambda server: pb_grpc.add_NodeServicer_to_server(servicer, server),
        "Node",
        max_message_bytes=max_message_bytes,
        authorizer=authorizer,
        tls=tls,
    )
