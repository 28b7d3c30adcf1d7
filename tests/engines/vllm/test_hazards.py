"""What must never make wrong bytes out of a miss, nor let a request wait for ever."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvpool.client import AsyncPool
from kvpool.client.data.layered import LayeredReader
from kvpool.client.pool import Pool
from kvpool.engines.vllm import loader
from kvpool.engines.vllm.loader import Loader
from kvpool.engines.vllm.saver import Saver
from kvpool.errors import DeadlineExceeded
from tests.engines.vllm.harness import Engine, expected_output
from tests.engines.vllm.test_serving import EXPECTED, PROMPT, gate, has_no_leases, leases
from tests.support.process_cluster import Cluster

MakeEngine = Callable[..., Engine]
LONG = [*PROMPT, *(3 + (i * 7907) % 900 for i in range(250))]


def step_until(one: Engine, claim: Callable[[], Any], what: str, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not claim():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        one.step()


# ---------------------------------------------------------------- weights that change under a name


def test_after_a_reset_nothing_of_before_is_found_and_nothing_goes_under_the_old_names(
    engine: MakeEngine, cluster: Cluster
) -> None:
    one, other = engine(), engine()
    one.run("a", PROMPT)
    # vLLM does so when its weights were updated, or it has slept.
    assert one.scheduler.reset_prefix_cache(reset_connector=True)
    assert one.run("b", PROMPT) == EXPECTED
    assert one.totals.get("loads", 0) == 0
    assert one.run("c", LONG) == expected_output(LONG, 4)
    assert other.run("d", LONG) == expected_output(LONG, 4)
    assert other.totals["loaded_tokens"] == 256  # of the first request alone
    assert one.scheduler.reset_prefix_cache(reset_connector=True)
    one.run("e", LONG)
    assert one.totals.get("loads", 0) == 0
    has_no_leases(cluster)


def test_after_a_reset_an_instance_goes_on_sharing_with_itself(engine: MakeEngine) -> None:
    one = engine()
    one.scheduler.reset_prefix_cache(reset_connector=True)
    one.run("a", PROMPT)
    one.scheduler.reset_prefix_cache()
    assert one.run("b", PROMPT) == EXPECTED
    assert one.totals["loaded_tokens"] == 256


def test_where_weights_are_said_to_be_fixed_a_reset_changes_no_names(engine: MakeEngine) -> None:
    one = engine({"fixed_weights": True})
    one.run("a", PROMPT)
    assert one.scheduler.reset_prefix_cache(reset_connector=True)
    assert one.run("b", PROMPT) == EXPECTED
    assert one.totals["loaded_tokens"] == 256


def test_a_request_that_began_before_a_reset_neither_saves_nor_loads_after_it(
    engine: MakeEngine, cluster: Cluster
) -> None:
    one, other = engine({"save_decoded": True}), engine()
    one.add("a", PROMPT, 200)
    one.step()
    one.scheduler.reset_prefix_cache(reset_running_requests=False, reset_connector=True)
    one.drain()
    follow_up = [*PROMPT, *one.outputs["a"]]
    other.run("b", follow_up)
    assert other.totals["loaded_tokens"] == 256
    has_no_leases(cluster)


# ---------------------------------------------------------------- late writes, and bad pages


def test_pages_come_back_only_when_nothing_writes_to_them_any_more(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = engine(), engine({"load_timeout_s": 0.2})
    first.run("a", PROMPT)
    monkeypatch.setattr(loader, "LATE_S", 0.1)
    hold, held, was_cancelled = threading.Event(), threading.Event(), threading.Event()
    original = AsyncPool.get

    async def get(self: AsyncPool, *arguments: Any, **options: Any) -> Any:
        """A copy that continues after its caller gave up."""
        held.set()
        while not hold.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                was_cancelled.set()
        return await original(self, *arguments, **options)

    monkeypatch.setattr(AsyncPool, "get", get)
    second.add("a", PROMPT)
    second.step()
    assert held.wait(30)
    second.abort("a")
    free = second.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    assert was_cancelled.wait(30)
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        second.step()
        assert second.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free
    hold.set()
    second.drain()
    assert second.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() > free


def test_what_a_step_computes_beside_its_own_load_is_saved_only_when_that_is_known_to_be_good(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = engine()
    first.run("a", PROMPT)
    second = engine({"layerwise_load": True}, prefix_caching=False)
    saved: list[tuple[int, bool]] = []
    original = Saver.submit

    def submit(self: Saver, job: Any, *arguments: Any) -> None:
        saved.append((second.steps, has_failed.is_set()))
        original(self, job, *arguments)

    has_failed = threading.Event()

    async def bad_blocks(self: LayeredReader) -> list[int]:
        has_failed.set()
        return [0]

    monkeypatch.setattr(Saver, "submit", submit)
    monkeypatch.setattr(LayeredReader, "bad_blocks", bad_blocks)
    second.add("b", LONG, 3)
    second.drain()
    assert second.outputs["b"] == expected_output(LONG, 3)
    assert second.totals["loads_failed"] == 1
    assert min(step for step, _ in saved) > 1
    assert second.totals["blocks_stored"] == 550 // 64 - 4


@pytest.mark.parametrize("is_good", [True, False])
def test_a_step_does_not_end_before_its_own_load_has(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, is_good: bool
) -> None:
    first = engine()
    first.run("a", PROMPT)
    second = engine({"layerwise_load": True, "load_timeout_s": 0.1}, prefix_caching=False)
    original = Loader._load_layers

    def slow(self: Loader, job: Any, progress: Any, deadline: float) -> int:
        threading.Event().wait(1.5)  # longer than the time-out and every margin
        return original(self, job, progress, time.monotonic() + 5) if is_good else 0

    monkeypatch.setattr(Loader, "_load_layers", slow)
    assert second.run("a", PROMPT) == EXPECTED
    assert second.totals.get("loads_failed", 0) == (0 if is_good else 1)


# ---------------------------------------------------------------- nobody waits for ever


@pytest.mark.parametrize("error", [ValueError("unforeseen"), MemoryError()])
def test_an_unforeseen_error_in_a_load_costs_that_load_alone(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    first, second = engine(), engine()
    first.run("a", PROMPT)
    first.run("b", LONG[::-1])
    original = Loader._load

    def fails(self: Loader, *arguments: Any) -> int:
        monkeypatch.setattr(Loader, "_load", original)
        raise error

    monkeypatch.setattr(Loader, "_load", fails)
    assert second.run("a", PROMPT) == EXPECTED
    assert second.run("b", LONG[::-1]) == expected_output(LONG[::-1], 4)
    assert second.totals["loads_failed"] == 1
    assert second.totals["load_bytes"] > 0


@pytest.mark.parametrize("error", [ValueError("unforeseen"), MemoryError()])
def test_an_unforeseen_error_in_a_save_costs_that_save_alone(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    one = engine()
    original = Saver._save

    def fails(self: Saver, *arguments: Any) -> bool:
        monkeypatch.setattr(Saver, "_save", original)
        raise error

    monkeypatch.setattr(Saver, "_save", fails)
    assert one.run("a", PROMPT) == EXPECTED
    one.run("b", LONG[::-1])
    assert one.totals["saves_failed"] == 1
    assert one.totals["blocks_stored"] == 550 // 64


def test_loads_that_wait_for_one_another_wait_no_longer_than_one_load_may_take(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeout_s = 1.0
    first, second = engine(), engine({"load_timeout_s": timeout_s})
    prompts = {f"r{i}": [9 + i, *PROMPT] for i in range(8)}
    for name, prompt in prompts.items():
        first.run(name, prompt)

    async def get(*_: Any, timeout_s: float, **__: Any) -> Any:
        """A node that does not answer."""
        await asyncio.sleep(timeout_s)
        raise TimeoutError

    monkeypatch.setattr(AsyncPool, "get", get)
    began = time.monotonic()
    for name, prompt in prompts.items():
        second.add(name, prompt)
    second.drain(1_000_000)
    assert time.monotonic() - began < 4 * timeout_s
    assert second.totals["loads_failed"] == 8
    for name, prompt in prompts.items():
        assert second.outputs[name] == expected_output(prompt, 4)


def test_saves_that_wait_for_one_another_hold_pages_no_longer_than_one_save_may_take(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeout_s = 1.0
    one = engine({"save_timeout_s": timeout_s})

    def put(*_: Any, timeout_s: float, **__: Any) -> Any:
        """A node that does not answer."""
        threading.Event().wait(timeout_s)
        raise DeadlineExceeded("no answer")

    monkeypatch.setattr(Pool, "put", put)
    began = time.monotonic()
    for i in range(8):
        one.add(f"r{i}", [9 + i, *PROMPT], 1)
    one.drain(1_000_000)
    assert time.monotonic() - began < 4 * timeout_s
    assert one.totals["saves_failed"] == 8


# ---------------------------------------------------------------- leases


def test_a_request_that_is_taken_back_and_resumed_in_one_step_keeps_the_lease_of_its_load(
    engine: MakeEngine, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = engine(prefix_caching=False)
    one.add("a", PROMPT, 60)
    step_until(one, lambda: one.totals.get("blocks_stored", 0) >= 4, "stored")
    step_until(one, lambda: not one.connector.has_pending_push_work(), "no save holds pages")
    hold, held = gate(monkeypatch)
    assert one.scheduler.reset_prefix_cache(reset_running_requests=True)
    one.step()
    assert held.wait(30)
    assert one.connector._scheduler.leases == 1  # type: ignore[union-attr]
    assert leases(cluster) == 1
    hold.set()
    one.drain()
    assert one.outputs["a"] == expected_output(PROMPT, 60)
    has_no_leases(cluster)


# ---------------------------------------------------------------- part of a block


@pytest.mark.parametrize("transport", ["auto", "nixl"])
def test_a_block_of_which_vllm_has_several_pages_is_verified_as_a_whole(
    engine: MakeEngine, transport: str
) -> None:
    extra = {"block_tokens": 96, "transport": transport}
    first, second = engine(extra), engine(extra)
    first.run("a", PROMPT)
    second.run("short", PROMPT[:90], 1)  # five of six pages
    assert second.run("a", PROMPT) == EXPECTED
    assert second.totals["loaded_tokens"] == 288 - 80
    assert second.totals.get("loads_failed", 0) == 0


def test_nothing_is_kept_of_requests_that_are_over(engine: MakeEngine) -> None:
    one = engine()
    for i in range(200):
        one.run(f"r{i}", [5 + i % 7, *PROMPT[:70]], 2)
    side = one.connector._scheduler
    assert side is not None
    assert [side._tracked, side._held, side._jobs, side._held_bytes] == [{}, {}, [], 0]
    assert one.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 511


def test_a_node_that_has_died_costs_its_own_blocks_alone(
    engine: MakeEngine, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cluster = Cluster(tmp_path_factory.mktemp("two"))
    try:
        cluster.start_conductor(
            "conductor.advanced.dead_after_s=60", "conductor.advanced.suspect_after_s=50"
        )
        cluster.start_node("near")
        cluster.start_node("far", host="elsewhere")
        cluster.wait_joined(nodes=2)
        extra = {"conductor": cluster.conductor["wire"]}
        here, there = engine(extra), engine({**extra, "host_label": "elsewhere"})
        there.run("a", PROMPT)
        here.run("b", LONG[::-1])
        one = engine(extra)
        one.run("warm", [7, *PROMPT])
        cluster.kill("far")
        for i in range(4):
            assert one.run(f"a{i}", [*PROMPT, i, 5, 6]) == expected_output([*PROMPT, i, 5, 6], 4)
            assert one.connector._health.is_well  # type: ignore[union-attr]
            one.scheduler.reset_prefix_cache()
        before = one.totals.get("loaded_tokens", 0)
        one.run("b", LONG[::-1])
        assert one.totals["loaded_tokens"] - before == 512
        assert one.totals.get("lookups_without_pool", 0) == 0
    finally:
        cluster.supervisor.stop()


def test_an_unforeseen_error_in_a_lookup_is_a_miss(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = engine(), engine()
    first.run("a", PROMPT)

    async def pin(*_: Any, **__: Any) -> Any:
        raise ValueError("unforeseen")

    async def lookup(*_: Any, **__: Any) -> Any:
        raise ValueError("unforeseen")

    with monkeypatch.context() as broken:
        broken.setattr(AsyncPool, "pin", pin)
        broken.setattr(AsyncPool, "lookup", lookup)
        assert second.run("a", PROMPT) == EXPECTED
    assert second.totals.get("loads", 0) == 0
    second.scheduler.reset_prefix_cache()
    assert second.run("b", PROMPT) == EXPECTED
    assert second.totals["loaded_tokens"] == 256


def test_requests_go_on_while_saves_hold_most_of_vllms_pages(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = engine(pages=40)
    hold, held = gate(monkeypatch, Saver, "_save")
    prompts = {f"r{i}": [9 + i, *PROMPT[:255]] for i in range(4)}
    for name, prompt in prompts.items():
        one.add(name, prompt, 40)
    step_until(one, lambda: one.outputs["r0"], "the first one computes")
    assert held.wait(30)
    for _ in range(300):
        one.step()
    hold.set()
    one.drain()
    for name, prompt in prompts.items():
        assert one.outputs[name] == expected_output(prompt, 40)
    assert one.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 39
