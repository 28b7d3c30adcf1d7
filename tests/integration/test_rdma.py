"""Which fabric bytes take is visible, and nothing falls back to TCP where RDMA is required. Real processes."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvpool import Pool
from kvpool.config.settings import NodeConfig
from kvpool.errors import KvpoolError, NoTransport
from kvpool.transports.nixl import NixlTransport
from tests.chaos.keyed import NAMESPACE, contents, prompt
from tests.support.process_cluster import Cluster, wait_until

HASHES = prompt(1, 8)
DATA = contents(HASHES)
RDMA = ("self/memory", "tcp/lo", "rc_mlx5/mlx5_0:1")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes for two hosts; the second listens on every interface, so that others may have to reach it."""
    running = Cluster(tmp_path_factory.mktemp("fabric"), env={"UCX_NET_DEVICES": "lo"})
    with running.supervisor:
        running.start_conductor()
        running.start_node("a", "node.node_id=a", host="here")
        everywhere = (
            "node.host=0.0.0.0",
            "node.allow_insecure=true",
            "node.advertise_host=127.0.0.1",
        )
        running.start_node("b", "node.node_id=b", *everywhere, host="there")
        running.wait_joined(nodes=2)
        with Pool(conductor=running.conductor["wire"], host_label="here") as pool:
            pool.put(NAMESPACE, HASHES, DATA, node_id="a")
            wait_until(lambda: pool.lookup(NAMESPACE, HASHES).found == 8, "the index hears of it")
            assert pool.replicate(NAMESPACE, HASHES, to="b").missing == 0
        yield running


def test_what_ucx_has_and_how_fast_peers_are_is_shown(cluster: Cluster) -> None:
    stats = cluster.node_stats("b")
    assert "tcp/lo" in stats["ucx"]
    [peer] = stats["peers"]
    assert (peer["node_id"], peer["transport"], peer["fabric"]) == ("a", "nixl", "tcp")
    assert peer["read_bytes"] == DATA.nbytes
    assert peer["read_bytes_per_s"] > 0
    metrics = cluster.http.get(f"http://{cluster.nodes['b']['http']}/metrics").text
    assert 'kvpool_ucx_resource{device="lo",transport="tcp"} 1.0' in metrics
    wanted = 'kvpool_peer_bytes_total{direction="read",fabric="tcp",peer="a",transport="nixl"}'
    assert f"{wanted} {float(DATA.nbytes)}" in metrics
    address = cluster.nodes["b"]["wire"]
    with Pool(node=address, host_label="there", transport="nixl", timeout_s=60) as pool:
        assert pool.get(NAMESPACE, HASHES, np.zeros_like(DATA)).found == 8
        [rate] = pool.peers()
    assert (rate.transport, rate.fabric, rate.read_bytes) == ("nixl", "host", DATA.nbytes)
    assert rate.read_bytes_per_s > 0


def test_a_node_that_others_reach_over_tcp_alone_says_so(cluster: Cluster) -> None:
    told = {
        name: cluster.http.get(f"http://{cluster.nodes[name]['http']}/readyz").json()
        for name in ("a", "b")
    }
    assert told["a"] == {"status": "ready"}  # nobody reaches it from elsewhere
    assert told["b"]["status"] == "ready"
    assert "over TCP" in told["b"]["notice"]
    assert "tcp/lo" in told["b"]["notice"]


def test_where_rdma_is_required_nothing_goes_over_tcp(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = {"conductor": cluster.conductor["wire"], "require_rdma": True, "timeout_s": 60}
    with Pool(**where, host_label="elsewhere") as pool:
        got = pool.get(NAMESPACE, HASHES, np.zeros_like(DATA))
        assert (got.found, got.bytes_moved) == (0, {})
        with pytest.raises(NoTransport, match="RDMA is required and missing"):
            pool.put(NAMESPACE, prompt(2, 2), contents(prompt(2, 2)))
        # Where both have it all is well; the node says of itself that it has not.
        nixl = pool._pool.transports.get("nixl")
        assert isinstance(nixl, NixlTransport)
        monkeypatch.setattr(nixl._thread, "ucx", RDMA)
        with pytest.raises(NoTransport, match="tcp/lo"):
            pool.put(NAMESPACE, prompt(2, 2), contents(prompt(2, 2)))
        assert pool.get(NAMESPACE, HASHES, np.zeros_like(DATA)).miss_reason == "failed_recently"
    # Others are not told that blocks are lost which this client alone cannot read.
    with Pool(**where, host_label="here") as pool:  # shared memory is no fall-back
        assert pool.get(NAMESPACE, HASHES, np.zeros_like(DATA)).bytes_moved == {"shm": DATA.nbytes}


def test_a_node_that_requires_rdma_does_not_start_without(cluster: Cluster) -> None:
    member = cluster.launch_node("c", "node.require_rdma=true", host="third")
    with pytest.raises((KvpoolError, RuntimeError, subprocess.SubprocessError)):
        cluster.supervisor.wait_ready(member, 60)
    assert member.process.wait(20) != 0
    told = (cluster.directory / "logs" / "c.log").read_text()
    assert "node.require_rdma is set, and UCX has no RDMA here" in told
    assert "tcp/lo" in told
    cluster.supervisor.members.remove(member)


def test_requiring_rdma_without_nixl_is_a_contradiction() -> None:
    with pytest.raises(ValueError, match="require_rdma needs the transport nixl"):
        NodeConfig(require_rdma=True, transports=("shm",))


def test_a_worker_that_requires_rdma_does_not_start_without(cluster: Cluster) -> None:
    settings = ("client.require_rdma=true", "worker.engine=fake")
    member = cluster.launch_worker("w", "both", Path("tiny"), *settings)
    with pytest.raises((KvpoolError, RuntimeError, subprocess.SubprocessError)):
        cluster.supervisor.wait_ready(member, 60)
    told = (cluster.directory / "logs" / "w.log").read_text()
    assert "client.require_rdma is set, and UCX has no RDMA here" in told
    cluster.supervisor.members.remove(member)
