"""Blocks written by ranks of one tensor-parallel size, read by ranks of another, in a real node."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from kvpool import AsyncPool, Layout, Namespace, Pool, TensorParallelRank, hash_chain
from kvpool.blocks.layout import DTYPE_BYTES
from kvpool.errors import CannotReshard, InvalidArgument, LayoutMismatch, UnverifiableRead
from kvpool.transports import Pieces
from kvpool.transports.shm import ShmTransport
from tests.support.process_cluster import Cluster, wait_until

# Eight heads of 4 KiB a layer and block.
WHOLE = Layout("bfloat16", layers=3, kv_heads=8, head_dim=64, block_tokens=32)
SPACES = {
    size: Namespace(f"tests/tp{size}", "r", msgspec.structs.replace(WHOLE, tp_size=size))
    for size in (1, 2, 4)
}
BLOCKS = 5
SEEDS = itertools.count(1000)  # prompts that no other test uses


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    running = Cluster(tmp_path_factory.mktemp("tensor-parallel"))
    with running.supervisor:
        running.start_conductor()
        running.start_node("n0")
        running.wait_joined(nodes=1)
        yield running


@pytest.fixture(params=["shm", "nixl"])
def pool(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Pool]:
    conductor = cluster.conductor["wire"]
    with Pool(conductor=conductor, host_label="here", transport=request.param) as made:
        yield made


def transport_of(pool: Pool) -> str:
    return "shm" if pool._pool.transports._forced == "shm" else "nixl"


def chain(seed: int, space: Namespace, blocks: int = BLOCKS) -> list[bytes]:
    tokens = np.random.default_rng(seed).integers(0, 50_000, blocks * WHOLE.block_tokens)
    return hash_chain(space, tokens)


def some_kv(seed: int, blocks: int = BLOCKS) -> np.ndarray:
    """[block, layer, kv, head, bytes of all tokens]"""
    row = WHOLE.block_tokens * WHOLE.head_dim * DTYPE_BYTES[WHOLE.dtype]
    shape = (blocks, WHOLE.layers, WHOLE.kv_per_token, WHOLE.kv_heads, row)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def share(kv: np.ndarray, size: int, rank: int) -> np.ndarray:
    """What a rank holds of each block, one row a block."""
    heads = WHOLE.kv_heads // size
    mine = kv[:, :, :, rank * heads : (rank + 1) * heads]
    return np.ascontiguousarray(mine).reshape(len(kv), -1)


def put_all(pool: Pool, space: Namespace, hashes: list[bytes], kv: np.ndarray) -> None:
    size = space.layout.tp_size
    for rank in range(size):
        if rank:
            assert_not_found(pool, space, hashes)  # before the last rank has written
        assert pool.put(space, hashes, share(kv, size, rank), part=rank).stored == len(hashes)
    wait_until(lambda: pool.lookup(space, hashes).found == len(hashes), "the index hears of it")


def assert_not_found(pool: Pool, space: Namespace, hashes: list[bytes]) -> None:
    """Not even when the index has heard all that the node can have said of them: it knows a later block."""
    seed = next(SEEDS)
    later, kv = chain(seed, space, 1), some_kv(seed, 1)
    pool.put(space, later, share(kv, 1, 0), as_rank=TensorParallelRank(1, 0))
    wait_until(lambda: pool.lookup(space, later).found == 1, "the index hears of a later block")
    assert pool.lookup(space, hashes).found == 0


@pytest.mark.parametrize(("stored", "size"), [(4, 2), (4, 1), (2, 1)])
def test_fewer_ranks_read_what_more_ranks_wrote_and_verify_it(
    pool: Pool, stored: int, size: int
) -> None:
    space, name = SPACES[stored], transport_of(pool)
    seed = next(SEEDS)
    hashes, kv = chain(seed, space), some_kv(seed)
    put_all(pool, space, hashes, kv)
    for rank in range(size):
        expected = share(kv, size, rank)
        out = np.zeros_like(expected)
        got = pool.get(space, hashes, out, as_rank=TensorParallelRank(size, rank))
        assert (got.found, got.verified) == (BLOCKS, BLOCKS)
        assert got.bytes_moved == {name: out.nbytes}
        assert (out == expected).all()


@pytest.mark.parametrize(("stored", "size"), [(1, 4), (1, 2), (2, 4)])
def test_more_ranks_read_what_fewer_ranks_wrote(pool: Pool, stored: int, size: int) -> None:
    space, name = SPACES[stored], transport_of(pool)
    seed = next(SEEDS)
    hashes, kv = chain(seed, space), some_kv(seed)
    put_all(pool, space, hashes, kv)
    for rank in range(size):
        expected = share(kv, size, rank)
        out = np.zeros_like(expected)
        as_rank = TensorParallelRank(size, rank)
        if name == "shm":  # the whole parts are summed in place
            assert pool.get(space, hashes, out, as_rank=as_rank).verified == BLOCKS
        else:
            with pytest.raises(UnverifiableRead, match="verify=False"):
                pool.get(space, hashes, out, as_rank=as_rank)
            assert not out.any()
            got = pool.get(space, hashes, out, as_rank=as_rank, verify=False)
            assert (got.found, got.verified) == (BLOCKS, 0)
            assert got.bytes_moved == {name: out.nbytes}
        assert (out == expected).all()


@pytest.mark.parametrize("size", [1, 2])
def test_fewer_ranks_write_all_parts_of_more(pool: Pool, size: int) -> None:
    space, name = SPACES[4], transport_of(pool)
    seed = next(SEEDS)
    hashes, kv = chain(seed, space), some_kv(seed)
    for rank in range(size):
        if rank:
            assert_not_found(pool, space, hashes)
        as_rank = TensorParallelRank(size, rank)
        put = pool.put(space, hashes, share(kv, size, rank), as_rank=as_rank)
        assert (put.stored, put.bytes_moved) == (BLOCKS, {name: kv.nbytes // size})
    wait_until(lambda: pool.lookup(space, hashes).found == BLOCKS, "the index hears of it")
    for rank in range(4):
        expected = share(kv, 4, rank)
        out = np.zeros_like(expected)
        assert pool.get(space, hashes, out, part=rank).verified == BLOCKS
        assert (out == expected).all()
    again = pool.put(space, hashes, share(kv, 1, 0), as_rank=TensorParallelRank(1, 0))
    assert (again.stored, again.existing, again.bytes_moved) == (0, BLOCKS, {})


def test_a_part_that_another_writer_holds_is_left_to_it(cluster: Cluster) -> None:
    space = SPACES[4]
    hashes, kv = chain(1, space), some_kv(1)
    with Pool(conductor=cluster.conductor["wire"], host_label="here") as pool:
        pool.put(space, hashes[:2], share(kv[:2], 4, 2), part=2)
        put = pool.put(space, hashes, share(kv, 1, 0), as_rank=TensorParallelRank(1, 0))
        assert put.stored == BLOCKS
        assert put.bytes_moved == {"shm": kv.nbytes - share(kv[:2], 4, 2).nbytes}
        wait_until(lambda: pool.lookup(space, hashes).found == BLOCKS, "the index hears of it")


@pytest.mark.parametrize("name", ["shm", "nixl"])
async def test_pieces_land_in_the_callers_memory_without_a_copy_between(
    cluster: Cluster, name: Any
) -> None:
    space = SPACES[4]
    seed = next(SEEDS)
    hashes, kv = chain(seed, space), some_kv(seed)
    node = cluster.nodes["n0"]["wire"]
    async with AsyncPool(node=node, host_label="here", transport=name) as pool:
        for rank in range(4):
            await pool.put(space, hashes, share(kv, 4, rank), part=rank)
        transport = pool.directory.link_to((await pool.nodes())[0].descriptor).transports.dram
        seen: list[Pieces] = []
        read = transport.read_and_sum
        transport.read_and_sum = lambda n, p, t: (seen.append(p), read(n, p, t))[1]  # type: ignore
        out = np.zeros_like(share(kv, 2, 1))
        as_rank = TensorParallelRank(2, 1)
        got = await pool.get(space, hashes, out, as_rank=as_rank, is_disposable=True)
    assert got.found == BLOCKS
    (pieces,) = seen
    start = out.ctypes.data
    assert pieces.total_bytes == out.nbytes
    assert pieces.local.min() == start
    assert (pieces.local + pieces.lengths).max() == start + out.nbytes
    assert (out == share(kv, 2, 1)).all()


async def test_wrong_bytes_anywhere_in_a_part_are_found(cluster: Cluster) -> None:
    node = cluster.nodes["n0"]["wire"]
    for stored, size, rank in ((4, 2, 1), (1, 4, 0)):
        space = SPACES[stored]
        hashes, kv = chain(2, space), some_kv(2)
        async with AsyncPool(node=node, host_label="here") as pool:
            for part in range(stored):
                await pool.put(space, hashes, share(kv, stored, part), part=part)
            link = pool.directory.link_to((await pool.nodes())[0].descriptor)
            last = stored - 1
            lease = await link.pin(space, hashes, ttl_s=5, timeout_s=5, parts=(last,))
            # The last byte of the last head: a rank of TP=4 that reads the first heads never sees it.
            place = lease.places[3:4].copy()
            place[0, 1] += space.layout.part_bytes - 1
            wrong = np.array([kv[3, -1, -1, -1, -1] ^ 1], dtype=np.uint8)
            pieces = Pieces(np.array([wrong.ctypes.data]), place, np.array([1]), wrong)
            ShmTransport().write(link.node, pieces, 1.0)
            link.release(lease)
            out = np.zeros_like(share(kv, size, rank))
            got = await pool.get(space, hashes, out, as_rank=TensorParallelRank(size, rank))
            assert got.miss_reason == "checksum"
            deadline = time.monotonic() + 10
            while (await pool.lookup(space, hashes)).found != 3:  # the report is one-way
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)


def test_what_cannot_be_done_is_refused_before_anything_moves(pool: Pool) -> None:
    space = SPACES[1]
    hashes, kv = chain(3, space), some_kv(3)
    mine = share(kv, 4, 1)
    with pytest.raises(CannotReshard, match="largest tp_size"):
        pool.put(space, hashes, mine, as_rank=TensorParallelRank(4, 1))
    with pytest.raises(InvalidArgument, match="one of the two"):
        pool.get(space, hashes, mine, part=1, as_rank=TensorParallelRank(4, 1))
    with pytest.raises(InvalidArgument, match="tp_size=3"):
        pool.get(space, hashes, mine, as_rank=TensorParallelRank(3, 1))
    order = "layer,kv,token,head,dim"
    layout = msgspec.structs.replace(WHOLE, tp_size=4, order=order)
    token_first = Namespace("tests/token-first", "r", layout)
    with pytest.raises(CannotReshard, match="head before token"):
        pool.get(token_first, hashes, share(kv, 2, 0), as_rank=TensorParallelRank(2, 0))


def test_an_engine_finds_the_namespace_that_another_tensor_parallel_size_wrote(
    cluster: Cluster,
) -> None:
    def named(model: str, layout: Layout) -> Namespace:
        return Namespace(model, "r", layout)

    stored = named("tests/found", msgspec.structs.replace(WHOLE, tp_size=4))
    mine = named("tests/found", msgspec.structs.replace(WHOLE, tp_size=2))
    other_dtype = named("tests/found", msgspec.structs.replace(mine.layout, dtype="float16"))
    with Pool(conductor=cluster.conductor["wire"]) as pool:
        assert pool.compatible_namespaces(mine) == []
        pool.register(stored)
        with pytest.raises(LayoutMismatch, match="compatible_namespaces"):
            pool.register(mine)
        assert pool.compatible_namespaces(mine) == [stored]
        assert pool.compatible_namespaces(stored) == [stored]
        assert pool.compatible_namespaces(other_dtype) == []
