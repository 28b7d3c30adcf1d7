"""TLS and mTLS on real processes, over the wire, HTTP and gRPC, beside tokens."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import msgspec
import numpy as np
import pytest

from kvpool import Credentials, Pool, hash_chain
from kvpool.errors import ConfigError, KvpoolError, Unavailable
from kvpool.proto import kvpool_pb2 as pb
from kvpool.proto import kvpool_pb2_grpc as pb_grpc
from kvpool.wire import WireClient
from kvpool.wire import messages as m
from tests.support.process_cluster import LAYOUT, NAMESPACE, Cluster
from tests.support.secured import Certificates, bearer, environment, token, tokens_file

SPACE = msgspec.structs.replace(NAMESPACE, tenant="acme")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module", params=["tls", "mtls"])
def secured(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    certificates: Certificates,
) -> Iterator[tuple[Cluster, bool]]:
    """A conductor and two nodes that speak TLS alone, and whether they ask for certificates."""
    directory = tmp_path_factory.mktemp(request.param)
    files = {
        "tls_cert": certificates.cert, "tls_key": certificates.key, "tls_ca": certificates.ca
    }  # fmt: skip
    is_mutual = request.param == "mtls"
    if is_mutual:
        files["tls_client_ca"] = certificates.ca
    running = Cluster(directory, env=environment(tokens_file(directory), **files))
    running.scheme = "https"
    context = ssl.create_default_context(cafile=certificates.ca)
    if is_mutual:
        context.load_cert_chain(*certificates.of("client"))
    running.http = httpx.Client(timeout=10, headers=bearer("operator"), verify=context)
    with running.supervisor:
        running.start_conductor()
        for name, host in (("a", "here"), ("b", "there")):
            running.launch_node(name, host=host)
        for name in ("a", "b"):
            running.ready_node(name)
        running.wait_joined(nodes=2)  # over HTTPS; and the nodes joined over TLS
        yield running, is_mutual


def credentials(certificates: Certificates, is_mutual: bool, name: str = "acme") -> Credentials:
    cert, key = certificates.of("client") if is_mutual else (None, None)
    return Credentials(token(name), certificates.ca, cert, key)


def test_blocks_travel_with_the_control_plane_encrypted(
    secured: tuple[Cluster, bool], certificates: Certificates
) -> None:
    cluster, is_mutual = secured
    hashes = hash_chain(SPACE, np.arange(3 * LAYOUT.block_tokens))
    data = np.random.default_rng(1).integers(0, 256, (3, LAYOUT.part_bytes), dtype=np.uint8)
    shown = credentials(certificates, is_mutual)
    with Pool(conductor=cluster.conductor["wire"], host_label="here", credentials=shown) as pool:
        done = pool.put(SPACE, hashes, data, replicas=2)  # the nodes meet over TLS, too
        assert (done.stored, done.replicas) == (3, 2), done.replica_failures
        out = np.empty_like(data)
        assert pool.get(SPACE, hashes, out).found == 3
        assert (out == data).all()


async def test_a_client_without_tls_or_with_another_authority_gets_nowhere(
    secured: tuple[Cluster, bool], certificates: Certificates
) -> None:
    cluster, is_mutual = secured
    wrong = [Credentials(token("acme")), Credentials(token("acme"), certificates.other_ca)]
    if is_mutual:
        wrong.append(Credentials(token("acme"), certificates.ca))
        wrong.append(Credentials(token("acme"), certificates.ca, *certificates.of("stranger")))
    for shown in wrong:
        link = WireClient(cluster.conductor["wire"], "c", credentials=shown)
        with pytest.raises(Unavailable):
            await link.call(m.Ping(), 5)
        await link.close()
    link = WireClient(
        cluster.conductor["wire"], "c", credentials=credentials(certificates, is_mutual)
    )
    await link.call(m.Ping(), 5)
    await link.close()


async def test_the_servers_name_is_checked(
    secured: tuple[Cluster, bool], certificates: Certificates
) -> None:
    cluster, is_mutual = secured
    port = cluster.conductor["wire"].rpartition(":")[2]
    shown = credentials(certificates, is_mutual)
    link = WireClient(f"127.0.0.2:{port}", "c", credentials=shown)
    with pytest.raises(KvpoolError):
        await link.call(m.Ping(), 5)
    await link.close()


def test_http_is_encrypted(secured: tuple[Cluster, bool], certificates: Certificates) -> None:
    cluster, is_mutual = secured
    for facts in (cluster.conductor, cluster.nodes["a"]):
        assert cluster.http.get(f"https://{facts['http']}/v1/stats").status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://{facts['http']}/healthz")
        stranger = ssl.create_default_context(cafile=certificates.ca)
        if is_mutual:
            with pytest.raises(httpx.TransportError):
                httpx.get(f"https://{facts['http']}/healthz", verify=stranger)
        else:
            shown = httpx.get(f"https://{facts['http']}/v1/stats", verify=stranger)
            assert shown.status_code == 401


def test_grpc_is_encrypted(secured: tuple[Cluster, bool], certificates: Certificates) -> None:
    cluster, is_mutual = secured
    address = cluster.nodes["a"]["grpc"]
    ca = certificates.ca.read_bytes()
    cert, key = (path.read_bytes() for path in certificates.of("client"))
    pair = {"private_key": key, "certificate_chain": cert} if is_mutual else {}
    channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(ca, **pair))
    metadata = (("authorization", f"Bearer {token('acme')}"),)
    assert pb_grpc.NodeStub(channel).Stats(pb.StatsRequest(), metadata=metadata, timeout=5).json
    with pytest.raises(grpc.RpcError) as caught:
        pb_grpc.NodeStub(channel).Stats(pb.StatsRequest(), timeout=5)
    assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
    others = [grpc.insecure_channel(address)]
    if is_mutual:
        others.append(grpc.secure_channel(address, grpc.ssl_channel_credentials(ca)))
    for other in others:
        with pytest.raises(grpc.RpcError) as refused:
            pb_grpc.NodeStub(other).Stats(pb.StatsRequest(), metadata=metadata, timeout=5)
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE


def test_files_that_cannot_be_used_are_named(tmp_path: Path, certificates: Certificates) -> None:
    nothing = tmp_path / "nothing.pem"
    nothing.write_text("not a certificate")
    for ca, cert, key in (
        (nothing, None, None),
        (tmp_path / "absent.pem", None, None),
        (certificates.ca, nothing, certificates.key),
        (certificates.ca, certificates.cert, None),
        (None, certificates.cert, certificates.key),
    ):
        with pytest.raises(ConfigError, match=r"tls|TLS|pem"):
            Credentials("", ca, cert, key)
