"""A node's HTTP interface: health, metrics, stats, DRAM size, and single blocks for curl."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec
from fastapi import FastAPI, Path, Query, Request, Response
from prometheus_client import CollectorRegistry

from kvpool.blocks.layout import Namespace
from kvpool.errors import InvalidArgument
from kvpool.security.authorization import CALLER, Authorizer
from kvpool.serving.http import base_app
from kvpool.serving.openapi import BINARY, OBJECT, add_bodies, body, responses
from kvpool.wire import messages as m
from kvpool.wire.json_view import named
from tiers.service.inline_blocks import STATUS_NAMES
from tiers.service.resize import Resizer
from tiers.service.service import NodeService
from tiers.service.stats import NodeStats

HTTP_CLIENT = "http"


class _DramSize(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `PUT /v1/dram`."""

    target_bytes: int


HexHash = Annotated[str, Path(pattern="^[0-9a-f]{32}$")]


def http_app(
    service: NodeService,
    stats: NodeStats,
    resizer: Resizer,
    registry: CollectorRegistry,
    not_ready: Callable[[], str],
    max_body_bytes: int,
    authorizer: Authorizer,
    notice: Callable[[], str] = lambda: "",
) -> FastAPI:
    """The HTTP application of a node."""
    app = base_app(
        "kvpool node",
        registry,
        not_ready,
        max_body_bytes=max_body_bytes,
        authorizer=authorizer,
        notice=notice,
    )

    _add_node_routes(app, service, stats, resizer, authorizer)
    _add_block_routes(app, service, authorizer)
    return app


def _add_node_routes(
    app: FastAPI,
    service: NodeService,
    stats: NodeStats,
    resizer: Resizer,
    authorizer: Authorizer,
) -> None:
    bodies = add_bodies(app, _DramSize, Namespace)

    @app.get("/v1/stats", responses=responses(application_json=OBJECT))
    async def read_stats() -> Response:
        return _json(stats.read(CALLER.get()))

    @app.put(
        "/v1/dram",
        responses=responses(application_json=OBJECT),
        openapi_extra=bodies[_DramSize],
    )
    async def resize(request: Request) -> Response:
        try:
            message = msgspec.json.decode(await request.body(), type=_DramSize)
        except msgspec.DecodeError as error:
            raise InvalidArgument(f'not {{"target_bytes": N}}: {error}') from error
        return _json(await resizer.resize(m.ResizeDram(message.target_bytes)))

    @app.post("/v1/namespaces", openapi_extra=bodies[Namespace])
    async def register(request: Request) -> dict[str, str]:
        try:
            namespace = msgspec.json.decode(await request.body(), type=Namespace)
        except msgspec.DecodeError as error:
            raise InvalidArgument(f"not a namespace: {error}") from error
        admitted = authorizer.authorize(m.RegisterNamespace(namespace), CALLER.get())
        reply = service.register_namespace(admitted)
        return {"namespace_id": reply.namespace_id.hex(), "name": namespace.name}


def _add_block_routes(app: FastAPI, service: NodeService, authorizer: Authorizer) -> None:
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
        reply = service.put_inline(authorizer.authorize(message, CALLER.get()), HTTP_CLIENT)
        return {"status": STATUS_NAMES[reply.status]}

    @app.get(
        "/v1/blocks/{namespace_id}/{block_hash}",
        response_class=Response,
        responses=responses(application_octet_stream=BINARY),
    )
    async def get(
        namespace_id: HexHash,
        block_hash: HexHash,
        part: Annotated[int, Query(ge=0, le=4096)] = 0,
    ) -> Response:
        message = m.GetInline(bytes.fromhex(namespace_id), bytes.fromhex(block_hash), part)
        reply = await service.inline.get(authorizer.authorize(message, CALLER.get()), HTTP_CLIENT)
        headers = {"X-Kvpool-Checksum": f"{reply.checksum:016x}", "X-Kvpool-Tier": str(reply.tier)}
        return Response(reply.data, media_type="application/octet-stream", headers=headers)


def _json(reply: m.Reply) -> Response:
    return Response(msgspec.json.encode(named(reply)), media_type="application/json")
