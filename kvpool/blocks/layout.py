"""What fixes a block's bytes and their order (`Layout`), and whose blocks they are (`Namespace`).

Both are plain values, which messages carry. Two processes that build them from the same fields get
the same fingerprints.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from kvpool.errors import InvalidArgument

DTYPE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
HashAlgorithm = Literal["xxh3-128", "sha256"]
MAX_BLOCK_TOKENS = 65_536
# A namespace fits easily into one record on disk and one small frame.
MAX_NAME_CHARS = 512  # of model, revision, tenant and salt, each
MAX_ORDER_CHARS = 256


class Layout(msgspec.Struct, frozen=True):
    """The shape of one block's KV: dtype, sizes, order of dimensions and tensor-parallel parts.

    The bytes of one part are a C-contiguous array of shape `[layers, kv_per_token, kv_heads /
    tp_size, block_tokens, head_dim]` of `dtype` for the default `order`. `block_tokens` is a whole
    number of the engine's pages. Engines that arrange bytes differently say so in `order`. kvpool
    never reorders bytes, so two engines share blocks only if the whole layout is equal.

    Raises:
        InvalidArgument: a size is not a positive integer, the dtype is unknown, `order` is not a
            text or is longer than `MAX_ORDER_CHARS`, or the KV heads cannot be divided over the
            ranks.
    """

    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int = 64
    tp_size: int = 1
    kv_per_token: int = 2  # K and V; 1 if the engine stores one latent vector (MLA)
    order: str = "layer,kv,head,token,dim"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise InvalidArgument(
                f"unknown dtype {self.dtype!r}",
                hint=f"use one of {', '.join(DTYPE_BYTES)}",
            )
        for name in (
            "layers",
            "kv_heads",
            "head_dim",
            "block_tokens",
            "tp_size",
            "kv_per_token",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidArgument(f"layout.{name} must be a positive integer, got {value!r}")
        if self.block_tokens > MAX_BLOCK_TOKENS:
            raise InvalidArgument(
                f"layout.block_tokens is {self.block_tokens}",
                hint=f"at most {MAX_BLOCK_TOKENS}",
            )
        if not isinstance(self.order, str) or len(self.order) > MAX_ORDER_CHARS:
            raise InvalidArgument(f"layout.order must be at most {MAX_ORDER_CHARS} characters")
        if self.kv_heads % self.tp_size and self.tp_size % self.kv_heads:
            raise InvalidArgument(
                f"{self.kv_heads} KV heads cannot be divided over tp_size={self.tp_size}",
                hint="one of the two must divide the other",
            )

    @property
    def heads_per_part(self) -> int:
        """KV heads of one rank. If there are more ranks than heads, ranks hold copies of heads."""
        return max(1, self.kv_heads // self.tp_size)

    @property
    def bytes_per_token(self) -> int:
        """KV bytes of a token over all parts: 2 x layers x KV heads x head dim x bytes of dtype."""
        return self.part_bytes * self.tp_size // self.block_tokens

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer within one part of a block."""
        return (
            self.kv_per_token
            * self.heads_per_part
            * self.block_tokens
            * self.head_dim
            * DTYPE_BYTES[self.dtype]
        )

    @property
    def part_bytes(self) -> int:
        """Bytes of one part: one rank's share of a block."""
        return self.layers * self.layer_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, all parts together."""
        return self.part_bytes * self.tp_size

    @property
    def part_shape(self) -> tuple[int, int, int, int, int]:
        """Shape of one part as an array of `dtype`, in the default order."""
        return (
            self.layers,
            self.kv_per_token,
            self.heads_per_part,
            self.block_tokens,
            self.head_dim,
        )

    @property
    def fingerprint(self) -> str:
        """A hash of every field, 32 hex digits. Equal fingerprints mean interchangeable bytes."""
        return hashlib.sha256(_canonical(self)).hexdigest()[:32]

    def differences(self, other: Layout) -> list[str]:
        """The fields in which `other` differs, with both values, for error messages."""
        return [
            f"{f}: {getattr(self, f)} != {getattr(other, f)}"
            for f in self.__struct_fields__
            if getattr(self, f) != getattr(other, f)
        ]


class Namespace(msgspec.Struct, frozen=True):
    """One model + revision + KV layout + tenant salt; blocks of two namespaces never mix.

    `revision` must identify the weights: use a content hash, not a path or a name. `salt` separates
    users who must not learn of each other's prompts. It is part of every hash and is never shown.
    Use `sha256` as `hash_algorithm` if users might craft collisions.

    Raises:
        InvalidArgument: model or revision is empty, one of the texts is longer than
            `MAX_NAME_CHARS`, or the algorithm is unknown.
    """

    model: str
    revision: str
    layout: Layout
    tenant: str = ""
    salt: str = ""
    hash_algorithm: HashAlgorithm = "xxh3-128"

    def __post_init__(self) -> None:
        for name in ("model", "revision"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value or len(value) > MAX_NAME_CHARS:
                raise InvalidArgument(f"namespace.{name} must be 1 to {MAX_NAME_CHARS} characters")
        for name in ("tenant", "salt"):
            value = getattr(self, name)
            if not isinstance(value, str) or len(value) > MAX_NAME_CHARS:
                raise InvalidArgument(
                    f"namespace.{name} must be at most {MAX_NAME_CHARS} characters"
                )
        if self.hash_algorithm not in ("xxh3-128", "sha256"):
            raise InvalidArgument(
                f"unknown hash_algorithm {self.hash_algorithm!r}",
                hint="use xxh3-128 or sha256",
            )

    @property
    def name(self) -> str:
        """The name that users see: model, short revision, and a digest of tenant and salt."""
        name = f"{self.model}@{self.revision[:12]}"
        if self.tenant or self.salt:
            secret = msgspec.msgpack.encode([self.tenant, self.salt])
            name += f"#{hashlib.sha256(b'kvpool-salt' + secret).hexdigest()[:8]}"
        return name

    @property
    def namespace_id(self) -> bytes:
        """A hash of every field, layout included: the 16 bytes by which calls name it."""
        return hashlib.sha256(b"kvpool-namespace-1" + _canonical(self)).digest()[:16]


def _canonical(value: msgspec.Struct) -> bytes:
    """JSON with sorted keys, so that equal values give equal bytes on every platform."""
    return msgspec.json.encode(value, order="sorted")
