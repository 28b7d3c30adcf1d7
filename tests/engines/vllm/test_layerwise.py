"""Layer by layer: saved as they become final, loaded while the first ones are used."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from kvpool.client.data.layered import LayeredReader, LayeredWriter
from tests.engines.vllm.harness import LAYERS, Engine, expected_output
from tests.engines.vllm.test_serving import EXPECTED, PROMPT, has_no_leases
from tests.support.process_cluster import Cluster, wait_until

MakeEngine = Callable[..., Engine]


@pytest.fixture(autouse=True)
def one_layer_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool.engines.vllm.layers.MIN_GROUP_BYTES", 1)


@pytest.mark.parametrize("page_tokens", [16, 64])
def test_layers_saved_and_loaded_one_by_one_are_the_same_bytes(
    engine: MakeEngine, cluster: Cluster, page_tokens: int
) -> None:
    saver = engine({"layerwise_save": True}, page_tokens=page_tokens)
    loader = engine({"layerwise_load": True}, page_tokens=page_tokens, prefix_caching=False)
    assert saver.run("a", PROMPT) == EXPECTED
    assert saver.totals["blocks_stored"] == 4
    assert loader.run("a", PROMPT) == EXPECTED
    assert loader.totals["loaded_tokens"] == 256
    assert loader.computed_tokens == 300 - 256 + 3
    has_no_leases(cluster)


def test_a_layer_is_on_its_way_while_the_next_one_computes(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    original = LayeredWriter.write

    async def write(self: LayeredWriter, *arguments: object) -> None:
        await original(self, *arguments)  # type: ignore[arg-type]
        written.append(len(written))

    monkeypatch.setattr(LayeredWriter, "write", write)
    saver = engine({"layerwise_save": True})
    seen: list[int] = []

    def compute(layer: int) -> None:
        if layer and not written[LAYERS:]:
            wait_until(lambda: len(written) >= layer, "the layer before is sent", 5)
            seen.append(len(written))

    saver.slow_layer = compute
    assert saver.run("a", PROMPT, 1) == EXPECTED[:1]
    assert seen == list(range(1, LAYERS))


def test_the_first_layer_is_used_before_the_last_one_is_there(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = engine()
    first.run("a", PROMPT)
    second = engine({"layerwise_load": True}, prefix_caching=False)
    is_computing = threading.Event()
    reads = 0
    original = LayeredReader.read

    async def read(self: LayeredReader, *arguments: object) -> None:
        nonlocal reads
        reads += 1
        if reads == LAYERS:
            import asyncio

            assert await asyncio.to_thread(is_computing.wait, 5), "the first layer computes"
        await original(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(LayeredReader, "read", read)
    second.slow_layer = lambda _layer: is_computing.set()
    assert second.run("a", PROMPT) == EXPECTED
    assert reads == LAYERS


def test_a_layerwise_load_that_proves_wrong_at_its_end_is_computed_again(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = engine()
    first.run("a", PROMPT)
    original = LayeredReader.bad_blocks

    async def bad_blocks(self: LayeredReader) -> list[int]:
        assert await original(self) == []
        return [2]

    monkeypatch.setattr(LayeredReader, "bad_blocks", bad_blocks)
    second = engine({"layerwise_load": True}, prefix_caching=False)
    assert second.run("a", PROMPT) == EXPECTED
    assert second.totals["loads_failed"] == 1
    assert second.computed_tokens == 300 - 256 + 300 - 128 + 3


def test_what_does_not_fit_the_buffer_is_saved_and_loaded_as_a_whole(engine: MakeEngine) -> None:
    long = [3 + (i * 31) % 900 for i in range(64 * 300)][:7000]
    small = {"staging_bytes": "1MiB", "layerwise_save": True, "layerwise_load": True}
    one = engine(small, prefix_caching=False, pages=1024)
    expected = expected_output(long, 2)
    assert one.run("a", long, 2) == expected
    assert one.run("b", long, 2) == expected
    assert one.totals["loaded_tokens"] == 7000 // 64 * 64


def test_layers_are_not_loaded_in_the_step_where_vllm_could_not_recover(engine: MakeEngine) -> None:
    first = engine()
    first.run("a", PROMPT)
    second = engine({"layerwise_load": True})  # with prefix caching
    second.add("a", PROMPT)
    assert not second.step().num_scheduled_tokens
    second.drain()
    assert second.outputs["a"] == EXPECTED
