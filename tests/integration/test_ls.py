"""`kvpool ls` on a real pool: what it shows of blocks, and to whom."""

from __future__ import annotations

import json
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from kvpool import Pool, hash_chain
from kvpool.errors import InvalidArgument, Unavailable, UnknownNamespace
from kvpool.wire import messages as m
from tests.integration.test_protect_command import Shell
from tests.integration.test_security import wire
from tests.support.process_cluster import LAYOUT, NAMESPACE, Cluster, wait_until
from tests.support.secured import credentials, environment, token, tokens_file

ACME, BOLT = (msgspec.structs.replace(NAMESPACE, tenant=tenant) for tenant in ("acme", "bolt"))
HASHES = hash_chain(ACME, np.arange(5 * LAYOUT.block_tokens))
DATA = np.zeros((5, LAYOUT.part_bytes), np.uint8)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("ls")
    running = Cluster(directory, env=environment(tokens_file(directory)))
    with running.supervisor:
        running.start_conductor()
        for name in ("a", "b"):
            running.start_node(name, f"node.node_id={name}", host=name)
        with client(running, "acme") as acme, client(running, "bolt") as bolt:
            # A client remembers the nodes for a second: each must have seen both before it names one.
            for pool in (acme, bolt):
                wait_until(lambda pool=pool: len(pool.nodes()) == 2, "both nodes have joined")
            acme.put(ACME, HASHES, DATA, node_id="a")
            acme.protect(ACME, HASHES[:1], ttl_s=None)
            bolt.put(BOLT, HASHES[:2], DATA[:2], node_id="b")
        yield running


def client(cluster: Cluster, name: str) -> Pool:
    return Pool(conductor=cluster.conductor["wire"], host_label="a", credentials=credentials(name))


def shown(cluster: Cluster, name: str, **options: object) -> dict[str, list[tuple[str, int, int]]]:
    """By node: the namespaces, with their blocks and how many of them were listed."""
    with client(cluster, name) as pool:
        listed = pool.list_blocks(**options)  # type: ignore[arg-type]
    return {
        node.node_id: [
            (s.usage.name, s.usage.blocks, len(s.blocks))
            for s in node.namespaces
            if s.usage.blocks  # where it was protected it is known, too
        ]
        for node in listed
    }


def test_tenants_are_shown_their_own_blocks_and_operators_all(cluster: Cluster) -> None:
    assert shown(cluster, "acme") == {"a": [(ACME.name, 5, 5)], "b": []}
    assert shown(cluster, "bolt") == {"a": [], "b": [(BOLT.name, 2, 2)]}
    assert shown(cluster, "operator") == {"a": [(ACME.name, 5, 5)], "b": [(BOLT.name, 2, 2)]}


async def test_another_tenants_namespace_does_not_exist_for_a_tenant(cluster: Cluster) -> None:
    link = wire(cluster, "bolt")
    with pytest.raises(UnknownNamespace):
        await link.call(m.ListBlocks(ACME.namespace_id), 5)
    for offset, limit in ((-1, 1), (0, 0), (0, 10_000)):
        with pytest.raises(InvalidArgument):
            await link.call(m.ListNamespaces(offset, limit), 5)
    await link.close()


def test_what_is_listed_can_be_chosen(cluster: Cluster) -> None:
    assert shown(cluster, "acme", node_id="a", limit=3) == {"a": [(ACME.name, 5, 3)]}
    for model in (NAMESPACE.model, ACME.name, ACME.namespace_id.hex()):
        assert shown(cluster, "acme", node_id="a", model=model, limit=0) == {
            "a": [(ACME.name, 5, 0)]
        }
    assert shown(cluster, "acme", node_id="a", model="another") == {"a": []}
    with pytest.raises(Unavailable):
        shown(cluster, "acme", node_id="nobody")


def test_the_command_shows_people_and_programs_the_same(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPOOL_CLIENT__TOKEN", token("acme"))
    shell = Shell(cluster, capsys)
    status, out, err = shell.run("ls", "--node", "a", "--limit", "2")
    assert status == 0, err
    [node] = json.loads(out)["nodes"]
    [space] = node["namespaces"]
    assert (space["model"], space["blocks"], space["resident"]) == (NAMESPACE.model, 5, {"dram": 5})
    first, second = space["listed"]
    assert (first["block_hash"], second["parent"]) == (HASHES[0].hex(), HASHES[0].hex())
    assert (first["retained_s"], second["retained_s"], first["parts"]) == (0.0, -1.0, 1)
    assert "salt" not in out
    assert "tenant" not in out
    status, out, err = shell.run("ls", "--limit", "2", is_json=False)
    assert status == 0, err
    for text in (ACME.name, HASHES[0].hex()[:12], "forever", "5 blocks", "and 3 more"):
        assert text in out
    assert HASHES[2].hex()[:12] not in out
    status, _, err = shell.run("ls", "--node", "zzz")
    assert status != 0
    assert "no node" in err
