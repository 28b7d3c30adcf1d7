"""The NIXL transport against a real node: large transfers in groups, and what a lost node does to them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvpool.errors import KvpoolError
from kvpool.transports import Pieces, Transports
from kvpool.transports import nixl as nixl_module
from kvpool.transports.nixl import NixlTransport
from kvpool.wire import WireClient
from kvpool.wire import messages as m
from tests.support.process_cluster import Cluster

RUNS = 12
RUN_BYTES = 256 << 10


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    running = Cluster(tmp_path)
    with running.supervisor:
        running.start_node("n0", "node.dram_bytes=64MiB", "node.advanced.slab_bytes=8MiB")
        yield running


async def _described(cluster: Cluster) -> m.NodeDescriptor:
    wire = WireClient(cluster.nodes["n0"]["wire"], "test")
    try:
        node: m.NodeDescriptor = await wire.call(m.Describe(), 5)
        return node
    finally:
        await wire.close()


def _pieces(memory: np.ndarray) -> Pieces:
    rows = np.arange(RUNS, dtype=np.int64) * RUN_BYTES
    places = np.stack((np.zeros_like(rows), rows), axis=1)
    return Pieces(memory.ctypes.data + rows, places, np.full(RUNS, RUN_BYTES, np.int64), memory)


async def test_transfers_in_groups_carry_every_byte_and_sum_every_run(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_module, "GROUP_BYTES", 3 * RUN_BYTES)
    node = await _described(cluster)
    transports = Transports("test-groups", forced="nixl", loopback_only=True)
    transport = transports.choose(node, "elsewhere")
    data = np.random.default_rng(1).integers(0, 256, RUNS * RUN_BYTES, dtype=np.uint8)
    expected = [xxhash.xxh3_64_intdigest(run.tobytes()) for run in data.reshape(RUNS, -1)]
    try:
        assert transport.write_and_sum(node, _pieces(data), 10).tolist() == expected
        back = np.zeros_like(data)
        assert transport.read_and_sum(node, _pieces(back), 10).tolist() == expected
        assert np.array_equal(data, back)
    finally:
        transports.close()


async def test_groups_whose_node_is_gone_fail_within_the_deadline_and_leave_nothing_running(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_module, "GROUP_BYTES", RUN_BYTES)
    node = await _described(cluster)
    transports = Transports("test-lost", forced="nixl", loopback_only=True)
    transport = transports.choose(node, "elsewhere")
    assert isinstance(transport, NixlTransport)
    memory = np.zeros(RUNS * RUN_BYTES, np.uint8)
    try:
        transport.read_and_sum(node, _pieces(memory), 10)
        cluster.kill("n0")
        started = time.monotonic()
        with pytest.raises(KvpoolError):
            transport.read_and_sum(node, _pieces(memory), 3)
        with pytest.raises(KvpoolError):
            transport.write_and_sum(node, _pieces(memory), 3)
        assert time.monotonic() - started < 30
        assert not transport._thread._active  # every transfer has ended or is quarantined
    finally:
        transports.close()
