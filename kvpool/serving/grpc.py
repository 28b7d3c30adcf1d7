"""The gRPC server of conductor and node: conversions, errors, authentication, reflection."""

from __future__ import annotations

import functools
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
from grpc_reflection.v1alpha import reflection

from kvpool.blocks.layout import Layout, Namespace
from kvpool.errors import InvalidArgument, KvpoolError, PortInUse, brief
from kvpool.proto import kvpool_pb2 as pb
from kvpool.security.authorization import CALLER, Authorizer, require
from kvpool.security.scopes import METHODS
from kvpool.security.tls import ServerTls
from kvpool.wire.principal import Scope

MAX_MESSAGE = 1000  # characters: a status is sent in headers, which have a limit
_STATUS = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
    507: grpc.StatusCode.RESOURCE_EXHAUSTED,
}


def typed_errors(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Turn a `KvpoolError` into a gRPC status, with its code in the trailer `kvpool-code`."""

    @functools.wraps(method)
    async def wrapper(self: Any, request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            return await method(self, request, context)
        except KvpoolError as error:
            await _abort(error, context)

    return wrapper


async def _abort(error: KvpoolError, context: grpc.aio.ServicerContext) -> None:
    context.set_trailing_metadata((("kvpool-code", error.code),))
    status = _STATUS.get(error.http_status, grpc.StatusCode.INTERNAL)
    await context.abort(status, brief(error, MAX_MESSAGE))


class Authentication(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Sets the caller of each call (`CALLER`). Refuses calls that the token does not allow."""

    def __init__(self, authorizer: Authorizer) -> None:
        self._authorizer = authorizer

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        given = next((v for k, v in details.invocation_metadata if k == "authorization"), "")
        try:
            caller = self._authorizer.authenticate_header(given)
            require(METHODS.get(details.method, Scope.ADMIN), caller, details.method)
        except KvpoolError as error:
            return grpc.unary_unary_rpc_method_handler(functools.partial(_refuse, error))
        CALLER.set(caller)
        return await continuation(details)


async def _refuse(error: KvpoolError, _request: Any, context: grpc.aio.ServicerContext) -> None:
    await _abort(error, context)


def namespace_from_proto(message: pb.Namespace) -> Namespace:
    """Convert a namespace.

    Raises:
        InvalidArgument: as `Namespace` and `Layout`.
    """
    shape = message.layout
    layout = Layout(
        dtype=shape.dtype,
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        block_tokens=shape.block_tokens or 64,
        tp_size=shape.tp_size or 1,
        kv_per_token=shape.kv_per_token or 2,
        order=shape.order or "layer,kv,head,token,dim",
    )
    algorithm = message.hash_algorithm or "xxh3-128"
    return Namespace(
        message.model,
        message.revision,
        layout,
        message.tenant,
        message.salt,
        algorithm,  # type: ignore[arg-type]
    )


class GrpcServer:
    """One gRPC server with reflection.

    Args:
        add: registers the servicer, e.g. `lambda server: add_NodeServicer_to_server(servicer,
            server)`.
        service: name of the service without its package, e.g. "Node".
        max_message_bytes: limit of requests and replies.
        authorizer: checks the token of every call; None: all callers may do everything.
        tls: None: no encryption.
    """

    def __init__(
        self,
        add: Callable[[grpc.aio.Server], None],
        service: str,
        *,
        max_message_bytes: int,
        authorizer: Authorizer | None = None,
        tls: ServerTls | None = None,
    ) -> None:
        self._tls = tls
        self._server = grpc.aio.server(
            interceptors=[Authentication(authorizer or Authorizer())],
            options=[
                ("grpc.max_receive_message_length", max_message_bytes),
                ("grpc.max_send_message_length", max_message_bytes),
                ("grpc.so_reuseport", 0),
            ],
        )
        add(self._server)
        names: Sequence[str] = (f"kvpool.v1.{service}", reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def start(self, host: str, port: int) -> int:
        """Listen; port 0 picks a free one. Returns the port.

        Raises:
            PortInUse: the port is taken.
        """
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if self._tls is None:
                bound = self._server.add_insecure_port(address)
            else:
                bound = self._server.add_secure_port(address, self._tls.for_grpc())
        except RuntimeError as error:
            raise PortInUse(
                f"cannot listen on {address}",
                hint="stop the process that has it, or choose another",
            ) from error
        await self._server.start()
        return int(bound)

    async def close(self) -> None:
        """Stop. Running calls may end, for a second at most."""
        await self._server.stop(grace=1.0)


def quiet_grpc() -> None:
    """Keep the log of gRPC's C core off stderr, unless the environment asks for it."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")  # kvpool never forks


def hashes_from(values: Sequence[bytes], limit: int = 65_536) -> list[bytes]:
    """Checked copies of repeated hash fields.

    Raises:
        InvalidArgument: there are too many, or one does not have 16 bytes.
    """
    if len(values) > limit:
        raise InvalidArgument(f"{len(values)} hashes in one call", hint=f"at most {limit}")
    if any(len(value) != 16 for value in values):
        raise InvalidArgument("block hashes have 16 bytes each")
    return list(values)
