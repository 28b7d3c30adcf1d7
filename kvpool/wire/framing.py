"""Frames of the wire protocol: cutting a byte stream into them and putting them together.

    | body length: u32 | request id: u32 | kind: u8 | body: msgpack |      (little-endian)

Not here: what bodies mean (`messages`), sockets (`server`, `client`).
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Iterator
from enum import IntEnum
from functools import reduce
from typing import Any

import msgspec

from kvpool.errors import KvpoolError, Overloaded, ProtocolError, from_code
from kvpool.wire.messages import REPLIES, Message, Reply

HEADER = struct.Struct("<IIB")
DEFAULT_MAX_FRAME_BYTES = 64 << 20


class Kind(IntEnum):
    """What a frame is."""

    REQUEST = 0
    REPLY = 1
    ERROR = 2
    ONE_WAY = 3
    ITEM = 4  # one item of a streamed reply
    CANCEL = 5  # the caller of this request id wants no more


class ErrorBody(Reply, frozen=True):
    """How an error travels."""

    code: str
    message: str
    retry_after_s: float = 0.0


_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
    type=reduce(operator.or_, REPLIES)
)
_decoders: dict[type[Reply], msgspec.msgpack.Decoder[Any]] = {}


def encode_frame(request_id: int, kind: Kind, body: msgspec.Struct | None) -> bytearray:
    """One frame, ready to be written."""
    buffer = bytearray(HEADER.size)
    if body is not None:
        _encoder.encode_into(body, buffer, HEADER.size)
    HEADER.pack_into(buffer, 0, len(buffer) - HEADER.size, request_id, kind)
    return buffer


def decode_error(body: bytes | memoryview) -> KvpoolError:
    """The error that an ERROR frame carries."""
    fields = msgspec.msgpack.decode(body, type=ErrorBody)
    error = from_code(fields.code, fields.message)
    if isinstance(error, Overloaded):
        error.retry_after_s = fields.retry_after_s
    return error


def error_body(error: BaseException) -> ErrorBody:
    """What may be told of an error to a peer; the text of an unforeseen one stays here."""
    if isinstance(error, KvpoolError):
        return ErrorBody(error.code, str(error), getattr(error, "retry_after_s", 0.0))
    return ErrorBody("internal", f"internal error ({type(error).__name__}); see the server's log")


class FrameReader:
    """Cuts a stream into frames.

    Args:
        max_frame_bytes: a longer body is a `ProtocolError` as soon as its header arrives, before any of
            it is buffered.
    """

    def __init__(self, max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES) -> None:
        self._buffer = bytearray()
        self._max = max_frame_bytes

    def feed(self, data: bytes) -> Iterator[tuple[int, int, memoryview]]:
        """Frames completed by `data`, as (request id, kind, body). Bodies are valid until the next step.

        Raises:
            ProtocolError: a body is longer than the limit or the kind is unknown.
        """
        if self._buffer:
            self._buffer += data
            source: bytes | bytearray = self._buffer
        else:
            source = data
        view = memoryview(source)
        position = 0
        try:
            while len(view) - position >= HEADER.size:
                length, request_id, kind = HEADER.unpack_from(view, position)
                if length > self._max:
                    raise ProtocolError(
                        f"frame of {length} bytes",
                        hint=f"the limit is {self._max} bytes",
                    )
                if kind > Kind.CANCEL:
                    raise ProtocolError(f"unknown frame kind {kind}")
                end = position + HEADER.size + length
                if end > len(view):
                    break
                yield request_id, kind, view[position + HEADER.size : end]
                position = end
        finally:
            rest = bytes(view[position:])
            view.release()
            self._buffer = bytearray(rest)


def decoder_for(reply_type: type[Reply]) -> msgspec.msgpack.Decoder[Any]:
    """The cached decoder of a reply type."""
    decoder = _decoders.get(reply_type)
    if decoder is None:
        decoder = _decoders[reply_type] = msgspec.msgpack.Decoder(type=reply_type)
    return decoder


def decode_request(body: memoryview) -> Message:
    """A request from its body.

    Raises:
        ProtocolError: it is not msgpack, or not a known message, or a field has the wrong type.
    """
    try:
        return _requests.decode(body)  # type: ignore[no-any-return]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"bad message: {error}") from error
