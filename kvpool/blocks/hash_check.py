"""Check that two processes compute the same block hashes.

A client that registers a namespace sends the hash of a fixed chain of tokens (a known answer). The
server compares it with its own. Hashes may differ by the version of a library, the platform, or a
patched module; without this check every look-up would miss, and nothing would say why.
"""

from __future__ import annotations

import platform
import sys
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version

import msgspec
import numpy as np
import xxhash

from kvpool.blocks.hashing import hash_chain
from kvpool.blocks.layout import Namespace
from kvpool.errors import HashMismatch

BLOCKS = 2  # the second builds on the first
_MULTIPLIER = 2_654_435_761  # 2**32 / golden ratio: every byte of the tokens varies


class HashProof(msgspec.Struct, array_like=True, frozen=True):
    """A process's known answer, and the versions that it may depend on, for error messages."""

    known_answer: bytes
    algorithm: str
    versions: dict[str, str]


@lru_cache(maxsize=256)
def known_answer(namespace: Namespace) -> bytes:
    """The prefix hash of the fixed chain, whose token i is i x 2654435761 modulo 2**32."""
    count = BLOCKS * namespace.layout.block_tokens
    tokens = np.arange(count, dtype=np.uint64) * np.uint64(_MULTIPLIER) % np.uint64(1 << 32)
    return hash_chain(namespace, tokens)[-1]


@lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    """The versions that hashes may depend on in this process."""
    try:
        own = version("kvpool")
    except PackageNotFoundError:
        own = "unknown"
    return {
        "kvpool": own,
        "xxhash": f"{xxhash.VERSION} ({xxhash.XXHASH_VERSION})",
        "msgspec": msgspec.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.machine()}, {sys.byteorder}-endian",
    }


def proof_of(namespace: Namespace) -> HashProof:
    """The proof that this process sends for a namespace."""
    return HashProof(known_answer(namespace), namespace.hash_algorithm, versions())


def check_proof(namespace: Namespace, proof: HashProof | None) -> None:
    """Compare a peer's proof with this process's.

    None is accepted, as older processes send no proof.

    Raises:
        HashMismatch: the peer computes other hashes; the message lists the versions that differ.
    """
    if proof is None or proof.known_answer == known_answer(namespace):
        return
    ours = {"hash algorithm": namespace.hash_algorithm, **versions()}
    theirs = {"hash algorithm": proof.algorithm, **proof.versions}
    differences = [
        f"{name[:32]} {theirs.get(name, 'unknown')[:64]} there, {ours.get(name, 'unknown')} here"
        for name in (*ours, *sorted(theirs.keys() - ours.keys()))
        if theirs.get(name) != ours.get(name)
    ]
    raise HashMismatch(
        f"the peer computes other block hashes for {namespace.name}: "
        + ("; ".join(differences[:12]) or "all versions are equal; is the code modified?"),
        hint="processes that share a namespace must run the same versions",
    )
