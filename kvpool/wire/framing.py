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
_errors = msgspec.msgpack.Decoder(type=ErrorBody)
_decoders: dict[type[Reply], msgspec.msgpack.Decoder[Any]] = {}


def encode_frame(request_id: int, kind: Kind, body: msgspec.Struct | None) -> bytearray:
    """One frame, ready to be written."""
    buffer = bytearray(HEADER.size)
    if body is not None:
        _encoder.encode_into(body, buffer, HEADER.size)
    HEADER.pack_into(buffer, 0, len(buffer) - HEADER.size, request_id, kind)
    return buffer


def decode_error(body: bytes | memoryview) -> KvpoolError:
    """The error that an ERROR frame carries.

    Raises:
        ProtocolError: it cannot be read.
    """
    fields: ErrorBody = decode_reply(_errors, body)
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
    """Cuts a stream into frames, in time linear in what arrives however it is cut.

    `push` takes what arrived, `next_frame` gives one frame at a time, so that its user may stop between
    two; `feed` does both for a user who never stops.

    Args:
        max_frame_bytes: a longer body is a `ProtocolError` as soon as its header arrives, before any of
            it is buffered. May be changed between two frames.
    """

    def __init__(self, max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES) -> None:
        self.max_frame_bytes = max_frame_bytes
        self._buffer: bytes | bytearray = b""
        self._start = 0  # of the next frame in `_buffer`

    def push(self, data: bytes) -> None:
        """Take what arrived. It is copied only while a frame is incomplete, and then once."""
        if self._start == len(self._buffer):
            self._buffer = data
            self._start = 0
        elif self._start == 0 and isinstance(self._buffer, bytearray):
            # No frame was cut from this one yet, so no view of it exists that forbids growing it.
            self._buffer += data
        else:
            self._buffer = bytearray(memoryview(self._buffer)[self._start :])
            self._buffer += data
            self._start = 0

    def next_frame(self) -> tuple[int, int, memoryview] | None:
        """The next complete frame as (request id, kind, body), or None if more must arrive first.

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
            self._buffer = b""  # the body keeps it alive for as long as anyone wants it
            self._start = 0
        return request_id, kind, body

    def feed(self, data: bytes) -> Iterator[tuple[int, int, memoryview]]:
        """The frames completed by `data`.

        Raises:
            ProtocolError: as `next_frame` does, when the iteration gets there.
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
    """A reply, an item or an error body.

    Raises:
        ProtocolError: it is not msgpack, or not what `decoder` wants, or a value in it is impossible.
    """
    try:
        return decoder.decode(body)
    except Exception as error:
        raise ProtocolError(f"bad reply: {error}") from error


def decode_request(body: memoryview) -> Message:
    """A request from its body.

    Raises:
        ProtocolError: it is not msgpack, or not a known message, or a field has the wrong type.
        KvpoolError: all of that is right, but a value in it refuses its fields (a `Layout`, say).
    """
    try:
        return _requests.decode(body)  # type: ignore[no-any-return]
    except KvpoolError:  # msgspec lets what `__post_init__` raises through, but for two types
        raise
    except Exception as error:
        raise ProtocolError(f"bad message: {error}") from error
