"""Whether two processes name blocks alike: each shows the hash of one fixed chain when it registers a namespace.

Hashes that differ (another version of a library, another platform, a patched module) would never meet, and nobody
would notice but for the misses. So whoever knows the namespace compares the hash with its own and refuses. Pure.
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
_MULTIPLIER = 2_654_435_761  # of the golden ratio: every byte of the tokens takes part


class HashProof(msgspec.Struct, array_like=True, frozen=True):
    """How a process hashes. `versions` help people to find out why two processes hash differently."""

    golden: bytes
    algorithm: str
    versions: dict[str, str]


@lru_cache(maxsize=256)
def golden_hash(namespace: Namespace) -> bytes:
    """Prefix hash of the fixed chain: token i is i x 2654435761 modulo 2**32."""
    count = BLOCKS * namespace.layout.block_tokens
    tokens = np.arange(count, dtype=np.uint64) * np.uint64(_MULTIPLIER) % np.uint64(1 << 32)
    return hash_chain(namespace, tokens)[-1]


@lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    """What hashes might depend on here, for the one who has to find out why they differ."""
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
    """What this process shows for a namespace."""
    return HashProof(golden_hash(namespace), namespace.hash_algorithm, versions())


def check_proof(namespace: Namespace, proof: HashProof | None) -> None:
    """Compare a peer's proof with our own; none at all is accepted, as older processes send none.

    Raises:
        HashMismatch: the peer hashes otherwise; says in what it differs from us.
    """
    if proof is None or proof.golden == golden_hash(namespace):
        return
    ours = {"hash algorithm": namespace.hash_algorithm, **versions()}
    theirs = {"hash algorithm": proof.algorithm, **proof.versions}
    differences = [
        f"{name[:32]} {theirs.get(name, 'not told')[:64]} there, {ours.get(name, 'unknown')} here"
        for name in (*ours, *sorted(theirs.keys() - ours.keys()))
        if theirs.get(name) != ours.get(name)
    ]
    raise HashMismatch(
        f"blocks of {namespace.name} have other names there than here: "
        + ("; ".join(differences[:12]) or "no version that is told differs: is the code modified?"),
        hint="processes that share a namespace must run the same versions",
    )
