"""Prefix hashes: fixed by known answers, the same in every process, strict about tokens."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvpool.blocks.hashing import (
    MAX_HASHES,
    MAX_TOKENS,
    chain_root,
    checksum,
    hash_chain,
    pack_hashes,
    token_bytes,
    unpack_hashes,
)
from kvpool.blocks.layout import HashAlgorithm, Layout, Namespace
from kvpool.errors import InvalidArgument

LAYOUT = Layout("bfloat16", layers=2, kv_heads=2, head_dim=8, block_tokens=4)
XXH3 = Namespace("m", "r", LAYOUT)
SHA256 = Namespace("m", "r", LAYOUT, hash_algorithm="sha256")
TOKENS = [0, 1, 2, 3, 70_000, 2**32 - 1, 6, 7, 8, 9]  # two full blocks and a tail
TOKEN_ID = st.integers(0, 2**32 - 1)


def reference_chain(
    namespace: Namespace, tokens: Sequence[int], extra: Sequence[str]
) -> list[bytes]:
    """A second implementation of the module's definition, one token at a time."""
    one: Callable[[bytes], bytes] = {
        "xxh3-128": lambda data: xxhash.xxh3_128(data).digest(),
        "sha256": lambda data: hashlib.sha256(data).digest()[:16],
    }[namespace.hash_algorithm]
    step = namespace.layout.block_tokens
    digest = one(msgspec.msgpack.encode(["kvpool-chain-1", namespace.namespace_id, list(extra)]))
    chain = []
    for start in range(0, len(tokens) - step + 1, step):
        block = b"".join(struct.pack("<I", token) for token in tokens[start : start + step])
        digest = one(digest + block)
        chain.append(digest)
    return chain


KNOWN_ANSWERS = {
    "xxh3": (XXH3, (), ["671c323b0432eaff62472e68764cab3b", "714596d22ddc887a1f5941d13afa991e"]),
    "sha256": (
        SHA256,
        (),
        ["f362716654d9d5f17633ffc8c7f7ebcf", "463e51f5f8e4b88a986d3e7ce48d6f3f"],
    ),
    "xxh3, extra keys": (
        XXH3,
        ("lora:sql@3f2a", "img:9"),
        ["424de59a337b8baadd9bfe14be89b272", "60a68797635cd0143ac0e0de448ede0c"],
    ),
    "sha256, extra keys": (
        SHA256,
        ("lora:sql@3f2a", "img:9"),
        ["6dbf33c395633c2afdd4ac097e1f2d10", "be0957623449529beeacdc326998af79"],
    ),
}


@pytest.mark.parametrize("name", KNOWN_ANSWERS)
def test_known_answers_never_change(name: str) -> None:
    namespace, extra, expected = KNOWN_ANSWERS[name]
    assert [h.hex() for h in hash_chain(namespace, TOKENS, extra)] == expected


def test_known_identities_never_change() -> None:
    assert XXH3.namespace_id.hex() == "47d0931588987ff4769088d4beccea92"
    assert LAYOUT.fingerprint == "924c43ae1589693361ca8af5ac4e3663"
    assert chain_root(XXH3).hex() == "d2e9f56d6eb42e30171dac4bccb0945a"
    assert checksum(b"kvpool") == 7733716412892655235


@given(
    st.lists(TOKEN_ID, max_size=40),
    st.sampled_from([XXH3, SHA256]),
    st.lists(st.text(), max_size=2),
)
def test_chain_follows_its_definition(
    tokens: list[int], namespace: Namespace, extra: list[str]
) -> None:
    assert hash_chain(namespace, tokens, extra) == reference_chain(namespace, tokens, extra)


@pytest.mark.parametrize("seed", ["0", "4711"])
def test_another_process_with_another_hash_seed_gets_the_same_hashes(seed: str) -> None:
    code = (
        "from kvpool.blocks.hashing import hash_chain\n"
        "from kvpool.blocks.layout import Layout, Namespace\n"
        "layout = Layout('bfloat16', layers=2, kv_heads=2, head_dim=8, block_tokens=4)\n"
        f"chain = hash_chain(Namespace('m', 'r', layout), {TOKENS}, ('lora:x', 'img:y'))\n"
        "print(b''.join(chain).hex())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": seed},
    )
    assert done.stdout.strip() == pack_hashes(hash_chain(XXH3, TOKENS, ("lora:x", "img:y"))).hex()


@pytest.mark.parametrize(
    "same",
    [
        tuple(TOKENS),
        np.array(TOKENS, dtype=np.int64),
        np.array(TOKENS, dtype=np.uint32),
        np.array(TOKENS, dtype=">u4"),
        np.repeat(np.array(TOKENS), 2)[::2],
        [np.int64(token) for token in TOKENS],
    ],
    ids=["tuple", "int64", "uint32", "big endian", "strided", "numpy scalars"],
)
def test_the_container_of_the_tokens_does_not_matter(same: Any) -> None:
    assert hash_chain(XXH3, same) == hash_chain(XXH3, TOKENS)


@pytest.mark.parametrize("algorithm", ["xxh3-128", "sha256"])
def test_a_hash_covers_every_token_before_it(algorithm: HashAlgorithm) -> None:
    namespace = Namespace("m", "r", LAYOUT, hash_algorithm=algorithm)
    tokens = list(range(16))
    before = hash_chain(namespace, tokens)
    tokens[5] += 1
    after = hash_chain(namespace, tokens)
    assert after[0] == before[0]
    assert all(new != old for new, old in zip(after[1:], before[1:], strict=True))


def test_a_chain_goes_on_from_a_known_parent() -> None:
    tokens = list(range(24))
    whole = hash_chain(XXH3, tokens, ("lora:x",))
    assert hash_chain(XXH3, tokens[8:], parent=whole[1]) == whole[2:]


def test_the_tail_that_fills_no_block_has_no_hash() -> None:
    assert [len(hash_chain(XXH3, range(n))) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


@pytest.mark.parametrize(
    "other",
    [
        Namespace("m2", "r", LAYOUT),
        Namespace("m", "r2", LAYOUT),
        Namespace("m", "r", msgspec.structs.replace(LAYOUT, dtype="float16")),
        Namespace("m", "r", msgspec.structs.replace(LAYOUT, tp_size=2)),
        Namespace("m", "r", msgspec.structs.replace(LAYOUT, order="layer,kv,token,head,dim")),
        Namespace("m", "r", LAYOUT, tenant="t"),
        Namespace("m", "r", LAYOUT, salt="s"),
        SHA256,
    ],
    ids=["model", "revision", "dtype", "tp", "order", "tenant", "salt", "algorithm"],
)
def test_namespaces_that_differ_in_anything_share_no_hash(other: Namespace) -> None:
    assert not set(hash_chain(XXH3, TOKENS)) & set(hash_chain(other, TOKENS))


def test_extra_keys_do_not_run_into_each_other() -> None:
    roots = [
        chain_root(XXH3, keys) for keys in ((), ("ab", "c"), ("a", "bc"), ("abc",), ("c", "ab"))
    ]
    assert len(set(roots)) == len(roots)


@pytest.mark.parametrize(
    "bad",
    [
        [1.0],
        [True],
        [1, 2, False],
        [-1],
        [2**32],
        ["1"],
        [None],
        [[1]],
        "1234",
        b"1234",
        np.array([1.0]),
        np.array([True]),
        np.array([-1]),
        np.array([2**32]),
        np.zeros((2, 4), dtype=np.int64),
        np.array(["1"]),
    ],
    ids=repr,
)
def test_tokens_that_are_no_token_ids_are_refused(bad: Any) -> None:
    with pytest.raises(InvalidArgument, match="token ids"):
        token_bytes(bad)


def test_too_many_tokens_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=str(MAX_TOKENS)):
        token_bytes(range(MAX_TOKENS + 1))


@pytest.mark.parametrize("parent", [b"", b"x" * 15, b"x" * 32])
def test_a_parent_of_wrong_length_is_refused(parent: bytes) -> None:
    with pytest.raises(InvalidArgument, match="parent"):
        hash_chain(XXH3, TOKENS, parent=parent)


@given(st.lists(st.binary(min_size=16, max_size=16), max_size=9))
def test_packed_hashes_come_back(hashes: list[bytes]) -> None:
    assert unpack_hashes(pack_hashes(hashes)) == hashes


def test_hashes_of_wrong_length_are_refused_even_when_they_add_up() -> None:
    with pytest.raises(InvalidArgument):
        pack_hashes([b"x" * 15, b"x" * 17])
    with pytest.raises(InvalidArgument):
        unpack_hashes(b"x" * 17)
    assert len(unpack_hashes(bytes(16 * MAX_HASHES))) == MAX_HASHES
    with pytest.raises(
        InvalidArgument, match="at most"
    ):  # what a frame could hold would take seconds
        unpack_hashes(bytes(16 * (MAX_HASHES + 1)))
