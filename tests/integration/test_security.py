"""Tokens and tenants on real processes, over the wire, HTTP and gRPC."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import msgspec
import numpy as np
import pytest

from kvpool import Credentials, Pool, hash_chain
from kvpool.blocks.hashing import pack_hashes
from kvpool.errors import (
    Forbidden,
    LeaseExpired,
    NotFound,
    ReservationGone,
    Unauthenticated,
    UnknownNamespace,
)
from kvpool.proto import kvpool_pb2 as pb
from kvpool.proto import kvpool_pb2_grpc as pb_grpc
from kvpool.security.scopes import ROUTES
from kvpool.wire import WireClient
from kvpool.wire import messages as m
from tests.support.fork_server import run_kvpool
from tests.support.process_cluster import LAYOUT, NAMESPACE, Cluster, wait_until
from tests.support.secured import bearer, credentials, environment, token, tokens_file

SIZE = LAYOUT.part_bytes
ACME, BOLT = (msgspec.structs.replace(NAMESPACE, tenant=tenant) for tenant in ("acme", "bolt"))
HASHES = hash_chain(ACME, np.arange(4 * LAYOUT.block_tokens))
DATA = np.random.default_rng(1).integers(0, 256, (4, SIZE), dtype=np.uint8)
MODEL = "tiny"  # as the cluster names every model


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("secured")
    env = environment(tokens_file(directory))
    running = Cluster(directory, env={**env, "KVPOOL_WORKER__TENANT": "acme"})
    running.http = httpx.Client(timeout=10, headers=bearer("operator"))
    with running.supervisor:
        running.start_conductor()
        for name in ("a", "b"):
            running.launch_node(name)
        running.launch_worker("w", "both", Path(MODEL), "worker.engine=fake")
        for name in ("a", "b"):
            running.ready_node(name)
        running.ready_worker("w")
        running.wait_joined(nodes=2, workers=1)
        with client(running, "acme") as pool:
            done = pool.put(ACME, HASHES, DATA, replicas=2)
            assert (done.stored, done.replicas) == (4, 2), done.replica_failures
            wait_until(lambda: pool.lookup(ACME, HASHES).found == 4, "the index hears of them")
        yield running


def client(cluster: Cluster, name: str, **where: Any) -> Pool:
    where = where or {"conductor": cluster.conductor["wire"]}
    return Pool(**where, host_label="here", credentials=credentials(name))


def wire(cluster: Cluster, name: str, where: str = "a") -> WireClient:
    address = cluster.conductor["wire"] if where == "conductor" else cluster.nodes[where]["wire"]
    return WireClient(address, f"client-of-{name}", credentials=credentials(name))


# ---------------------------------------------------------------- who comes in


async def test_a_wrong_token_is_refused_over_the_wire_and_the_connection_closed(
    cluster: Cluster,
) -> None:
    for where in ("conductor", "a"):
        for wrong in ("", "kvp_wrong"):
            address = wire(cluster, "acme", where).address
            stranger = WireClient(address, "s", credentials=Credentials(wrong))
            with pytest.raises(Unauthenticated) as caught:
                await stranger.call(m.Ping(), 5)
            assert not stranger.is_connected
            assert not wrong or wrong not in str(caught.value)
            await stranger.close()


def test_a_wrong_token_is_refused_over_http(cluster: Cluster) -> None:
    for facts in (cluster.conductor, cluster.nodes["a"], cluster.workers["w"]):
        url = f"http://{facts['http']}"
        assert httpx.get(f"{url}/healthz").status_code == 200
        for headers in ({}, {"Authorization": "Bearer kvp_wrong"}, {"Authorization": "Basic x"}):
            refused = httpx.get(f"{url}/metrics", headers=headers)
            assert refused.status_code == 401
            assert refused.headers["WWW-Authenticate"] == "Bearer"
            assert refused.json()["error"]["code"] == "unauthenticated"
            assert "kvp_wrong" not in refused.text


def test_a_wrong_token_is_refused_over_grpc(cluster: Cluster) -> None:
    stub = pb_grpc.NodeStub(grpc.insecure_channel(cluster.nodes["a"]["grpc"]))
    for metadata in (None, (("authorization", "Bearer kvp_wrong"),)):
        with pytest.raises(grpc.RpcError) as caught:
            stub.Stats(pb.StatsRequest(), metadata=metadata, timeout=5)
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        assert ("kvpool-code", "unauthenticated") in caught.value.trailing_metadata()


def test_scopes_hold_on_every_face(cluster: Cluster) -> None:
    with client(cluster, "acme-reader") as pool:
        assert pool.get(ACME, HASHES, np.empty_like(DATA)).found == 4
        with pytest.raises(Forbidden, match="write"):
            pool.protect(ACME, HASHES)
        with pytest.raises(Forbidden, match="write"):
            pool.put(ACME, HASHES, DATA)
    with client(cluster, "acme") as pool:
        node_id = pool.nodes()[0].descriptor.node_id
        with pytest.raises(Forbidden, match="admin"):
            pool.drain(node_id)
    block = f"http://{cluster.nodes['a']['http']}/v1/blocks/{ACME.namespace_id.hex()}"
    url = f"{block}/{HASHES[0].hex()}"
    assert httpx.get(url, headers=bearer("acme-reader")).content == DATA[0].tobytes()
    refused = httpx.put(url, content=DATA[0].tobytes(), headers=bearer("acme-reader"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
    stub = pb_grpc.NodeStub(grpc.insecure_channel(cluster.nodes["a"]["grpc"]))
    put = pb.PutRequest(
        namespace_id=ACME.namespace_id, block_hash=HASHES[0], data=DATA[0].tobytes()
    )
    with pytest.raises(grpc.RpcError) as caught:
        stub.Put(put, metadata=_metadata("acme-reader"), timeout=5)
    assert caught.value.code() == grpc.StatusCode.PERMISSION_DENIED
    assert stub.Put(put, metadata=_metadata("acme"), timeout=5).status == "exists"


def test_every_route_has_a_scope_and_every_entry_a_route(cluster: Cluster) -> None:
    served = {("GET", path) for path in ("/docs", "/docs/oauth2-redirect", "/openapi.json")}
    for facts in (cluster.conductor, cluster.nodes["a"], cluster.workers["w"]):
        document = httpx.get(f"http://{facts['http']}/openapi.json").json()
        for path, methods in document["paths"].items():
            served |= {(method.upper(), path) for method in methods}
    assert served == ROUTES.keys()


def test_metrics_are_for_their_own_scope_and_name_no_tenant(cluster: Cluster) -> None:
    for facts in (cluster.conductor, cluster.nodes["a"], cluster.workers["w"]):
        url = f"http://{facts['http']}/metrics"
        assert httpx.get(url, headers=bearer("acme")).status_code == 403
        shown = httpx.get(url, headers=bearer("prometheus"))
        assert shown.status_code == 200
        assert "acme" not in shown.text
        assert "bolt" not in shown.text


def test_tokens_stand_in_no_log(cluster: Cluster) -> None:
    for path in (cluster.directory / "logs").iterdir():
        text = path.read_text()
        assert "ready" in text
        assert "kvp_" not in text


# ---------------------------------------------------------------- two tenants


async def test_a_tenant_sees_nothing_of_another_over_the_wire(cluster: Cluster) -> None:
    """With the id, the hashes and all: the answers are those for what does not exist."""
    packed = pack_hashes(HASHES)
    unknown = bytes(range(16))

    def naming(namespace_id: bytes) -> list[tuple[str, m.Message]]:
        on_node: list[m.Message] = [
            m.NodeLookup(namespace_id, packed),
            m.Pin(namespace_id, packed, 5.0),
            m.GetInline(namespace_id, HASHES[0], 0),
            m.PutInline(namespace_id, HASHES[0], b"", 0, DATA[0].tobytes()),
            m.Reserve(namespace_id, packed, b"", 0, 5.0),
            m.Protect(namespace_id, packed, 0.0),
            m.Protect(namespace_id, packed, 0.0, release=True),
            m.ReportCorrupt(namespace_id, HASHES[0]),
            m.Prefetch(namespace_id, packed),
            m.Replicate(namespace_id, packed, b"", _nowhere(), 1.0),
        ]
        on_conductor: list[m.Message] = [
            m.Lookup(namespace_id, packed),
            m.CountCopies(namespace_id, packed),
            m.ReportMiss("any", namespace_id, packed),
        ]
        return [("a", r) for r in on_node] + [("conductor", r) for r in on_conductor]

    links = {where: wire(cluster, "bolt", where) for where in ("a", "conductor")}
    for (where, theirs), (_, nobodys) in zip(
        naming(ACME.namespace_id), naming(unknown), strict=True
    ):
        texts = []
        request: Any
        for request in (theirs, nobodys):
            with pytest.raises(UnknownNamespace) as caught:
                await links[where].call(request, 5)
            texts.append(str(caught.value).replace(request.namespace_id.hex(), "ID"))
        assert texts[0] == texts[1]
        assert "acme" not in texts[0]
    for where in links:
        with pytest.raises(UnknownNamespace):
            await links[where].call(m.RegisterNamespace(ACME), 5)
    for link in links.values():
        await link.close()
    with client(cluster, "acme") as pool:  # and nothing has become of them
        assert pool.get(ACME, HASHES, out := np.empty_like(DATA)).found == 4
        assert (out == DATA).all()


async def test_leases_and_reservations_of_another_are_like_none(cluster: Cluster) -> None:
    acme, bolt = wire(cluster, "acme"), wire(cluster, "bolt")
    pin: m.PinReply = await acme.call(m.Pin(ACME.namespace_id, pack_hashes(HASHES), 20.0), 5)
    fresh = hash_chain(ACME, np.arange(7, 7 + LAYOUT.block_tokens))
    reserve = m.Reserve(ACME.namespace_id, pack_hashes(fresh), b"", 0, 20.0)
    granted: m.ReserveReply = await acme.call(reserve, 5)
    commit = m.Commit(granted.reservation_id, np.array([1], "<u8").tobytes())
    for request, expected in (
        (m.Renew(pin.lease_id, 5.0), LeaseExpired),
        (commit, ReservationGone),
        (m.RenewReservation(granted.reservation_id, 5.0), ReservationGone),
    ):
        with pytest.raises(expected):
            await bolt.call(request, 5)
    await bolt.call(m.Release([pin.lease_id]), 5)
    await bolt.call(m.Abort(granted.reservation_id, True), 5)
    assert (await acme.call(m.Renew(pin.lease_id, 5.0), 5)).ttl_s > 0
    assert (await acme.call(m.RenewReservation(granted.reservation_id, 5.0), 5)).ttl_s > 0
    await acme.call(m.Abort(granted.reservation_id, True), 5)
    await acme.call(m.Release([pin.lease_id]), 5)
    await acme.close()
    await bolt.close()


async def test_a_client_that_takes_anothers_name_ends_nothing_of_it(cluster: Cluster) -> None:
    acme = wire(cluster, "acme")
    pin: m.PinReply = await acme.call(m.Pin(ACME.namespace_id, pack_hashes(HASHES), 20.0), 5)
    address = cluster.nodes["a"]["wire"]
    impostor = WireClient(address, "client-of-acme", credentials=credentials("bolt"))
    await impostor.call(m.Ping(), 5)
    await impostor.close()
    probe = wire(cluster, "operator")
    for _ in range(50):  # the node has seen the impostor leave when it answers who came after
        await probe.call(m.Ping(), 5)
    assert (await acme.call(m.Renew(pin.lease_id, 5.0), 5)).ttl_s > 0
    await probe.close()
    await acme.close()


def test_a_tenant_sees_nothing_of_another_over_http_and_grpc(cluster: Cluster) -> None:
    node = f"http://{cluster.nodes['a']['http']}"
    url = f"{node}/v1/blocks/{ACME.namespace_id.hex()}/{HASHES[0].hex()}"
    nobodys = f"{node}/v1/blocks/{bytes(16).hex()}/{HASHES[0].hex()}"
    with httpx.Client(headers=bearer("bolt")) as bolt:
        for method, content in (("GET", None), ("PUT", DATA[0].tobytes())):
            answers = [bolt.request(method, address, content=content) for address in (url, nobodys)]
            assert [answer.status_code for answer in answers] == [404, 404]
            theirs, none = (answer.json()["error"]["message"] for answer in answers)
            assert theirs.replace(ACME.namespace_id.hex(), "0" * 32) == none
        register = bolt.post(f"{node}/v1/namespaces", content=msgspec.json.encode(ACME))
        assert register.status_code == 404
        own = bolt.post(
            f"{node}/v1/namespaces",
            content=msgspec.json.encode(msgspec.structs.replace(ACME, tenant="")),
        )
        assert own.json()["namespace_id"] == BOLT.namespace_id.hex()
    node_stub = pb_grpc.NodeStub(grpc.insecure_channel(cluster.nodes["a"]["grpc"]))
    conductor_stub = pb_grpc.ConductorStub(grpc.insecure_channel(cluster.conductor["grpc"]))
    calls: list[tuple[Any, Any]] = [
        (node_stub.Get, pb.GetRequest(namespace_id=ACME.namespace_id, block_hash=HASHES[0])),
        (node_stub.Lookup, pb.NodeLookupRequest(namespace_id=ACME.namespace_id, hashes=HASHES)),
        (conductor_stub.Lookup, pb.LookupRequest(namespace_id=ACME.namespace_id, hashes=HASHES)),
    ]
    for call, request in calls:
        with pytest.raises(grpc.RpcError) as caught:
            call(request, metadata=_metadata("bolt"), timeout=5)
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
        call(request, metadata=_metadata("acme"), timeout=5)


def test_stats_and_listings_name_no_other_tenant(cluster: Cluster) -> None:
    for name, sees in (("bolt", False), ("acme", True), ("operator", True)):
        with client(cluster, name) as pool:
            pool.register(BOLT if name == "bolt" else ACME)
            tenants = {namespace.tenant for namespace in pool.namespaces()}
            assert ("acme" in tenants) == sees
            stats = pool.stats()
            assert (len(stats.workers) == 1) == sees
            assert bool(stats.counters) == (name == "operator")
            assert all(bool(node.counters) == (name == "operator") for node in stats.nodes)
        for facts in (cluster.conductor, cluster.nodes["a"]):
            shown = httpx.get(f"http://{facts['http']}/v1/stats", headers=bearer(name)).text
            assert name == "acme" or sees or "acme" not in shown
        models = httpx.get(f"http://{cluster.conductor['http']}/v1/models", headers=bearer(name))
        assert bool(models.json()["data"]) == sees


def test_blocks_of_one_tenant_are_no_hit_for_another_with_the_same_prompt(
    cluster: Cluster,
) -> None:
    nameless = msgspec.structs.replace(NAMESPACE, revision="shared")
    hashes = hash_chain(nameless, np.arange(2 * LAYOUT.block_tokens))
    with client(cluster, "acme") as acme, client(cluster, "bolt") as bolt:
        assert acme.put(nameless, hashes, DATA[:2]).stored == 2
        wait_until(lambda: acme.lookup(nameless, hashes).found == 2, "acme's blocks are found")
        assert bolt.lookup(nameless, hashes).found == 0
        out = np.zeros_like(DATA[:2])
        assert bolt.get(nameless, hashes, out).found == 0
        assert not out.any()
        assert acme.get(nameless, hashes, out).found == 2
        assert (out == DATA[:2]).all()


async def test_a_tenant_cannot_send_a_node_to_a_server_of_its_own(cluster: Cluster) -> None:
    """A node that copies shows its token to the source, so the source is the conductor's word."""
    link = wire(cluster, "acme", "b")
    fresh = hash_chain(ACME, np.arange(3, 3 + LAYOUT.block_tokens))
    request = m.Replicate(ACME.namespace_id, pack_hashes(fresh), b"", _nowhere(), 2.0)
    with pytest.raises(NotFound, match="not known here"):
        await link.call(request, 5)
    await link.close()


# ---------------------------------------------------------------- the gateway


def test_the_gateway_serves_the_tenant_whose_workers_are_there_and_no_other(
    cluster: Cluster,
) -> None:
    url = f"http://{cluster.conductor['http']}"
    body = {"model": MODEL, "prompt": list(range(100)), "max_tokens": 4}
    served = httpx.post(f"{url}/v1/completions", json=body, headers=bearer("acme"), timeout=30)
    assert served.status_code == 200, served.text
    request_id = served.json()["id"].removeprefix("cmpl-")
    assert httpx.get(f"{url}/v1/requests/{request_id}", headers=bearer("acme")).status_code == 200
    for name in ("bolt", "acme-reader"):
        refused = httpx.post(f"{url}/v1/completions", json=body, headers=bearer(name))
        assert refused.status_code in (403, 503)
        assert "acme" not in refused.json()["error"]["message"].replace("acme-reader", "")
    theirs = httpx.get(f"{url}/v1/requests/{request_id}", headers=bearer("bolt"))
    nobodys = httpx.get(f"{url}/v1/requests/{'0' * 32}", headers=bearer("bolt"))
    assert theirs.status_code == nobodys.status_code == 404
    assert theirs.text.replace(request_id, "0" * 32) == nobodys.text
    assert httpx.get(f"{url}/v1/requests/{request_id}", headers=bearer("operator")).is_success


# ---------------------------------------------------------------- starting


@pytest.mark.parametrize("section", ["node", "conductor", "worker"])
def test_nobody_listens_beyond_this_machine_without_tokens(section: str, tmp_path: Path) -> None:
    ended = run_kvpool("--set", f"{section}.host=0.0.0.0", section, cwd=tmp_path)
    assert ended.returncode == 2
    for option in ("host", "tokens_path", "allow_insecure"):
        assert f"{section}.{option}" in ended.stderr


def test_a_server_may_listen_beyond_this_machine_with_tokens_or_allow_insecure(
    tmp_path: Path,
) -> None:
    tokens = tokens_file(tmp_path)
    for setting, warning in (
        ("conductor.allow_insecure=true", "without tokens"),
        (f"conductor.tokens_path={tokens}", "unencrypted"),
    ):
        running = Cluster(tmp_path)
        with running.supervisor:
            running.start_conductor(setting, "conductor.host=0.0.0.0")
            [log] = [p for p in (tmp_path / "logs").iterdir() if p.name.startswith("conductor")]
            assert warning in log.read_text()
            log.unlink()


def _metadata(name: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token(name)}"),)


def _nowhere() -> m.NodeDescriptor:
    return m.NodeDescriptor("nowhere", 1, "here", "127.0.0.1:9")
