"""Frames of the wire protocol: encode them, and cut a byte stream into them.

    | body length: u32 | request id: u32 | kind: u8 | body: msgpack |      (little-endian)

`messages` defines the bodies; `server` and `client` have the sockets.
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
    """The kind of a frame."""

    REQUEST = 0
    REPLY = 1
    ERROR = 2
    ONE_WAY = 3
    ITEM = 4  # one item of a streamed reply
    CANCEL = 5  # stop the call with this request id


class ErrorBody(Reply, frozen=True):
    """The body of an ERROR frame."""

    code: str
    message: str
    retry_after_s: float = 0.0


_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
    type=reduce(operator.or_, REPLIES)
)
_errors = msgspec.msgpack.Decoder(type=ErrorBody)
_decoders: dict[type[Reply], msgspec.msgpack.Decoder[Any]] = {}


def encode_frame(request_id: int, kind: Kind, body: msgspec.Struct | None) -> bytearray:
    """Encode one frame."""
    buffer = bytearray(HEADER.size)
    if body is not None:
        _encoder.encode_into(body, buffer, HEADER.size)
    HEADER.pack_into(buffer, 0, len(buffer) - HEADER.size, request_id, kind)
    return buffer


def decode_error(body: bytes | memoryview) -> KvpoolError:
    """Decode the body of an ERROR frame.

    Raises:
        ProtocolError: the body cannot be read.
    """
    fields: ErrorBody = decode_reply(_errors, body)
    error = from_code(fields.code, fields.message)
    if isinstance(error, Overloaded):
        error.retry_after_s = fields.retry_after_s
    return error


def error_body(error: BaseException) -> ErrorBody:
    """The error as a peer may see it. The text of an unexpected error is not sent."""
    if isinstance(error, KvpoolError):
        return ErrorBody(error.code, str(error), getattr(error, "retry_after_s", 0.0))
    return ErrorBody("internal", f"internal error ({type(error).__name__}); see the server's log")


class FrameReader:
    """Cuts a stream into frames, in time linear in its bytes.

    `push` adds bytes, and `next_frame` returns one frame, so that the caller may stop between two.
    `feed` does both.

    Args:
        max_frame_bytes: limit of a body. A longer one raises `ProtocolError` when its header
            arrives, before it is buffered. It may be changed between two frames.
    """

    def __init__(self, max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES) -> None:
        self.max_frame_bytes = max_frame_bytes
        self._buffer: bytes | bytearray = b""
        self._start = 0  # of the next frame in `_buffer`

    def push(self, data: bytes) -> None:
        """Add bytes. They are copied once if a frame is incomplete, else not at all."""
        if self._start == len(self._buffer):
            self._buffer = data
            self._start = 0
        elif self._start == 0 and isinstance(self._buffer, bytearray):
            # No frame was cut from this buffer, so no view of it keeps it from growing.
            self._buffer += data
        else:
            self._buffer = bytearray(memoryview(self._buffer)[self._start :])
            self._buffer += data
            self._start = 0

    def next_frame(self) -> tuple[int, int, memoryview] | None:
        """The next frame as (request id, kind, body); None if it is incomplete.

        Raises:
            ProtocolError: a body is longer than the limit or the kind is unknown.
        """
        start = self._start + HEADER.size
        if start > len(self._buffer):
            return None
        length, request_id, kind = HEADER.unpack_from(self._buffer, self._start)
        if length > self.max_frame_bytes:
            raise ProtocolError(
                f"frame of {length} bytes", hint=f"the limit is {self.max_frame_bytes} bytes"
            )
        if kind > Kind.CANCEL:
            raise ProtocolError(f"unknown frame kind {kind}")
        end = start + length
        if end > len(self._buffer):
            return None
        body = memoryview(self._buffer)[start:end]
        self._start = end
        if end == len(self._buffer):
            self._buffer = b""  # the view `body` keeps it alive
            self._start = 0
        return request_id, kind, body

    def feed(self, data: bytes) -> Iterator[tuple[int, int, memoryview]]:
        """Add bytes and iterate over the complete frames.

        Raises:
            ProtocolError: as `next_frame`, during the iteration.
        """
        self.push(data)
        return iter(self.next_frame, None)


def decoder_for(reply_type: type[Reply]) -> msgspec.msgpack.Decoder[Any]:
    """The cached decoder of a reply type."""
    decoder = _decoders.get(reply_type)
    if decoder is None:
        decoder = _decoders[reply_type] = msgspec.msgpack.Decoder(type=reply_type)
    return decoder


def decode_reply(decoder: msgspec.msgpack.Decoder[Any], body: bytes | memoryview) -> Any:
    """Decode a reply, an item or an error.

    Raises:
        ProtocolError: the body is not msgpack, not of the decoder's type, or has an invalid value.
    """
    try:
        return decoder.decode(body)
    except Exception as error:
        raise ProtocolError(f"bad reply: {error}") from error


def decode_request(body: memoryview) -> Message:
    """Decode a request.

    Raises:
        ProtocolError: the body is not msgpack or not a known message, or a field has the wrong
            type.
        KvpoolError: a struct in it rejects its values, e.g. `Layout`.
    """
    try:
        return _requests.decode(body)  # type: ignore[no-any-return]
    except KvpoolError:  # raised by a `__post_init__`
        raise
    except Exception as error:
        raise ProtocolError(f"bad message: {error}") from error
