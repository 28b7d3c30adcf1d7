"""Several conductors of one pool on a real Valkey: any of them may die, freeze, or lose Redis."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from kvpool import AsyncPool, Pool
from tests.support.node_pair import Pair, running_pair
from tests.support.process_cluster import LAYOUT, NAMESPACE, chain, some_bytes, wait_until

SIZE = LAYOUT.part_bytes


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with running_pair(tmp_path) as running:
        yield running


@pytest.fixture
def patient_pair(tmp_path: Path) -> Iterator[Pair]:
    """Suspects nobody in the time that a node takes to turn to the conductor that is left."""
    patient = ("conductor.advanced.suspect_after_s=4", "conductor.advanced.dead_after_s=8")
    with running_pair(tmp_path, *patient) as running:
        yield running


def test_what_one_conductor_knows_the_other_knows(pair: Pair) -> None:
    pair.start_node("n0")
    pair.start_node("n1", host="there")
    for name in "ab":
        pair.wait_live(name, 2)
    hashes, data = chain(1, 6), some_bytes(1, 6)
    with (
        Pool(conductor=pair.facts["a"]["wire"], host_label="here") as at_a,
        Pool(conductor=pair.facts["b"]["wire"], host_label="here") as at_b,
    ):
        at_a.put(NAMESPACE, hashes, data)
        wait_until(lambda: at_b.lookup(NAMESPACE, hashes).found == 6, "B answers what A was told")
        assert at_b.lookup(NAMESPACE, hashes) == at_a.lookup(NAMESPACE, hashes)
        out = np.zeros_like(data)
        assert at_b.get(NAMESPACE, hashes, out).found == 6
        assert (out == data).all()
        assert [n.descriptor for n in at_b.nodes()] == [n.descriptor for n in at_a.nodes()]
    for name in "ab":
        stats = pair.stats_of(name)
        assert (stats["index"], stats["notice"], len(stats["conductors"])) == ("redis", "", 2)
        assert stats["index_blocks"] >= 6


@pytest.mark.parametrize("victim", ["a", "b"])
async def test_no_call_is_lost_when_a_conductor_is_killed_under_load(
    patient_pair: Pair, victim: str
) -> None:
    pair = patient_pair
    for name in ("n0", "n1"):
        pair.start_node(name)
    pair.wait_live("a", 2)
    pair.wait_live("b", 2)
    survivor = "b" if victim == "a" else "a"
    seeds = range(10, 16)
    data = {seed: some_bytes(seed, 4) for seed in seeds}
    calls = 0
    is_over = False

    async def work(pool: AsyncPool, seed: int) -> None:
        nonlocal calls
        hashes, out = chain(seed, 4), np.zeros_like(data[seed])
        await writer.put(NAMESPACE, hashes, data[seed])
        await _found(pool, hashes)
        while not is_over:
            got = await pool.get(NAMESPACE, hashes, out)
            assert got.found == 4, got
            assert (out == data[seed]).all()
            calls += 1
            await asyncio.sleep(0.005)

    addresses = f"{pair.facts[victim]['wire']},{pair.facts[survivor]['wire']}"
    async with (
        # Another client: one that wrote blocks finds them for a while, whatever a conductor answers.
        AsyncPool(conductor=addresses, host_label="here") as writer,
        AsyncPool(conductor=addresses, host_label="here") as pool,
    ):
        tasks = [asyncio.create_task(work(pool, seed)) for seed in seeds]
        await _until(lambda: calls > 50, tasks)
        await asyncio.to_thread(pair.signal, victim, signal.SIGKILL)
        before = calls
        await _until(lambda: calls > before + 100, tasks)
        is_over = True
        await asyncio.gather(*tasks)
        # Nodes report to the remaining one within seconds, so new blocks are found there.
        fresh = chain(99, 3)
        await writer.put(NAMESPACE, fresh, some_bytes(99, 3))
        await _found(pool, fresh)
    # The other node may be the last to learn which conductor is left.
    await asyncio.to_thread(pair.wait_live, survivor, 2)


async def _found(pool: AsyncPool, hashes: list[bytes], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while (await pool.lookup(NAMESPACE, hashes)).found < len(hashes):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def _until(claim: Any, tasks: list[asyncio.Task[None]], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not claim():
        for task in tasks:
            if task.done():
                task.result()
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def test_without_redis_conductors_go_on_say_so_and_recover_even_from_an_empty_one(
    pair: Pair,
) -> None:
    pair.start_node("n0")
    for name in "ab":
        pair.wait_live(name, 1)
    hashes, data = chain(2, 5), some_bytes(2, 5)
    later = chain(3, 4)
    out = np.zeros_like(data)
    with (
        Pool(conductor=pair.facts["a"]["wire"], host_label="here") as at_a,
        Pool(conductor=pair.facts["b"]["wire"], host_label="here") as at_b,
    ):
        at_a.put(NAMESPACE, hashes, data)
        for pool in (at_a, at_b):
            wait_until(lambda pool=pool: pool.lookup(NAMESPACE, hashes).found == 5, "found")
        pair.stop_redis()
        wait_until(lambda: pair.stats_of("a")["notice"], "A notices")
        wait_until(lambda: pair.stats_of("b")["notice"], "B notices")
        ready = httpx.get(f"http://{pair.facts['a']['http']}/readyz", timeout=5)
        assert ready.status_code == 200
        assert "Redis is down" in ready.json()["notice"]
        # A goes on from what the node told it, B from what it has lately been asked.
        for pool in (at_a, at_b):
            assert pool.get(NAMESPACE, hashes, out).found == 5
            assert (out == data).all()
        at_a.put(NAMESPACE, later, data[:4])
        wait_until(lambda: at_a.lookup(NAMESPACE, later).found == 4, "A hears of new blocks")
        assert at_b.lookup(NAMESPACE, later).found == 0  # a miss, no error
        # Nobody is given up meanwhile, though B hears nothing of the node.
        deadline = time.monotonic() + 3  # longer than `dead_after_s`
        wait_until(lambda: time.monotonic() > deadline, "silence", 10)
        assert pair.states("a") == pair.states("b") == ["live"]
        pair.restart_redis()
        for name in "ab":
            wait_until(lambda name=name: not pair.stats_of(name)["notice"], "recovered")
        wait_until(lambda: at_b.lookup(NAMESPACE, later).found == 4, "all was reported again")
        assert at_b.lookup(NAMESPACE, hashes).found == 5
        pair.wait_live("b", 1)
    assert pair.stats_of("a")["counters"]["redis_failures"] >= 1


def test_a_redis_that_hangs_costs_one_deadline_and_no_request(pair: Pair) -> None:
    pair.start_node("n0")
    pair.wait_live("a", 1)
    hashes, data = chain(4, 5), some_bytes(4, 5)
    with Pool(conductor=pair.facts["a"]["wire"], host_label="here") as pool:
        pool.put(NAMESPACE, hashes, data)
        wait_until(lambda: pool.lookup(NAMESPACE, hashes).found == 5, "found")
        assert pair.redis._process is not None
        pair.redis._process.send_signal(signal.SIGSTOP)
        slowest = 0.0
        for _ in range(50):
            started = time.monotonic()
            assert pool.lookup(NAMESPACE, hashes).found == 5
            slowest = max(slowest, time.monotonic() - started)
        assert slowest < 5.0  # `redis_timeout_s` is 0.3; the machine may be busy
        pair.redis._process.send_signal(signal.SIGCONT)
        wait_until(lambda: not pair.stats_of("a")["notice"], "recovered")
        assert pool.lookup(NAMESPACE, hashes).found == 5


def test_a_frozen_conductor_is_left_and_comes_back_without_harm(pair: Pair) -> None:
    pair.start_node("n0")
    for name in "ab":
        pair.wait_live(name, 1)
    hashes, data = chain(5, 5), some_bytes(5, 5)
    addresses = f"{pair.facts['a']['wire']},{pair.facts['b']['wire']}"
    with Pool(conductor=addresses, host_label="here") as pool:
        pool.put(NAMESPACE, hashes, data)
        wait_until(lambda: pool.lookup(NAMESPACE, hashes).found == 5, "found")
        pair.signal("a", signal.SIGSTOP)
        frozen_at = time.monotonic()
        assert pool.lookup(NAMESPACE, hashes).found == 5  # of B
        later = chain(6, 4)
        pool.put(NAMESPACE, later, data[:4])
        wait_until(lambda: pool.lookup(NAMESPACE, later).found == 4, "the node reports to B")
        # Longer than `dead_after_s`: A's clocks all run out at once when it wakes up.
        wait_until(lambda: time.monotonic() - frozen_at > 4, "the freeze", 10)
        pair.signal("a", signal.SIGCONT)
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            assert pair.states("a") == pair.states("b") == ["live"]
            assert pool.lookup(NAMESPACE, hashes).found == 5
            assert pool.lookup(NAMESPACE, later).found == 4
            time.sleep(0.05)
    with Pool(conductor=pair.facts["a"]["wire"], host_label="here") as at_a:
        assert at_a.lookup(NAMESPACE, later).found == 4


def test_a_node_that_dies_is_forgotten_by_all_conductors(pair: Pair) -> None:
    pair.start_node("n0")
    pair.start_node("n1")
    for name in "ab":
        pair.wait_live(name, 2)
    hashes, data = chain(7, 3), some_bytes(7, 3)
    with Pool(conductor=pair.facts["b"]["wire"], host_label="here") as pool:
        pool.put(NAMESPACE, hashes, data)
        wait_until(lambda: pool.lookup(NAMESPACE, hashes).found == 3, "found")
        [segment] = pool.lookup(NAMESPACE, hashes).segments
        holder = next(n for n, facts in pair.nodes.items() if facts["id"] == segment.node_id)
        pair.kill(holder)
        for name in "ab":
            wait_until(lambda name=name: pair.states(name) == ["live"], "forgotten")
        assert pool.lookup(NAMESPACE, hashes).found == 0
        wait_until(lambda: pair.stats_of("b")["index_blocks"] == 0, "its entries are freed")
