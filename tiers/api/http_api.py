"""The node's handlers exposed over gRPC and HTTP. Nothing is decided here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Path, Query, Request, Response
from prometheus_client import CollectorRegistry

from kvpool.blocks.hashing import pack_hashes
from kvpool.blocks.layout import Namespace
from kvpool.blocks.tier import unpack_tiers
from kvpool.errors import InvalidArgument
from kvpool.proto import kvpool_pb2 as pb
from kvpool.proto import kvpool_pb2_grpc as pb_grpc
from kvpool.security.authorization import CALLER, Authorizer
from kvpool.security.tls import ServerTls
from kvpool.serving.grpc import GrpcServer, hashes_from, namespace_from_proto, typed_errors
from kvpool.serving.http import base_app
from kvpool.serving.openapi import BINARY, OBJECT, add_bodies, answers, body
from kvpool.wire import messages as m
from kvpool.wire.json_view import named
from tiers.service.service import NodeService

GRPC_CLIENT = "grpc"
HTTP_CLIENT = "http"
_STATUS = {
    m.BlockStatus.GRANTED: "stored",
    m.BlockStatus.EXISTS: "exists",
    m.BlockStatus.IN_PROGRESS: "in_progress",
}


class _DramSize(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `PUT /v1/dram`."""

    target_bytes: int


HexHash = Annotated[str, Path(pattern="^[0-9a-f]{32}$")]


class NodeGrpc(pb_grpc.NodeServicer):
    """gRPC face of a `NodeService`."""

    def __init__(self, service: NodeService, authorizer: Authorizer) -> None:
        self._service = service
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
        reply = await self._service.put_inline(
            self._authorizer.authorize(put, CALLER.get()), GRPC_CLIENT
        )
        return pb.PutReply(status=_STATUS[reply.status])

    @typed_errors
    async def Get(self, request: Any, _context: Any) -> Any:
        [block_hash] = hashes_from([request.block_hash])
        get = m.GetInline(request.namespace_id, block_hash, request.part)
        reply = await self._service.get_inline(
            self._authorizer.authorize(get, CALLER.get()), GRPC_CLIENT
        )
        return pb.GetReply(data=reply.data, checksum=reply.checksum, tier=str(reply.tier))

    @typed_errors
    async def Stats(self, _request: Any, _context: Any) -> Any:
        return pb.StatsReply(json=stats_json(self._service).decode())


def grpc_server(
    service: NodeService,
    max_message_bytes: int,
    authorizer: Authorizer,
    tls: ServerTls | None = None,
) -> GrpcServer:
    """The node's gRPC server, not started."""
    servicer = NodeGrpc(service, authorizer)
    return GrpcServer(
        lambda server: pb_grpc.add_NodeServicer_to_server(servicer, server),
        "Node",
        max_message_bytes=max_message_bytes,
        authorizer=authorizer,
        tls=tls,
    )


def stats_json(service: NodeService) -> bytes:
    """A node's stats, as the caller may see them, as one JSON object with named fields."""
    return msgspec.json.encode(named(service.stats(CALLER.get())))


def http_app(
    service: NodeService,
    registry: CollectorRegistry,
    not_ready: Callable[[], str],
    max_body_bytes: int,
    authorizer: Authorizer,
    notice: Callable[[], str] = lambda: "",
) -> FastAPI:
    """The node's HTTP face: health, metrics, stats, and single blocks for anyone with curl."""
    app = base_app(
        "kvpool node",
        registry,
        not_ready,
        max_body_bytes=max_body_bytes,
        authorizer=authorizer,
        notice=notice,
    )

    bodies = add_bodies(app, _DramSize, Namespace)

    @app.get("/v1/stats", responses=answers(application_json=OBJECT))
    async def stats() -> Response:
        return Response(stats_json(service), media_type="application/json")

    @app.put(
        "/v1/dram",
        responses=answers(application_json=OBJECT),
        openapi_extra=bodies[_DramSize],
    )
    async def resize(request: Request) -> Response:
        try:
            message = msgspec.json.decode(await request.body(), type=_DramSize)
        except msgspec.DecodeError as error:
            raise InvalidArgument(f'not {{"target_bytes": N}}: {error}') from error
        reply = await service.resize(m.ResizeDram(message.target_bytes))
        return Response(msgspec.json.encode(named(reply)), media_type="application/json")

    @app.post("/v1/namespaces", openapi_extra=bodies[Namespace])
    async def register(request: Request) -> dict[str, str]:
        try:
            namespace = msgspec.json.decode(await request.body(), type=Namespace)
        except msgspec.DecodeError as error:
            raise InvalidArgument(f"not a namespace: {error}") from error
        admitted = authorizer.authorize(m.RegisterNamespace(namespace), CALLER.get())
        reply = service.register_namespace(admitted)
        return {"namespace_id": reply.namespace_id.hex(), "name": namespace.name}

    @app.put(
        "/v1/blocks/{namespace_id}/{block_hash}",
        openapi_extra=body("application/octet-stream", BINARY),
    )
    async def put(
        request: Request,
        namespace_id: HexHash,
        block_hash: HexHash,
        parent: Annotated[str, Query(pattern="^([0-9a-f]{32})?$")] = "",
        part: Annotated[int, Query(ge=0, le=4096)] = 0,
    ) -> dict[str, str]:
        message = m.PutInline(
            bytes.fromhex(namespace_id),
            bytes.fromhex(block_hash),
            bytes.fromhex(parent),
            part,
            await request.body(),
        )
        reply = await service.put_inline(authorizer.authorize(message, CALLER.get()), HTTP_CLIENT)
        return {"status": _STATUS[reply.status]}

    @app.get(
        "/v1/blocks/{namespace_id}/{block_hash}",
        response_class=Response,
        responses=answers(application_octet_stream=BINARY),
    )
    async def get(
        namespace_id: HexHash,
        block_hash: HexHash,
        part: Annotated[int, Query(ge=0, le=4096)] = 0,
    ) -> Response:
        message = m.GetInline(bytes.fromhex(namespace_id), bytes.fromhex(block_hash), part)
        reply = await service.get_inline(authorizer.authorize(message, CALLER.get()), HTTP_CLIENT)
        headers = {"X-Kvpool-Checksum": f"{reply.checksum:016x}", "X-Kvpool-Tier": str(reply.tier)}
        return Response(reply.data, media_type="application/octet-stream", headers=headers)

    return app
