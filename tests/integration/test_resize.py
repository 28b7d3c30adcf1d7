"""A node whose DRAM grows and shrinks while clients read and write, over shared memory and over NIXL."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

from kvpool import Pool
from kvpool.client import PinnedBlocks
from kvpool.errors import InvalidArgument, NoSharedMemory
from kvpool.wire import messages as m
from tests.support.fork_server import run_kvpool
from tests.support.process_cluster import LAYOUT, NAMESPACE, Cluster, chain, some_bytes, wait_until

MIB = 1 << 20
SIZE = LAYOUT.part_bytes
HOSTS = {"shm": "here", "nixl": "elsewhere"}  # the transport by which a client of that host reads


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A node of two arenas of 16 MiB; parametrize indirectly with more settings of it."""
    running = Cluster(tmp_path)
    with running.supervisor:
        running.start_conductor("conductor.advanced.heartbeat_s=0.2")
        settings = (
            "node.advanced.arenas=2",
            "node.node_id=a",
            "node.advanced.grace_s=0.2",
            "node.advanced.quarantine_s=0.5",
        )
        running.start_node("a", *settings, *getattr(request, "param", ()))
        running.wait_joined(nodes=1)
        yield running


def client(cluster: Cluster, transport: str = "shm") -> Pool:
    return Pool(conductor=cluster.conductor["wire"], host_label=HOSTS[transport])


def put(pool: Pool, seed: int, blocks: int) -> None:
    pool.put(NAMESPACE, chain(seed, blocks), some_bytes(seed, blocks), node_id="a")
    wait_until(
        lambda: pool.lookup(NAMESPACE, chain(seed, blocks)).found == blocks, "the index hears of it"
    )


def found_right(pool: Pool, seed: int, blocks: int) -> int:
    """How many leading blocks of a chain can be read. Their bytes must be those written."""
    out = np.zeros((blocks, SIZE), dtype=np.uint8)
    found = pool.get(NAMESPACE, chain(seed, blocks), out).found
    assert (out[:found] == some_bytes(seed, found)).all()
    return found


def stats(cluster: Cluster) -> dict[str, object]:
    reply = httpx.get(f"http://{cluster.nodes['a']['http']}/v1/stats", timeout=5)
    answer: dict[str, object] = reply.json()
    return answer


def arena_ids(cluster: Cluster) -> set[int]:
    arenas = stats(cluster)["arenas"]
    assert isinstance(arenas, list)
    return {arena["arena_id"] for arena in arenas}


def memory_of(cluster: Cluster, name: str = "a") -> tuple[int, int, int]:
    """Shared memory in use by the node's process (bytes), its open memfds, and its mapped arenas."""
    process = Path(f"/proc/{cluster.member(name).process.pid}")
    shared = int((process / "status").read_text().partition("RssShmem:")[2].split()[0]) << 10
    arenas = (process / "maps").read_text().count("memfd:kvpool-arena")
    files = 0
    for fd in (process / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            files += "memfd:kvpool-arena" in str(fd.readlink())
    return shared, files, arenas


@pytest.mark.parametrize("transport", HOSTS)
def test_new_memory_is_used_and_known_to_clients_that_were_there_before(
    cluster: Cluster, transport: str
) -> None:
    with client(cluster, transport) as pool:
        put(pool, 1, 100)
        assert found_right(pool, 1, 100) == 100
        reply = pool.resize("a", 96 * MIB)
        assert (reply.before_bytes, reply.capacity_bytes, reply.evacuating_bytes) == (
            32 * MIB,
            96 * MIB,
            0,
        )
        for seed in range(2, 8):
            put(pool, seed, 500)  # 72 MiB in all: more than there was
        for seed in range(2, 8):
            assert found_right(pool, seed, 500) == 500
        assert found_right(pool, 1, 100) == 100
        with client(cluster, transport) as newcomer:
            assert found_right(newcomer, 7, 500) == 500


def test_the_conductor_learns_of_the_new_capacity_and_keeps_its_index(cluster: Cluster) -> None:
    with client(cluster) as pool:
        put(pool, 1, 50)
        pool.resize("a", 64 * MIB)
        wait_until(lambda: pool.nodes()[0].capacity_bytes == 64 * MIB, "the conductor hears of it")
        wait_until(lambda: len(pool.nodes()[0].descriptor.arenas) == 3, "and of the arena")
        wait_until(lambda: pool.lookup(NAMESPACE, chain(1, 50)).found == 50, "blocks are known")


@pytest.mark.parametrize("transport", HOSTS)
def test_leased_bytes_stay_while_the_node_shrinks_below_what_it_holds(
    cluster: Cluster, transport: str
) -> None:
    with client(cluster, transport) as pool:
        pool.resize("a", 64 * MIB)
        for seed in range(1, 5):
            put(pool, seed, 500)  # 47 MiB
        before = memory_of(cluster)
        pinned = pool.pin(NAMESPACE, chain(4, 500), part=0, ttl_s=20)
        assert pinned.found == 500
        reply = pool.resize("a", 8 * MIB)
        assert reply.capacity_bytes == 8 * MIB
        assert reply.evacuating_bytes >= 32 * MIB
        for _ in range(5):
            assert_leased(pool, pinned, 4, 500)
        put(pool, 9, 100)
        assert found_right(pool, 9, 100) == 100
        assert_leased(pool, pinned, 4, 500)
        pool.release(pinned)
        wait_until(lambda: len(arena_ids(cluster)) == 1, "the arenas are given back")
        assert before[1:] == (6, 3)  # Python's mmap keeps a descriptor of its own
        wait_until(lambda: memory_of(cluster)[1:] == (2, 1), "they are closed and unmapped")
        assert memory_of(cluster)[0] < before[0] - 40 * MIB
        assert found_right(pool, 9, 100) == 100
        used = stats(cluster)["tiers"][0]  # type: ignore[index]
        assert used["capacity_bytes"] == 8 * MIB


def assert_leased(pool: Pool, pinned: PinnedBlocks, seed: int, blocks: int) -> None:
    out = np.zeros((blocks, SIZE), dtype=np.uint8)
    pool.read_pinned(pinned, out, timeout_s=10.0)
    assert (out == some_bytes(seed, blocks)).all()


@pytest.mark.parametrize("transport", HOSTS)
def test_nothing_wrong_is_read_while_the_node_grows_and_shrinks(
    cluster: Cluster, transport: str
) -> None:
    """Blocks that fit at all times are never lost; others may be, and are never wrong."""
    ended = threading.Event()
    reads = [0]

    def read_and_write() -> None:
        with client(cluster, transport) as pool:
            seed = 100
            while not ended.is_set():
                seed += 1
                pool.put(NAMESPACE, chain(seed, 40), some_bytes(seed, 40), node_id="a")
                for earlier in range(max(101, seed - 8), seed + 1):
                    reads[0] += found_right(pool, earlier, 40)
                    assert found_right(pool, 1, 50) == 50

    with client(cluster) as pool:
        put(pool, 1, 50)
        with ThreadPoolExecutor(1) as threads:
            work = threads.submit(read_and_write)
            try:
                for mib in (48, 12, 64, 20, 40, 8, 32):
                    aim = reads[0] + 400
                    pool.resize("a", mib * MIB)
                    wait_until(lambda aim=aim: reads[0] > aim or work.done(), "reads go on", 30)
            finally:
                ended.set()
            work.result(30)
    counters = stats(cluster)["counters"]
    assert isinstance(counters, dict)
    assert counters["relocated"] > 0
    assert counters.get("corrupt_blocks", 0) == 0


def test_what_the_machine_has_not_got_is_refused_and_nothing_changes(cluster: Cluster) -> None:
    with client(cluster) as pool:
        put(pool, 1, 10)
        with pytest.raises(NoSharedMemory, match="available"):
            pool.resize("a", 64 << 40)
        with pytest.raises(InvalidArgument):
            pool.resize("a", 1000)
        assert arena_ids(cluster) == {0, 1}
        assert found_right(pool, 1, 10) == 10


def test_the_command_and_the_http_route_resize(cluster: Cluster) -> None:
    to = ("--conductor", cluster.conductor["wire"])
    given = run_kvpool("resize", "a", "24MiB", "--json", *to)
    assert given.returncode == 0, given.stderr
    reply = json.loads(given.stdout)
    assert (reply["node"], reply["before_bytes"], reply["capacity_bytes"]) == (
        "a",
        32 * MIB,
        24 * MIB,
    )
    wrong = run_kvpool("resize", "a", "much")
    assert wrong.returncode == 1
    assert "much: not a size" in wrong.stderr
    url = f"http://{cluster.nodes['a']['http']}/v1/dram"
    assert httpx.put(url, json={"target_bytes": 40 * MIB}).json()["capacity_bytes"] == 40 * MIB
    assert httpx.put(url, json={"bytes": 1}).status_code == 400


@pytest.mark.parametrize(
    "cluster", [("node.hugepages=off",), ("node.advanced.numa_nodes=0",)], indirect=True
)
def test_stats_say_what_every_arena_is_made_of(cluster: Cluster) -> None:
    with client(cluster) as pool:
        put(pool, 1, 10)
        reply = wait_until(
            lambda: next(iter(pool.stats().nodes), None),
            "the node reports",
        )
        wait_until(
            lambda: sum(a.used_bytes for a in pool.stats().nodes[0].arenas) == 10 * SIZE,
            "the conductor hears what they hold",
        )
    assert [type(arena) for arena in reply.arenas] == [m.ArenaUsage] * 2
    assert {arena.page_bytes for arena in reply.arenas} == {4096}
    numa = {arena.numa_node for arena in reply.arenas}
    assert numa in ({-1}, {0})
    if numa == {-1}:
        assert {arena.huge_bytes for arena in reply.arenas} == {0}
