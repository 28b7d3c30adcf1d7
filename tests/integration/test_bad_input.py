"""What a clumsy or hostile client can send to a node, at each of its doors: typed errors, and nothing is taken.

Frames that are no frames at all are in `tests/chaos/test_frame_fuzz.py`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import msgspec
import numpy as np
import pytest

from kvpool import Layout, Namespace, Pool
from kvpool.blocks.hashing import checksum, pack_hashes
from kvpool.errors import (
    BlockTooLarge,
    InvalidArgument,
    KvpoolError,
    LayoutMismatch,
    LeaseExpired,
    NoRoom,
    ReservationGone,
    WrongByteCount,
)
from kvpool.proto import kvpool_pb2 as pb
from kvpool.proto import kvpool_pb2_grpc as pb_grpc
from kvpool.wire import WireClient
from kvpool.wire import messages as m
from kvpool.wire.framing import Kind, encode_frame
from tests.chaos.keyed import LAYOUT, NAMESPACE, SIZE, content, contents, prompt, wrong_blocks
from tests.support.process_cluster import Cluster, wait_until
from tiers.store.config import StoreConfig

SPACE = NAMESPACE.namespace_id
HUGE = 2**63 - 1


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    running = Cluster(tmp_path_factory.mktemp("bad-input"))
    with running.supervisor:
        running.start_node(
            *(
                "n0",
                "node.transports=shm",
                "node.advanced.max_frame_bytes=4MiB",
                "node.advanced.quarantine_s=0.5",
            )
        )
        with Pool(node=running.nodes["n0"]["wire"]) as pool:
            pool.register(NAMESPACE)
        yield running
        assert "Traceback" not in running.member("n0").log_path.read_text()


@pytest.fixture
def good(cluster: Cluster) -> Iterator[Pool]:
    """A client that must be served as ever after each test, on a node that holds nothing more."""
    with Pool(node=cluster.nodes["n0"]["wire"], host_label="here") as pool:
        hashes = prompt(1, 4)
        pool.put(NAMESPACE, hashes, contents(hashes))
        yield pool
        out = np.zeros((4, SIZE), np.uint8)
        assert pool.get(NAMESPACE, hashes, out).found == 4
        assert wrong_blocks(hashes, out) == []
    wait_until(lambda: cluster.is_settled("n0"), "nothing is held")


async def refusal(cluster: Cluster, request: m.Message) -> KvpoolError:
    """The error that answers a request over the wire; the connection must survive it."""
    link = WireClient(cluster.nodes["n0"]["wire"], "clumsy")
    try:
        with pytest.raises(KvpoolError) as caught:
            await link.call(request, 5)
        await link.call(m.Ping(), 5)
        return caught.value
    finally:
        await link.close()


# ---------------------------------------------------------------- sizes and counts


@pytest.mark.parametrize(
    "request_",
    [
        m.Pin(SPACE, bytes(16) * 70_000, 1.0),
        m.Reserve(SPACE, bytes(16) * 70_000, b"", 0, 1.0),
        m.NodeLookup(SPACE, bytes(16) * 70_000),
        m.Prefetch(SPACE, bytes(16) * 70_000),
        m.Protect(SPACE, bytes(16) * 70_000, 1.0),
        m.Pin(SPACE, bytes(16), 1.0, [HUGE]),
        m.Pin(SPACE, bytes(16), 1.0, [0] * 100_000),
        m.Pin(SPACE, bytes(16), HUGE),
        m.Reserve(SPACE, bytes(16), b"", HUGE, 1.0),
        m.Reserve(SPACE, bytes(16), b"", 0, float("inf")),
        m.Protect(SPACE, bytes(16), float("nan")),
        m.Drain(HUGE),
        m.Drain(-1.0),
    ],
    ids=lambda request: type(request).__name__,
)
@pytest.mark.usefixtures("good")
async def test_absurd_sizes_and_counts_are_refused_over_the_wire(
    cluster: Cluster, request_: m.Message
) -> None:
    assert type(await refusal(cluster, request_)) is InvalidArgument


@pytest.mark.parametrize(
    "request_",
    [
        m.Pin(SPACE, bytes(15), 1.0),
        m.Reserve(SPACE, bytes(33), b"", 0, 1.0),
        m.Reserve(SPACE, bytes(16), bytes(15), 0, 1.0),
        m.NodeLookup(SPACE, bytes(1)),
        m.Prefetch(SPACE, bytes(17)),
        m.Protect(SPACE, bytes(31), 1.0),
        m.PutInline(SPACE, bytes(15), b"", 0, bytes(SIZE)),
        m.PutInline(SPACE, bytes(32), b"", 0, bytes(SIZE)),
        m.PutInline(SPACE, bytes(16), bytes(3), 0, bytes(SIZE)),
        m.GetInline(SPACE, b""),
        m.GetInline(SPACE, bytes(15)),
        m.GetInline(SPACE, bytes(32)),
        m.ReportCorrupt(SPACE, bytes(7)),
    ],
    ids=lambda request: type(request).__name__,
)
@pytest.mark.usefixtures("good")
async def test_hashes_of_the_wrong_length_are_refused_over_the_wire(
    cluster: Cluster, request_: m.Message
) -> None:
    assert type(await refusal(cluster, request_)) is InvalidArgument


@pytest.mark.usefixtures("good")
async def test_a_layout_of_absurd_size_is_refused_at_each_door(cluster: Cluster) -> None:
    absurd = Namespace("tests/absurd", "r", Layout("float32", 2**31 - 1, 1, 2**31 - 1))
    assert type(await refusal(cluster, m.RegisterNamespace(absurd))) is BlockTooLarge
    status, code = http(cluster, "POST", "/v1/namespaces", content=msgspec.json.encode(absurd))
    assert (status, code) == (413, "block_too_large")
    for layers in (2**31 - 1, 0):
        shape = pb.Layout(dtype="float32", layers=layers, kv_heads=1, head_dim=2**31 - 1)
        space = pb.Namespace(model="tests/absurd", revision="r", layout=shape)
        request = pb.RegisterNamespaceRequest(namespace=space)
        code = grpc_code(cluster, "RegisterNamespace", request)
        assert code == ("block_too_large" if layers else "invalid_argument")


@pytest.mark.usefixtures("good")
async def test_a_namespace_known_under_another_layout_is_refused_at_each_door(
    cluster: Cluster,
) -> None:
    other = msgspec.structs.replace(
        NAMESPACE, layout=msgspec.structs.replace(LAYOUT, block_tokens=2 * LAYOUT.block_tokens)
    )
    refused = await refusal(cluster, m.RegisterNamespace(other))
    assert type(refused) is LayoutMismatch
    assert "block_tokens: 32 != 64" in str(refused)
    body = msgspec.json.encode(other)
    assert http(cluster, "POST", "/v1/namespaces", content=body) == (409, "layout_mismatch")
    shape = pb.Layout(dtype="bfloat16", layers=3, kv_heads=2, head_dim=32, block_tokens=64)
    space = pb.Namespace(model=other.model, revision=other.revision, layout=shape)
    request = pb.RegisterNamespaceRequest(namespace=space)
    assert grpc_code(cluster, "RegisterNamespace", request) == "layout_mismatch"


# ---------------------------------------------------------------- the same twice


@pytest.mark.usefixtures("good")
async def test_a_reservation_is_committed_once(cluster: Cluster) -> None:
    link = WireClient(cluster.nodes["n0"]["wire"], "twice")
    hashes = prompt(2, 2)
    granted = await link.call(m.Reserve(SPACE, pack_hashes(hashes), b"", 0, 5.0), 5)
    sums = np.array([checksum(bytes(SIZE))] * 2, dtype="<u8").tobytes()
    first = np.array([0], dtype="<u4").tobytes()
    assert (await link.call(m.Commit(granted.reservation_id, sums[:8], first), 5)).visible == 1
    for again in (m.Commit(granted.reservation_id, sums[:8], first), m.Commit(1, sums, b"")):
        with pytest.raises(ReservationGone):
            await link.call(again, 5)
    for odd in (
        m.Commit(granted.reservation_id, sums),  # two sums, and one that is left
        m.Commit(granted.reservation_id, sums, np.array([1, 1], dtype="<u4").tobytes()),
        m.Commit(granted.reservation_id, sums[:8], np.array([7], dtype="<u4").tobytes()),
        m.Commit(granted.reservation_id, sums[:7]),
    ):
        with pytest.raises((InvalidArgument, ReservationGone)):
            await link.call(odd, 5)
    second = np.array([1], dtype="<u4").tobytes()
    assert (await link.call(m.Commit(granted.reservation_id, sums[:8], second), 5)).visible == 1
    for request in (
        m.Commit(granted.reservation_id, sums[:8], second),
        m.Commit(granted.reservation_id, sums),
        m.RenewReservation(granted.reservation_id, 5.0),
    ):
        with pytest.raises(ReservationGone):
            await link.call(request, 5)
    await link.call(m.Abort(granted.reservation_id, False), 5)  # ended: ignored
    assert (await link.call(m.NodeLookup(SPACE, pack_hashes(hashes)), 5)).found == 2
    await link.close()


@pytest.mark.usefixtures("good")
async def test_a_lease_released_twice_is_released_once(cluster: Cluster) -> None:
    link = WireClient(cluster.nodes["n0"]["wire"], "twice")
    hashes = pack_hashes(prompt(1, 4))
    mine = await link.call(m.Pin(SPACE, hashes, 5.0), 5)
    other = await link.call(m.Pin(SPACE, hashes, 5.0), 5)
    await link.call(m.Release([mine.lease_id, mine.lease_id, 0, -1, HUGE]), 5)
    await link.call(m.Release([mine.lease_id]), 5)
    with pytest.raises(LeaseExpired):
        await link.call(m.Renew(mine.lease_id, 5.0), 5)
    # The other lease on the same blocks still holds them.
    [dram] = cluster.node_stats("n0")["tiers"]
    assert (cluster.node_stats("n0")["leases"], dram["pinned_bytes"]) == (1, 4 * SIZE)
    await link.call(m.Release([other.lease_id]), 5)
    await link.close()


@pytest.mark.usefixtures("good")
async def test_namespaces_without_end_push_out_those_of_which_nothing_is_here(
    cluster: Cluster,
) -> None:
    link = WireClient(cluster.nodes["n0"]["wire"], "collector")
    refused = 0
    for batch in range(9):
        calls = [
            link.call(m.RegisterNamespace(Namespace(f"tests/{batch}/{n}", "r", LAYOUT)), 20)
            for n in range(500)
        ]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        refused += sum(isinstance(answer, NoRoom) for answer in answers)
        assert all(isinstance(answer, (m.NamespaceReply, NoRoom)) for answer in answers)
    forgotten = cluster.node_stats("n0")["counters"]["namespaces_forgotten"]
    assert refused + forgotten >= 9 * 500 - StoreConfig().max_namespaces
    await link.close()


# ---------------------------------------------------------------- sockets


@pytest.mark.usefixtures("good")
def test_sockets_closed_in_mid_frame_take_nothing_along(cluster: Cluster) -> None:
    host, _, port = cluster.nodes["n0"]["wire"].rpartition(":")
    hello = bytes(encode_frame(1, Kind.REQUEST, m.Hello(m.PROTOCOL_VERSION, "cut", "client")))
    requests = (
        m.Pin(SPACE, pack_hashes(prompt(1, 4)), 60.0),
        m.Reserve(SPACE, pack_hashes(prompt(3, 4)), b"", 0, 60.0),
        m.PutInline(SPACE, prompt(3, 1)[0], b"", 0, content(prompt(3, 1)[0])),
    )
    for request in requests:
        frame = bytes(encode_frame(2, Kind.REQUEST, request))
        for length in (1, 8, 9, 10, len(frame) // 2, len(frame) - 1):
            with socket.create_connection((host, int(port)), timeout=5) as link:
                link.sendall(hello + frame[:length])
    # Not one of them was carried out.
    wait_until(lambda: cluster.is_settled("n0"), "nothing is held")
    with Pool(node=cluster.nodes["n0"]["wire"]) as pool:
        assert pool.lookup(NAMESPACE, prompt(3, 4)).found == 0


# ---------------------------------------------------------------- HTTP


def http(cluster: Cluster, method: str, path: str, **options: Any) -> tuple[int, str]:
    """Status and error code of an answer."""
    url = f"http://{cluster.nodes['n0']['http']}{path}"
    answer = httpx.request(method, url, timeout=10, **options)
    return answer.status_code, answer.json().get("error", {}).get("code", "")


BLOCK = f"/v1/blocks/{SPACE.hex()}/{'ab' * 16}"


@pytest.mark.parametrize(
    ("method", "path", "content_", "status"),
    [
        ("PUT", BLOCK, bytes(SIZE - 1), 400),
        ("PUT", BLOCK, b"", 400),
        ("PUT", BLOCK, bytes(5 << 20), 413),
        ("PUT", f"{BLOCK}?part=1", bytes(SIZE), 400),
        ("PUT", f"{BLOCK}?part=-1", bytes(SIZE), 400),
        ("PUT", f"{BLOCK}?part={HUGE}", bytes(SIZE), 400),
        ("PUT", f"{BLOCK}?parent=abc", bytes(SIZE), 400),
        ("PUT", f"{BLOCK}ab", bytes(SIZE), 400),
        ("PUT", f"/v1/blocks/{'00' * 16}/{'ab' * 16}", bytes(SIZE), 404),
        ("PUT", f"/v1/blocks/{SPACE.hex()}/{'ab' * 15}", bytes(SIZE), 400),
        ("GET", f"/v1/blocks/{SPACE.hex()}/{'ab' * 32}", b"", 400),
        ("GET", f"{BLOCK}?part=9", b"", 400),
        ("GET", BLOCK, b"", 404),
        ("GET", "/v1/blocks/../../etc/passwd", b"", 404),
        ("POST", "/v1/namespaces", b"", 400),
        ("POST", "/v1/namespaces", b"\xff\xfe", 400),
        ("POST", "/v1/namespaces", b"[" * 100_000, 400),
        ("POST", "/v1/namespaces", b'{"model": 7}', 400),
        ("POST", "/v1/namespaces", b'{"model": "' + b"x" * 1_000_000 + b'"}', 400),
        ("DELETE", "/v1/namespaces", b"", 405),
    ],
)
@pytest.mark.usefixtures("good")
def test_bad_http_requests_get_an_error_of_one_shape(
    cluster: Cluster, method: str, path: str, content_: bytes, status: int
) -> None:
    answered, code = http(cluster, method, path, content=content_)
    assert answered == status
    assert code not in ("", "internal")


@pytest.mark.usefixtures("good")
def test_http_bodies_cut_short_take_nothing_along(cluster: Cluster) -> None:
    host, _, port = cluster.nodes["n0"]["http"].rpartition(":")
    head = f"PUT {BLOCK} HTTP/1.1\r\nHost: x\r\nContent-Length: {SIZE}\r\n\r\n".encode()
    for length in (0, 1, SIZE // 2, SIZE - 1):
        with socket.create_connection((host, int(port)), timeout=5) as link:
            link.sendall(head + bytes(length))
    assert http(cluster, "GET", BLOCK) == (404, "miss")


# ---------------------------------------------------------------- gRPC


def grpc_code(cluster: Cluster, method: str, request: Any) -> str:
    """The error code of a call that must fail."""
    with grpc.insecure_channel(cluster.nodes["n0"]["grpc"]) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            getattr(pb_grpc.NodeStub(channel), method)(request, timeout=10)
        trailers = dict(caught.value.trailing_metadata() or ())
        return str(trailers.get("kvpool-code", caught.value.code().name))


@pytest.mark.parametrize(
    ("method", "request_", "code"),
    [
        ("Put", pb.PutRequest(namespace_id=SPACE, block_hash=bytes(16)), "wrong_byte_count"),
        ("Put", pb.PutRequest(namespace_id=SPACE, block_hash=bytes(15)), "invalid_argument"),
        ("Put", pb.PutRequest(namespace_id=bytes(3), block_hash=bytes(16)), "unknown_namespace"),
        (
            "Put",
            pb.PutRequest(namespace_id=SPACE, block_hash=bytes(16), part=9, data=bytes(SIZE)),
            "invalid_argument",
        ),
        (
            "Put",
            pb.PutRequest(
                namespace_id=SPACE, block_hash=bytes(16), parent=bytes(5), data=bytes(SIZE)
            ),
            "invalid_argument",
        ),
        (
            "Put",
            pb.PutRequest(namespace_id=SPACE, block_hash=bytes(16), data=bytes(5 << 20)),
            "RESOURCE_EXHAUSTED",
        ),
        ("Get", pb.GetRequest(namespace_id=SPACE, block_hash=bytes(32)), "invalid_argument"),
        ("Get", pb.GetRequest(namespace_id=SPACE, block_hash=b""), "invalid_argument"),
        ("Get", pb.GetRequest(namespace_id=SPACE, block_hash=bytes(16)), "miss"),
        (
            "Get",
            pb.GetRequest(namespace_id=SPACE, block_hash=bytes(16), part=2**32 - 1),
            "invalid_argument",
        ),
        (
            "Lookup",
            pb.NodeLookupRequest(namespace_id=SPACE, hashes=[bytes(16)] * 70_000),
            "invalid_argument",
        ),
        ("Lookup", pb.NodeLookupRequest(namespace_id=SPACE, hashes=[b"x"]), "invalid_argument"),
        ("RegisterNamespace", pb.RegisterNamespaceRequest(), "invalid_argument"),
    ],
)
@pytest.mark.usefixtures("good")
def test_bad_grpc_requests_fail_with_a_code(
    cluster: Cluster, method: str, request_: Any, code: str
) -> None:
    assert grpc_code(cluster, method, request_) == code


def test_a_wrong_byte_count_names_both_counts(good: Pool) -> None:
    with pytest.raises(WrongByteCount, match=str(SIZE)):
        good.put(NAMESPACE, prompt(4, 1), bytes(SIZE - 1))
