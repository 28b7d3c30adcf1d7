"""Requests through vLLM's real scheduler and a real pool; the model is a function of its KV."""

from __future__ import annotations

from collections.abc import Callable

from tests.engines.vllm.harness import Engine, expected_output

PROMPT = [3 + (i * 7919) % 900 for i in range(300)]
MakeEngine = Callable[..., Engine]


def test_second_engine_reads_what_the_first_one_computed(engine: MakeEngine) -> None:
    first, second = engine(), engine()
    expected = expected_output(PROMPT, 4)
    assert first.run("a", PROMPT) == expected
    assert first.totals["blocks_stored"] == 300 // 64
    assert second.run("a", PROMPT) == expected
    assert second.totals["loaded_tokens"] == 256
    assert second.computed_tokens == 300 - 256 + 3
    assert second.connector._scheduler.leases == 0
