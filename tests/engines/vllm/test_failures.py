"""What goes wrong with the pool never reaches a request: it is computed, with the same text."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import structlog

from kvpool.blocks.hashing import hash_chain
from kvpool.blocks.layout import Namespace
from kvpool.client import AsyncPool, Pool
from kvpool.engines.vllm import KVPoolConnector, scheduler_side
from kvpool.engines.vllm.loader import Loader
from kvpool.engines.vllm.saver import Saver
from kvpool.engines.vllm.version import require_supported
from kvpool.errors import ConfigError, KvpoolError, LayoutMismatch
from kvpool.transports import Pieces
from kvpool.transports.shm import ShmTransport
from tests.engines.vllm.harness import Engine
from tests.engines.vllm.test_serving import EXPECTED, PROMPT, gate, has_no_leases
from tests.support.process_cluster import Cluster, wait_until
from tests.support.waiting import free_port

MakeEngine = Callable[..., Engine]


@pytest.fixture
def fragile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A pool to be broken."""
    cluster = Cluster(tmp_path_factory.mktemp("fragile"))
    try:
        cluster.start_conductor(
            "conductor.advanced.suspect_after_s=2", "conductor.advanced.dead_after_s=3"
        )
        cluster.start_node("near")
        cluster.wait_joined(nodes=1)
        yield cluster
    finally:
        cluster.supervisor.stop()


def namespace(engine: Engine) -> Namespace:
    space = engine.connector._scheduler._namespace  # type: ignore[union-attr]
    assert space is not None
    return space


def corrupt(cluster: Cluster, space: Namespace, block: bytes) -> None:
    """Change the bytes of a block in the memory of the node, behind its back."""

    async def change() -> None:
        async with AsyncPool(node=cluster.nodes["near"]["wire"], host_label="here") as pool:
            pinned = await pool.pin(space, [block], part=0)
            [(link, lease, _)] = pinned.held
            wrong = np.full(64, 0xA5, dtype=np.uint8)
            local = np.array([wrong.ctypes.data], dtype=np.int64)
            pieces = Pieces(local, lease.places, np.array([64], dtype=np.int64), wrong)
            ShmTransport().write(link.node, pieces, 1.0)
            pinned.release()

    asyncio.run(change())


@pytest.mark.parametrize("options", [{}, {"prefix_caching": False}])
@pytest.mark.parametrize("extra", [{}, {"layerwise_load": True}])
def test_wrong_bytes_are_recomputed_and_stored_again(
    engine: MakeEngine, cluster: Cluster, options: dict[str, Any], extra: dict[str, Any]
) -> None:
    first, second = engine(), engine(extra, **options)
    first.run("a", PROMPT)
    space = namespace(first)
    corrupt(cluster, space, hash_chain(space, PROMPT)[2])
    assert second.run("a", PROMPT) == EXPECTED
    assert second.totals["loads_failed"] == 1
    assert second.totals["blocks_stored"] >= 1
    has_no_leases(cluster)
    # vLLM's own cache keeps nothing of the failed load.
    assert second.run("b", PROMPT) == EXPECTED


def test_by_vllms_default_policy_the_request_fails_and_the_connector_said_so(
    engine: MakeEngine, cluster: Cluster
) -> None:
    first = engine()
    first.run("a", PROMPT)
    space = namespace(first)
    corrupt(cluster, space, hash_chain(space, PROMPT)[0])
    with structlog.testing.capture_logs() as lines:
        second = engine(policy="fail")
    assert any(line.get("policy") == "fail" for line in lines)
    second.run("a", PROMPT)
    assert second.errors == {"a"}


def test_a_node_that_dies_in_mid_load_costs_a_recomputation(
    engine: MakeEngine, fragile: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra = {"conductor": fragile.conductor["wire"], "load_timeout_s": 3.0}
    first, second = engine(extra), engine(extra)
    first.run("a", PROMPT)
    hold, held = gate(monkeypatch, Loader, "_place")
    for worker in second.workers:
        worker._worker._loader._blocks = 1  # type: ignore[union-attr]  # four buffers
    second.add("a", PROMPT)
    second.step()
    assert held.wait(30)
    fragile.kill("near")
    hold.set()
    second.drain()
    assert second.outputs["a"] == EXPECTED
    assert second.totals["loads_failed"] == 1
    assert second.run("b", PROMPT[::-1]) == first.run("b", PROMPT[::-1])


def test_a_pool_that_is_not_there_at_start_is_met_when_it_comes(
    engine: MakeEngine, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cluster = Cluster(tmp_path_factory.mktemp("late"))
    try:
        port = free_port()
        with structlog.testing.capture_logs() as lines:
            one = engine({"conductor": f"127.0.0.1:{port}"})
        assert any("cannot be reached" in line["event"] for line in lines)
        assert one.run("a", PROMPT) == EXPECTED
        assert one.totals["lookups_without_pool"] == 1
        cluster.start_conductor(port=str(port))
        cluster.start_node("near")
        health = one.connector._health
        assert health is not None
        wait_until(lambda: health.is_well, "the pool is reached")
        cluster.wait_joined(nodes=1)

        def is_stored() -> bool:  # the node becomes known within a second
            one.scheduler.reset_prefix_cache()
            assert one.run(f"b{one.steps}", PROMPT) == EXPECTED
            return one.totals.get("blocks_stored", 0) == 4

        wait_until(is_stored, "what is computed is stored")
    finally:
        cluster.supervisor.stop()


def test_a_pool_lost_while_serving_is_done_without(engine: MakeEngine, fragile: Cluster) -> None:
    one = engine({"conductor": fragile.conductor["wire"]})
    one.run("a", PROMPT)
    for member in list(fragile.supervisor.members):
        fragile.kill(member.name)
    one.scheduler.reset_prefix_cache()
    assert one.run("b", PROMPT) == EXPECTED
    assert one.run("c", [5, *PROMPT]) == engine().run("c", [5, *PROMPT])


def test_a_pool_that_does_not_answer_holds_up_the_loop_until_the_deadline_and_no_longer(
    engine: MakeEngine, fragile: Cluster
) -> None:
    deadline_s = 0.3  # a busy machine wakes threads late
    one = engine({"conductor": fragile.conductor["wire"], "lookup_deadline_s": deadline_s})
    one.run("a", PROMPT)
    one.scheduler.reset_prefix_cache()
    before = one.totals["lookup_wait_s"]
    paused = [member.process.pid for member in fragile.supervisor.members]
    for pid in paused:
        os.kill(pid, signal.SIGSTOP)
    try:
        one.add("b", PROMPT)
        while len(one.outputs["b"]) < 4:
            one.step()
    finally:
        for pid in paused:
            os.kill(pid, signal.SIGCONT)
    assert one.outputs["b"] == EXPECTED
    assert one.totals["lookups_too_late"] == 1
    assert one.totals["lookup_wait_s"] - before < 3 * deadline_s
    assert one.connector._scheduler.leases == 0  # type: ignore[union-attr]
    one.drain()


def test_a_save_without_room_is_dropped_and_the_request_served(
    engine: MakeEngine, cluster: Cluster
) -> None:
    one = engine({"max_pending_save_bytes": 0})
    assert one.run("a", PROMPT) == EXPECTED
    assert one.totals["saves_put_off"] > 0
    assert one.totals.get("saves", 0) == 0


def test_an_engine_of_another_layout_is_refused_by_name(engine: MakeEngine) -> None:
    engine()
    with pytest.raises(LayoutMismatch, match="block_tokens"):
        engine({"block_tokens": 128})


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"conducter": "x:1"}, "did you mean 'conductor'"),
        ({"block_tokens": 100}, "no multiple of vLLM's page of 16 tokens"),
        ({"lookup_deadline_s": -1}, "lookup_deadline_s"),
        ({"transport": "tcp"}, "transport"),
    ],
)
def test_settings_that_make_no_sense_are_named(
    engine: MakeEngine, extra: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        engine(extra)


def test_a_wrong_key_is_refused_while_vllm_reads_its_command_line() -> None:
    asks = KVPoolConnector.requires_piecewise_for_cudagraph
    with pytest.raises(ConfigError, match="did you mean 'conductor'"):
        asks({"conducter": "x:1"})
    assert asks({"layerwise_load": True})
    assert not asks({"layerwise_load": "false"})


def test_what_would_be_hits_that_never_come_is_said_at_start(engine: MakeEngine) -> None:
    engine()
    with structlog.testing.capture_logs() as alike:
        engine()
    assert not any("configuration" in line["event"] for line in alike)
    with structlog.testing.capture_logs() as lines:
        engine({"revision": "newer"})
    [said] = [line["differs"] for line in lines if "another configuration" in line["event"]]
    assert said.startswith("revision: ")
    assert said.endswith(" there, newer here")


def test_a_pool_without_a_node_is_said_at_start(
    engine: MakeEngine, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cluster = Cluster(tmp_path_factory.mktemp("no-node"))
    try:
        cluster.start_conductor()
        with structlog.testing.capture_logs() as lines:
            engine({"conductor": cluster.conductor["wire"]})
        assert any("has no node" in line["event"] for line in lines)
    finally:
        cluster.supervisor.stop()


@pytest.mark.parametrize("version", ["0.31.1", "0.33.0", "1.0.0", "0.3.2"])
def test_another_version_of_vllm_is_refused(version: str) -> None:
    with pytest.raises(ConfigError, match=r"supported: 0\.32\.x"):
        require_supported(version)


def test_the_installed_version_is_supported() -> None:
    require_supported()


@pytest.mark.parametrize("error", [KvpoolError("no"), ValueError("a defect of ours")])
def test_a_saver_that_fails_is_asked_again_later(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(scheduler_side, "SAVE_AGAIN_S", 0.0)
    one = engine()
    original = Saver._save

    def fails(self: Saver, *arguments: Any) -> bool:
        monkeypatch.setattr(Saver, "_save", original)
        raise error

    monkeypatch.setattr(Saver, "_save", fails)
    one.add("a", PROMPT, 30)
    one.step()
    wait_until(lambda: one.totals.get("saves_failed"), "the save fails")
    one.drain()
    assert one.totals["saves_failed"] == 1
    assert one.totals["blocks_stored"] == 5


def test_a_node_that_has_restarted_is_read_from_at_once(
    engine: MakeEngine, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cluster = Cluster(tmp_path_factory.mktemp("phoenix"))
    disk = tmp_path_factory.mktemp("disk")
    settings = ("node.node_id=phoenix", f"node.nvme_directories={disk}", "node.nvme_bytes=64MiB")
    try:
        cluster.start_conductor()
        cluster.start_node("near", *settings)
        cluster.wait_joined(nodes=1)
        extra = {"conductor": cluster.conductor["wire"]}
        first, second = engine(extra), engine(extra)
        first.run("a", PROMPT)
        second.run("b", PROMPT)  # it knows the node and its transport
        space = namespace(first)
        hashes = hash_chain(space, PROMPT)
        wait_until(lambda: cluster.node_stats("near")["counters"].get("demoted", 0) >= 4, "on NVMe")
        cluster.kill("near")
        cluster.start_node("again", *settings)
        epoch = cluster.nodes["again"]["epoch"]
        with Pool(conductor=cluster.conductor["wire"]) as pool:
            # Until then the index has the earlier epoch.
            wait_until(
                lambda: [info.descriptor.epoch for info in pool.nodes()] == [epoch], "it has joined"
            )
            wait_until(lambda: pool.lookup(space, hashes).found == 4, "the node has told")
        second.scheduler.reset_prefix_cache()
        before = second.totals["loaded_tokens"]
        assert second.run("c", PROMPT) == EXPECTED
        assert second.totals["loaded_tokens"] - before == 256
        assert second.totals.get("loads_failed", 0) == 0
    finally:
        cluster.supervisor.stop()


def test_a_load_that_fails_is_not_tried_again_by_the_request(
    engine: MakeEngine, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = engine(), engine()
    first.run("a", PROMPT)
    monkeypatch.setattr(Loader, "_load", lambda *_: 0)  # although the pool has the blocks
    assert second.run("a", PROMPT) == EXPECTED
    assert second.totals["loads"] == 1
    has_no_leases(cluster)


def test_a_defect_in_a_load_costs_a_recomputation_and_later_loads_go_on(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = engine(), engine()
    first.run("a", PROMPT)
    original = Loader._load

    def breaks(self: Loader, *arguments: Any) -> int:
        monkeypatch.setattr(Loader, "_load", original)
        raise ValueError("a defect of ours")

    monkeypatch.setattr(Loader, "_load", breaks)
    assert second.run("a", PROMPT) == EXPECTED
    assert second.totals["loads_failed"] == 1
    second.scheduler.reset_prefix_cache()
    assert second.run("b", PROMPT) == EXPECTED
    assert second.totals["loads"] == 2
    assert second.totals["loads_failed"] == 1
