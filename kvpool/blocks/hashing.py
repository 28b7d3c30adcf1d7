"""Chained prefix hashes: the name of a block is a 128-bit hash of all tokens up to its end.

    root     = H("kvpool-chain-1" | namespace_id | extra keys)
    hash[0]  = H(root    | tokens[0 : block_tokens])
    hash[i]  = H(hash[i-1] | tokens[i*block_tokens : (i+1)*block_tokens])

Tokens enter as little-endian unsigned 32-bit integers. H is xxh3-128 (canonical, big-endian digest)
or the first 16 bytes of SHA-256. Hashes do not depend on the process, the machine, PYTHONHASHSEED
or the Python version. The chaining follows vLLM's prefix caching (hash of parent, tokens, extra
keys). The encoding is kvpool's own; known answers in the tests fix it.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from kvpool.blocks.layout import HashAlgorithm, Namespace
from kvpool.errors import InvalidArgument

HASH_BYTES = 16
MAX_TOKENS = 16_777_216
MAX_HASHES = 65_536  # in one message; servers take them in one go, between two turns of their loops
TokenIds = Sequence[int] | npt.NDArray[np.integer[Any]]


def token_bytes(tokens: TokenIds) -> memoryview:
    """Token ids as packed little-endian uint32.

    Args:
        tokens: a sequence of ints or a one-dimensional integer array, each in [0, 2**32).

    Raises:
        InvalidArgument: not integers (bool and float included), out of range, too many, or more
            than one dimension.
    """
    if isinstance(tokens, np.ndarray) and tokens.ndim != 1:
        raise InvalidArgument(f"token ids must be one-dimensional, got shape {tokens.shape}")
    if len(tokens) > MAX_TOKENS:
        raise InvalidArgument(f"{len(tokens)} tokens in one chain", hint=f"at most {MAX_TOKENS}")
    if isinstance(tokens, np.ndarray):
        if not np.issubdtype(tokens.dtype, np.integer):
            raise InvalidArgument(
                f"token ids must be a one-dimensional integer array, got {tokens.dtype} of shape "
                f"{tokens.shape}"
            )
        if tokens.size and (int(tokens.min()) < 0 or int(tokens.max()) > 0xFFFF_FFFF):
            raise InvalidArgument("token ids must lie in [0, 2**32)")
        return np.ascontiguousarray(tokens, dtype="<u4").data.cast("B")
    if isinstance(tokens, (str, bytes, bytearray)):
        raise InvalidArgument(f"token ids must be integers, got {type(tokens).__name__}")
    try:
        packed = array("I", tokens)
    except (TypeError, OverflowError) as error:
        raise InvalidArgument(f"token ids must be integers in [0, 2**32): {error}") from error
    if bool in set(map(type, tokens)):
        raise InvalidArgument("token ids must be integers, got a bool")
    return np.asarray(packed, dtype="<u4").data.cast("B")


def cache_salt_key(salt: str) -> str:
    """The extra key of a prompt whose caller gave a salt: only callers with the same one share."""
    return f"cache_salt:{salt}"


def chain_root(namespace: Namespace, extra_keys: Sequence[str] = ()) -> bytes:
    """The hash before the first block, of the namespace and extra keys (LoRA, multimodal, cache
    salt).

    Args:
        extra_keys: what else this prompt's KV depends on, in a fixed order, e.g.
            `("lora:sql@3f2a",)`.

    Returns:
        16 bytes.
    """
    seed = msgspec.msgpack.encode(["kvpool-chain-1", namespace.namespace_id, list(extra_keys)])
    return _digest(namespace.hash_algorithm, seed)


def hash_chain(
    namespace: Namespace,
    tokens: TokenIds,
    extra_keys: Sequence[str] = (),
    *,
    parent: bytes | None = None,
) -> list[bytes]:
    """Prefix hashes of all full blocks of `tokens`, in order.

    Args:
        tokens: token ids from the start of the prompt (or from the end of `parent`).
        extra_keys: as in `chain_root`; ignored if `parent` is given.
        parent: hash of the block before the first one here, to continue a known chain.

    Returns:
        `len(tokens) // block_tokens` hashes of 16 bytes. The tail that fills no block has no hash.

    Raises:
        InvalidArgument: as `token_bytes`, or `parent` does not have 16 bytes.
    """
    if parent is not None and len(parent) != HASH_BYTES:
        raise InvalidArgument(f"a parent hash has {HASH_BYTES} bytes, got {len(parent)}")
    data = token_bytes(tokens)
    step = 4 * namespace.layout.block_tokens
    digest = parent if parent is not None else chain_root(namespace, extra_keys)
    chain: list[bytes] = []
    edges = range(0, len(data) - len(data) % step + 1, step)
    if namespace.hash_algorithm == "xxh3-128":
        hash_one = xxhash.xxh3_128_digest
        for start, end in pairwise(edges):
            digest = hash_one(digest + data[start:end])
            chain.append(digest)
    else:
        for start, end in pairwise(edges):
            digest = hashlib.sha256(digest + data[start:end]).digest()[:HASH_BYTES]
            chain.append(digest)
    return chain


def object_hash(namespace: Namespace, root: bytes, name: bytes) -> bytes:
    """The hash of a block to which the engine gives a name itself, as LMCache does with its chunks.

    Args:
        root: from `chain_root`, with an extra key that no chain of tokens has, so that their hashes
            differ.
        name: the engine's whole name for the block, in one unambiguous encoding.

    Returns:
        16 bytes.
    """
    return _digest(namespace.hash_algorithm, root + name)


def checksum(data: Any) -> int:
    """xxh3-64 of the bytes of a part, which is verified from commit on (invariant 5)."""
    return xxhash.xxh3_64_intdigest(data)


def pack_hashes(hashes: Sequence[bytes]) -> bytes:
    """Pack hashes into one byte string, 16 bytes each, for the wire.

    Raises:
        InvalidArgument: one of them has another length.
    """
    packed = b"".join(hashes)
    if len(packed) != HASH_BYTES * len(hashes) or any(len(h) != HASH_BYTES for h in hashes):
        raise InvalidArgument(f"block hashes have {HASH_BYTES} bytes each")
    return packed


def unpack_hashes(packed: bytes, limit: int = MAX_HASHES) -> list[bytes]:
    """Unpack what `pack_hashes` packed.

    Raises:
        InvalidArgument: the length is not a multiple of 16, or there are more than `limit`.
    """
    if len(packed) % HASH_BYTES:
        raise InvalidArgument(
            f"packed hashes of {len(packed)} bytes",
            hint=f"a multiple of {HASH_BYTES} is needed",
        )
    count = len(packed) // HASH_BYTES
    if count > limit:
        raise InvalidArgument(f"{count} hashes in one call", hint=f"at most {limit}")
    return list(struct.unpack(f"{HASH_BYTES}s" * count, packed))  # a quarter of the time of slicing


def _digest(algorithm: HashAlgorithm, data: bytes) -> bytes:
    if algorithm == "sha256":
        return hashlib.sha256(data).digest()[:HASH_BYTES]
    return xxhash.xxh3_128_digest(data)
