"""Frames that no honest client sends, from a seed: every request type with values made up by type, then damaged.

Each comes with what a server must do about it (`Fate`), which is found out by decoding it as the server will.
"""

from __future__ import annotations

import random
import struct
import types
import typing
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec

from kvpool.blocks.layout import DTYPE_BYTES, Layout, Namespace
from kvpool.errors import KvpoolError, ProtocolError
from kvpool.wire import messages as m
from kvpool.wire.framing import HEADER, Kind, decode_request

REQUESTS = sorted(m.REPLIES, key=lambda request: request.__name__)
OF_A_NODE = (
    *(m.Reserve, m.Commit, m.Abort, m.RenewReservation, m.Pin, m.Renew, m.Release, m.NodeLookup),
    *(m.PutInline, m.GetInline, m.ReportCorrupt, m.Protect, m.Prefetch, m.RegisterNamespace),
)
INTS = (
    0,
    1,
    2,
    7,
    255,
    256,
    65_535,
    65_536,
    2**31 - 1,
    2**31,
    2**32,
    2**63 - 1,
    2**64 - 1,
    -1,
    -(2**63),
)
FLOATS = (0.0, 1e-9, 0.002, 1.0, 3600.0, 1e300, -1.0, float("inf"), float("nan"))
TEXTS = ("", "a", "127.0.0.1:9", "unix:/nowhere", "\x00", "é" * 40, "x" * 5000)


class Fate(Enum):
    """What a frame deserves."""

    ANSWER = "one reply or typed error with its id"
    SILENCE = "nothing"
    CLOSE = "a reason, and the end of its connection"


@dataclass(slots=True, frozen=True)
class Frame:
    """One frame as it goes onto the wire."""

    data: bytes
    fate: Fate
    request: type[m.Message] | None = None  # what an answer must answer


class FrameSource:
    """Makes frames.

    Args:
        space: a namespace that the server knows; half of the frames name it.
        hashes: blocks of it, some of which are there.
        max_frame_bytes: the server's limit.
    """

    def __init__(
        self, rng: random.Random, space: Namespace, hashes: list[bytes], max_frame_bytes: int
    ) -> None:
        self._rng = rng
        self._space = space
        self._hashes = hashes
        self._max_frame_bytes = max_frame_bytes
        self.leases: deque[int] = deque([0], maxlen=4)  # the last that the server granted
        self.reservations: deque[int] = deque([0], maxlen=2)
        self.granted = 1  # blocks of the last reservation
        # Sound requests, sent before what they name is over.
        self.next_up: deque[m.Message] = deque(maxlen=8)
        self._made: dict[type[m.Message], list[bytes]] = {}
        self._fatal: list[Callable[[int], bytes]] = [
            self._random_bytes,
            self._mutated,
            self._mutated,
            self._mutated,
            self._cut_body,
            self._oversized,
            self._wrong_kind,
            self._wrong_tag,
            self._absurd_count,
            self._nested,
            self._second_hello,
        ]

    def served(self, request_id: int) -> Frame:
        """A frame whose connection goes on: sound but absurd, mutated within its fields, one-way, or a cancel."""
        while True:
            kind = Kind.ONE_WAY if self._rng.random() < 0.05 else Kind.REQUEST
            if self._rng.random() < 0.01:
                return Frame(HEADER.pack(0, request_id + 1_000_000, Kind.CANCEL), Fate.SILENCE)
            body = self._body()
            if self._rng.random() < 0.3:
                body = self._damage(body)
            frame = self._judge(request_id, kind, body)
            if frame is not None and frame.fate is not Fate.CLOSE:
                return frame

    def fatal(self, request_id: int) -> Frame:
        """A frame that must end its connection."""
        while True:
            data = self._rng.choice(self._fatal)(request_id)
            length, number, kind = HEADER.unpack_from(data)
            if length > self._max_frame_bytes:  # what follows is less than was announced
                return Frame(data, Fate.CLOSE)
            frame = self._judge(number, kind, data[HEADER.size :])
            if frame is not None and frame.fate is Fate.CLOSE:
                return Frame(data, Fate.CLOSE)

    def truncated(self, request_id: int) -> bytes:
        """The beginning of a frame whose sender goes away, or of one that announces far more than comes."""
        body = self._body()
        length = self._rng.choice((len(body), self._max_frame_bytes))
        data = HEADER.pack(length, request_id, Kind.REQUEST) + body
        return data[: self._rng.randrange(1, len(data))]

    def _judge(self, request_id: int, kind: int, body: bytes) -> Frame | None:
        """What a server must do about a frame; None for one that we had better not send."""
        data = HEADER.pack(len(body), request_id, kind) + body
        answer = Fate.ANSWER if kind == Kind.REQUEST else Fate.SILENCE
        if len(body) > self._max_frame_bytes or kind not in (Kind.REQUEST, Kind.ONE_WAY):
            return Frame(data, Fate.CLOSE)
        try:
            request = decode_request(memoryview(body))
        except ProtocolError:
            return Frame(data, Fate.CLOSE)
        except KvpoolError:
            return Frame(data, answer)
        if isinstance(request, m.Hello):
            return Frame(data, Fate.CLOSE)
        if isinstance(request, m.Drain) and 0 < request.deadline_s <= 86_400:
            return None  # that would be an order, and obeyed
        if isinstance(request, m.ResizeDram) and request.target_bytes > 0:
            return None  # so would that
        if isinstance(request, m.Replicate) and request.deadline_s > 0.01:
            return None  # its answer may take that long, and others wait for it
        return Frame(data, answer, type(request))

    # ------------------------------------------------------------ bodies

    def _body(self) -> bytes:
        """A request of any type, a node's own more often; large ones are used several times."""
        rng = self._rng
        if self.next_up:
            sound = self.next_up.popleft()
            return _encode(
                [type(sound).__name__, *(getattr(sound, n) for n, _ in _fields(type(sound)))]
            )
        request = rng.choice(OF_A_NODE if rng.random() < 0.7 else REQUESTS)
        if request is m.DropBlocks and rng.random() < 0.95:
            request = m.Pin  # else hardly anything would be left to pin, and no lease to renew
        if request is m.Reserve and rng.random() < 0.05:
            return self._sound_reserve()  # chance alone makes hardly any that is granted
        if all(hint in (int, float, str, bytes, bool) for _, hint in _fields(request)):
            return self._fresh(request)
        made = self._made.setdefault(request, [])
        if len(made) < 60 or rng.random() < 0.02:
            made.append(self._fresh(request))
        return rng.choice(made)

    def _sound_reserve(self) -> bytes:
        start = self._rng.randrange(len(self._hashes) - 2)
        run = b"".join(self._hashes[start : start + 2])
        sound = m.Reserve(self._space.namespace_id, run, b"", 0, 1.0, "frames")
        return _encode(["Reserve", *(getattr(sound, name) for name, _ in _fields(m.Reserve))])

    def _fresh(self, request: type[m.Message]) -> bytes:
        rng = self._rng
        values = [self._value(hint, name) for name, hint in _fields(request)]
        if rng.random() < 0.1:
            del values[rng.randrange(len(values) + 1) :]
        if rng.random() < 0.05:
            values.append(self._value(Any, "more"))
        return _encode([request.__name__, *values])

    def _value(self, hint: Any, name: str) -> Any:
        """Something of a type: likely of the right meaning half of the time."""
        rng = self._rng
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if rng.random() < 0.01:
            hint = rng.choice((int, float, str, bytes, bool, Any))
        if origin in (types.UnionType, typing.Union):
            return self._value(rng.choice(arguments), name)
        if origin is list:
            return [self._value(arguments[0], name) for _ in range(rng.choice((0, 0, 1, 2, 9)))]
        if origin is dict:
            return {text: self._value(arguments[1], name) for text in rng.sample(TEXTS, 2)}
        if origin is typing.Literal:
            return rng.choice((*arguments, "none of these"))
        if hint is Namespace:
            return self._namespace()
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            return [self._value(inner, name) for name, inner in _fields(hint)]
        if hint is bytes:
            return self._bytes(name)
        if hint is float:
            return rng.choice(FLOATS)
        if hint is bool:
            return rng.random() < 0.5
        if hint is str:
            return rng.choice(TEXTS)
        if (
            hint is int
            and name in ("lease_id", "lease_ids", "reservation_id")
            and rng.random() < 0.8
        ):
            return rng.choice(self.reservations if name == "reservation_id" else self.leases)
        if hint is int:
            return rng.choice((0, 1)) if rng.random() < 0.5 else rng.choice(INTS)
        return rng.choice((None, [], {}, -1, "text", b"bytes", 0.5))

    def _bytes(self, name: str) -> bytes:
        rng = self._rng
        if rng.random() < 0.15:
            return rng.randbytes(rng.choice((0, 1, 7, 15, 17, 33, 400)))
        if name == "namespace_id":
            return self._space.namespace_id if rng.random() < 0.8 else rng.randbytes(16)
        if name == "data":
            exact = self._space.layout.part_bytes
            return bytes(rng.choice((0, 1, exact, exact, exact - 1, exact + 1)))
        if name == "block_hash":
            return rng.choice(self._hashes)
        if name == "parent":
            return rng.choice((b"", rng.choice(self._hashes)))
        if name in ("checksums", "places"):
            return rng.randbytes(8 * rng.choice((1, self.granted, self.granted, rng.randrange(5))))
        if name == "indices":
            return rng.choice((b"", b"", struct.pack("<2I", 0, rng.choice((0, 1, 2**32 - 1)))))
        if rng.random() < 0.002:
            return rng.randbytes(16) * (self._max_frame_bytes // 16 - 64)
        start = rng.randrange(len(self._hashes))
        return b"".join(self._hashes[start : start + rng.choice((1, 2, 8, 64))])

    def _namespace(self) -> dict[str, Any]:
        rng = self._rng
        if rng.random() < 0.3:
            known: dict[str, Any] = msgspec.to_builtins(self._space)
            return known
        number = rng.choice((1, 2, 8, 64)) if rng.random() < 0.7 else rng.choice(INTS)
        layout: dict[str, Any] = dict.fromkeys(Layout.__struct_fields__, number)
        layout["dtype"] = rng.choice((*DTYPE_BYTES, "complex7"))
        layout["order"] = rng.choice(TEXTS)
        return {"model": rng.choice(TEXTS), "revision": "r", "layout": layout}

    # ------------------------------------------------------------ damage

    def _damage(self, body: bytes) -> bytes:
        rng = self._rng
        damaged = bytearray(body)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(damaged))
            choice = rng.randrange(4)
            if choice == 0:
                damaged[at] = rng.randrange(256)
            elif choice == 1:
                damaged[at] ^= 1 << rng.randrange(8)
            elif choice == 2:
                damaged[at:at] = rng.randbytes(rng.randint(1, 4))
            elif len(damaged) > 1:
                del damaged[at : at + rng.randint(1, 4)]
            damaged = damaged or bytearray(b"\x00")
        return bytes(damaged)

    def _framed(self, request_id: int, body: bytes, kind: int = Kind.REQUEST) -> bytes:
        return HEADER.pack(len(body), request_id, kind) + body

    def _random_bytes(self, request_id: int) -> bytes:
        return self._framed(request_id, self._rng.randbytes(self._rng.choice((0, 1, 9, 64, 3000))))

    def _mutated(self, request_id: int) -> bytes:
        return self._framed(request_id, self._damage(self._body()))

    def _cut_body(self, request_id: int) -> bytes:
        body = self._body()
        return self._framed(request_id, body[: self._rng.randrange(len(body))])

    def _oversized(self, request_id: int) -> bytes:
        length = self._rng.choice((self._max_frame_bytes + 1, 2**31, 2**32 - 1))
        return HEADER.pack(length, request_id, Kind.REQUEST) + self._rng.randbytes(100)

    def _wrong_kind(self, request_id: int) -> bytes:
        kind = self._rng.choice((Kind.REPLY, Kind.ERROR, Kind.ITEM, 6, 99, 255))
        return self._framed(request_id, self._body(), kind)

    def _wrong_tag(self, request_id: int) -> bytes:
        tag: Any = self._rng.choice(("", "Exit", "pin", "Reply", "x" * 3000, 7, None, [[]]))
        return self._framed(request_id, _encode([tag, 1, b""]))

    def _absurd_count(self, request_id: int) -> bytes:
        header = self._rng.choice(
            (b"\xdd", b"\xdf", b"\xdb", b"\xc6")
        )  # array, map, str, bin of 32 bits
        count = struct.pack(">I", self._rng.choice((2**32 - 1, 2**31, 10**6)))
        tag = _encode(self._rng.choice(REQUESTS).__name__)
        return self._framed(request_id, self._rng.choice((header, b"\x94" + tag + header)) + count)

    def _nested(self, request_id: int) -> bytes:
        depth = self._rng.choice((100, 2000, 100_000))
        opening = self._rng.choice((b"\x91", b"\x81\xa1k"))
        tag = _encode(self._rng.choice(REQUESTS).__name__)
        return self._framed(request_id, self._rng.choice((b"", b"\x92" + tag)) + opening * depth)

    def _second_hello(self, request_id: int) -> bytes:
        return self._framed(request_id, _encode(["Hello", 1, "again", "client"]))


def _fields(struct_type: type[msgspec.Struct]) -> list[tuple[str, Any]]:
    hints = _HINTS.get(struct_type)
    if hints is None:
        known = typing.get_type_hints(struct_type)
        hints = [(name, known[name]) for name in struct_type.__struct_fields__]
        _HINTS[struct_type] = hints
    return hints


_HINTS: dict[type, list[tuple[str, Any]]] = {}
_encoder = msgspec.msgpack.Encoder()


def _encode(value: Any) -> bytes:
    return _encoder.encode(value)
