"""Isolated tenants: their blocks are in memory that no other caller learns of or gets into."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import numpy as np
import pytest

from kvpool import Namespace, Pool, hash_chain
from kvpool.errors import Forbidden, KvpoolError, TransferFailed, Unauthenticated
from kvpool.transports.shm import ShmTransport
from kvpool.wire import WireClient
from kvpool.wire import messages as m
from tests.support.process_cluster import LAYOUT, NAMESPACE, Cluster, wait_until
from tests.support.secured import bearer, credentials, environment, token, tokens_file

SIZE = LAYOUT.part_bytes
SECRET = b"the secret of the vault. "
DATA = np.frombuffer((SECRET * (2 * SIZE // len(SECRET) + 1))[: 2 * SIZE], np.uint8).reshape(2, -1)


def space(tenant: str) -> Namespace:
    return msgspec.structs.replace(NAMESPACE, tenant=tenant)


HASHES = hash_chain(space("vault"), np.arange(2 * LAYOUT.block_tokens))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("isolated")
    running = Cluster(directory, env=environment(tokens_file(directory)))
    running.http = httpx.Client(timeout=10, headers=bearer("operator"))
    with running.supervisor:
        running.start_conductor()
        running.start_node("a", "node.advanced.isolated_dram_bytes=8MiB")
        running.wait_joined(nodes=3)  # its own, and those of vault and safe
        for tenant in ("vault", "acme"):
            with client(running, tenant) as pool:
                assert pool.put(space(tenant), HASHES, DATA).stored == 2
        yield running


def client(cluster: Cluster, name: str) -> Pool:
    address = cluster.conductor["wire"]
    return Pool(conductor=address, host_label="here", credentials=credentials(name))


def described(cluster: Cluster, tenant: str) -> m.NodeDescriptor:
    """The node that holds a tenant's blocks, as the operator sees it: nobody else sees all of them."""
    with client(cluster, "operator") as pool:
        [node] = [i.descriptor for i in pool.nodes() if i.descriptor.tenant == tenant]
    return node


def test_an_isolated_tenant_uses_its_own_node_and_learns_of_no_other(
    cluster: Cluster,
) -> None:
    for name, tenant in (("vault", "vault"), ("safe", "safe"), ("acme", ""), ("bolt", "")):
        with client(cluster, name) as pool:
            nodes = [info.descriptor for info in pool.nodes()]
            assert [node.tenant for node in nodes] == [tenant]
            wait_until(lambda pool=pool: pool.stats().nodes, "the node has reported")
            stats = pool.stats()
            assert [node.node_id for node in stats.nodes] == [nodes[0].node_id]
            assert list(stats.node_states) == [nodes[0].node_id]
        shown = httpx.get(f"http://{cluster.conductor['http']}/v1/nodes", headers=bearer(name))
        assert [info["descriptor"]["tenant"] for info in shown.json()["nodes"]] == [tenant]
    for name in ("vault", "acme"):
        with client(cluster, name) as pool:
            out = np.zeros_like(DATA)
            assert pool.get(space(name), HASHES, out).found == 2
            assert (out == DATA).all()


async def test_a_node_turns_away_whom_it_is_not_for_whatever_their_token_allows_elsewhere(
    cluster: Cluster,
) -> None:
    for name, tenant in (("acme", "vault"), ("safe", "vault"), ("vault", "")):
        node = described(cluster, tenant)
        link = WireClient(node.address, name, credentials=credentials(name))
        with pytest.raises(Unauthenticated):
            await link.call(m.Describe(), 5)
        await link.close()
        for path in ("/v1/stats", "/metrics"):
            async with httpx.AsyncClient(headers=bearer(name)) as http:
                refused = await http.get(f"http://{node.http_address}{path}")
            assert refused.status_code == 401


async def test_not_even_an_operator_puts_blocks_where_they_must_not_stand(
    cluster: Cluster,
) -> None:
    for tenant, where in (("vault", ""), ("acme", "vault"), ("", "vault"), ("safe", "vault")):
        node = described(cluster, where)
        link = WireClient(node.address, "op", credentials=credentials("operator"))
        with pytest.raises(Forbidden):
            await link.call(m.RegisterNamespace(space(tenant)), 5)
        await link.close()
    with client(cluster, "operator") as pool:  # a write for a tenant goes to the tenant's node
        fresh = hash_chain(space("safe"), np.arange(LAYOUT.block_tokens))
        assert pool.put(space("safe"), fresh, DATA[:1]).stored == 1
        segments = wait_until(
            lambda: pool.lookup(space("safe"), fresh).segments, "the index knows the block"
        )
        [segment] = segments
        assert segment.node_id == described(cluster, "safe").node_id


# ---------------------------------------------------------------- thefts


def test_the_shared_memory_is_handed_to_its_tenant_alone(cluster: Cluster) -> None:
    node = described(cluster, "vault")
    for name in ("acme", "safe"):
        with pytest.raises(TransferFailed, match="hands out no memory"):
            ShmTransport(token(name)).connect(node, 5)
    with pytest.raises(TransferFailed):
        ShmTransport("").connect(node, 5)
    for sent in (b"", b"\xc1", b"\x91\xa0"):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.settimeout(5)
            raw.connect(node.shm_path)
            raw.sendall(sent)
            raw.shutdown(socket.SHUT_WR)
            data, fds, _, _ = socket.recv_fds(raw, 65536, 64)
            assert (data, fds) == (b"", [])
    ShmTransport(token("vault")).connect(node, 5)  # whose it is gets it
    ShmTransport(token("operator")).connect(node, 5)


THIEF = """
import os, sys, msgspec, numpy as np
from kvpool.errors import KvpoolError
from kvpool.transports import Pieces, Transports
from kvpool.wire.messages import NodeDescriptor

SIZE = 1 << 20
answers = []
for number, node in enumerate(msgspec.msgpack.decode(sys.stdin.buffer.read(), type=list[NodeDescriptor])):
    # An agent for each attempt: what a refused transfer leaves behind must not be why the next one fails.
    transports = Transports(f"thief-{number}", forced="nixl", loopback_only=True)
    loot = np.zeros(SIZE, np.uint8)
    place = np.array([[0, 0]])
    pieces = Pieces(np.array([loot.ctypes.data]), place, np.array([SIZE]), loot)
    try:
        transports.choose(node, "elsewhere").read(node, pieces, 30)
        outcome = "read"
    except KvpoolError:
        outcome = "refused"
    answers.append((outcome, loot.tobytes()))
sys.stdout.buffer.write(msgspec.msgpack.encode(answers))
sys.stdout.flush()
os._exit(0)
"""


def steal(*nodes: m.NodeDescriptor) -> list[tuple[str, bool]]:
    """Read the first MiB of arena 0 as each of `nodes` describes it; how that ended, and whether the secret came."""
    ended = subprocess.run(
        [sys.executable, "-c", THIEF],
        input=msgspec.msgpack.encode(nodes),
        capture_output=True,
        timeout=240,
    )
    answers = msgspec.msgpack.decode(ended.stdout, type=list[tuple[str, bytes]])
    return [(outcome, SECRET in loot) for outcome, loot in answers]


def test_reading_by_address_with_anothers_metadata_gets_nothing(cluster: Cluster) -> None:
    vault, shared, safe = (described(cluster, tenant) for tenant in ("vault", "", "safe"))
    [target] = vault.arenas
    attempts = [vault, shared]
    for given in (shared, safe):
        [own] = given.arenas
        assert target.base != own.base
        aimed = msgspec.structs.replace(own, base=target.base, size_bytes=target.size_bytes)
        by_address = msgspec.structs.replace(given, arenas=[aimed])
        # And with metadata into which the address was forged, so that the library itself lets it pass.
        old, new = (base.to_bytes(8, "little") for base in (own.base, target.base))
        assert given.nixl_metadata.count(old) >= 1
        metadata = given.nixl_metadata.replace(old, new)
        attempts += [by_address, msgspec.structs.replace(by_address, nixl_metadata=metadata)]
    owners, *thefts = zip(*[iter(steal(*attempts))] * 2, strict=True)
    # It works on what one was given: the vault's arena with its own metadata, the shared one with its.
    assert owners == (("read", True), ("read", True))
    for by_address, with_forged_metadata in thefts:
        assert by_address == ("refused", False)
        assert with_forged_metadata[1] is False
    with client(cluster, "vault") as pool:
        assert pool.get(space("vault"), HASHES, np.zeros_like(DATA)).found == 2


# ---------------------------------------------------------------- life


def test_a_tenant_node_that_dies_is_started_again_and_all_end_with_their_parent(
    cluster: Cluster,
) -> None:
    before = described(cluster, "safe")
    tenant_nodes = _tenant_node_processes(cluster)
    [pid] = [pid for pid, node_id in tenant_nodes.items() if node_id == before.node_id]
    os.kill(pid, signal.SIGKILL)

    def is_back() -> bool:
        try:
            return described(cluster, "safe").epoch > before.epoch
        except (KvpoolError, ValueError):
            return False

    wait_until(is_back, "the node of tenant safe is back", 120)
    with client(cluster, "safe") as pool:
        fresh = hash_chain(space("safe"), np.arange(9, 9 + LAYOUT.block_tokens))
        wait_until(lambda: _stores(pool, fresh), "it takes blocks again", 60)
    cluster.kill("a")
    wait_until(
        lambda: not _tenant_node_processes(cluster),
        "the tenant nodes are gone with their parent",
        20,
    )


def _stores(pool: Pool, hashes: list[bytes]) -> bool:
    try:
        done = pool.put(space("safe"), hashes, DATA[:1])
    except KvpoolError:
        return False
    return done.stored + done.existing == 1


def _tenant_node_processes(cluster: Cluster) -> dict[int, str]:
    """Node ids of the running processes that were started for isolated tenants, by pid."""
    found = {}
    tokens = str(cluster.directory / "tokens.yaml").encode()
    for path in Path("/proc").iterdir():
        if not path.name.isdigit():
            continue
        try:
            env = (path / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        values = dict(entry.partition(b"=")[::2] for entry in env)
        is_ours = values.get(b"KVPOOL_NODE__TOKENS_PATH") == tokens
        if is_ours and values.get(b"KVPOOL_NODE__TENANT"):
            found[int(path.name)] = values[b"KVPOOL_NODE__NODE_ID"].decode()
    return found
