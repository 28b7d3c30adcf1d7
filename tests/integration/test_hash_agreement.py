"""Processes that hash otherwise are refused where they register, and told why: real processes."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from kvpool import AsyncPool, Namespace, Pool
from kvpool.blocks.hash_check import HashProof, proof_of
from kvpool.client.node import directory, node_link
from kvpool.errors import HashMismatch
from kvpool.wire import WireClient
from kvpool.wire import messages as m
from tests.chaos.keyed import NAMESPACE, contents, prompt
from tests.support.process_cluster import Cluster, wait_until


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    running = Cluster(tmp_path_factory.mktemp("hashes"))
    with running.supervisor:
        running.start_conductor()
        running.start_node("n0", "node.transports=shm")
        running.wait_joined(nodes=1)
        yield running


def wrong(namespace: Namespace) -> HashProof:
    """As from another version of the library."""
    proof = proof_of(namespace)
    told = {**proof.versions, "xxhash": "2.0.0 (0.6)"}
    return msgspec.structs.replace(proof, known_answer=bytes(16), versions=told)


@pytest.mark.parametrize("at", ["conductor", "node"])
async def test_a_client_that_hashes_otherwise_is_refused_at_registration(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    hashes, data = prompt(1, 2), contents(prompt(1, 2))
    where = {
        "conductor": {"conductor": cluster.conductor["wire"]},
        "node": {"node": cluster.nodes["n0"]["wire"]},
    }[at]
    async with AsyncPool(host_label="here", **where) as pool:
        await pool.put(NAMESPACE, hashes, data)
    for module in (directory, node_link):
        monkeypatch.setattr(module, "proof_of", wrong)
    fresh = msgspec.structs.replace(NAMESPACE, revision=f"revision-{at}")
    async with AsyncPool(host_label="here", **where) as pool:
        with pytest.raises(HashMismatch, match=r"xxhash 2\.0\.0 \(0\.6\) there, "):
            await pool.register(fresh)
        # It cannot slip in by way of a put either.
        with pytest.raises(HashMismatch):
            await pool.put(fresh, hashes, np.zeros_like(data))


async def test_a_worker_that_hashes_otherwise_does_not_join(cluster: Cluster) -> None:
    link = WireClient(cluster.conductor["wire"], "worker-1", kind="worker")
    me = m.WorkerDescriptor("worker-1", 1, "both", "here", "h:1", NAMESPACE, "m", 1024)
    try:
        with pytest.raises(HashMismatch, match="xxhash"):
            await link.call(m.WorkerJoin(me, wrong(NAMESPACE)), 5)
        assert cluster.stats()["workers"] == []
        for proof in (None, proof_of(NAMESPACE)):  # an older worker shows none
            assert not (await link.call(m.WorkerJoin(me, proof), 5)).resync
        await link.call(m.WorkerLeave("worker-1", 1), 5)
    finally:
        await link.close()


def test_clients_without_proof_are_served(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes, data = prompt(2, 2), contents(prompt(2, 2))
    for module in (directory, node_link):
        monkeypatch.setattr(module, "proof_of", lambda _namespace: None)
    with Pool(conductor=cluster.conductor["wire"], host_label="here") as pool:
        pool.put(NAMESPACE, hashes, data)
        wait_until(lambda: pool.lookup(NAMESPACE, hashes).found == 2, "the index hears of it")
        out = np.zeros_like(data)
        assert pool.get(NAMESPACE, hashes, out).found == 2
    assert (out == data).all()
