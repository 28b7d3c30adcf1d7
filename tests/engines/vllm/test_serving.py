"""Requests through vLLM's real scheduler and a real pool; the model is a function of its KV."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvpool.config.engine_server import EngineServer
from kvpool.engines.vllm.loader import Loader
from tests.engines.vllm.harness import Engine, expected_output
from tests.support.process_cluster import Cluster, wait_until

PROMPT = [3 + (i * 7919) % 900 for i in range(300)]
EXPECTED = expected_output(PROMPT, 4)
MakeEngine = Callable[..., Engine]


def leases(cluster: Cluster) -> int:
    return int(cluster.node_stats("near")["leases"])


def has_no_leases(cluster: Cluster) -> None:
    wait_until(lambda: leases(cluster) == 0, "every lease was given back", 5)


def test_second_engine_reads_what_the_first_one_computed(
    engine: MakeEngine, cluster: Cluster
) -> None:
    first, second = engine(), engine()
    assert first.run("a", PROMPT) == EXPECTED
    assert first.totals["blocks_stored"] == 300 // 64
    assert second.run("a", PROMPT) == EXPECTED
    assert second.totals["loaded_tokens"] == 256
    assert second.computed_tokens == 300 - 256 + 3
    has_no_leases(cluster)


@pytest.mark.parametrize("page_tokens", [16, 64, 128])
def test_pages_of_any_size_are_read_as_they_were_written(
    engine: MakeEngine, page_tokens: int
) -> None:
    first, second = (engine(page_tokens=page_tokens) for _ in range(2))
    assert first.run("a", PROMPT) == EXPECTED
    assert second.run("a", PROMPT) == EXPECTED
    assert second.totals["loaded_tokens"] == 256
    assert np.array_equal(first.caches[0].numel(), second.caches[0].numel())


def test_a_block_of_several_pages_that_vllm_has_in_part_leaves_those_alone(
    engine: MakeEngine,
) -> None:
    first, second = engine({"block_tokens": 96}), engine({"block_tokens": 96})
    first.run("a", PROMPT)
    # Two pages of 16 are local: within the first block of the pool.
    second.run("short", PROMPT[:40], 1)
    assert second.run("a", PROMPT) == EXPECTED
    assert second.totals["loaded_tokens"] == 288 - 32


def test_chunked_prefill_saves_each_chunk_once(engine: MakeEngine) -> None:
    first, second = engine(step_tokens=80), engine(step_tokens=80)
    assert first.run("a", PROMPT) == EXPECTED
    assert first.totals["blocks_stored"] == 4
    assert first.totals.get("blocks_known", 0) == 0
    assert second.run("a", PROMPT) == EXPECTED
    assert second.totals["loaded_tokens"] == 256


def test_without_prefix_caching_the_pool_serves_all(engine: MakeEngine) -> None:
    one = engine(prefix_caching=False)
    assert one.run("a", PROMPT) == EXPECTED
    assert one.run("b", PROMPT) == EXPECTED
    assert one.totals["loaded_tokens"] == 256


def test_a_prompt_that_is_found_whole_computes_its_last_token(engine: MakeEngine) -> None:
    first, second = engine(), engine()
    prompt = PROMPT[:256]
    first.run("a", prompt)
    assert second.run("a", prompt) == expected_output(prompt, 4)
    assert second.totals["loaded_tokens"] == 256
    assert second.computed_tokens == 1 + 3


def test_generated_tokens_are_found_by_the_next_turn(engine: MakeEngine) -> None:
    first, second = engine(), engine()
    answer = first.run("a", PROMPT, 100)
    follow_up = [*PROMPT, *answer, 5, 6, 7]
    assert second.run("b", follow_up) == expected_output(follow_up, 4)
    assert second.totals["loaded_tokens"] == (300 + 99) // 64 * 64


def test_generated_tokens_can_be_left_out(engine: MakeEngine) -> None:
    one = engine({"save_decoded": False})
    one.run("a", PROMPT, 100)
    assert one.totals["blocks_stored"] == 300 // 64


def test_overlapping_prompts_in_one_batch_store_each_block_once(engine: MakeEngine) -> None:
    prompts = [PROMPT[: 130 + 40 * i] for i in range(4)]
    first, second = engine(), engine()
    for one in (first, second):
        for i, prompt in enumerate(prompts):
            one.add(f"r{i}", prompt)
        one.drain()
        for i, prompt in enumerate(prompts):
            assert one.outputs[f"r{i}"] == expected_output(prompt, 4)
    assert first.totals["blocks_stored"] == 3
    assert second.totals.get("blocks_stored", 0) == 0


def test_what_vllm_has_itself_is_not_loaded_and_not_leased(
    engine: MakeEngine, cluster: Cluster
) -> None:
    one = engine()
    one.run("a", PROMPT)
    one.add("b", PROMPT)
    one.step()
    has_no_leases(cluster)
    one.drain()
    assert one.outputs["b"] == EXPECTED
    assert one.totals.get("loads", 0) == 0


def test_an_aborted_request_gives_its_lease_back_and_its_pages_when_the_load_is_over(
    engine: MakeEngine, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = engine(), engine()
    first.run("a", PROMPT)
    hold, held = gate(monkeypatch)
    second.add("a", PROMPT)
    second.step()
    held.wait(30)
    assert leases(cluster) > 0
    used = second.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    second.abort("a")
    second.step()
    assert second.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == used
    hold.set()
    second.drain()
    has_no_leases(cluster)
    assert second.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() > used
    assert second.connector._scheduler.leases == 0  # type: ignore[union-attr]


def test_a_request_that_is_aborted_before_it_is_scheduled_leaves_no_lease(
    engine: MakeEngine, cluster: Cluster
) -> None:
    first, second = engine(), engine()
    first.run("a", PROMPT)
    second.add("a", PROMPT)
    second.abort("a")
    second.drain()
    has_no_leases(cluster)


def test_requests_without_room_are_asked_for_again_under_one_lease(
    engine: MakeEngine, cluster: Cluster
) -> None:
    first, second = engine(), engine(pages=30)
    first.run("a", PROMPT)
    second.add("long", [7] * 200, 40)
    second.step()
    second.add("a", PROMPT)  # 19 pages, 29 - 13 are free
    for _ in range(5):
        second.step()
        assert second.connector._scheduler.leases == 1  # type: ignore[union-attr]
    assert leases(cluster) == 1
    second.drain()
    assert second.outputs["a"] == EXPECTED
    assert second.totals["lookups"] == 2
    has_no_leases(cluster)


def test_a_preempted_request_goes_on_with_what_the_pool_has(
    engine: MakeEngine, cluster: Cluster
) -> None:
    one = engine(pages=40, prefix_caching=False)
    prompts = {f"r{i}": [9 + i, *PROMPT[:255]] for i in range(2)}
    for name, prompt in prompts.items():
        one.add(name, prompt, 120)
    one.drain()
    for name, prompt in prompts.items():
        assert one.outputs[name] == expected_output(prompt, 120)
    assert one.totals["loaded_tokens"] >= 256
    has_no_leases(cluster)


@pytest.mark.parametrize("other", [{"cache_salt": "tenant-b"}, {}])
def test_cache_salts_share_nothing(engine: MakeEngine, other: dict[str, Any]) -> None:
    first, second = engine(), engine()
    first.run("a", PROMPT, cache_salt="tenant-a")
    second.run("b", PROMPT, **other)
    assert second.totals.get("loads", 0) == 0
    second.scheduler.reset_prefix_cache()
    assert second.run("c", PROMPT, cache_salt="tenant-a") == EXPECTED
    assert second.totals["loaded_tokens"] == 256


def test_a_request_may_ask_not_to_be_stored_or_not_to_be_loaded(
    engine: MakeEngine, cluster: Cluster
) -> None:
    first, second = engine(), engine()
    assert first.run("a", PROMPT, transfer={"kvpool": {"save": False}}) == EXPECTED
    assert "saves" not in first.totals
    assert second.run("b", PROMPT, transfer={"kvpool": {"load": True}}) == EXPECTED
    assert second.totals["blocks_stored"] == 300 // 64
    first.scheduler.reset_prefix_cache()
    assert first.run("c", PROMPT, transfer={"kvpool": {"load": False}}) == EXPECTED
    assert "loads" not in first.totals
    first.scheduler.reset_prefix_cache()
    assert first.run("d", PROMPT, transfer={"kvpool": {"save": False}}) == EXPECTED
    assert first.totals["loaded_tokens"] == 256
    has_no_leases(cluster)


@pytest.mark.parametrize(
    "options", [{"lod": False}, {"save": "no"}, "nothing", [{"save": False}], {"load": 0}]
)
def test_a_request_whose_wishes_cannot_be_read_shares_nothing(
    engine: MakeEngine, options: Any
) -> None:
    one = engine()
    assert one.run("a", PROMPT, transfer={"kvpool": options, "other": 1}) == EXPECTED
    assert not {"saves", "lookups"} & set(one.totals)
    assert one.run("b", [7, *PROMPT], transfer={"kvpool": None, "other": 1})
    assert {"saves", "lookups"} <= set(one.totals)


def test_blocks_stay_in_vllm_until_they_are_copied(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvpool.engines.vllm.saver import Saver

    one, two = engine(pages=40), engine()
    hold, held = gate(monkeypatch, Saver, "_save")
    one.add("a", PROMPT, 1)
    while not one.outputs["a"]:
        one.step()
    held.wait(30)
    pool = one.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == 39 - 16  # the request is over, its full blocks are held
    one.add("b", [11] * 350, 1)  # would overwrite them
    one.step()
    hold.set()
    one.drain()
    assert pool.get_num_free_blocks() == 39
    assert two.run("a", PROMPT) == EXPECTED
    assert two.totals["loaded_tokens"] == 256


def test_producers_only_save_and_consumers_only_load(engine: MakeEngine) -> None:
    producer, consumer = engine(role="kv_producer"), engine(role="kv_consumer")
    producer.run("a", PROMPT)
    other = [5, *PROMPT]
    consumer.run("b", other)
    assert consumer.totals.get("saves", 0) == 0
    assert consumer.run("a", PROMPT) == EXPECTED
    assert consumer.totals["loaded_tokens"] == 256
    producer.scheduler.reset_prefix_cache()
    producer.run("c", PROMPT)
    assert producer.totals.get("lookups", 0) == 0


def test_kvpool_engines_prints_the_entry_of_a_namespace(
    engine: MakeEngine, cluster: Cluster
) -> None:
    one = engine()
    printed = subprocess.run(
        [
            sys.executable,
            "-m",
            "kvpool",
            "engines",
            "--json",
            "--conductor",
            cluster.conductor["wire"],
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )
    entries = json.loads(printed.stdout)["engines"]
    found = [EngineServer(url="http://h:1", model="m", **entry).namespace() for entry in entries]
    assert one.connector._scheduler._namespace in found  # type: ignore[union-attr,operator]


def gate(
    monkeypatch: pytest.MonkeyPatch, owner: type = Loader, name: str = "_load"
) -> tuple[Any, Any]:
    """Hold a method of a loader or saver at its start: (let go on, is held)."""
    import threading

    hold, held = threading.Event(), threading.Event()
    original = getattr(owner, name)

    def held_up(self: Any, *arguments: Any) -> Any:
        held.set()
        hold.wait(20)
        return original(self, *arguments)

    monkeypatch.setattr(owner, name, held_up)
    return hold, held
