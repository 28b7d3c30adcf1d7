"""A node that is emptied before it ends: its blocks move, its readers finish, its writers go elsewhere."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool import AsyncPool, Pool, hash_chain
from kvpool.errors import Draining, InvalidArgument, NotFound
from kvpool.wire import WireClient
from kvpool.wire import messages as m
from tests.support.fork_server import run_kvpool
from tests.support.process_cluster import LAYOUT, NAMESPACE, Cluster, chain, some_bytes, wait_until

SIZE = LAYOUT.part_bytes
HOSTS = {"a": "here", "b": "there"}
KVPOOL = (sys.executable, "-m", "kvpool")


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Nodes a and b; parametrize indirectly with settings of node a."""
    running = Cluster(tmp_path)
    with running.supervisor:
        running.start_conductor(
            "conductor.advanced.heartbeat_s=0.2", "conductor.advanced.suspect_after_s=1"
        )
        for name, host in HOSTS.items():
            more = getattr(request, "param", ()) if name == "a" else ()
            settings = (f"node.node_id={name}", "node.advanced.grace_s=0.2", *more)
            running.launch_node(name, *settings, host=host)
        for name in HOSTS:
            running.ready_node(name)
        running.wait_joined(nodes=2)
        yield running


def client(cluster: Cluster, host: str = "here") -> Pool:
    return Pool(conductor=cluster.conductor["wire"], host_label=host)


def wait_indexed(pool: Pool, hashes: list[bytes]) -> None:
    wait_until(lambda: pool.lookup(NAMESPACE, hashes).found == len(hashes), "the index hears of it")


def wait_ended(cluster: Cluster, name: str) -> None:
    """Until the process has ended by itself, with status 0, and the conductor has forgotten it."""
    process = cluster.member(name).process
    assert process.wait(10) == 0
    wait_until(lambda: name not in cluster.stats()["node_states"], "the node has left")


def test_blocks_of_no_other_node_move_and_are_served_on(cluster: Cluster) -> None:
    alone, both = chain(1, 40), chain(2, 5)
    data, other = some_bytes(1, 40), some_bytes(2, 5)
    with client(cluster) as pool:
        pool.put(NAMESPACE, alone, data, node_id="a")
        assert pool.put(NAMESPACE, both, other, node_id="a", replicas=2).replicas == 2
        for hashes in (alone, both):
            wait_indexed(pool, hashes)
        wait_until(
            lambda: sum(n["tiers"][0]["blocks"] for n in cluster.stats()["nodes"]) == 50,
            "the index hears of all copies",
        )
        reply = pool.drain("a", timeout_s=20)
        assert (reply.moved, reply.elsewhere, reply.lost, reply.leases_left) == (40, 5, {}, 0)
        wait_ended(cluster, "a")
        wait_until(lambda: pool.lookup(NAMESPACE, alone).found == 40, "the index hears of it")
        for hashes, expected in ((alone, data), (both, other)):
            out = np.zeros_like(expected)
            assert pool.get(NAMESPACE, hashes, out).found == len(hashes)
            assert (out == expected).all()


def test_a_branching_tree_of_chains_moves_whole(cluster: Cluster) -> None:
    trunk = np.random.default_rng(3).integers(0, 50_000, 4 * LAYOUT.block_tokens)
    ends = [
        np.random.default_rng(30 + i).integers(0, 50_000, 3 * LAYOUT.block_tokens) for i in range(3)
    ]
    chains = [hash_chain(NAMESPACE, np.concatenate((trunk, end))) for end in ends]
    data = [some_bytes(300 + i, 7) for i in range(3)]
    for blocks in data[1:]:
        blocks[:4] = data[0][:4]
    with client(cluster) as pool:
        for hashes, blocks in zip(chains, data, strict=True):
            pool.put(NAMESPACE, hashes, blocks, node_id="a")
        wait_indexed(pool, chains[2])
        assert pool.drain("a", timeout_s=20).moved == 4 + 3 * 3
        wait_ended(cluster, "a")
        for hashes, blocks in zip(chains, data, strict=True):
            wait_indexed(pool, hashes)
            out = np.zeros_like(blocks)
            assert pool.get(NAMESPACE, hashes, out).found == 7
            assert (out == blocks).all()


def test_dropping_moves_nothing(cluster: Cluster) -> None:
    hashes = chain(4, 6)
    with client(cluster) as pool:
        pool.put(NAMESPACE, hashes, some_bytes(4, 6), node_id="a")
        wait_indexed(pool, hashes)
        reply = pool.drain("a", drop=True, timeout_s=20)
        assert (reply.moved, reply.elsewhere, reply.lost) == (0, 0, {"dropped": 6})
        wait_ended(cluster, "a")
        assert pool.lookup(NAMESPACE, hashes).found == 0


async def test_readers_finish_and_writers_are_sent_elsewhere(cluster: Cluster) -> None:
    hashes, data = chain(5, 4), some_bytes(5, 4)
    address = cluster.nodes["a"]["wire"]
    async with (
        AsyncPool(conductor=cluster.conductor["wire"], host_label="here") as pool,
        AsyncPool(node=address, host_label="here") as reader,
    ):
        await pool.put(NAMESPACE, hashes, data, node_id="a")
        pinned = await reader.pin(NAMESPACE, hashes, part=0, ttl_s=20)
        draining = asyncio.create_task(pool.drain("a", timeout_s=20))

        def state() -> Any:
            return cluster.stats()["node_states"].get("a")

        await asyncio.to_thread(wait_until, lambda: state() == "draining", "the conductor knows")
        with pytest.raises(Draining):
            await reader.put(NAMESPACE, chain(6, 1), data[:1])
        put = await pool.put(
            NAMESPACE, chain(6, 1), data[:1]
        )  # this host's node is not asked again
        assert put.stored == 1
        out = np.zeros_like(data)
        assert await reader.read_pinned(pinned, out) == 4
        assert (out == data).all()
        assert not draining.done()  # a lease is in force
        pinned.release()
        reply = await draining
    assert (reply.moved, reply.leases_left, reply.elapsed_s < 18) == (4, 0, True)
    wait_ended(cluster, "a")
    assert cluster.node_stats("b")["tiers"][0]["blocks"] == 5


async def test_a_lease_that_never_ends_delays_no_longer_than_the_deadline(cluster: Cluster) -> None:
    hashes = chain(7, 2)
    async with (
        AsyncPool(conductor=cluster.conductor["wire"]) as pool,
        AsyncPool(node=cluster.nodes["a"]["wire"], host_label="here") as reader,
    ):
        await pool.put(NAMESPACE, hashes, some_bytes(7, 2), node_id="a")
        await reader.pin(NAMESPACE, hashes, ttl_s=25)
        started = time.monotonic()
        first = asyncio.create_task(pool.drain("a", timeout_s=1.0))
        second = WireClient(cluster.nodes["a"]["wire"], "another")
        replies = await asyncio.gather(first, second.call(m.Drain(9.0), 5))  # joins the first
        assert time.monotonic() - started < 8
        assert [reply.leases_left for reply in replies] == [1, 1]
        await second.close()
    wait_ended(cluster, "a")


def test_what_finds_no_room_is_counted(cluster: Cluster) -> None:
    hashes = chain(8, 6)
    with client(cluster) as pool, Pool(node=cluster.nodes["b"]["wire"], host_label="there") as b:
        pool.put(NAMESPACE, hashes, some_bytes(8, 6), node_id="a")
        wait_indexed(pool, hashes)
        capacity = cluster.node_stats("b")["tiers"][0]["capacity_bytes"]
        filler = chain(80, capacity // SIZE)
        b.put(NAMESPACE, filler, np.zeros((len(filler), SIZE), np.uint8))
        with b.pinned(NAMESPACE, filler, ttl_s=20):
            reply = pool.drain("a", timeout_s=20)
    assert reply.lost == {"no_room": 6 - reply.moved}
    assert reply.moved < 6
    wait_ended(cluster, "a")


def test_a_node_without_another_to_move_to_says_so_and_ends(cluster: Cluster) -> None:
    hashes = chain(9, 3)
    with client(cluster) as pool:
        pool.put(NAMESPACE, hashes, some_bytes(9, 3), node_id="a")
        wait_indexed(pool, hashes)
        assert pool.drain("b", timeout_s=20).moved == 0
        wait_ended(cluster, "b")
        reply = pool.drain("a", timeout_s=20)
        assert (reply.moved, reply.lost) == (0, {"no_other_node": 3})
        wait_ended(cluster, "a")


@pytest.mark.parametrize("cluster", [("node.drain_on_stop=true",)], indirect=True)
def test_sigterm_drains_first_where_that_is_set(cluster: Cluster) -> None:
    hashes, data = chain(10, 8), some_bytes(10, 8)
    with client(cluster) as pool:
        pool.put(NAMESPACE, hashes, data, node_id="a")
        wait_indexed(pool, hashes)
        cluster.kill("a", signal.SIGTERM)
        wait_ended(cluster, "a")
        wait_indexed(pool, hashes)
        out = np.zeros_like(data)
        assert pool.get(NAMESPACE, hashes, out).found == 8
    assert (out == data).all()


def test_sigterm_alone_moves_nothing(cluster: Cluster) -> None:
    hashes = chain(11, 3)
    with client(cluster) as pool:
        pool.put(NAMESPACE, hashes, some_bytes(11, 3), node_id="a")
        wait_indexed(pool, hashes)
        cluster.kill("a", signal.SIGTERM)
        wait_ended(cluster, "a")
    assert cluster.node_stats("b")["tiers"][0]["blocks"] == 0


def test_a_conductor_that_restarts_learns_that_a_node_drains(cluster: Cluster) -> None:
    hashes = chain(12, 2)
    address = cluster.conductor["wire"]
    with Pool(node=cluster.nodes["a"]["wire"], host_label="here") as reader:
        reader.put(NAMESPACE, hashes, some_bytes(12, 2))
        pinned = reader.pin(NAMESPACE, hashes, ttl_s=25)
        draining = subprocess.Popen(
            [*KVPOOL, "drain", "a", "--conductor", address, "--json"],
            stdout=subprocess.PIPE,
        )
        wait_until(lambda: cluster.stats()["node_states"].get("a") == "draining", "draining")
        old = cluster.supervisor.members[0]
        old.process.kill()
        old.process.wait(10)
        cluster.supervisor.members.remove(old)
        cluster.start_conductor(
            "conductor.advanced.heartbeat_s=0.2", port=address.rpartition(":")[2]
        )
        wait_until(
            lambda: cluster.stats()["node_states"] == {"a": "draining", "b": "live"},
            "the new conductor knows",
        )
        reader.release(pinned)
        out, _ = draining.communicate(timeout=20)
    assert json.loads(out)["node"] == "a"
    wait_ended(cluster, "a")


def command(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_kvpool("drain", *arguments, "--conductor", cluster.conductor["wire"])


def test_the_command_drains_and_names_unknown_nodes(cluster: Cluster) -> None:
    hashes = chain(13, 5)
    with client(cluster) as pool:
        pool.put(NAMESPACE, hashes, some_bytes(13, 5), node_id="a")
        wait_indexed(pool, hashes)
        with pytest.raises(NotFound):
            pool.drain("nobody")
        with pytest.raises(InvalidArgument):
            pool.drain("a", timeout_s=-1)
    unknown = command(cluster, "nobody")
    assert (unknown.returncode, "no node 'nobody'" in unknown.stderr) == (1, True)
    done = command(cluster, "a", "--json")
    assert done.returncode == 0, done.stderr
    reply = json.loads(done.stdout)
    assert (reply["node"], reply["moved"], reply["lost"]) == ("a", 5, {})
    wait_ended(cluster, "a")
    plain = command(cluster, "b", "--drop")
    assert plain.returncode == 0
    assert "5 lost (5 dropped)" in plain.stdout
