"""Client, nodes and conductor as real processes: bytes, errors, and whose they are."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import msgspec
import numpy as np
import pytest
import torch

from kvpool import AsyncPool, Layout, Namespace, Pool
from kvpool.blocks.hashing import pack_hashes
from kvpool.errors import (
    BlockTooLarge,
    ConfigError,
    InvalidArgument,
    LayoutMismatch,
    NoRoom,
    Unavailable,
    UnknownNamespace,
    WrongByteCount,
)
from kvpool.proto import kvpool_pb2 as pb
from kvpool.proto import kvpool_pb2_grpc as pb_grpc
from kvpool.wire import WireClient
from kvpool.wire import messages as m
from tests.support.process_cluster import LAYOUT, NAMESPACE, Cluster, chain, some_bytes, wait_until

SIZE = LAYOUT.part_bytes


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    running = Cluster(tmp_path_factory.mktemp("pool"))
    with running.supervisor:
        running.start_conductor()
        for name, host in (("here", "here"), ("there", "there")):
            running.launch_node(name, "node.advanced.lease_s=5", host=host)
        for name in ("here", "there"):
            running.ready_node(name)
        running.wait_joined(nodes=2)
        yield running


def client(cluster: Cluster, **options: Any) -> Pool:
    return Pool(conductor=cluster.conductor["wire"], **{"host_label": "here", **options})


@pytest.mark.parametrize(
    ("seed", "host", "transport", "used"),
    [(1, "here", "auto", "shm"), (2, "there", "auto", "shm"), (3, "here", "nixl", "nixl")],
)
def test_bytes_come_back_over_each_transport(
    cluster: Cluster, seed: int, host: str, transport: str, used: str
) -> None:
    hashes, data = chain(seed, 6), some_bytes(seed, 6)
    with client(cluster, host_label=host, transport=transport) as pool:
        put = pool.put(NAMESPACE, hashes, data)
        assert (put.stored, put.bytes_moved) == (6, {used: 6 * SIZE})
        wait_until(lambda: pool.lookup(NAMESPACE, hashes).found == 6, "the index hears of it")
        out = np.zeros_like(data)
        got = pool.get(NAMESPACE, hashes, out)
    assert (got.found, got.verified, got.bytes_moved) == (6, 6, {used: 6 * SIZE})
    assert (out == data).all()


def test_who_writes_blocks_can_read_them_at_once(cluster: Cluster) -> None:
    """The conductor hears of them later; a chain is found though it grows block by block."""
    with client(cluster) as pool:
        for seed in range(900, 920):
            hashes, data = chain(seed, 4), some_bytes(seed, 4)
            out = np.zeros_like(data)
            pool.put(NAMESPACE, hashes[:2], data[:2])
            pool.put(NAMESPACE, hashes[2:], data[2:], parent=hashes[1])
            assert pool.get(NAMESPACE, hashes, out).found == 4
            assert (out == data).all()
            pool.drop(NAMESPACE, hashes)
            assert pool.get(NAMESPACE, hashes, out).found == 0


def test_blocks_of_another_host_are_read_over_nixl(cluster: Cluster) -> None:
    hashes, data = chain(7, 4), some_bytes(7, 4)
    with client(cluster, host_label="there") as writer:
        writer.put(NAMESPACE, hashes, data)
    with client(cluster, host_label="here") as reader:
        wait_until(lambda: reader.lookup(NAMESPACE, hashes).found == 4, "the index hears of it")
        out = torch.zeros((4, SIZE), dtype=torch.uint8)
        got = reader.get(NAMESPACE, hashes, out)
    assert got.bytes_moved == {"nixl": 4 * SIZE}
    assert (out.numpy() == data).all()


def test_get_reads_the_leading_run_and_says_why_it_ends(cluster: Cluster) -> None:
    hashes, data = chain(11, 5), some_bytes(11, 5)
    with client(cluster) as pool:
        pool.put(NAMESPACE, hashes[:3], data[:3])
        wait_until(lambda: pool.lookup(NAMESPACE, hashes).found == 3, "the index hears of it")
        got = pool.get(NAMESPACE, hashes, np.zeros_like(data))
        assert (got.found, got.miss_reason) == (3, "not_in_index")
        nothing = pool.get(NAMESPACE, chain(12, 2), np.zeros((2, SIZE), np.uint8))
    assert (nothing.found, nothing.bytes_moved) == (0, {})


def test_a_second_put_of_the_same_blocks_writes_nothing(cluster: Cluster) -> None:
    hashes, data = chain(13, 3), some_bytes(13, 3)
    with client(cluster) as first, client(cluster) as second:
        first.put(NAMESPACE, hashes, data)
        again = second.put(NAMESPACE, hashes, data)
    assert (again.stored, again.existing, again.bytes_moved) == (0, 3, {})


def test_pin_holds_and_release_lets_go(cluster: Cluster) -> None:
    hashes, data = chain(17, 3), some_bytes(17, 3)
    with client(cluster) as pool:
        pool.put(NAMESPACE, hashes, data)
        wait_until(lambda: pool.lookup(NAMESPACE, hashes).found == 3, "the index hears of it")
        with pool.pinned(NAMESPACE, hashes, part=0) as pinned:
            assert pinned.found == 3
            assert cluster.node_stats("here")["leases"] == 1
            out = np.zeros_like(data)
            assert pool.read_pinned(pinned, out) == 3
            assert (out == data).all()
        wait_until(lambda: cluster.node_stats("here")["leases"] == 0, "the lease is released")


async def test_one_node_alone_serves_without_a_conductor(cluster: Cluster) -> None:
    hashes, data = chain(19, 2), some_bytes(19, 2)
    address = cluster.nodes["here"]["wire"]
    async with AsyncPool(node=address, host_label="here") as pool:
        await pool.put(NAMESPACE, hashes, data)
        assert (await pool.lookup(NAMESPACE, hashes)).found == 2
        out = bytearray(2 * SIZE)
        got = await pool.get(NAMESPACE, hashes, out)
    assert got.found == 2
    assert bytes(out) == data.tobytes()


# ---------------------------------------------------------------- bad input


def test_a_namespace_with_another_layout_is_refused_by_conductor_and_node(cluster: Cluster) -> None:
    other = Layout("bfloat16", layers=3, kv_heads=2, head_dim=32, block_tokens=16)
    first = Namespace("tests/mismatch", "r", LAYOUT)
    second = Namespace("tests/mismatch", "r", other)
    for where in (
        {"conductor": cluster.conductor["wire"]},
        {"node": cluster.nodes["here"]["wire"]},
    ):
        with Pool(host_label="here", **where) as pool:
            pool.register(first)
            with pytest.raises(LayoutMismatch, match="block_tokens: 32 != 16"):
                pool.register(second)


def test_a_block_larger_than_a_slab_is_refused(cluster: Cluster) -> None:
    huge = Namespace("tests/huge", "r", Layout("float32", 80, 8, 128, block_tokens=64))
    with Pool(node=cluster.nodes["here"]["wire"]) as pool, pytest.raises(BlockTooLarge):
        pool.register(huge)


@pytest.mark.parametrize("size", [SIZE - 1, SIZE + 1, 0])
def test_a_put_of_the_wrong_byte_count_is_refused(cluster: Cluster, size: int) -> None:
    before = cluster.node_stats("here")["reservations"]
    with client(cluster) as pool, pytest.raises(WrongByteCount, match=str(SIZE)):
        pool.put(NAMESPACE, chain(23, 1), bytes(size))
    assert cluster.node_stats("here")["reservations"] == before


def test_buffers_that_cannot_be_written_are_refused(cluster: Cluster) -> None:
    frozen = np.zeros((1, SIZE), dtype=np.uint8)
    frozen.flags.writeable = False
    strided = np.zeros((1, 2 * SIZE), dtype=np.uint8)[:, ::2]
    with client(cluster) as pool:
        for out in (frozen, strided, bytes(SIZE), object()):
            with pytest.raises(InvalidArgument):
                pool.get(NAMESPACE, chain(23, 1), out)


async def test_an_unknown_namespace_is_named_by_node_and_conductor(cluster: Cluster) -> None:
    hashes = pack_hashes(chain(29, 1))
    for address, request in (
        (cluster.nodes["here"]["wire"], m.Pin(b"n" * 16, hashes, 1.0)),
        (cluster.nodes["here"]["wire"], m.Reserve(b"n" * 16, hashes, b"", 0, 1.0)),
        (cluster.conductor["wire"], m.Lookup(b"n" * 16, hashes)),
    ):
        link = WireClient(address, "stranger")
        with pytest.raises(UnknownNamespace):
            await link.call(request, 2)
        await link.close()


async def test_odd_hashes_and_lifetimes_are_refused(cluster: Cluster) -> None:
    link = WireClient(cluster.nodes["here"]["wire"], "stranger")
    await link.call(m.RegisterNamespace(NAMESPACE), 2)
    space = NAMESPACE.namespace_id
    for request in (
        m.Pin(space, b"x" * 15, 1.0),
        m.Pin(space, b"x" * 16, 0.0),
        m.Pin(space, b"x" * 16, float("nan")),
        m.Reserve(space, b"x" * 16, b"", -1, 1.0),
        m.Reserve(space, b"x" * 16, b"", 99, 1.0),
        m.Reserve(space, b"x" * 16, b"short", 0, 1.0),
        m.Commit(1, b"odd"),
    ):
        with pytest.raises(InvalidArgument):
            await link.call(request, 2)
    await link.close()


def test_a_client_needs_exactly_one_address() -> None:
    with pytest.raises(ConfigError):
        Pool()
    with pytest.raises(ConfigError):
        Pool(conductor="127.0.0.1:1", node="127.0.0.1:2")


def test_a_conductor_that_is_not_there_is_an_error_within_the_deadline() -> None:
    started = time.monotonic()
    with Pool(conductor="127.0.0.1:9", timeout_s=2) as pool, pytest.raises(Unavailable):
        pool.lookup(NAMESPACE, chain(31, 1))
    assert time.monotonic() - started < 10


def test_a_full_node_of_pinned_blocks_says_so_and_recovers(cluster: Cluster) -> None:
    node = cluster.node_stats("here")
    capacity = next(t for t in node["tiers"] if t["tier"] == "dram")["capacity_bytes"]
    count = capacity // (-(-SIZE // 4096) * 4096)
    with Pool(node=cluster.nodes["here"]["wire"], host_label="here") as pool:
        hashes = chain(37, count + 8)
        kept = pool.put(NAMESPACE, hashes, np.zeros((count + 8, SIZE), np.uint8))
        assert kept.stored < count + 8
        pinned = pool.pin(NAMESPACE, hashes, ttl_s=5, part=0)
        assert pinned.found == kept.stored
        with pytest.raises(NoRoom):
            pool.put(NAMESPACE, chain(41, 1), np.zeros((1, SIZE), np.uint8))
        pool.release(pinned)
        again = pool.put(NAMESPACE, chain(41, 1), np.zeros((1, SIZE), np.uint8))
    assert again.stored == 1


# ---------------------------------------------------------------- the other two doors


def test_grpc_serves_the_same_blocks(cluster: Cluster) -> None:
    shape = pb.Layout(dtype="bfloat16", layers=3, kv_heads=2, head_dim=32, block_tokens=32)
    space = pb.Namespace(model="tests/model", revision="revision-1", layout=shape)
    [block_hash], data = chain(43, 1), some_bytes(43, 1).tobytes()
    with (
        grpc.insecure_channel(cluster.nodes["here"]["grpc"]) as at_node,
        grpc.insecure_channel(cluster.conductor["grpc"]) as at_conductor,
    ):
        node = pb_grpc.NodeStub(at_node)
        conductor = pb_grpc.ConductorStub(at_conductor)
        known = node.RegisterNamespace(pb.RegisterNamespaceRequest(namespace=space))
        assert known.namespace_id == NAMESPACE.namespace_id
        put = pb.PutRequest(namespace_id=known.namespace_id, block_hash=block_hash, data=data)
        assert node.Put(put).status == "stored"
        assert node.Put(put).status == "exists"
        get = pb.GetRequest(namespace_id=known.namespace_id, block_hash=block_hash)
        assert node.Get(get).data == data
        conductor.RegisterNamespace(pb.RegisterNamespaceRequest(namespace=space))
        lookup = pb.LookupRequest(namespace_id=known.namespace_id, hashes=[block_hash])
        wait_until(lambda: conductor.Lookup(lookup).found == 1, "the index hears of it")
        assert len(conductor.Nodes(pb.NodesRequest()).nodes) == 2
        assert "nodes" in msgspec.json.decode(conductor.Stats(pb.StatsRequest()).json)
        with pytest.raises(grpc.RpcError) as caught:
            node.Put(pb.PutRequest(namespace_id=known.namespace_id, block_hash=block_hash))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert dict(caught.value.trailing_metadata())["kvpool-code"] == "wrong_byte_count"


def test_http_serves_the_same_blocks(cluster: Cluster) -> None:
    [block_hash], data = chain(47, 1), some_bytes(47, 1).tobytes()
    with httpx.Client(base_url=f"http://{cluster.nodes['here']['http']}", timeout=10) as http:
        body = msgspec.json.encode(NAMESPACE)
        space = http.post("/v1/namespaces", content=body).json()["namespace_id"]
        url = f"/v1/blocks/{space}/{block_hash.hex()}"
        missing = http.get(url)
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "miss")
        assert http.put(url, content=data).json() == {"status": "stored"}
        assert http.get(url).content == data
        assert http.put(url, content=data[1:]).status_code == 400
        assert http.put("/v1/blocks/zz/zz", content=data).status_code == 400
        assert http.get("/healthz").status_code == http.get("/readyz").status_code == 200
        assert "kvpool_tier_bytes" in http.get("/metrics").text


def test_dropped_blocks_are_gone_from_every_tier_and_can_be_stored_again(cluster: Cluster) -> None:
    hashes = chain(7_001, 6)
    data = some_bytes(7_001, 6)
    with client(cluster) as pool:
        pool.put(NAMESPACE, hashes, data)
        wait_until(lambda: pool.lookup(NAMESPACE, hashes).found == 6, "the index has heard of them")
        pool.protect(NAMESPACE, hashes[:4], ttl_s=None)
        with pool.pinned(NAMESPACE, hashes[:1], part=0) as held:
            assert sum(pool.drop(NAMESPACE, hashes[:4]).values()) == 4
            out = np.empty((1, SIZE), np.uint8)
            assert pool.read_pinned(held, out) == 1  # leased blocks stay until their lease ends
            assert np.array_equal(out[0], data[0])
        assert pool.get(NAMESPACE, hashes, np.empty_like(data)).found == 0
        assert sum(pool.drop(NAMESPACE, hashes[:4]).values()) == 0
        wait_until(lambda: pool.lookup(NAMESPACE, hashes).found == 0, "the index has heard of it")
        assert pool.put(NAMESPACE, hashes, data).stored == 4
        again = np.empty_like(data)
        wait_until(lambda: pool.get(NAMESPACE, hashes, again).found == 6, "and of what came back")
        assert np.array_equal(again, data)
    wait_until(lambda: cluster.is_settled("here"), "nothing leaks")
