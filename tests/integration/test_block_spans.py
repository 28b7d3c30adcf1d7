"""Blocks that lie in several runs of the caller's memory, written and read over shared memory and NIXL."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvpool import Pool, TensorParallelRank, hash_chain
from kvpool.client import BlockSpans
from kvpool.errors import InvalidArgument, WrongByteCount
from kvpool.transports.nixl import NixlTransport
from tests.support.process_cluster import LAYOUT, NAMESPACE, Cluster, wait_until

BLOCKS = 5
SEEDS = itertools.count(1)
LENGTHS = np.array([100, LAYOUT.part_bytes - 1100, 1000], dtype=np.int64)  # unlike each other


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    running = Cluster(tmp_path_factory.mktemp("spans"))
    with running.supervisor:
        running.start_conductor()
        running.start_node("n0")
        running.wait_joined(nodes=1)
        yield running


@pytest.fixture(params=["shm", "nixl"])
def pool(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Pool]:
    wire = cluster.conductor["wire"]
    with Pool(conductor=wire, host_label="here", transport=request.param) as made:
        yield made


def chain() -> list[bytes]:
    tokens = np.random.default_rng(next(SEEDS)).integers(0, 50_000, BLOCKS * LAYOUT.block_tokens)
    return hash_chain(NAMESPACE, tokens)


def scattered(memory: np.ndarray, lengths: np.ndarray = LENGTHS) -> BlockSpans:
    """Blocks in reverse order, and the runs of each as far apart as the memory allows."""
    starts = np.cumsum(BLOCKS * lengths) - BLOCKS * lengths
    rows = np.arange(BLOCKS)[::-1, None] * lengths + starts
    return BlockSpans(memory.ctypes.data + rows, lengths, memory)


def joined(memory: np.ndarray) -> np.ndarray:
    """The same blocks, each in one piece."""
    columns = np.split(memory, np.cumsum(BLOCKS * LENGTHS)[:-1])
    return np.concatenate([c.reshape(BLOCKS, -1)[::-1] for c in columns], axis=1)


def test_runs_are_one_block_to_every_other_reader_and_writer(pool: Pool, cluster: Cluster) -> None:
    hashes = chain()
    data = np.random.default_rng(7).integers(0, 256, BLOCKS * LAYOUT.part_bytes, dtype=np.uint8)
    pool.register_memory(data)
    assert pool.put(NAMESPACE, hashes, scattered(data)).stored == BLOCKS
    wait_until(lambda: pool.lookup(NAMESPACE, hashes).found == BLOCKS, "the index hears of it")

    whole = np.zeros_like(data)
    assert pool.get(NAMESPACE, hashes, whole).found == BLOCKS
    assert np.array_equal(whole.reshape(BLOCKS, -1), joined(data))

    back = np.zeros_like(data)
    result = pool.get(NAMESPACE, hashes, scattered(back))
    assert (result.found, result.verified) == (BLOCKS, BLOCKS)
    assert np.array_equal(back, data)

    back[:] = 0
    with pool.pinned(NAMESPACE, hashes, part=0) as pinned:
        assert pool.read_pinned(pinned, scattered(back)) == BLOCKS
    assert np.array_equal(back, data)
    pool.deregister_memory(data)


def test_registered_memory_is_not_registered_again_with_each_transfer(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = np.ones(BLOCKS * LAYOUT.part_bytes, np.uint8)
    wire = cluster.conductor["wire"]
    with Pool(conductor=wire, host_label="here", transport="nixl") as pool:
        pool.register_memory(data)  # before NIXL is loaded
        pool.put(NAMESPACE, chain(), data)
        transport = pool._pool.transports.get("nixl")
        assert isinstance(transport, NixlTransport)
        agent = transport._thread._agent
        assert agent is not None
        calls: list[int] = []
        register = agent.register

        def counted_register(address: int, size: int) -> Any:
            calls.append(address)
            return register(address, size)

        monkeypatch.setattr(agent, "register", counted_register)
        pool.put(NAMESPACE, chain(), data)
        assert calls == []
        pool.deregister_memory(data)
        pool.put(NAMESPACE, chain(), data)
        assert calls


def test_memory_that_does_not_fit_is_refused(cluster: Cluster) -> None:
    data = np.zeros(BLOCKS * LAYOUT.part_bytes, np.uint8)
    short = np.array([10, 20], dtype=np.int64)
    with Pool(node=cluster.nodes["n0"]["wire"], host_label="here") as pool:
        with pytest.raises(WrongByteCount, match="runs of 30 bytes"):
            pool.get(NAMESPACE, chain(), scattered(data, short))
        with pytest.raises(WrongByteCount, match="1 blocks need 1 rows"):
            pool.get(NAMESPACE, chain()[:1], scattered(data))
        rank = TensorParallelRank(1, 0, "kv,layer,head,token,dim")
        with pytest.raises(InvalidArgument, match="as_rank"):
            pool.put(NAMESPACE, chain(), scattered(data), as_rank=rank)
    with pytest.raises(InvalidArgument, match="shape"):
        BlockSpans(np.ones(3, np.int64), LENGTHS, data)
    with pytest.raises(InvalidArgument, match="not positive"):
        BlockSpans(np.zeros((1, 3), np.int64), LENGTHS, data)


@pytest.mark.parametrize("by", ["conductor", "node"])
def test_lookup_by_block_sees_past_gaps(cluster: Cluster, by: str) -> None:
    hashes = chain()
    data = np.ones(LAYOUT.part_bytes, np.uint8)
    address = cluster.conductor["wire"] if by == "conductor" else cluster.nodes["n0"]["wire"]
    with Pool(**{by: address}, host_label="here") as pool:
        for i in (1, 3):
            pool.put(NAMESPACE, hashes[i : i + 1], data)
        expected = [False, True, False, True, False]
        wait_until(lambda: pool.exists(NAMESPACE, hashes) == expected, "the index hears of it")
        assert pool.exists(NAMESPACE, []) == []
