"""A token that is taken back while processes run: its holder loses connections, leases and entry within seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import numpy as np
import pytest

from kvpool import Pool, hash_chain
from kvpool.errors import KvpoolError, Unauthenticated
from tests.support.process_cluster import LAYOUT, NAMESPACE, Cluster, wait_until
from tests.support.secured import bearer, credentials, environment, tokens_file

BOLT = msgspec.structs.replace(NAMESPACE, tenant="bolt")
ACME = msgspec.structs.replace(NAMESPACE, tenant="acme")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    running = Cluster(tmp_path, env=environment(tokens_file(tmp_path)))
    running.http = httpx.Client(timeout=10, headers=bearer("operator"))
    with running.supervisor:
        running.start_conductor()
        running.start_node("n0")
        running.wait_joined(nodes=1)
        yield running


def test_who_loses_its_token_loses_its_connections_and_leases_and_nobody_else_does(
    cluster: Cluster,
) -> None:
    data = np.ones((4, LAYOUT.part_bytes), np.uint8)
    out = np.empty_like(data)
    where = {"conductor": cluster.conductor["wire"], "host_label": "here"}
    hashes = {ns.tenant: hash_chain(ns, np.arange(4 * LAYOUT.block_tokens)) for ns in (ACME, BOLT)}
    with (
        Pool(**where, credentials=credentials("acme")) as acme,
        Pool(**where, credentials=credentials("bolt")) as bolt,
    ):
        for pool, namespace in ((acme, ACME), (bolt, BOLT)):
            assert pool.put(namespace, hashes[namespace.tenant], data).stored == 4
            wait_until(
                lambda pool=pool, namespace=namespace: (
                    pool.lookup(namespace, hashes[namespace.tenant]).found == 4
                ),
                "the conductor knows",
            )
        with bolt.pinned(BOLT, hashes["bolt"]) as pinned:
            assert pinned.found == 4
            assert cluster.node_stats("n0")["leases"] == 1
            path = cluster.directory / "tokens.yaml"
            lines = [line for line in path.read_text().splitlines() if '"bolt"' not in line]
            path.write_text("\n".join(lines) + "\n")
            wait_until(lambda: cluster.node_stats("n0")["leases"] == 0, "the lease is over", 5)
        with pytest.raises(Unauthenticated):
            bolt.lookup(BOLT, hashes["bolt"])
        with pytest.raises(KvpoolError):
            bolt.put(BOLT, hashes["bolt"], data)
        assert acme.get(ACME, hashes["acme"], out).found == 4
    for facts in (cluster.conductor, cluster.nodes["n0"]):
        url = f"http://{facts['http']}/v1/stats"
        assert httpx.get(url, headers=bearer("bolt")).status_code == 401
        assert httpx.get(url, headers=bearer("acme")).status_code == 200
    assert cluster.stats()["node_states"] == {cluster.nodes["n0"]["id"]: "live"}
