"""Copies between nodes, replicas of a put, and reading from another replica: real processes, real NIXL."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from kvpool import AsyncPool, Layout, Namespace, Pool
from kvpool.blocks.hashing import pack_hashes
from kvpool.blocks.tier import Tier
from kvpool.client.node.node_link import NodeLink
from kvpool.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidArgument,
    KvpoolError,
    TransferFailed,
    Unavailable,
)
from kvpool.transports import Pieces, Transport, Transports
from kvpool.transports.shm import ShmTransport
from kvpool.wire import WireClient
from kvpool.wire import messages as m
from tests.support.process_cluster import LAYOUT, NAMESPACE, Cluster, chain, some_bytes, wait_until
from tiers.memory.arena import Arena
from tiers.service import replication
from tiers.service.replication import Replicator
from tiers.store.slab_allocator import SlabAllocator
from tiers.store.store import Store

SIZE = LAYOUT.part_bytes
HOSTS = {"a": "here", "beside": "here", "b": "there"}
# Over TCP the owner must make progress: a frozen one leaves the transfer under way.
TCP_ONLY = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three nodes that live through all tests of this module that use them."""
    running = Cluster(tmp_path_factory.mktemp("copies"))
    with running.supervisor:
        running.start_conductor(
            "conductor.advanced.heartbeat_s=0.2", "conductor.advanced.suspect_after_s=1"
        )
        for name, host in HOSTS.items():
            running.launch_node(
                name, f"node.node_id={name}", "node.advanced.quarantine_s=1", host=host
            )
        for name in HOSTS:
            running.ready_node(name)
        running.wait_joined(nodes=3)
        yield running


@pytest.fixture
def doomed(tmp_path: Path) -> Iterator[Cluster]:
    """Two nodes for a test that ends one of them; copies go over TCP."""
    running = Cluster(tmp_path, env=TCP_ONLY)
    with running.supervisor:
        running.start_conductor(
            "conductor.advanced.heartbeat_s=0.2", "conductor.advanced.suspect_after_s=0.8"
        )
        for name in ("a", "b"):
            sizes = ("node.dram_bytes=256MiB", "node.advanced.slab_bytes=8MiB")
            once = (
                f"node.node_id={name}",
                "node.advanced.quarantine_s=1",
                "node.advanced.grace_s=0.3",
            )
            running.launch_node(name, *sizes, *once, host=HOSTS[name])
        for name in ("a", "b"):
            running.ready_node(name)
        running.wait_joined(nodes=2)
        yield running


def client(cluster: Cluster, host: str = "here") -> Pool:
    return Pool(conductor=cluster.conductor["wire"], host_label=host)


def held_by(cluster: Cluster, name: str, hashes: list[bytes]) -> int:
    """How many leading blocks a node says it holds."""
    with Pool(node=cluster.nodes[name]["wire"]) as pool:
        return pool.lookup(NAMESPACE, hashes).found


def wait_indexed(pool: Pool, hashes: list[bytes]) -> None:
    wait_until(lambda: pool.lookup(NAMESPACE, hashes).found == len(hashes), "the index hears of it")


async def indexed(
    pool: AsyncPool, hashes: list[bytes], *nodes: str, space: Namespace = NAMESPACE
) -> None:
    """Until the index knows that each of the nodes holds the whole chain."""
    for node in nodes:
        others = [name for name in HOSTS if name != node]
        deadline = time.monotonic() + 15
        while (await pool.lookup(space, hashes, exclude=others)).found < len(hashes):
            assert time.monotonic() < deadline, "the index hears of it"
            await asyncio.sleep(0.02)


async def known_at(cluster: Cluster, hashes: list[bytes], *nodes: str) -> None:
    """`indexed`, for tests without a loop."""
    async with AsyncPool(conductor=cluster.conductor["wire"]) as pool:
        await indexed(pool, hashes, *nodes)


def counter(cluster: Cluster, name: str, what: str) -> float:
    return float(cluster.node_stats(name)["counters"].get(what, 0))


def corrupt(cluster: Cluster, name: str, block: bytes) -> None:
    """Change the bytes of a block in the memory of a node, behind its back."""

    async def change() -> None:
        async with AsyncPool(node=cluster.nodes[name]["wire"], host_label=HOSTS[name]) as pool:
            pinned = await pool.pin(NAMESPACE, [block], part=0)
            [(link, lease, _)] = pinned.held
            wrong = np.full(64, 0xA5, dtype=np.uint8)
            local = np.array([wrong.ctypes.data], dtype=np.int64)
            pieces = Pieces(local, lease.places, np.array([64], dtype=np.int64), wrong)
            ShmTransport().write(link.node, pieces, 1.0)
            pinned.release()

    asyncio.run(change())


# ---------------------------------------------------------------- replicate


@pytest.mark.parametrize(("seed", "to", "used"), [(1, "b", "nixl"), (2, "beside", "shm")])
def test_a_node_pulls_copies_from_another(cluster: Cluster, seed: int, to: str, used: str) -> None:
    hashes, data = chain(seed, 8), some_bytes(seed, 8)
    with client(cluster) as pool:
        pool.put(NAMESPACE, hashes, data, node_id="a")
        wait_indexed(pool, hashes)
        result = pool.replicate(NAMESPACE, hashes, to=to)
        assert (result.stored, result.missing, result.reason) == (8, 0, "")
        assert result.bytes_moved == {used: 8 * SIZE}
        again = pool.replicate(NAMESPACE, hashes, to=to)
        assert (again.stored, again.existing, again.bytes_moved) == (0, 8, {})
    assert counter(cluster, to, "replicated") >= 8
    with Pool(node=cluster.nodes[to]["wire"], host_label=HOSTS[to]) as pool:
        out = np.zeros_like(data)
        assert pool.get(NAMESPACE, hashes, out).found == 8
    assert (out == data).all()


def test_what_the_target_has_of_a_chain_is_not_copied_again(cluster: Cluster) -> None:
    hashes, data = chain(3, 6), some_bytes(3, 6)
    with client(cluster) as pool:
        pool.put(NAMESPACE, hashes, data, node_id="a")
        pool.put(NAMESPACE, hashes[:2], data[:2], node_id="b")
        wait_indexed(pool, hashes)
        result = pool.replicate(NAMESPACE, hashes, to="b")
        assert (result.stored, result.existing, result.missing) == (4, 2, 0)
        assert result.bytes_moved == {"nixl": 4 * SIZE}


def test_blocks_of_several_parts_are_copied_whole(cluster: Cluster) -> None:
    layout = Layout("bfloat16", layers=3, kv_heads=4, head_dim=32, block_tokens=32, tp_size=2)
    space = Namespace("tests/tp", "r", layout)
    hashes = chain(4, 5, space)
    parts = [some_bytes(40 + part, 5, layout.part_bytes) for part in range(2)]
    with client(cluster) as pool:
        for part, data in enumerate(parts):
            pool.put(space, hashes, data, part=part, node_id="a")
        wait_until(lambda: pool.lookup(space, hashes).found == 5, "the index hears of it")
        assert pool.replicate(space, hashes, to="b").stored == 5
    with Pool(node=cluster.nodes["b"]["wire"], host_label="there") as pool:
        for part, data in enumerate(parts):
            out = np.zeros_like(data)
            assert pool.get(space, hashes, out, part=part).found == 5
            assert (out == data).all()


def test_wrong_bytes_at_the_source_are_not_copied_and_the_block_is_dropped_there(
    cluster: Cluster,
) -> None:
    hashes, data = chain(5, 6), some_bytes(5, 6)
    with client(cluster) as pool:
        pool.put(NAMESPACE, hashes, data, node_id="a")
        wait_indexed(pool, hashes)
        corrupt(cluster, "a", hashes[3])
        result = pool.replicate(NAMESPACE, hashes, to="b")
        assert (result.stored, result.missing, result.reason) == (3, 3, "checksum")
        assert held_by(cluster, "b", hashes) == 3
        assert counter(cluster, "b", "not_replicated:checksum") == 3
        wait_until(lambda: held_by(cluster, "a", hashes) == 3, "the corrupt block is dropped")


def test_another_source_goes_on_where_the_first_has_wrong_bytes(cluster: Cluster) -> None:
    hashes, data = chain(6, 6), some_bytes(6, 6)
    with client(cluster) as pool:
        for name in ("a", "beside"):
            pool.put(NAMESPACE, hashes, data, node_id=name)
        asyncio.run(known_at(cluster, hashes, "a", "beside"))
        first = pool.lookup(NAMESPACE, hashes).segments[0].node_id
        corrupt(cluster, first, hashes[2])
        result = pool.replicate(NAMESPACE, hashes, to="b")
    assert (result.stored, result.missing) == (6, 0)
    with Pool(node=cluster.nodes["b"]["wire"], host_label="there") as pool:
        out = np.zeros_like(data)
        assert pool.get(NAMESPACE, hashes, out).found == 6
    assert (out == data).all()


def test_a_full_target_takes_what_it_can_and_says_no_room(cluster: Cluster) -> None:
    hashes, data = chain(7, 6), some_bytes(7, 6)
    with client(cluster) as pool, Pool(node=cluster.nodes["b"]["wire"], host_label="there") as b:
        pool.put(NAMESPACE, hashes, data, node_id="a")
        wait_indexed(pool, hashes)
        capacity = cluster.node_stats("b")["tiers"][0]["capacity_bytes"]
        filler = chain(70, capacity // SIZE)
        b.put(NAMESPACE, filler, np.zeros((len(filler), SIZE), np.uint8))
        with b.pinned(NAMESPACE, filler, ttl_s=20):
            result = pool.replicate(NAMESPACE, hashes, to="b")
            put = pool.put(NAMESPACE, chain(71, 2), data[:2], node_id="a", replicas=3)
        assert (result.reason, result.missing) == ("no_room", 6 - result.stored)
        assert result.missing > 0
        assert (put.replicas, put.replica_failures["b"]) == (2, "no_room")
        wait_until(
            lambda: pool.replicate(NAMESPACE, hashes, to="b").missing == 0, "room after the pin"
        )


async def test_bad_requests_are_typed_errors(cluster: Cluster) -> None:
    hashes = chain(8, 2)
    link = WireClient(cluster.nodes["a"]["wire"], "stranger")
    me: m.NodeDescriptor = await link.call(m.Describe(), 2)
    other = WireClient(cluster.nodes["b"]["wire"], "stranger")
    await other.call(m.RegisterNamespace(NAMESPACE), 2)
    await link.call(m.RegisterNamespace(NAMESPACE), 2)
    space = NAMESPACE.namespace_id
    packed = pack_hashes(hashes)
    for request in (
        m.Replicate(space, packed, b"", me, 1.0),  # from itself
        m.Replicate(space, packed[:-1], b"", me, 1.0),
        m.Replicate(b"n" * 16, packed, b"", me, 1.0),
    ):
        with pytest.raises(InvalidArgument):
            await link.call(request, 2)
    for deadline_s in (0.0, -1.0, float("nan"), 1e9):
        with pytest.raises(InvalidArgument):
            await other.call(m.Replicate(space, packed, b"", me, deadline_s), 2)
    nobody = m.NodeDescriptor("nobody", 1, "there", "127.0.0.1:9")
    reply = await other.call(m.Replicate(space, packed, b"", nobody, 2.0), 4)
    assert (reply.stored, reply.reason) == (0, "unavailable")
    stale = m.NodeDescriptor(
        me.node_id, me.epoch - 1, me.host, me.address, "", me.arenas, "", "x", b"x", ["nixl"]
    )
    async with AsyncPool(conductor=cluster.conductor["wire"]) as pool:
        await pool.put(NAMESPACE, hashes, some_bytes(8, 2), node_id="a")
        reply = await other.call(m.Replicate(space, packed, b"", stale, 2.0), 4)
        assert (reply.stored, reply.reason) == (0, "stale_epoch")
        with pytest.raises(Unavailable):
            await pool.replicate(NAMESPACE, hashes, to="nobody")
        missing = await pool.replicate(NAMESPACE, chain(9, 2), to="b")
        assert (missing.missing, missing.reason) == (2, "not_in_index")
    async with AsyncPool(node=cluster.nodes["a"]["wire"]) as alone:
        with pytest.raises(ConfigError):
            await alone.replicate(NAMESPACE, hashes, to="b")
    await link.close()
    await other.close()


BIG_LAYOUT = Layout("bfloat16", layers=16, kv_heads=8, head_dim=128, block_tokens=64)
BIG = Namespace("tests/big", "r", BIG_LAYOUT)  # 4 MiB a block


def settled(cluster: Cluster, name: str) -> bool:
    """Nothing is reserved, leased or in quarantine, and the states add up (invariant 7)."""
    stats = cluster.node_stats(name)
    dram = stats["tiers"][0]
    states = ("free_bytes", "reserved_bytes", "committed_bytes", "quarantined_bytes")
    assert sum(dram[state] for state in states) == dram["capacity_bytes"]
    held = dram["reserved_bytes"] + dram["quarantined_bytes"] + dram["pinned_bytes"]
    return not held and not stats["leases"] and not stats["reservations"]


async def test_a_source_killed_in_mid_copy_leaves_whole_blocks_and_no_leak(doomed: Cluster) -> None:
    count = 40
    hashes, data = chain(10, count, BIG), some_bytes(10, count, BIG_LAYOUT.part_bytes)
    async with (
        AsyncPool(conductor=doomed.conductor["wire"], host_label="here") as pool,
        AsyncPool(node=doomed.nodes["b"]["wire"], host_label="there") as b,
    ):
        await pool.put(BIG, hashes, data, node_id="a")
        await indexed(pool, hashes, "a", space=BIG)
        started = time.monotonic()
        copying = asyncio.create_task(pool.replicate(BIG, hashes, to="b", timeout_s=15))
        while not (await b.lookup(BIG, hashes)).found:  # noqa: ASYNC110
            await asyncio.sleep(0)
        doomed.kill("a", signal.SIGSTOP)  # the next transfer cannot end any more
        doomed.kill("a")
        result = await copying
        assert time.monotonic() - started < 30
        assert 0 < result.stored < count
        assert result.stored + result.missing == count
        assert result.reason in ("transfer_failed", "unavailable", "not_in_index", "deadline")
        out = np.zeros_like(data)
        got = await b.get(BIG, hashes, out)
    assert got.found == result.stored
    assert (out[: got.found] == data[: got.found]).all()
    wait_until(lambda: settled(doomed, "b"), "nothing leaks")


async def test_a_frozen_source_costs_no_more_than_the_deadline(doomed: Cluster) -> None:
    hashes, data = chain(11, 4, BIG), some_bytes(11, 4, BIG_LAYOUT.part_bytes)
    async with AsyncPool(conductor=doomed.conductor["wire"], host_label="here") as pool:
        await pool.put(BIG, hashes, data, node_id="a")
        await indexed(pool, hashes, "a", space=BIG)
        doomed.kill("a", signal.SIGSTOP)
        try:
            started = time.monotonic()
            result = await pool.replicate(BIG, hashes, to="b", timeout_s=1.5)
            assert time.monotonic() - started < 10
            assert (result.stored, result.missing) == (0, 4)
            assert result.reason in ("deadline", "unavailable")
        finally:
            doomed.kill("a", signal.SIGCONT)
        wait_until(lambda: settled(doomed, "b"), "nothing leaks")
        doomed.wait_joined(nodes=2)

        async def copied() -> bool:
            return (await pool.replicate(BIG, hashes, to="b")).missing == 0

        deadline = time.monotonic() + 15
        while not await copied():  # the conductor doubts the copy for a while
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("transport", "is_cancelled", "is_quarantined"),
    [("nixl", False, True), ("nixl", True, True), ("shm", False, False), ("shm", True, True)],
)
async def test_slots_into_which_a_copy_may_still_arrive_are_quarantined(
    cluster: Cluster, transport: Literal["nixl", "shm"], is_cancelled: bool, is_quarantined: bool
) -> None:
    hashes = chain(12, 4)
    async with AsyncPool(node=cluster.nodes["a"]["wire"], host_label="here") as pool:
        await pool.put(NAMESPACE, hashes, some_bytes(12, 4))
        [info] = await pool.nodes()
    fetching = asyncio.Event()

    async def fetch(_link: NodeLink, _pieces: Pieces, _timeout_s: float) -> Any:
        fetching.set()
        if is_cancelled:
            await asyncio.Event().wait()
        raise DeadlineExceeded("not over")

    arena = Arena(0, 8 << 20)
    store = Store(SlabAllocator(arena.size_bytes, 1 << 20, 0))
    store.namespaces.register(NAMESPACE)
    transports = Transports(f"test-{transport}-{is_cancelled}", forced=transport)
    replicator = Replicator("me", "here", store, [arena], transports, lambda: None, fetch=fetch)
    packed = pack_hashes(hashes)
    request = m.Replicate(NAMESPACE.namespace_id, packed, b"", info.descriptor, 40.0)
    copying = asyncio.create_task(replicator.replicate(request))
    await asyncio.wait_for(fetching.wait(), 40)  # NIXL is loaded first
    if is_cancelled:
        copying.cancel()
    [outcome] = await asyncio.gather(copying, return_exceptions=True)
    if is_cancelled:
        assert isinstance(outcome, asyncio.CancelledError)
    else:
        assert isinstance(outcome, m.ReplicateReply)
        assert (outcome.stored, outcome.reason) == (0, "deadline")
    [dram] = store.inspection.tiers()
    assert (dram.quarantined_bytes > 0, dram.reserved_bytes) == (is_quarantined, 0)
    store.check_integrity()
    await replicator.close()
    arena.close()


async def test_a_source_that_stops_in_mid_transfer_holds_few_threads_and_none_for_long(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replication, "BATCH_S", 0.5)
    hashes = chain(13, 4)
    async with AsyncPool(node=cluster.nodes["a"]["wire"], host_label="here") as pool:
        await pool.put(NAMESPACE, hashes, some_bytes(13, 4))
        [info] = await pool.nodes()
    reading: list[str] = []

    def hangs(_self: Any, _node: Any, _pieces: Pieces, timeout_s: float) -> Any:
        reading.append(threading.current_thread().name)
        time.sleep(timeout_s)  # nothing comes
        raise DeadlineExceeded("not over")

    monkeypatch.setattr(ShmTransport, "read_and_sum", hangs)
    arena = Arena(0, 8 << 20)
    store = Store(SlabAllocator(arena.size_bytes, 1 << 20, 0))
    store.namespaces.register(NAMESPACE)
    transports = Transports("test-frozen", forced="shm")
    replicator = Replicator("me", "here", store, [arena], transports, lambda: None)
    request = m.Replicate(NAMESPACE.namespace_id, pack_hashes(hashes), b"", info.descriptor, 3000.0)
    for _ in range(6):  # the caller gives up at once, again and again
        begun = len(reading)
        copying = asyncio.create_task(replicator.replicate(request))
        deadline = time.monotonic() + 10
        while len(reading) == begun and not copying.done():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.005)
        copying.cancel()
        await asyncio.gather(copying, return_exceptions=True)
        store.expire(time.monotonic() + 1e6)  # what may still arrive was waited for
    assert {name.rpartition("_")[0] for name in reading} == {"kvpool-replicate"}
    assert len(set(reading)) <= replication.THREADS
    reply = await asyncio.wait_for(replicator.replicate(request), 10)  # asked for 3,000 s
    assert (reply.stored, reply.reason) == (0, "deadline")
    await replicator.close()
    arena.close()


# ---------------------------------------------------------------- replicas


def test_a_put_of_replicas_prefers_other_hosts(cluster: Cluster) -> None:
    with client(cluster) as pool:
        for seed, wanted, holders in (
            (20, 2, {"a", "b"}),
            (21, 3, set(HOSTS)),
            (22, 9, set(HOSTS)),
        ):
            hashes, data = chain(seed, 4), some_bytes(seed, 4)
            put = pool.put(NAMESPACE, hashes, data, node_id="a", replicas=wanted)
            assert (put.stored, put.replicas, put.replica_failures) == (4, len(holders), {})
            assert {n for n in HOSTS if held_by(cluster, n, hashes) == 4} == holders
        with pytest.raises(ConfigError):
            pool.put(NAMESPACE, hashes, data, replicas=0)
    with Pool(node=cluster.nodes["a"]["wire"]) as alone, pytest.raises(ConfigError):
        alone.put(NAMESPACE, hashes, data, replicas=2)


def test_a_corrupted_replica_is_dropped_and_the_other_serves(cluster: Cluster) -> None:
    hashes, data = chain(23, 6), some_bytes(23, 6)
    with client(cluster) as pool:
        assert pool.put(NAMESPACE, hashes, data, node_id="a", replicas=2).replicas == 2

        async def both_known() -> None:
            async with AsyncPool(conductor=cluster.conductor["wire"]) as viewer:
                await indexed(viewer, hashes, "a", "b")

        asyncio.run(both_known())
        corrupt(cluster, "a", hashes[4])
        out = np.zeros_like(data)
        got = pool.get(NAMESPACE, hashes, out)
        assert (got.found, got.verified, got.miss_reason) == (6, 6, "")
        # The last block comes from either: the index doubts only the one that was reported.
        assert got.bytes_moved["nixl"] in (SIZE, 2 * SIZE)
        assert sum(got.bytes_moved.values()) == 6 * SIZE
        assert (out == data).all()
        wait_until(lambda: held_by(cluster, "a", hashes) == 4, "the corrupt block is dropped")


def test_a_stale_reply_is_reported_to_the_index_and_not_tried_again(cluster: Cluster) -> None:
    hashes, data = chain(24, 5), some_bytes(24, 5)
    stale = [m.Segment("a", 0, 5, Tier.DRAM)]
    with client(cluster) as writer:
        writer.put(NAMESPACE, hashes, data, node_id="b")
        wait_indexed(writer, hashes)
    told = cluster.stats()["counters"].get("reported_misses", 0)
    asked = counter(cluster, "a", "misses")

    async def read_twice() -> None:
        async with AsyncPool(conductor=cluster.conductor["wire"], host_label="here") as pool:
            for _ in range(2):
                out = np.zeros_like(data)
                got = await pool.get(NAMESPACE, hashes, out, segments=stale)
                assert got.found == 5
                assert (out == data).all()

    asyncio.run(read_twice())
    assert counter(cluster, "a", "misses") == asked + 5  # one pin of five blocks, not two
    wait_until(
        lambda: cluster.stats()["counters"].get("reported_misses", 0) == told + 1, "the report"
    )


async def test_a_reported_copy_is_not_answered_for_a_while(cluster: Cluster) -> None:
    hashes, data = chain(25, 4), some_bytes(25, 4)
    async with AsyncPool(conductor=cluster.conductor["wire"], host_label="here") as pool:
        put = await pool.put(NAMESPACE, hashes, data, node_id="a", replicas=2)
        assert put.replicas == 2
        await indexed(pool, hashes, "a", "b")
        link = WireClient(cluster.conductor["wire"], "stranger")
        await link.call(m.ReportMiss("a", NAMESPACE.namespace_id, hashes[2]), 2)
        segments = (await pool.lookup(NAMESPACE, hashes)).segments
        assert [(s.node_id, s.count) for s in segments] == [("a", 2), ("b", 1), ("a", 1)]
        assert (await pool.lookup(NAMESPACE, hashes, exclude=["a", "b"])).found == 0
        deadline = time.monotonic() + 10
        while len((await pool.lookup(NAMESPACE, hashes)).segments) > 1:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        await link.close()


@pytest.mark.parametrize("transport", ["nixl", "auto"])
async def test_a_replica_takes_over_when_a_node_dies_between_pin_and_read(
    doomed: Cluster, transport: Any
) -> None:
    hashes, data = chain(26, 8), some_bytes(26, 8)
    async with AsyncPool(
        conductor=doomed.conductor["wire"], host_label="here", transport=transport
    ) as pool:
        assert (await pool.put(NAMESPACE, hashes, data, node_id="a", replicas=2)).replicas == 2
        await indexed(pool, hashes, "a", "b")
        assert (await pool.lookup(NAMESPACE, hashes)).segments[0].node_id == "a"
        link = await pool.directory.link("a", time.monotonic() + 5)
        if transport == "auto":  # memory that is mapped outlives its node: make it fail on purpose
            pool.transports.get("shm").forget("a")

        class Dying:
            """The transport to a node that dies as soon as bytes are asked of it."""

            def __init__(self, real: Transport) -> None:
                self._real = real

            def __getattr__(self, name: str) -> object:
                return getattr(self._real, name)

            def read_and_sum(self, *arguments: Any) -> object:
                doomed.kill("a")
                return self._real.read_and_sum(*arguments)

        link.transports.dram = Dying(link.transports.dram)  # type: ignore[assignment]
        out = np.zeros_like(data)
        started = time.monotonic()
        got = await pool.get(NAMESPACE, hashes, out, timeout_s=5)
        assert time.monotonic() - started < 5
        assert (got.found, got.miss_reason) == (8, "")
        assert got.bytes_moved == {"nixl": 8 * SIZE}
        assert (out == data).all()
        # Once is enough: what failed is remembered, and the conductor knows.
        assert "a" not in {s.node_id for s in (await pool.lookup(NAMESPACE, hashes)).segments}


async def test_a_silent_node_leaves_time_for_another_replica(doomed: Cluster) -> None:
    hashes, data = chain(27, 4), some_bytes(27, 4)
    async with AsyncPool(conductor=doomed.conductor["wire"], host_label="here") as pool:
        assert (await pool.put(NAMESPACE, hashes, data, node_id="a", replicas=2)).replicas == 2
        await indexed(pool, hashes, "a", "b")
        segments = (await pool.lookup(NAMESPACE, hashes)).segments
        assert segments[0].node_id == "a"
        await pool.directory.link("b", time.monotonic() + 5)
        doomed.kill("a", signal.SIGSTOP)
        try:
            out = np.zeros_like(data)
            got = await pool.get(NAMESPACE, hashes, out, segments=segments, timeout_s=4)
            assert got.found == 4
            assert (out == data).all()
            started = time.monotonic()  # and the next one does not wait for it at all
            got = await pool.get(NAMESPACE, hashes, out, segments=segments, timeout_s=4)
            assert (got.found, time.monotonic() - started < 1) == (4, True)
        finally:
            doomed.kill("a", signal.SIGCONT)


async def test_nobody_waits_twice_for_a_node_that_was_silent(doomed: Cluster) -> None:
    """By pins or reads, hasty or not; and other clients hear of it from the index."""
    hashes, data = chain(30, 4), some_bytes(30, 4)
    async with (
        AsyncPool(conductor=doomed.conductor["wire"], host_label="here") as pool,
        AsyncPool(conductor=doomed.conductor["wire"], host_label="here") as hasty,
    ):
        assert (await pool.put(NAMESPACE, hashes, data, node_id="a")).stored == 4
        await indexed(pool, hashes, "a")
        stale = (await pool.lookup(NAMESPACE, hashes)).segments
        pinned = await pool.pin(NAMESPACE, hashes, part=0, ttl_s=30)
        out = np.zeros_like(data)
        for each in (pool, hasty):
            assert (await each.get(NAMESPACE, hashes, out)).found == 4
        doomed.kill("a", signal.SIGSTOP)
        try:
            with pytest.raises(KvpoolError):
                await pool.pin(NAMESPACE, hashes, timeout_s=0.6)
            started = time.monotonic()
            got = await pool.get(NAMESPACE, hashes, out, segments=stale, timeout_s=4)
            assert (got.found, got.miss_reason) == (0, "failed_recently")
            assert (await pool.pin(NAMESPACE, hashes, timeout_s=4)).found == 0
            assert time.monotonic() - started < 1.5
            # The index was told: who asks it is not sent there, though the node counts as live still.
            assert (await hasty.lookup(NAMESPACE, hashes)).found == 0
            waits = []
            for _ in range(8):
                started = time.monotonic()
                await hasty.get(NAMESPACE, hashes, out, segments=stale, timeout_s=0.3)
                waits.append(time.monotonic() - started)
            # A pin has half of the call's time: four waits of 0.15 s are one of 0.6.
            assert len([wait_s for wait_s in waits if wait_s > 0.1]) <= 4
        finally:
            doomed.kill("a", signal.SIGCONT)
        pinned.release()

        async def is_back() -> bool:
            return (await pool.get(NAMESPACE, hashes, out)).found == 4

        deadline = time.monotonic() + 10
        while not await is_back():  # for a while only
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)


async def test_a_read_of_pinned_blocks_that_failed_is_remembered(doomed: Cluster) -> None:
    hashes, data = chain(31, 4), some_bytes(31, 4)
    async with AsyncPool(
        conductor=doomed.conductor["wire"], host_label="here", transport="nixl"
    ) as pool:
        await pool.put(NAMESPACE, hashes, data, node_id="a")
        await indexed(pool, hashes, "a")
        pinned = await pool.pin(NAMESPACE, hashes, part=0, ttl_s=30)
        doomed.kill("a")
        with pytest.raises(KvpoolError):
            await pool.read_pinned(pinned, np.zeros_like(data), timeout_s=2)
        assert len(pool.directory.negative_cache) == 4
        assert (await pool.lookup(NAMESPACE, hashes)).found == 0


async def test_a_put_goes_on_to_another_node_when_the_first_is_gone(doomed: Cluster) -> None:
    hashes, data = chain(28, 3), some_bytes(28, 3)
    async with AsyncPool(conductor=doomed.conductor["wire"], host_label="here") as pool:
        assert len(await pool.nodes()) == 2
        doomed.kill("a")
        put = await pool.put(NAMESPACE, hashes, data, timeout_s=5)
        assert put.stored == 3
        with contextlib.suppress(TransferFailed):
            await pool.put(NAMESPACE, chain(29, 1), data[:1], replicas=2, timeout_s=5)
    assert held_by(doomed, "b", hashes) == 3
