"""Paused processes and expired promises: callers get a reply in time, at worst a miss."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool import AsyncPool, Pool
from kvpool.client.node.node_link import NodeLink
from kvpool.errors import DeadlineExceeded, LeaseExpired, Unavailable
from kvpool.transports import Transports
from kvpool.transports.shm import ShmTransport
from tests.chaos.keyed import NAMESPACE, contents, prompt
from tests.support.process_cluster import Cluster, wait_until


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    running = Cluster(tmp_path)
    with running.supervisor:
        running.start_conductor(
            "conductor.advanced.heartbeat_s=0.2",
            "conductor.advanced.suspect_after_s=0.8",
            "conductor.advanced.dead_after_s=2",
        )
        yield running


def test_a_frozen_conductor_costs_a_deadline_and_forgets_nobody(cluster: Cluster) -> None:
    cluster.start_node("n0", "node.transports=shm")
    cluster.wait_joined(nodes=1)
    hashes, data = prompt(1, 4), contents(prompt(1, 4))
    conductor = cluster.supervisor.members[0].process
    with (
        Pool(conductor=cluster.conductor["wire"], host_label="here") as pool,
        Pool(node=cluster.nodes["n0"]["wire"], host_label="here") as direct,
    ):
        pool.put(NAMESPACE, hashes, data)
        wait_until(lambda: pool.lookup(NAMESPACE, hashes).found == 4, "the index hears of it")
        conductor.send_signal(signal.SIGSTOP)
        try:
            started = time.monotonic()
            with pytest.raises((DeadlineExceeded, Unavailable)):
                pool.lookup(NAMESPACE, hashes, timeout_s=1)
            assert time.monotonic() - started < 10
            # The node does not need it: it stores, serves, and notices nothing, for longer than any of
            # the conductor's patience lasts.
            until = time.monotonic() + 3
            number = 2
            while time.monotonic() < until:
                more = prompt(number, 4)
                assert direct.put(NAMESPACE, more, contents(more)).stored == 4
                assert direct.get(NAMESPACE, hashes, np.zeros_like(data)).found == 4
                number += 1
        finally:
            conductor.send_signal(signal.SIGCONT)
        # Its own stall is no sign of anybody's death.
        assert list(cluster.stats()["node_states"].values()) in (["live"], ["suspect"])
        wait_until(lambda: pool.lookup(NAMESPACE, hashes).found == 4, "the index is as it was")
        wait_until(
            lambda: pool.lookup(NAMESPACE, prompt(number - 1, 4)).found == 4,
            "it hears of what came meanwhile",
        )


async def test_a_lease_too_short_to_read_in_is_a_miss_and_no_error(cluster: Cluster) -> None:
    # Shorter than the margin before its end within which nothing is believed.
    cluster.start_node("n0", "node.advanced.lease_s=0.04", "node.transports=shm")
    cluster.wait_joined(nodes=1)
    hashes, data = prompt(3, 4), contents(prompt(3, 4))
    async with AsyncPool(node=cluster.nodes["n0"]["wire"], host_label="here") as pool:
        await pool.put(NAMESPACE, hashes, data)
        got = await pool.get(NAMESPACE, hashes, np.zeros_like(data))
        assert (got.found, got.miss_reason) == (0, "lease_expired")


async def test_a_read_that_outlives_its_lease_is_caught_by_the_look_after_it_and_by_nothing_else(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.start_node("n0", "node.transports=shm")
    hashes, data = prompt(5, 4), contents(prompt(5, 4))
    async with AsyncPool(node=cluster.nodes["n0"]["wire"], host_label="here") as pool:
        await pool.put(NAMESPACE, hashes, data)
        read = ShmTransport.read_and_sum

        def read_slowly(self: ShmTransport, *given: Any) -> Any:
            sums = read(self, *given)
            wait_until(lambda: time.monotonic() > pinned.deadline, "the lease's end")
            return sums

        async def refuse(*_given: Any) -> None:
            raise LeaseExpired("not renewed")

        monkeypatch.setattr(ShmTransport, "read_and_sum", read_slowly)
        monkeypatch.setattr(NodeLink, "renew", refuse)
        pinned = await pool.pin(NAMESPACE, hashes, part=0, ttl_s=0.5)
        with pytest.raises(LeaseExpired):
            await pool.read_pinned(pinned, np.zeros_like(data))
        # Without the guard (invariant 3) bytes that were read too late would be accepted.
        monkeypatch.setattr(NodeLink, "_check_lease", lambda self, lease: None)
        pinned = await pool.pin(NAMESPACE, hashes, part=0, ttl_s=0.5)
        assert await pool.read_pinned(pinned, np.zeros_like(data)) == 4


async def test_a_read_slower_than_its_lease_renews_it_and_is_no_miss(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.start_node(
        "n0", "node.transports=shm", "node.advanced.lease_s=0.6", "node.advanced.grace_s=0.1"
    )
    # More than is read on the event loop itself.
    hashes, data = prompt(8, 32), contents(prompt(8, 32))
    async with AsyncPool(node=cluster.nodes["n0"]["wire"], host_label="here") as pool:
        await pool.put(NAMESPACE, hashes, data)
        read = ShmTransport.read_and_sum

        def read_slowly(self: ShmTransport, *given: Any) -> Any:
            until = time.monotonic() + 1.5  # twice what lease and grace give
            wait_until(lambda: time.monotonic() > until, "a slow read")
            leases.append(cluster.node_stats("n0")["leases"])
            return read(self, *given)

        leases: list[int] = []
        monkeypatch.setattr(ShmTransport, "read_and_sum", read_slowly)
        got = await pool.get(NAMESPACE, hashes, np.zeros_like(data), timeout_s=10)
        assert (got.found, got.miss_reason) == (32, "")
        pinned = await pool.pin(NAMESPACE, hashes, part=0, ttl_s=0.6)
        until = pinned.deadline
        assert await pool.read_pinned(pinned, np.zeros_like(data), timeout_s=10) == 32
        assert pinned.deadline > until
        assert leases == [1, 1]
        pinned.release()
    wait_until(lambda: cluster.is_settled("n0"), "leases that nobody renews end")


async def test_a_transport_that_is_slow_to_load_costs_no_call_more_than_its_deadline(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.start_node("n0", "node.transports=shm")
    hashes, data = prompt(6, 4), contents(prompt(6, 4))
    is_loaded = threading.Event()
    choose = Transports.choose

    def choose_slowly(self: Transports, *given: Any) -> Any:
        assert is_loaded.wait(30)  # as NIXL, which brings torch with it
        return choose(self, *given)

    async with AsyncPool(node=cluster.nodes["n0"]["wire"], host_label="here") as writer:
        await writer.put(NAMESPACE, hashes, data)
    monkeypatch.setattr(Transports, "choose", choose_slowly)
    async with AsyncPool(node=cluster.nodes["n0"]["wire"], host_label="here") as pool:
        started = time.monotonic()
        got = await pool.get(NAMESPACE, hashes, np.zeros_like(data), timeout_s=0.3)
        assert (got.found, got.miss_reason) == (0, "deadline")
        with pytest.raises(DeadlineExceeded):
            await pool.put(NAMESPACE, prompt(7, 4), data, timeout_s=0.3)
        assert time.monotonic() - started < 10
        is_loaded.set()
        assert (await pool.get(NAMESPACE, hashes, np.zeros_like(data))).found == 4
